//! Models and data files of the Hugging Face hub, from a server that speaks its endpoints.

use crate::harness::{Output, Place, finish, golden, write};
use crate::web::{Reply, Seen, Server};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex};

const TOKEN: &str = "hf_SecretOfThisTest";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const WEIGHTS: &str = "model.safetensors";

/// Files of a repository on the test's hub.
type Files = Arc<BTreeMap<String, Vec<u8>>>;

/// The files of a small model, and some that no model needs.
fn model_files() -> Files {
    static FILES: LazyLock<Files> = LazyLock::new(|| {
        let place = Place::empty();
        place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for name in place.names("model") {
            files.insert(name.clone(), place.read(&format!("model/{name}")));
        }
        for name in ["README.md", "original/model.safetensors", "pytorch_model.bin"] {
            files.insert(name.to_owned(), b"not needed".to_vec());
        }
        Arc::new(files)
    });
    Arc::clone(&FILES)
}

fn etag(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The tag of a small file.
fn git_hash(bytes: &[u8]) -> String {
    let start = format!("blob {}\0", bytes.len());
    format!("{:x}", Sha1::new_with_prefix(start).chain_update(bytes).finalize())
}

/// A hub that keeps large files on another server, as the real one does.
struct Hub {
    hub: Server,
    store: Server,
}

impl Hub {
    /// `change` may replace an answer of the store of large files.
    fn start(
        kind: &'static str,
        files: Files,
        change: impl Fn(&Seen, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::with_changes(kind, files, change, |_, reply| reply)
    }

    /// `change_of_hub` may replace an answer of the hub itself.
    fn with_changes(
        kind: &'static str,
        files: Files,
        change: impl Fn(&Seen, Reply) -> Reply + Send + Sync + 'static,
        change_of_hub: impl Fn(&Seen, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let of_store = Arc::clone(&files);
        let store = Server::start(move |request| {
            let name = request.path.trim_start_matches('/').split('?').next().unwrap();
            change(request, Reply::file(request, &of_store[name]))
        });
        let address = store.url();
        let hub = Server::start(move |request| {
            if request.header("authorization") != Some(&format!("Bearer {TOKEN}")) {
                let code = if request.header("authorization").is_some() {
                    "GatedRepo"
                } else {
                    "RepoNotFound"
                };
                return Reply::new(401, "who are you?").with("X-Error-Code", code);
            }
            change_of_hub(request, hub_reply(request, kind, &files, &address))
        });
        Self { hub, store }
    }

    fn model() -> Self {
        Self::start("models", model_files(), |_, reply| reply)
    }

    /// A command that uses this hub, online and with the right token.
    fn online(&self, command: &mut Command) -> Output {
        command.env("HF_ENDPOINT", self.hub.url()).env("HF_TOKEN", TOKEN);
        finish(command.env_remove("HF_HUB_OFFLINE"))
    }
}

fn hub_reply(request: &Seen, kind: &str, files: &Files, store: &str) -> Reply {
    let path = request.path.split('?').next().unwrap();
    let id = if kind == "models" { "o/n" } else { "datasets/o/n" };
    // The repository had another name, from which the hub redirects to a relative address.
    if let Some(rest) = path.strip_prefix(&format!("/api/{kind}/o/old")) {
        return Reply::redirect(format!("/api/{kind}/o/n{rest}"));
    }
    if let Some(rest) = path.strip_prefix("/o/old") {
        return Reply::redirect(format!("/{id}{rest}"));
    }
    if path == format!("/api/{kind}/o/n/revision/main")
        || path == format!("/api/{kind}/o/n/revision/{COMMIT}")
    {
        let names: Vec<Value> = files.keys().map(|name| json!({"rfilename": name})).collect();
        return Reply::new(200, json!({"sha": COMMIT, "siblings": names}).to_string());
    }
    let name = path.strip_prefix(&format!("/{id}/resolve/{COMMIT}/"));
    let Some((name, bytes)) = name.and_then(|name| Some((name, files.get(name)?))) else {
        return Reply::new(404, "no").with("X-Error-Code", "EntryNotFound");
    };
    if bytes.len() < 10_000 {
        let reply = Reply::file(request, bytes);
        return reply.with("ETag", format!("\"{}\"", git_hash(bytes)));
    }
    let signed = format!("{store}/{name}?signature=SecretOfTheStore");
    Reply::redirect(signed)
        .with("X-Linked-Etag", format!("\"{}\"", etag(bytes)))
        .with("X-Linked-Size", bytes.len().to_string())
        .with("ETag", "\"of-the-redirect\"")
}

/// A folder with two rows and a config that names the model by `path`.
fn place(path: &str) -> Place {
    let place = Place::empty();
    let text = fs::read_to_string(golden("data/text.jsonl")).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.len() < 300).take(2).collect();
    place.write("rows.jsonl", &(rows.join("\n") + "\n"));
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: {path}}}\ndata: {{train: [{{path: rows.jsonl}}], packing_length: 600}}\n\
             train: {{max_steps: 1}}\n"
        ),
    );
    place
}

const INSPECT: [&str; 5] = ["inspect", "--config", "config.yaml", "--num", "1"];

fn repo(place: &Place) -> PathBuf {
    place.path("hf/hub/models--o--n")
}

/// The requests for large files.
fn loaded(store: &Server) -> Vec<(String, usize)> {
    let name = |request: &Seen| request.path[1..].split('?').next().unwrap().to_owned();
    store.take().iter().map(|request| (name(request), request.from())).collect()
}

fn all_files(folder: &Path) -> Vec<PathBuf> {
    crate::architecture::files(folder, &[])
}

#[test]
fn a_hub_id_is_downloaded_into_the_cache_of_huggingface_hub() {
    let (hub, place) = (Hub::model(), place("o/n"));
    let shown = hub.online(&mut place.command(&INSPECT)).ends_with(0).says("downloading");
    assert!(shown.stdout.contains("<|im_start|>"), "{}", shown.stdout);
    let (repo, files) = (repo(&place), model_files());
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let snapshot = repo.join("snapshots").join(COMMIT);
    for name in ["config.json", "tokenizer.json", "preprocessor_config.json", WEIGHTS] {
        let link = fs::read_link(snapshot.join(name)).unwrap();
        assert!(link.starts_with("../../blobs"), "{}", link.display());
        assert_eq!(fs::read(snapshot.join(name)).unwrap(), files[name], "{name}");
    }
    for name in ["README.md", "original", "pytorch_model.bin"] {
        assert!(!snapshot.join(name).exists(), "{name} is not needed");
    }
    assert!(repo.join("blobs").join(etag(&files[WEIGHTS])).is_file());
    // The second run looks up the commit and downloads nothing.
    hub.hub.take();
    hub.store.take();
    hub.online(&mut place.command(&INSPECT)).ends_with(0);
    let paths: Vec<String> = hub.hub.take().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/api/models/o/n/revision/main"]);
    assert_eq!(loaded(&hub.store), []);
}

#[test]
fn the_token_goes_to_the_hub_only_and_appears_in_no_log_and_no_file() {
    let (hub, place) = (Hub::model(), place("o/old"));
    let mut command = place.command(&INSPECT);
    let shown = hub.online(command.env("RUST_LOG", "trace")).ends_with(0);
    // Redirects to relative addresses stay on the hub.
    let requests = hub.hub.take();
    assert!(requests.iter().any(|request| request.path.starts_with("/api/models/o/old")));
    assert!(requests.iter().all(|request| request.header("authorization").is_some()));
    let requests = hub.store.take();
    assert!(!requests.is_empty());
    assert!(
        requests.iter().all(|request| request.header("authorization").is_none()),
        "{requests:?}"
    );
    for secret in [TOKEN, "SecretOfTheStore"] {
        assert!(
            !shown.stderr.contains(secret) && !shown.stdout.contains(secret),
            "{}",
            shown.stderr
        );
        for path in all_files(&place.path(".")) {
            let bytes = fs::read(&path).unwrap_or_default();
            let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!found, "{}", path.display());
        }
    }
}

#[test]
fn a_lost_connection_continues_where_it_was_cut_off() {
    let cuts = AtomicUsize::new(0);
    let hub = Hub::start("models", model_files(), move |request, reply| {
        let is_cut = request.path.contains(WEIGHTS) && cuts.fetch_add(1, SeqCst) < 2;
        Reply { cut: is_cut.then_some(7_000), ..reply }
    });
    let place = place("o/n");
    hub.online(&mut place.command(&INSPECT)).ends_with(0).says("repeating the request in 0.2 s");
    let weights: Vec<usize> = loaded(&hub.store)
        .into_iter()
        .filter(|(name, _)| name == WEIGHTS)
        .map(|(_, from)| from)
        .collect();
    assert_eq!(weights, [0, 7_000, 14_000]);
    let snapshot = repo(&place).join("snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), model_files()[WEIGHTS]);
}

#[test]
fn every_request_that_fails_for_a_moment_is_repeated() {
    let seen = Mutex::new(BTreeSet::new());
    let hub = Hub::with_changes(
        "models",
        model_files(),
        |_, reply| reply,
        move |request, reply| {
            let is_first =
                seen.lock().unwrap().insert((request.method.clone(), request.path.clone()));
            match request.path.starts_with("/api") {
                // The connection is lost in the middle of the list, the server is busy otherwise.
                true => Reply { cut: is_first.then_some(20), ..reply },
                false if is_first => Reply::new(503, "busy"),
                false => reply,
            }
        },
    );
    hub.online(&mut place("o/n").command(&INSPECT)).ends_with(0);
}

#[test]
fn a_server_that_stays_busy_ends_the_command_after_five_retries() {
    let hub = Hub::with_changes(
        "models",
        model_files(),
        |_, reply| reply,
        |_, _| Reply::new(503, "busy"),
    );
    let failed = hub.online(&mut place("o/n").command(&INSPECT)).ends_with(74);
    failed.says("the hub answers with status 503").says("repeating the request in 2.0 s");
    assert_eq!(hub.hub.take().len(), 6);
}

#[test]
fn a_list_without_end_is_refused() {
    let hub = Hub::with_changes(
        "models",
        model_files(),
        |_, reply| reply,
        |_, reply| Reply { body: vec![b' '; (64 << 20) + 1], ..reply },
    );
    let failed = hub.online(&mut place("o/n").command(&INSPECT));
    failed.says("the list of files has more than 64 MiB");
}

#[test]
fn a_small_file_of_the_same_size_with_another_content_is_refused_and_removed() {
    let hub = Hub::with_changes(
        "models",
        model_files(),
        |_, reply| reply,
        |request, mut reply| {
            if request.path.ends_with("/config.json") && request.method == "GET" {
                reply.body.reverse();
            }
            reply
        },
    );
    let place = place("o/n");
    let failed = hub.online(&mut place.command(&INSPECT)).ends_with(74);
    failed.says("`config.json` does not have the content that the hub announced");
    let blobs = all_files(&repo(&place).join("blobs"));
    let config = git_hash(&model_files()["config.json"]);
    assert!(!blobs.iter().any(|path| path.to_string_lossy().contains(&config)), "{blobs:?}");
}

/// Writes the beginning of the weights, as a run that was killed leaves it behind.
fn leave_part(place: &Place, bytes: &[u8]) -> PathBuf {
    let part =
        repo(place).join("blobs").join(format!("{}.incomplete", etag(&model_files()[WEIGHTS])));
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    write(&part, bytes);
    part
}

#[test]
fn the_next_run_continues_a_download() {
    let (hub, place) = (Hub::model(), place("o/n"));
    leave_part(&place, &model_files()[WEIGHTS][..9_000]);
    hub.online(&mut place.command(&INSPECT)).ends_with(0);
    assert!(loaded(&hub.store).contains(&(WEIGHTS.to_owned(), 9_000)));
    let snapshot = repo(&place).join("snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), model_files()[WEIGHTS]);
}

#[test]
fn a_server_that_cannot_continue_sends_the_whole_file() {
    let hub = Hub::start("models", model_files(), |request, reply| {
        let name = request.path[1..].split('?').next().unwrap();
        Reply { status: 200, headers: vec![], body: model_files()[name].clone(), ..reply }
    });
    let place = place("o/n");
    leave_part(&place, b"from another file");
    hub.online(&mut place.command(&INSPECT)).ends_with(0);
    let snapshot = repo(&place).join("snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), model_files()[WEIGHTS]);
}

#[test]
fn a_file_of_the_wrong_size_or_content_is_refused_and_removed() {
    type Change = fn(Reply) -> Reply;
    let short: Change = |reply| Reply { body: reply.body[..100].to_vec(), ..reply };
    let long: Change = |reply| Reply { body: [reply.body.as_slice(), b"more"].concat(), ..reply };
    let other: Change = |reply| Reply { body: vec![0; reply.body.len()], ..reply };
    for (change, problem) in [
        (short, "has 100 bytes, but the hub announced"),
        (long, "bytes, but the hub announced"),
        (other, "does not have the content that the hub announced"),
    ] {
        let hub = Hub::start("models", model_files(), move |request, reply| {
            if request.path.contains(WEIGHTS) { change(reply) } else { reply }
        });
        let place = place("o/n");
        let refused = hub.online(&mut place.command(&INSPECT)).ends_with(74);
        refused.says(problem).says("hint: run the command again");
        let blobs = all_files(&repo(&place).join("blobs"));
        let weights = etag(&model_files()[WEIGHTS]);
        assert!(!blobs.iter().any(|path| path.to_string_lossy().contains(&weights)), "{blobs:?}");
        assert!(!repo(&place).join("snapshots").join(COMMIT).join(WEIGHTS).exists());
    }
}

#[test]
fn refused_access_and_missing_repositories_say_what_to_do() {
    let hub = Hub::model();
    let place = place("o/n");
    let inspect = |token: Option<&str>, model: &str| {
        let mut command = place.command(&INSPECT);
        command.args(["--set", &format!("model.path={model}")]);
        command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", hub.hub.url());
        finish(command.envs(token.map(|token| ("HF_TOKEN", token))))
    };
    let refused = inspect(None, "o/n").ends_with(64);
    refused
        .says("--set model.path=o/n: `model.path`: the hub refuses access to `o/n` (status 401, RepoNotFound)")
        .says("set `HF_TOKEN`");
    let refused = inspect(Some("hf_Other"), "o/n").ends_with(64).says("(status 401, GatedRepo)");
    let refused = refused.says(&format!("accept the licence on {}/o/n", hub.hub.url()));
    assert!(!refused.stderr.contains("hf_Other"), "{}", refused.stderr);
    let missing = inspect(Some(TOKEN), "o/none").ends_with(64);
    missing
        .says("the hub has no repository or revision `o/none` (status 404)")
        .says("check the spelling");
    // The token in the file of `hf auth login` is used too.
    fs::create_dir_all(place.path("hf")).unwrap();
    place.write("hf/token", &format!("{TOKEN}\n"));
    inspect(None, "o/n").ends_with(0);
}

#[test]
fn offline_mode_uses_the_cache_and_makes_no_request() {
    let (hub, place) = (Hub::model(), place("o/n"));
    let offline = || {
        let mut command = place.command(&INSPECT);
        finish(command.env("HF_ENDPOINT", hub.hub.url()).env("HF_HUB_OFFLINE", "1"))
    };
    let refused = offline().ends_with(64).says("there is no folder `o/n`");
    refused.says("lacks `o/n`: `HF_HUB_OFFLINE` is set");
    assert_eq!(hub.hub.take().len(), 0);
    hub.online(&mut place.command(&INSPECT)).ends_with(0);
    hub.hub.take();
    offline().ends_with(0);
    // As if the download had been interrupted.
    fs::remove_file(repo(&place).join("snapshots").join(COMMIT).join(WEIGHTS)).unwrap();
    offline().ends_with(64).says("lacks `model.safetensors`");
    // As if huggingface_hub had downloaded it.
    fs::remove_dir_all(repo(&place).join("trainer")).unwrap();
    offline().ends_with(64).says("lacks `model.safetensors`");
    assert_eq!(hub.hub.take().len(), 0);
}

#[test]
fn without_a_connection_the_last_download_is_used_with_a_warning() {
    let (hub, place) = (Hub::model(), place("o/n"));
    hub.online(&mut place.command(&INSPECT)).ends_with(0);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let inspect = |model: &str| {
        let mut command = place.command(&INSPECT);
        command.args(["--set", &format!("model.path={model}")]).env_remove("HF_HUB_OFFLINE");
        finish(command.env("HF_ENDPOINT", format!("http://{closed}")))
    };
    inspect("o/n").ends_with(0).says("using the files in the cache");
    inspect("o/other").ends_with(74).says("cannot download `o/other`: the connection to");
}

#[test]
fn a_run_records_the_commit_and_resumes_with_the_cache_in_another_folder() {
    let (hub, place) = (Hub::model(), place("o/n"));
    let sft = ["sft", "--config", "config.yaml"];
    hub.online(&mut place.command(&sft)).ends_with(0);
    let config = String::from_utf8(place.read("run/config.yaml")).unwrap();
    assert!(config.contains(&format!("path: o/n@{COMMIT}")), "{config}");
    fs::rename(place.path("hf"), place.path("moved")).unwrap();
    let mut command =
        place.command(&["sft", "--config", "run/config.yaml", "--set", "train.max_steps=2"]);
    let resumed = finish(command.env("HF_HOME", place.path("moved"))).ends_with(0);
    resumed.says("resume from_step=1");
}

#[test]
fn data_files_of_the_hub_are_opened_like_local_files() {
    let rows = place("unused").read("rows.jsonl");
    let mut files = BTreeMap::from([("README.md".to_owned(), b"a page".to_vec())]);
    files.insert("data/train-0.jsonl".to_owned(), rows);
    let hub = Hub::start("datasets", Arc::new(files), |_, reply| reply);
    let place = place("model");
    place.trainer(&["init", "--preset", "debug", "--out", "model"]).ends_with(0);
    let inspect = |path: &str| {
        let set = format!("data.train=[{{path: \"{path}\"}}]");
        hub.online(place.command(&INSPECT).args(["--set", &set]))
    };
    for path in [
        "hf://datasets/o/n/data/train-0.jsonl".to_owned(),
        format!("hf://datasets/o/n@{COMMIT}/data/train-0.jsonl"),
    ] {
        let shown = inspect(&path).ends_with(0);
        assert!(shown.stdout.contains("train-0.jsonl:"), "{}", shown.stdout);
    }
    // A pattern and a folder.
    for path in ["hf://datasets/o/n/data/*.jsonl", "hf://datasets/o/n/data"] {
        let shown = inspect(path).ends_with(0);
        assert!(shown.stdout.contains("train-0.jsonl:"), "{}", shown.stdout);
    }
    let file =
        place.path("hf/hub/datasets--o--n/snapshots").join(COMMIT).join("data/train-0.jsonl");
    assert!(fs::read_link(file).unwrap().starts_with("../../../blobs"));
    let missing = inspect("hf://datasets/o/n/data/tran-0.jsonl").ends_with(64);
    missing
        .says("`data.train.0.path`: the hub has no file `data/tran-0.jsonl` in `o/n`")
        .says("the repository has `data/train-0.jsonl`");
    inspect("hf://o/n/rows.jsonl").ends_with(64).says("hint: write `hf://datasets/");
}
