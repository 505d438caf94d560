//! `log.trackers` and `trainer track`, with a stand-in for the client of Weights & Biases.
//! `scripts/trackers/test.sh` uses the real clients.

use super::harness::{Output, Place, finish, golden};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SECRET: &str = "0123456789-a-secret";

/// A folder with the config of a run of 6 steps and 3 evaluations with answers, and the stand-in.
fn place() -> Place {
    let place = Place::with_model_and_rows();
    let data = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    let rows: Vec<&str> = data.lines().skip(30).take(2).collect();
    place.write("eval.jsonl", &(rows.join("\n") + "\n"));
    let images = golden("data").display().to_string();
    place.write(
        "config.yaml",
        &format!(
            "output_dir: run\nmodel: {{path: model}}\ndevice: cpu\ndata:\n\
             \x20 train: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
             \x20 eval: [{{path: eval.jsonl, image_root: '{images}'}}]\n\
             \x20 packing_length: 512\n  max_rejected: 1.0\n\
             train: {{max_steps: 6}}\noptim: {{schedule: constant}}\n\
             checkpoint: {{every_steps: 0}}\n\
             eval: {{every_steps: 2, show: 0, generate: {{max_new_tokens: 2}}}}\n\
             log: {{trackers: [wandb], project: shapes}}\n"
        ),
    );
    place
}

/// Runs a command with the stand-in, which is killed `deaths` times.
fn run(place: &Place, deaths: u32, arguments: &[&str]) -> Output {
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trackers");
    let mut command = place.command(arguments);
    command.env("PYTHONPATH", client).env("FAKE_WANDB", place.path("sent.jsonl"));
    command.env("FAKE_DEATHS", deaths.to_string()).env("WANDB_API_KEY", SECRET);
    command.env_remove("WANDB_PROJECT").env_remove("TRAINER_PYTHON");
    finish(&mut command)
}

const SFT: [&str; 3] = ["sft", "--config", "config.yaml"];

/// Step and loss of each row of the run, in the order in which they are sent.
fn expected(place: &Place) -> Vec<Value> {
    let row = |kind: &str, row: &Value| {
        let loss = format!("{kind}/loss");
        json!({"step": row["step"].as_f64(), loss: row["loss"]})
    };
    let train = place.rows("run/metrics.jsonl").into_iter().map(|found| row("train", &found));
    let evals = place.rows("run/eval.jsonl").into_iter().map(|found| row("eval", &found));
    let mut rows: Vec<Value> = train.chain(evals).collect();
    rows.sort_by_key(|row| row["step"].as_f64().map(f64::to_bits)); // stable
    rows
}

/// Fails unless the stand-in has each row of the run once, in order, and all of them as one run.
#[track_caller]
fn check(place: &Place) -> Vec<Value> {
    let sent = place.rows("sent.jsonl");
    let rows = sent.iter().filter(|row| row["_step"].is_u64()).map(|row| {
        let loss = if row["eval/loss"].is_null() { "train/loss" } else { "eval/loss" };
        json!({"step": row["step"].as_f64(), loss: row[loss]})
    });
    assert_eq!(rows.collect::<Vec<_>>(), expected(place));
    let mut ids: Vec<&Value> =
        sent.iter().map(|row| &row["id"]).filter(|id| !id.is_null()).collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    sent
}

/// Fails if a file in the folder contains the secret.
fn check_no_secret(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            check_no_secret(&path);
        } else {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            assert!(!text.contains(SECRET), "{}", path.display());
        }
    }
}

#[test]
fn every_row_is_sent_once_though_the_client_is_killed_three_times() {
    let place = place();
    let output = run(&place, 3, &SFT).ends_with(0);
    assert_eq!(output.stderr.matches("another process continues where it stopped").count(), 3);
    let sent = check(&place);
    assert_eq!(sent[0], json!({"project": "shapes", "name": "run"}));
    let config = &sent.iter().find(|row| !row["config"].is_null()).unwrap()["config"];
    assert_eq!(config["train"]["max_steps"], 6);
    assert_eq!(config["run"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(sent.last().unwrap(), &json!({"exit_code": 0}));
    let answers: Vec<&Value> =
        sent.iter().map(|row| &row["eval/answers"]).filter(|table| !table.is_null()).collect();
    assert_eq!(answers.len(), 3);
    let predictions = place.rows("run/predictions.jsonl");
    for (answer, row) in answers[0].as_array().unwrap().iter().zip(&predictions) {
        assert_eq!((&answer[0], &answer[2]), (&row["row"], &row["answered"]));
        assert!(answer[3].as_str().is_some_and(|image| image.contains(".png")), "{answer}");
    }
    check_no_secret(&place.path("."));
}

#[test]
fn a_resumed_run_and_track_continue_the_same_run_of_the_tracker() {
    let place = place();
    run(&place, 0, &[&SFT[..], &["--set", "train.max_steps=3"]].concat()).ends_with(0);
    check(&place);
    run(&place, 0, &SFT).ends_with(0).says("resume");
    check(&place);
    // a tracker that the run did not have, and the second time no row is left
    for _ in 0..2 {
        run(&place, 0, &["track", "run"]).ends_with(0).says("wandb: sent 6 steps");
        check(&place);
    }
    // a new run in the same folder is a new run of the tracker
    fs::remove_file(place.path("sent.jsonl")).unwrap();
    let first = place.read("run/trackers/wandb.json");
    run(&place, 0, &[&SFT[..], &["--resume", "never"]].concat()).ends_with(0);
    assert_ne!(place.read("run/trackers/wandb.json"), first);
    check(&place);
}

#[test]
fn a_finished_run_is_sent_by_track() {
    let place = place();
    run(&place, 0, &[&SFT[..], &["--set", "log.trackers=[tensorboard]"]].concat()).ends_with(0);
    assert!(!place.path("sent.jsonl").exists());
    run(&place, 0, &["track", "run"]).ends_with(64).says("--tracker wandb");
    run(&place, 0, &["track", "run", "--tracker", "wandb"]).ends_with(0);
    let sent = check(&place);
    assert_eq!(sent.last().unwrap(), &json!({"exit_code": 0}));
    run(&place, 0, &["track", "model", "--tracker", "wandb"]).ends_with(64).says("`output_dir`");
}

/// A process may outlive its run: a new run in the same folder has other files and another process.
#[test]
fn a_process_of_an_earlier_run_sends_no_row_of_a_new_one() {
    let place = place();
    run(&place, 0, &SFT).ends_with(0);
    fs::remove_file(place.path("sent.jsonl")).unwrap();
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trackers");
    let mut command = Command::new("python3");
    command.args(["run/trackers/follow.py", "run", "wandb"]).current_dir(place.path("."));
    command.env("PYTHONPATH", client).env("FAKE_WANDB", place.path("sent.jsonl"));
    let mut process = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let sent = || if place.path("sent.jsonl").exists() { place.rows("sent.jsonl") } else { vec![] };
    let rows = || sent().iter().filter(|row| row["_step"].is_u64()).count();
    while rows() < 9 {
        assert!(started.elapsed() < Duration::from_mins(2), "{:?}", sent());
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::rename(place.path("run/trackers"), place.path("run/earlier")).unwrap();
    fs::create_dir(place.path("run/trackers")).unwrap();
    let metrics = String::from_utf8(place.read("run/metrics.jsonl")).unwrap();
    place.write("run/metrics.jsonl", &(metrics + "{\"step\":7,\"loss\":1.0}\n"));
    let _open = process.stdin.take(); // the earlier run has not ended
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("the files of the run were moved"));
    assert_eq!(rows(), 9);
    assert_eq!(fs::read_dir(place.path("run/trackers")).unwrap().count(), 0);
}

#[test]
fn track_waits_for_the_end_of_a_run_and_long_rows_are_sent() {
    let place = place();
    run(&place, 0, &[&SFT[..], &["--set", "log.trackers=[]"]].concat()).ends_with(0);
    let folder = fs::File::open(place.path("run")).unwrap();
    folder.lock().unwrap();
    let track = ["track", "run", "--tracker", "wandb"];
    run(&place, 0, &track).ends_with(64);
    assert!(!place.path("sent.jsonl").exists());
    drop(folder);
    let files: serde_json::Map<String, Value> =
        (0..40_000).map(|file| (format!("{file:040}"), 1.into())).collect();
    let long = json!({"step": 7, "loss": 0.5, "rejected_by_file": files}).to_string();
    assert!(long.len() > 1 << 20);
    let metrics = String::from_utf8(place.read("run/metrics.jsonl")).unwrap();
    place.write("run/metrics.jsonl", &format!("{metrics}{long}\n{{\"step\":8,\"loss\":0.25}}\n"));
    run(&place, 0, &track).ends_with(0).says("wandb: sent 8 steps");
    check(&place);
}

#[test]
fn a_missing_python_or_package_ends_the_run_before_its_first_step() {
    let place = place();
    fs::create_dir(place.path("empty")).unwrap();
    place.write("empty/wandb.py", "raise ImportError('no module')\n");
    let mut command = place.command(&SFT);
    let output = finish(command.env("PYTHONPATH", place.path("empty"))).ends_with(64);
    let output = output.says("config.yaml:").says("cannot import the package `wandb`");
    output.says("ImportError: no module").says("`python3 -m pip install wandb`");
    let mut command = place.command(&["check", "--config", "config.yaml"]);
    let output = finish(command.env("PYTHONPATH", place.path("empty"))).ends_with(65);
    assert!(output.stdout.contains("cannot import the package `wandb`"), "{}", output.stdout);
    let output = finish(place.command(&SFT).env("TRAINER_PYTHON", "absent/python")).ends_with(64);
    output.says("cannot start Python as `absent/python`").says("TRAINER_PYTHON");
    assert!(!place.path("run/metrics.jsonl").exists());
}
