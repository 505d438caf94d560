//! Images by URL, from a server on this machine.

use crate::harness::{Output, Place, finish, golden, json_lines};
use crate::web::{Reply, Server};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

fn image() -> Vec<u8> {
    fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden/data/images/exact_astronaut_96x64.png"),
    )
    .unwrap()
}

/// A folder with a model, one row for each URL, and a config that allows URLs.
fn place(urls: &[String]) -> Place {
    let place = Place::empty();
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    let row = |url: &String| {
        json!({"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "An astronaut."}
        ]})
    };
    let rows: Vec<String> = urls.iter().map(|url| row(url).to_string() + "\n").collect();
    place.write("rows.jsonl", &rows.concat());
    place.write(
        "config.yaml",
        "output_dir: run\nmodel: {path: model}\n\
         data: {train: [{path: rows.jsonl}], allow_urls: true, packing_length: 600, shuffle: false, max_rejected: 1.0}\n\
         train: {epochs: 2}\n",
    );
    place
}

/// Runs a command that may connect to 127.0.0.1, and to no other address of this machine.
fn run(place: &Place, arguments: &[&str]) -> Output {
    finish(place.command(arguments).env("TRAINER_TEST_LOOPBACK_URLS", "1"))
}

fn inspect(place: &Place, more: &[&str]) -> Output {
    let arguments = ["inspect", "--config", "config.yaml", "--format", "jsonl"];
    run(place, &[&arguments, more].concat()).ends_with(0)
}

#[test]
fn a_url_is_requested_once_for_all_rows_epochs_and_runs() {
    let server = Server::start(|_| Reply::new(200, image()));
    let urls = ["/a.png", "/b.png", "/a.png", "/a.png"].map(|path| server.url() + path);
    let place = place(&urls);
    let sft = ["sft", "--config", "config.yaml"];
    run(&place, &[&sft[..], &["--set", "train.max_steps=1"]].concat()).ends_with(0);
    run(&place, &sft).ends_with(0).says("resume from_step=1");
    let shown = json_lines(&inspect(&place, &[]).stdout);
    assert_eq!(shown.len(), 4);
    assert_eq!(shown[0]["image_grid_thw"], shown[1]["image_grid_thw"]);
    let mut paths: Vec<String> = server.take().into_iter().map(|request| request.path).collect();
    paths.sort();
    assert_eq!(paths, ["/a.png", "/b.png"]);
    // Equal content is stored once.
    let content = crate::architecture::files(&place.path("run/cache/images/content"), &[]);
    assert_eq!(content.len(), 1, "{content:?}");
    assert_eq!(fs::read(&content[0]).unwrap(), image());
}

#[test]
fn generate_takes_an_image_by_url_as_that_of_a_file() {
    let image = fs::read(golden("data/digits/1400.png")).unwrap();
    let server = Server::start(move |request| match request.path.as_str() {
        "/digit.png" => Reply::new(200, image.clone()),
        _ => Reply::new(404, Vec::new()),
    });
    let place = Place::empty();
    let model = golden("models/small-tied");
    let ask = |image: &str| {
        let model = model.to_str().unwrap();
        let fixed = ["generate", "--max-new-tokens", "8", "--model", model, "--prompt", "What?"];
        let mut command = place.command(&[&fixed[..], &["--image", image]].concat());
        finish(command.env("TRAINER_TEST_LOOPBACK_URLS", "1"))
    };
    let expected = ask(golden("data/digits/1400.png").to_str().unwrap()).ends_with(0).stdout;
    let url = server.url() + "/digit.png";
    assert_eq!(ask(&url).ends_with(0).stdout, expected);
    let lines = format!("/image {url}\nWhat?\n");
    place.write("lines.txt", &lines);
    let fixed = ["generate", "--chat", "--max-new-tokens", "8", "--model"];
    let mut command = place.command(&[&fixed[..], &[model.to_str().unwrap()]].concat());
    command.env("TRAINER_TEST_LOOPBACK_URLS", "1");
    let turn = finish(command.stdin(fs::File::open(place.path("lines.txt")).unwrap()));
    assert_eq!(turn.ends_with(0).stdout, expected);
    let missing = ask(&(server.url() + "/cat.png")).ends_with(65);
    missing.says("cannot download `http").says("the server answers with status 404");
    // Nothing is kept.
    assert_eq!(server.requests(), 3);
}

/// The loader waits for a server that does not answer.
#[test]
fn a_stuck_loader_ends_the_run_with_code_74_and_its_place() {
    let server = Server::start(|_| {
        std::thread::sleep(Duration::from_mins(5));
        Reply::new(200, image())
    });
    let place = place(&[server.url() + "/never.png"]);
    let url = String::from_utf8(place.read("rows.jsonl")).unwrap();
    let text = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},\
                {\"role\":\"assistant\",\"content\":\"b\"}]}\n";
    place.write("rows.jsonl", &(text.repeat(5) + &url + &text.repeat(100)));
    let stuck = run(
        &place,
        &[
            "sft",
            "--config",
            "config.yaml",
            "--set",
            "train={max_steps: 30, timeout_s: 8}",
            "--set",
            "data.packing=false",
            "--set",
            "data.length_cache=off",
            "--set",
            "data.url.timeout_s=290",
        ],
    );
    // The loader reads ahead, so the step that waits is before that of the row.
    let step = place.rows("run/metrics.jsonl").len() + 1;
    assert!((2..=6).contains(&step), "{step}");
    let place = format!("error: no progress for 8 s: step {step}: reading data");
    let stuck = stuck.ends_with(74).says(&place).says("raise `train.timeout_s`");
    // half of the time, so that the row is named before the run ends
    stuck.says("this row has been read for 4 s").says("rows.jsonl:6");
}

/// The loader, or the pass that measures rows, waits for a server that does not answer, and the
/// signal does not wait for it.
#[test]
fn a_signal_stops_a_run_that_waits_for_a_server() {
    stops_while_it_waits("off");
    stops_while_it_waits("complete");
}

fn stops_while_it_waits(length_cache: &str) {
    let server = Server::start(|_| {
        std::thread::sleep(Duration::from_mins(5));
        Reply::new(200, image())
    });
    let place = place(&[server.url() + "/never.png"]);
    let url = String::from_utf8(place.read("rows.jsonl")).unwrap();
    let text = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},\
                {\"role\":\"assistant\",\"content\":\"b\"}]}\n";
    place.write("rows.jsonl", &(text.repeat(5) + &url + &text.repeat(100)));
    let cache = format!("data.length_cache={length_cache}");
    let settings =
        ["train={max_steps: 30}", "data.packing=false", &cache, "data.url.timeout_s=290"];
    let trains = length_cache == "off";
    let mut arguments = vec!["sft", "--config", "config.yaml"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    let mut command = place.command(&arguments);
    command.env("TRAINER_TEST_LOOPBACK_URLS", "1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let wait = |child: &mut Child, limit: Duration, done: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !done() && child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < limit, "it took {limit:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let metrics = place.path("run/metrics.jsonl");
    let has_step = || fs::metadata(&metrics).is_ok_and(|file| file.len() > 0);
    let waits = || has_step() == trains && server.requests() > 0;
    wait(&mut child, Duration::from_mins(1), &waits);
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    wait(&mut child, Duration::from_secs(3), &|| false);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    assert_eq!(place.path("run/checkpoints").exists(), trains);
}

#[test]
fn a_stored_image_that_is_damaged_is_downloaded_again() {
    let server = Server::start(|_| Reply::new(200, image()));
    let place = place(&[server.url() + "/a.png"]);
    let before = inspect(&place, &[]).stdout;
    let content = crate::architecture::files(&place.path("run/cache/images/content"), &[]);
    // Still an image of the same size, with another pixel or a checksum that the decoder ignores.
    let mut bytes = image();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    crate::harness::write(&content[0], &bytes);
    let again = inspect(&place, &[]).says("a stored image is damaged");
    assert_eq!(again.stdout, before);
    assert_eq!(fs::read(&content[0]).unwrap(), image());
    assert_eq!(server.take().len(), 2);
    // Undamaged, it is not requested again.
    assert_eq!(inspect(&place, &[]).stdout, before);
    assert_eq!(server.take().len(), 0);
}

#[test]
fn without_the_key_of_the_config_a_url_is_refused_and_not_requested() {
    let server = Server::start(|_| Reply::new(200, image()));
    let place = place(&[server.url() + "/a.png?secret=1"]);
    let refused = inspect(&place, &["--set", "data.allow_urls=false"]);
    let refused = refused.says("hint: set `data.allow_urls: true`");
    assert!(!refused.stderr.contains("secret=1"), "{}", refused.stderr);
    assert_eq!(server.take().len(), 0);
}

#[test]
fn a_redirect_to_an_address_that_is_not_public_is_refused() {
    let target = Server::start(|_| Reply::new(200, image()));
    let port = target.port;
    for to in [
        format!("http://127.0.0.2:{port}/"),
        format!("http://[::1]:{port}/"),
        format!("http://[::ffff:127.0.0.1]:{port}/"),
        format!("http://0.0.0.0:{port}/"),
        "http://10.0.0.1/".to_owned(),
        "http://169.254.169.254/latest/meta-data".to_owned(),
    ] {
        let location = to.clone();
        let server = Server::start(move |_| Reply::redirect(location.clone()));
        let place = place(&[server.url() + "/a.png"]);
        inspect(&place, &[]).says("which is not on the public internet");
        assert_eq!(server.take().len(), 1, "{to}: a refused address is not requested again");
    }
    assert_eq!(target.take().len(), 0);
}

#[test]
fn an_error_of_the_server_rejects_the_row_with_the_status() {
    let server = Server::start(|_| Reply::new(404, "nothing here"));
    let place = place(&[server.url() + "/a.png"]);
    inspect(&place, &[]).says("status 404");
    assert_eq!(server.take().len(), 1);
    let counted = json_lines(&run(&place, &["cache", "--config", "config.yaml"]).stdout);
    assert_eq!(counted[0]["rejected"], json!({"image_url": 1}));
    // Nothing was stored: when the image is there, it is used.
    let server = Server::start(|_| Reply::new(200, "<html>please wait</html>"));
    let busy = self::place(&[server.url() + "/a.png"]);
    inspect(&busy, &[]).says("is not a PNG");
    inspect(&busy, &[]).says("is not a PNG");
    assert_eq!(server.take().len(), 2);
}

#[test]
fn a_busy_server_receives_the_request_again() {
    let requests = AtomicUsize::new(0);
    let server = Server::start(move |_| match requests.fetch_add(1, SeqCst) {
        0 => Reply::new(503, "busy"),
        1 => Reply { cut: Some(10), ..Reply::new(200, image()) },
        _ => Reply::new(200, image()),
    });
    let place = place(&[server.url() + "/a.png"]);
    assert_eq!(json_lines(&inspect(&place, &[]).stdout).len(), 1);
    assert_eq!(server.take().len(), 3);
}

#[test]
fn more_than_five_redirects_are_refused() {
    let server = Server::start(|request| {
        let number: u32 = request.path[1..].parse().unwrap();
        if number == 0 {
            Reply::new(200, image())
        } else {
            Reply::redirect(format!("{}", number - 1))
        }
    });
    let five = place(&[server.url() + "/5"]);
    assert_eq!(json_lines(&inspect(&five, &[]).stdout).len(), 1);
    let six = place(&[server.url() + "/6"]);
    inspect(&six, &[]).says("more than 5 redirects");
}

#[test]
fn an_image_that_is_too_large_is_refused_with_and_without_an_announced_size() {
    for without_length in [false, true] {
        let server = Server::start(move |_| Reply { without_length, ..Reply::new(200, image()) });
        let place = place(&[server.url() + "/a.png"]);
        let refused = inspect(&place, &["--set", "data.url.max_bytes=1000"]);
        refused.says("more than 1000 bytes (`data.url.max_bytes`)");
        assert_eq!(json_lines(&inspect(&place, &[]).stdout).len(), 1, "with the default limit");
    }
}

#[test]
fn a_slow_server_rejects_the_row() {
    let server =
        Server::start(|_| Reply { wait: Duration::from_mins(1), ..Reply::new(200, image()) });
    let place = place(&[server.url() + "/a.png"]);
    let start = Instant::now();
    let refused = inspect(&place, &["--set", "data.url.timeout_s=0.2"]);
    refused.says("did not answer in time").says("`data.url.timeout_s`");
    assert!(start.elapsed() < Duration::from_secs(20));
}
