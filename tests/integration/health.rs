//! What a run does when something goes wrong: values that are not finite, signals, a disk that
//! takes no more, inputs that changed.

use super::harness::{
    Output, Place, binary, finish, golden, tensors, values, without_measured, write,
};
use super::images::bmp;
use serde_json::Value;
use sha2::Digest as _;
use std::cell::Cell;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use trainer::dist::Monitor;
use trainer::run::{Run, RunOptions};
use trainer::train::Evaluator;

/// A folder with a tiny model, text rows, and a config of `steps` steps.
fn place(steps: u64) -> Place {
    let place = Place::with_model_and_rows();
    let text = fs::read_to_string(golden("data/text.jsonl")).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.len() < 420).take(12).collect();
    place.write("rows.jsonl", &(rows.join("\n") + "\n"));
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndata:\n\
             \x20 train: [{{path: rows.jsonl}}]\n  packing_length: 256\n\
             train: {{max_steps: {steps}}}\noptim: {{lr: 1.0e-3}}\n\
             checkpoint: {{every_steps: 0}}\neval: {{show: 0}}\n"
        ),
    );
    place
}

fn sft<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["sft", "--config", "config.yaml"], more].concat()
}

/// A learning rate after whose first step the loss is not a number.
const TOO_HIGH: &str = "optim.lr=1e6";

fn is_finite(folder: &std::path::Path) -> bool {
    let tensors =
        candle_core::safetensors::load(folder.join("model.safetensors"), &candle_core::Device::Cpu);
    tensors.unwrap().values().all(|tensor| {
        let tensor = tensor.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap();
        tensor.to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite())
    })
}

#[test]
fn a_step_that_is_not_finite_ends_the_run_and_its_rows_are_named() {
    let place = place(8);
    let said = place.trainer(&sft(&["--set", TOO_HIGH])).ends_with(65).says("the loss is");
    said.says("the rows with the highest losses of this step").says("rows.jsonl:");
    assert!(!place.path("run/final").exists());
}

#[test]
fn a_step_that_is_not_finite_can_be_skipped() {
    let place = place(8);
    let skip = ["--set", TOO_HIGH, "--set", "train.on_non_finite=skip"];
    place.trainer(&sft(&skip)).ends_with(0).says("skipped a step").says("rows.jsonl:");
    let rows = place.rows("run/metrics.jsonl");
    let skipped: Vec<&Value> = rows.iter().filter(|row| row["skipped"] == true).collect();
    assert!(skipped.len() >= 5 && skipped[0]["step"] == 2, "{skipped:?}");
    assert!(skipped.iter().all(|row| row["loss"].is_null()), "{skipped:?}");
    assert!(is_finite(&place.path("run/final")), "no weight has changed since step 1");

    let why = place.trainer(&["why", "run", "--step", "2"]).ends_with(0).stdout;
    let row = why.lines().nth(3).unwrap();
    assert!(why.contains("skipped") && row.contains("not finite"), "{why}");
    place.trainer(&["why", "run", "--step", "999"]).ends_with(64).says("has no step 999");
}

#[test]
fn too_many_skipped_steps_in_a_row_end_the_run() {
    let place = place(8);
    let skip = ["--set", "train.on_non_finite=skip", "--set", "train.max_skipped=3"];
    let high = [&skip[..], &["--set", TOO_HIGH]].concat();
    place.trainer(&sft(&high)).ends_with(65).says("in_a_row=3").says("the loss is");
    assert_eq!(place.rows("run/samples.jsonl").len(), 5, "one step, and four that are not finite");
}

#[test]
fn a_step_without_images_decays_the_vision_encoder_and_changes_nothing_else_of_it() {
    let place = place(1);
    let settings = ["--set", "optim={lr: 1.0e-2, weight_decay: 0.5}"];
    let said = place.trainer(&sft(&settings)).ends_with(0);
    let said = said.says("24 of 63 trained tensors received a gradient");
    said.says("the gradients of the vision encoder are checked at the first step with images");
    let [start, end] =
        ["model", "run/final"].map(|of| tensors(&place, &format!("{of}/model.safetensors")));
    let is_visual = |name: &str| name.starts_with("model.visual.");
    assert_eq!(start.keys().filter(|name| is_visual(name)).count(), 63 - 24);
    for (name, before) in start.iter().filter(|(name, _)| is_visual(name)) {
        let factor = if before.rank() > 1 { 1.0 - 1e-2 * 0.5 } else { 1.0 };
        for (before, after) in values(before).iter().zip(values(&end[name])) {
            let expected = factor * before;
            let off = (after - expected).abs();
            assert!(off <= 1e-6 * expected.abs(), "{name}: {after} not {expected}");
        }
    }
}

#[test]
fn every_sample_of_every_step_is_listed_with_its_loss() {
    let place = place(6);
    place.trainer(&sft(&[])).ends_with(0);
    let metrics = place.rows("run/metrics.jsonl");
    for (samples, row) in place.rows("run/samples.jsonl").iter().zip(&metrics) {
        assert_eq!(samples["step"], row["step"]);
        let list = |key: &str| samples[key].as_array().unwrap().clone();
        assert_eq!(list("rows").len() as u64, row["num_samples"]);
        let targets: u64 = list("num_target_tokens").iter().map(|n| n.as_u64().unwrap()).sum();
        assert_eq!(targets, row["num_target_tokens"]);
        let pairs = list("loss").into_iter().zip(list("num_target_tokens"));
        let sum: f64 = pairs.map(|(loss, n)| loss.as_f64().unwrap() * n.as_f64().unwrap()).sum();
        let loss = row["loss"].as_f64().unwrap();
        assert!((sum / targets as f64 - loss).abs() < 1e-6 * loss, "{samples} {row}");
    }
    let off = ["--set", "log.samples=false", "--set", "output_dir=off"];
    place.trainer(&sft(&off)).ends_with(0);
    assert!(!place.path("off/samples.jsonl").exists());
}

/// Waits until `done` holds.
fn wait_until(what: &str, child: &mut Child, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_mins(1), "no {what} in a minute");
        assert!(child.try_wait().unwrap().is_none(), "the run ended before {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn send(signal: &str, child: &Child) {
    let kill = format!("kill -{signal} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

fn has_step(place: &Place, step: u64) -> bool {
    let metrics = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
    metrics.contains(&format!("{{\"step\":{step},"))
}

#[test]
fn a_signal_of_a_scheduler_saves_and_the_run_continues() {
    let place = place(16_000);
    let mut child = place.start(&sft(&[]));
    wait_until("step 2", &mut child, || has_step(&place, 2));
    send("USR1", &child);
    // a checkpoint that is being written has a hidden folder
    let saved = || {
        let folder = "run/checkpoints";
        let names = if place.path(folder).is_dir() { place.names(folder) } else { Vec::new() };
        names.into_iter().find_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok())
    };
    wait_until("checkpoint", &mut child, || saved().is_some());
    let step = saved().unwrap();
    wait_until("a later step", &mut child, || has_step(&place, step + 2));
    // the terminal was closed
    send("HUP", &child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let last = place.rows("run/metrics.jsonl").last().unwrap()["step"].as_u64().unwrap();
    assert!(place.path(&format!("run/checkpoints/step-{last:08}/manifest.json")).is_file());
}

#[test]
fn a_signal_before_the_first_step_saves_after_it() {
    let place = super::ranks::place();
    let settings = ["train.epochs=null", "train.max_steps=3", "checkpoint.every_steps=0"];
    let config = super::ranks::config(&place, "run", &settings);
    let options = RunOptions::default();
    options.save.store(true, Ordering::Relaxed);
    Run::with_options(&config, &options).unwrap().train(&mut ()).unwrap();
    assert_eq!(place.names("run/checkpoints"), ["step-00000001", "step-00000003"]);
    assert!(!options.save.load(Ordering::Relaxed));
}

/// The calls of a monitor.
#[derive(Default)]
struct Calls(Mutex<Vec<String>>);

impl Monitor for Calls {
    fn report(&self, work: &str) {
        self.0.lock().unwrap().push(work.to_owned());
    }

    fn fail(&self, _: &str) {}

    fn finish(&self) {
        self.0.lock().unwrap().push("finished".to_owned());
    }
}

#[test]
fn the_watchdog_learns_that_training_has_ended() {
    let place = super::ranks::place();
    let settings = ["train.epochs=null", "train.max_steps=1", "checkpoint.every_steps=0"];
    let config = super::ranks::config(&place, "run", &settings);
    let calls = Arc::new(Calls::default());
    let monitor: Arc<dyn Monitor> = calls.clone();
    let options = RunOptions { monitor: Some(monitor), ..RunOptions::default() };
    let mut run = Run::with_options(&config, &options).unwrap();
    run.train(&mut ()).unwrap();
    let calls = calls.0.lock().unwrap();
    assert_eq!(calls.last().unwrap(), "finished", "{calls:?}"); // while `run` is in use
    assert!(calls.len() > 1, "{calls:?}");
}

#[test]
fn a_run_under_nohup_survives_the_end_of_the_terminal() {
    let place = place(4000);
    let mut command = Command::new("nohup");
    command.arg(binary()).args(sft(&[])).current_dir(place.path("."));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    wait_until("step 2", &mut child, || has_step(&place, 2));
    send("HUP", &child);
    let step = place.rows("run/metrics.jsonl").len() as u64;
    wait_until("a later step", &mut child, || has_step(&place, step + 3));
    send("TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

#[test]
fn a_signal_ends_an_evaluation_and_the_resumed_run_makes_it_again() {
    let place = place(4);
    let rows = String::from_utf8(place.read("rows.jsonl")).unwrap();
    place.write("eval.jsonl", &rows.repeat(150));
    let with_eval = [
        "--set",
        "data.eval=[{path: eval.jsonl}]",
        "--set",
        "eval.every_steps=2",
        "--set",
        "checkpoint.every_steps=2",
    ];
    let whole = [&with_eval[..], &["--set", "output_dir=whole"]].concat();
    place.trainer(&sft(&whole)).ends_with(0);

    let mut child = place.start(&sft(&with_eval));
    // the checkpoint of a step is written before its evaluation
    let saved = || place.path("run/checkpoints/step-00000002/manifest.json").is_file();
    wait_until("checkpoint", &mut child, saved);
    send("TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    assert_eq!(place.rows("run/eval.jsonl").len(), 0);
    place.trainer(&sft(&with_eval)).ends_with(0).says("resume from_step=2");
    let rows = |file: &str| without_measured(place.rows(file));
    assert_eq!(rows("run/metrics.jsonl"), rows("whole/metrics.jsonl"));
    assert_eq!(rows("run/eval.jsonl"), rows("whole/eval.jsonl"));
}

#[test]
fn an_evaluation_is_stopped_between_a_few_rows() {
    let place = super::ranks::place();
    let text = fs::read_to_string(golden("data/text.jsonl")).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.len() < 420).take(40).collect();
    place.write("eval.jsonl", &rows.join("\n"));
    let config = super::ranks::config(&place, "run", &[]);
    let run = Run::with_options(&config, &RunOptions::default()).unwrap();
    let runner = run.trainer().runner();
    let evaluator = Evaluator {
        rows: run.trainer().eval_rows().unwrap(),
        max_tokens: 192,
        dtype: runner.dtype,
        device: &runner.device,
        ranks: &runner.ranks,
        weights: &runner.weights,
    };
    let done = Cell::new(0);
    let stop = || done.get() >= 8;
    let report = evaluator.run_until(&runner.model, &stop, &|rows| done.set(rows)).unwrap();
    assert_eq!(report, None);
    assert_eq!(done.get(), 8, "of {} rows", rows.len());
}

/// Runs the program with a limit of the shell, such as `ulimit -f 100`.
fn limited(place: &Place, limit: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let script = format!("{limit}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, &binary()]).args(arguments);
    finish(command.current_dir(place.path(".")))
}

#[test]
fn a_checkpoint_that_cannot_be_written_does_not_end_the_run() {
    let place = place(6);
    let often = sft(&["--set", "checkpoint.every_steps=2"]);
    // 1 MiB a file: enough for the logs, not for the weights
    let said = limited(&place, "ulimit -f 2048", &often);
    let said = said.ends_with(73).says("cannot write a checkpoint; training continues");
    assert_eq!(said.stderr.matches("cannot write a checkpoint").count(), 3, "{}", said.stderr);
    assert_eq!(place.rows("run/metrics.jsonl").len(), 6, "every step was trained");
    assert!(!place.path("run/final").exists());
    assert!(place.names("run/checkpoints").is_empty());
    place.trainer(&often).ends_with(0);
}

#[test]
fn a_resumed_run_notices_that_an_input_changed() {
    let place = place(4);
    let brief = sft(&["--set", "train.max_steps=2"]);
    place.trainer(&brief).ends_with(0);
    let change = |file: &str, from: &str, to: &str, said: &str| {
        let path = place.path(&format!("model/{file}"));
        let before = fs::read_to_string(&path).unwrap();
        assert!(before.contains(from), "{file}");
        write(&path, before.replacen(from, to, 1).as_bytes());
        place.trainer(&sft(&[])).ends_with(65).says("changed since").says(said).says("hint: ");
        write(&path, before.as_bytes());
    };
    change("chat_template.jinja", "user", "User", "chat template");
    change("preprocessor_config.json", "0.5", "0.25", "image settings");
    let state = "run/checkpoints/step-00000002/trainer_state.json";
    assert!(String::from_utf8(place.read(state)).unwrap().contains("\"tokenizer\""));
    place.trainer(&sft(&[])).ends_with(0).says("resume from_step=2");
}

#[test]
fn a_state_of_another_version_is_refused_and_stays() {
    let place = place(4);
    place.trainer(&sft(&["--set", "train.max_steps=2"])).ends_with(0);
    let folder = "run/checkpoints/step-00000002";
    let [state, manifest] =
        ["trainer_state.json", "manifest.json"].map(|name| format!("{folder}/{name}"));
    let mut value: Value = serde_json::from_slice(&place.read(&state)).unwrap();
    let version = value["version"].as_u64().unwrap();
    value["version"] = (version + 1).into();
    let text = serde_json::to_string(&value).unwrap();
    place.write(&state, &text);
    let mut listed: Value = serde_json::from_slice(&place.read(&manifest)).unwrap();
    let sum = format!("{:x}", sha2::Sha256::digest(&text));
    listed["files"]["trainer_state.json"] = serde_json::json!({"bytes": text.len(), "sha256": sum});
    place.write(&manifest, &listed.to_string());
    let said = place.trainer(&sft(&[])).ends_with(65);
    said.says(&format!("version {}", version + 1)).says("hint: continue with the version");
    assert!(place.read(&state) == text.as_bytes());
}

#[test]
fn a_run_whose_folder_was_renamed_saves_nothing_elsewhere() {
    let place = place(16_000);
    let mut child = place.start(&sft(&["--set", "checkpoint.every_steps=1000000"]));
    wait_until("step 2", &mut child, || has_step(&place, 2));
    fs::rename(place.path("run"), place.path("moved")).unwrap();
    // Another run may have started at the old path.
    fs::create_dir(place.path("run")).unwrap();
    send("TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(73));
    assert!(place.names("run").is_empty());
}

/// Loops of the template are limited, so that a run ends with the line and does not hang.
#[test]
fn a_template_that_never_ends_is_refused_with_its_line() {
    let place = place(2);
    let template = String::from_utf8(place.read("model/chat_template.jinja")).unwrap();
    let lines = template.lines().count() + 1;
    let endless = "{%- for a in range(99999) %}{%- for b in range(99999) %}{{- '' }}{%- endfor %}{%- endfor %}";
    place.write("model/chat_template.jinja", &format!("{}\n{endless}", template.trim_end()));
    let said = place.trainer(&sft(&[])).ends_with(65);
    said.says(&format!("(line {lines})"));
    assert!(!place.path("run/checkpoints").exists());
}

/// [`place`] with three rows with this image in `a.bmp`, `b.bmp` and `c.bmp`, and their modification time.
fn place_of_images(image: &[u8]) -> (Place, SystemTime) {
    let place = place(4);
    let row = |image: &str| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"<image>What is it?\"}},\
             {{\"role\":\"assistant\",\"content\":\"a moon\"}}],\"images\":[\"{image}\"]}}\n"
        )
    };
    let names = ["a.bmp", "b.bmp", "c.bmp"];
    place.write("rows.jsonl", &names.map(row).concat());
    let long_ago = SystemTime::now() - Duration::from_secs(1000);
    for name in names {
        put(&place, name, image, long_ago);
    }
    (place, long_ago)
}

fn put(place: &Place, name: &str, bytes: &[u8], modified: SystemTime) {
    write(&place.path(name), bytes);
    let file = fs::File::options().append(true).open(place.path(name)).unwrap();
    file.set_modified(modified).unwrap();
}

/// Sizes, and often times, do not change if another set of images is unpacked in the same folder.
#[test]
fn a_resumed_run_notices_exchanged_images_of_the_same_size() {
    let black = bmp(64, 64);
    let mut other = black.clone();
    other[200..400].fill(255);
    let (place, long_ago) = place_of_images(&black);
    let put = |name, bytes: &[u8], modified| put(&place, name, bytes, modified);
    place.trainer(&sft(&["--set", "train.max_steps=2"])).ends_with(0);

    for modified in [SystemTime::now(), long_ago] {
        put("b.bmp", &other, modified);
        let said = place.trainer(&sft(&[])).ends_with(65);
        said.says("images or videos of the rows changed").says("`b.bmp`").says("hint: ");
    }
    put("b.bmp", &black, SystemTime::now());
    let said = place.trainer(&sft(&[])).ends_with(0).says("resume from_step=2");
    let said = said.says("new modification times and the same contents");
    assert!(!said.stderr.contains("WARN"), "{}", said.stderr);
}

#[test]
fn a_resumed_run_does_not_claim_to_have_read_the_middle_of_large_images() {
    let black = bmp(128, 128);
    let (place, _) = place_of_images(&black);
    place.trainer(&sft(&["--set", "train.max_steps=2"])).ends_with(0);
    let mut other = black.clone();
    other[20_000..30_000].fill(255);
    put(&place, "b.bmp", &other, SystemTime::now());
    let said = place.trainer(&sft(&[])).ends_with(0).says("resume from_step=2");
    let said = said.says("WARN media files have new modification times").says("16 KiB");
    assert!(!said.stderr.contains("the same contents"), "{}", said.stderr);
}

/// The start of the run could not update the cache, so the cache has the image of before.
#[test]
fn a_change_before_the_start_of_a_run_does_not_prevent_resuming() {
    let black = bmp(64, 64);
    let (place, _) = place_of_images(&black);
    let cache = ["cache", "--config", "config.yaml", "--set", "data.cache_dir=lengths"];
    place.trainer(&cache).ends_with(0);
    put(&place, "b.bmp", &bmp(96, 64), SystemTime::now());
    let names = place.names("lengths");
    let lock = names.iter().find(|name| name.contains(".lock")).unwrap();
    let lock = place.path(&format!("lengths/{lock}"));
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap(); // cannot be opened for writing
    let with_cache = ["--set", "data.cache_dir=lengths"];
    let brief = [&with_cache[..], &["--set", "train.max_steps=2"]].concat();
    place.trainer(&sft(&brief)).ends_with(73).says("cannot write the length cache");
    let off = [&brief[..], &["--set", "data.length_cache=off"]].concat();
    place.trainer(&sft(&off)).ends_with(0);
    fs::remove_dir(&lock).unwrap();
    place.trainer(&sft(&with_cache)).ends_with(0).says("resume from_step=2");
}

#[test]
fn a_run_that_is_not_resumed_says_which_settings_changed() {
    let place = place(2);
    place.trainer(&sft(&[])).ends_with(0);
    let other = sft(&["--set", "optim.lr=5e-4", "--set", "data.workers=2"]);
    let said = place.trainer(&other).ends_with(0).says("WARN").says("optim.lr");
    assert!(said.stderr.contains("0.001") && said.stderr.contains("0.0005"), "{}", said.stderr);
    assert!(!said.stderr.contains("data.workers"), "{}", said.stderr);
    let from = ["--resume", "run/previous-1/checkpoints/step-00000002", "--set", "seed=1"];
    place.trainer(&sft(&from)).ends_with(64).says("`seed` was 42 and is 1");
}

#[test]
fn the_same_path_in_another_spelling_is_the_same_run() {
    let place = place(4);
    place.trainer(&sft(&["--set", "train.max_steps=2"])).ends_with(0);
    let other =
        sft(&["--set", "data.train=[{path: ./rows.jsonl}]", "--set", "model.path=./model/"]);
    place.trainer(&other).ends_with(0).says("resume from_step=2");
}

#[test]
fn a_run_without_memory_ends_with_a_message_and_its_checkpoints() {
    let place = place(4);
    // the program starts, but the first layer of a row of this length does not fit
    let text = "word ".repeat(30_000);
    let row = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}},\
         {{\"role\":\"assistant\",\"content\":\"{text}\"}}]}}\n"
    );
    place.write("rows.jsonl", &row);
    let long = sft(&["--set", "data.packing_length=100000", "--set", "data.packing=false"]);
    let limit = "export RAYON_NUM_THREADS=2; ulimit -v 500000";
    let said = limited(&place, limit, &long);
    let said =
        said.ends_with(71).says("error: out of memory").says("were predicted").says("hint: ");
    // Before the first step, `sft` warns, and `check` refuses.
    said.says("the predicted memory exceeds what is free");
    let check = [&["check"], &long[1..]].concat();
    let found = limited(&place, limit, &check).ends_with(65).stdout;
    assert!(
        found.contains("error: about") && found.contains("are needed for its largest"),
        "{found}"
    );
}

#[test]
fn a_stuck_step_ends_the_run_with_code_74_and_its_place() {
    let place = place(1);
    // The attention of one row of this length takes many seconds.
    let text = "word ".repeat(30_000);
    let row = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}},\
         {{\"role\":\"assistant\",\"content\":\"yes\"}}]}}\n"
    );
    place.write("rows.jsonl", &row);
    let long = ["data.packing=false", "data.packing_length=100000", "train.timeout_s=1"];
    let arguments: Vec<&str> = long.iter().flat_map(|setting| ["--set", setting]).collect();
    let mut command = place.command(&sft(&arguments));
    let stuck = finish(command.env("RAYON_NUM_THREADS", "1"));
    let stuck = stuck.ends_with(74).says("error: no progress for 1 s: step 1: micro-batch 1");
    stuck.says("raise `train.timeout_s`");
}

/// A row for each of these answers, trained in this order, one a step.
fn one_row_a_step(answers: impl Iterator<Item = String>) -> Place {
    let place = place(1000);
    let row = |answer: String| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"?\"}},\
             {{\"role\":\"assistant\",\"content\":\"{answer}\"}}]}}\n"
        )
    };
    place.write("rows.jsonl", &answers.map(row).collect::<String>());
    place
}

const IN_ORDER: [&str; 8] = [
    "--set",
    "data.packing=false",
    "--set",
    "data.shuffle=false",
    "--set",
    "train={epochs: 1}",
    "--set",
    "optim={lr: 1.0e-2, schedule: constant}",
];

#[test]
fn a_row_unlike_all_before_is_a_spike_and_is_named() {
    let odd = "xq zj vk wp gh ttr bn lkm ao";
    let answers = (0..50).map(|row| if row == 45 { odd } else { "yes yes yes" }.to_owned());
    let place = one_row_a_step(answers);
    let run = place.trainer(&sft(&IN_ORDER)).ends_with(0).says("spike: loss is far above");
    let line = run.stderr.lines().find(|line| line.contains("spike: loss")).unwrap();
    assert!(line.contains("step=46") && line.contains("rows.jsonl:46"), "{line}");
}

#[test]
fn a_run_that_diverges_says_so_when_it_is_noticed_and_at_its_end() {
    // The model does not learn, and the later answers have a higher loss from the start.
    let answers = (0..175).map(|row| if row < 12 { "yes yes yes" } else { "1 2 3 4" }.to_owned());
    let place = one_row_a_step(answers);
    let fixed = [&IN_ORDER[..], &["--set", "optim={lr: 0.0, schedule: constant}"]].concat();
    let run = place.trainer(&sft(&fixed)).ends_with(0);
    let run = run
        .says("for 100 steps, the mean of the recent losses has been above the loss of the first");
    run.says("the loss ended above its first values: the run has diverged");
}

#[test]
fn a_process_that_may_not_start_its_threads_ends_with_71() {
    let place = Place::with_model_and_rows();
    let limit = "export RAYON_NUM_THREADS=200; ulimit -v 500000";
    let check = ["check", "--config", "config.yaml"];
    let failed = limited(&place, limit, &check).ends_with(71);
    failed.says("error: cannot start a thread").says("hint: raise the limits");
}

/// Otherwise the C library reserves 64 MiB of addresses for each thread, and a thread cannot be started.
#[test]
fn many_threads_fit_into_a_limited_address_space() {
    let place = place(2);
    let many = sft(&["--set", "data.workers=64"]);
    limited(&place, "export RAYON_NUM_THREADS=2; ulimit -v 1000000", &many).ends_with(0);
}

#[test]
fn a_step_that_is_trained_again_has_the_same_loss_and_changes_no_file() {
    let place = place(8);
    let often = ["--set", "checkpoint.every_steps=3"];
    place.trainer(&sft(&often)).ends_with(0);
    let metrics = place.read("run/metrics.jsonl");
    let (files, checkpoints) = (place.names("run"), place.names("run/checkpoints"));
    let again = place.trainer(&sft(&[&often[..], &["--replay-step", "5"]].concat()));
    let shown = again.ends_with(0).stdout;
    let loss = place.rows("run/metrics.jsonl")[4]["loss"].as_f64().unwrap();
    let head = format!("step 5, from the checkpoint of step 3: loss {loss}, grad_norm ");
    assert!(shown.starts_with(&head), "{head} in {shown}");
    assert!(shown.contains("model.language_model.layers.0"), "{shown}");
    let why = place.trainer(&["why", "run", "--step", "5"]).ends_with(0).stdout;
    let rows = |text: &str| text[text.find("targets  row").unwrap()..].to_owned();
    assert_eq!(rows(&shown), rows(&why));
    assert_eq!((place.names("run"), place.names("run/checkpoints")), (files, checkpoints));
    assert!(place.read("run/metrics.jsonl") == metrics);
    let beyond = sft(&[&often[..], &["--replay-step", "99"]].concat());
    place.trainer(&beyond).ends_with(64).says("no step 99");
}

#[test]
fn the_gradients_of_a_step_that_is_not_finite_are_shown() {
    let place = place(8);
    let skip = ["--set", TOO_HIGH, "--set", "train.on_non_finite=skip"];
    place.trainer(&sft(&skip)).ends_with(0);
    let again = place.trainer(&sft(&[&skip[..], &["--replay-step", "2"]].concat()));
    let shown = again.ends_with(0).says("skipped a step").stdout;
    assert!(shown.contains("loss NaN") && shown.contains("not finite"), "{shown}");
    assert!(shown.contains("NaN  model."), "{shown}");
}
