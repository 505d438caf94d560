//! `log.trackers` and `trainer track`, with a stand-in for the client of Weights & Biases.
//! `scripts/trackers/test.sh` uses the real clients.

use super::harness::{Output, Place, finish, golden};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

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
        assert!(answer[3].as_str().is_some_and(|image| image.ends_with(".png")), "{answer}");
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

#[test]
fn a_missing_python_or_package_ends_the_run_before_its_first_step() {
    let place = place();
    fs::create_dir(place.path("empty")).unwrap();
    place.write("empty/wandb.py", "raise ImportError('no module')\n");
    let mut command = place.command(&SFT);
    let output = finish(command.env("PYTHONPATH", place.path("empty"))).ends_with(64);
    let output = output.says("config.yaml:").says("cannot import the package `wandb`");
    output.says("ImportError: no module").says("`python3 -m pip install wandb`");
    let output = finish(place.command(&SFT).env("TRAINER_PYTHON", "absent/python")).ends_with(64);
    output.says("cannot start Python as `absent/python`").says("TRAINER_PYTHON");
    assert!(!place.path("run/metrics.jsonl").exists());
}
