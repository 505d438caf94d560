//! Checkpoints that are written while training continues.

use super::harness::{Place, golden, without_measured};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A folder with a tiny model, text rows, and a config of `steps` steps with a checkpoint of each.
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
             checkpoint: {{every_steps: 1, keep: 20}}\neval: {{show: 0}}\n"
        ),
    );
    place
}

fn sft<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["sft", "--config", "config.yaml"], more].concat()
}

/// All files below a folder, with their bytes.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            let below = files(&path).into_iter();
            found.extend(below.map(|(file, bytes)| (format!("{name}/{file}"), bytes)));
        } else {
            found.insert(name, fs::read(&path).unwrap());
        }
    }
    found
}

fn assert_same_checkpoints(more: &[&str]) {
    let place = place(6);
    let at_once = ["--set", "output_dir=at_once", "--set", "checkpoint.background=false"];
    place.trainer(&sft(&[more, &at_once].concat())).ends_with(0);
    place.trainer(&sft(more)).ends_with(0);
    for folder in ["checkpoints", "final"] {
        let (expected, found) =
            (files(&place.path("at_once").join(folder)), files(&place.path("run").join(folder)));
        assert!(expected.keys().eq(found.keys()), "{folder}");
        for (name, bytes) in expected {
            assert!(found[&name] == bytes, "{folder}/{name}");
        }
    }
    let rows = |run: &str| place.rows(&format!("{run}/metrics.jsonl"));
    assert_eq!(without_measured(rows("run")), without_measured(rows("at_once")));
    for run in ["run", "at_once"] {
        let rows = rows(run);
        assert!(rows[0]["save_hold_s"] == 0.0, "nothing was saved before step 1");
        assert!(rows[1..].iter().all(|row| row["save_hold_s"].as_f64().unwrap() > 0.0), "{run}");
        assert!(rows.iter().any(|row| row["save_s"] != 0.0), "{run}");
    }
}

#[test]
fn every_file_equals_that_of_a_save_during_which_training_waits() {
    assert_same_checkpoints(&[]);
}

#[test]
fn files_of_bf16_with_masters_and_8_bit_moments_are_equal() {
    assert_same_checkpoints(&[
        "--set",
        "model.precision=bf16",
        "--set",
        "optim.kind=adamw_8bit",
        "--set",
        "model.freeze=[vision]",
    ]);
}

/// Waits until the run has written the row of `step`.
fn wait_for(place: &Place, step: u64, child: &mut Child) {
    let started = Instant::now();
    let row = format!("{{\"step\":{step},");
    while !fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default().contains(&row) {
        assert!(started.elapsed() < Duration::from_mins(1), "no step {step} in a minute");
        assert!(child.try_wait().unwrap().is_none(), "the run ended before step {step}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stop(child: &mut Child) {
    let kill = format!("kill -TERM {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

fn last_step(place: &Place) -> u64 {
    place.rows("run/metrics.jsonl").last().unwrap()["step"].as_u64().unwrap()
}

#[test]
fn a_signal_waits_for_the_save_that_is_being_written() {
    let place = place(4000);
    let mut child = place.start(&sft(&["--set", "checkpoint.keep=2"]));
    wait_for(&place, 5, &mut child);
    stop(&mut child);
    let last = last_step(&place);
    let expected = [last - 1, last].map(|step| format!("step-{step:08}"));
    assert_eq!(place.names("run/checkpoints"), expected, "no incomplete folder is left");
}

#[test]
fn a_failed_save_is_reported_and_the_next_one_is_tried() {
    let place = place(4000);
    fs::create_dir(place.path("run")).unwrap();
    let folder = place.path("run/checkpoints");
    std::os::unix::fs::symlink("no/such/folder", &folder).unwrap();
    let mut command = place.command(&sft(&[]));
    let log = fs::File::create(place.path("log")).unwrap();
    let mut child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
    wait_for(&place, 3, &mut child);
    fs::remove_file(&folder).unwrap();
    let now = last_step(&place);
    wait_for(&place, now + 3, &mut child);
    stop(&mut child);
    let said = fs::read_to_string(place.path("log")).unwrap();
    assert!(said.contains("cannot write a checkpoint; training continues"), "{said}");
    let names = place.names("run/checkpoints");
    assert!(!names.contains(&"step-00000001".to_owned()), "{names:?}");
    assert!(names.contains(&format!("step-{:08}", last_step(&place))), "{names:?}");
}
