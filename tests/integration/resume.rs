//! A resumed run is bit-identical to the uninterrupted one: weights, moments, metrics, rejects.
//!
//! Rows are shuffled and packed, have images or only text, and some are rejected; 20 steps are
//! several epochs.

use super::harness::{
    Place, bits, copy_folder, finish, golden, some_of, tensors, without_measured, write,
};
use serde_json::Value;
use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

const STEPS: u64 = 20;

fn place() -> Place {
    let place = Place::with_model_and_rows();
    let images = golden("data").display().to_string();
    let config = format!(
        "output_dir: run\n\
         model: {{path: model}}\n\
         data:\n\
         \x20 train: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
         \x20 eval: [{{path: eval.jsonl, image_root: '{images}'}}]\n\
         \x20 packing_length: 192\n\
         \x20 max_rejected: 1.0\n\
         train: {{gradient_accumulation_steps: 2, max_steps: {STEPS}}}\n\
         optim: {{lr: 2.0e-3, schedule: cosine, warmup_steps: 4, weight_decay: 0.1}}\n\
         checkpoint: {{every_steps: 1, keep: 100}}\n\
         eval: {{every_steps: 6}}\n"
    );
    place.write("config.yaml", &config);
    let eval = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    place.write("eval.jsonl", eval.lines().nth(40).unwrap());
    place
}

/// Arguments of `trainer sft` with the folder's config and `more`.
fn sft<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["sft", "--config", "config.yaml"], more].concat()
}

/// Rows of a metrics or rejects file after `step`, without times and memory.
fn rows_after(place: &Place, file: &str, step: u64) -> Vec<Value> {
    let mut rows = place.rows(file);
    rows.retain(|row| row["step"].as_u64().unwrap() > step);
    without_measured(rows)
}

fn steps(rows: &[Value]) -> Vec<u64> {
    rows.iter().map(|row| row["step"].as_u64().unwrap()).collect()
}

/// Asserts that weights, moments and state of the run `found` are those of `expected`, and so are
/// the rows of metrics and rejects after `step`.
#[track_caller]
fn assert_same(place: &Place, found: &str, expected: &str, last: u64, step: u64) {
    let checkpoint = format!("checkpoints/step-{last:08}");
    for file in
        ["final/model.safetensors".to_owned(), format!("{checkpoint}/optimizer.safetensors")]
    {
        let read = |run: &str| place.read(&format!("{run}/{file}"));
        assert!(read(found) == read(expected), "{found}: {file} differs from {expected}'s");
    }
    let state = |run: &str| {
        let file = place.read(&format!("{run}/{checkpoint}/trainer_state.json"));
        let mut state: Value = serde_json::from_slice(&file).unwrap();
        // a run without a complete length cache has no digest of the sizes of its images
        state.as_object_mut().unwrap().remove("media");
        state
    };
    assert_eq!(state(found), state(expected), "{found}");
    for file in ["metrics.jsonl", "eval.jsonl", "rejects.jsonl"] {
        let rows = |run: &str| rows_after(place, &format!("{run}/{file}"), step);
        assert_eq!(rows(found), rows(expected), "{found}: {file}");
    }
    let metrics = rows_after(place, &format!("{found}/metrics.jsonl"), step);
    assert_eq!(steps(&metrics), (step + 1..=last).collect::<Vec<_>>(), "{found}");
}

/// Resumes from each step of `stops` into a new folder and compares the result. Returns the number
/// of comparisons.
fn assert_equal_from(place: &Place, stops: impl Iterator<Item = u64>) -> usize {
    let mut equal = 0;
    for step in stops {
        let (from, to) = (format!("run/checkpoints/step-{step:08}"), format!("from-{step}"));
        let output = format!("output_dir={to}");
        let rare = ["--set", &output, "--set", "checkpoint.every_steps=0"];
        place.trainer(&sft(&[&["--resume", &from], &rare[..]].concat())).ends_with(0);
        assert_same(place, &to, "run", STEPS, step);
        equal += 1;
    }
    equal
}

#[test]
fn a_run_continued_from_any_of_its_steps_ends_equal_to_the_bit() {
    let place = place();
    place.trainer(&sft(&[])).ends_with(0);
    let metrics = place.rows("run/metrics.jsonl");
    let epochs: Vec<f64> = metrics.iter().filter_map(|row| row["epoch"].as_f64()).collect();
    assert!(epochs.last().unwrap() > &2.0 && epochs.iter().any(|e| e.fract() > 0.3), "{epochs:?}");
    let reasons = place.rows("run/rejects.jsonl");
    assert!(reasons.len() >= 8, "bad rows of two epochs: {reasons:?}");

    let stops = some_of(&(1..=STEPS).collect::<Vec<_>>());
    let equal = assert_equal_from(&place, stops.into_iter());
    println!("{equal} of {STEPS} steps: continued runs equal the uninterrupted one");

    // The same with `--resume auto`, in a folder as an interruption after that step leaves it: no
    // later checkpoints, and an incomplete last line in the metrics.
    for step in [1, 8, 15] {
        let run = format!("auto-{step}");
        copy_folder(&place.path("run"), &place.path(&run));
        fs::remove_dir_all(place.path(&format!("{run}/final"))).unwrap();
        for later in step + 1..=STEPS {
            let folder = format!("{run}/checkpoints/step-{later:08}");
            fs::remove_dir_all(place.path(&folder)).unwrap();
        }
        let metrics = place.read(&format!("{run}/metrics.jsonl"));
        let torn = &metrics[..metrics.len() - 9];
        write(&place.path(&format!("{run}/metrics.jsonl")), torn);
        let output = format!("output_dir={run}");
        place.trainer(&sft(&["--set", &output])).ends_with(0);
        assert_same(&place, &run, "run", STEPS, 0);
    }
}

#[test]
fn a_run_with_max_steps_writes_a_length_cache_and_uses_it() {
    let place = place();
    let run = |output: &str| {
        let output = format!("output_dir={output}");
        let brief = ["--set", "data.max_length=40", "--set", "train.max_steps=6"];
        let cache = ["--set", "data.cache_dir=lengths", "--set", &output];
        place.trainer(&sft(&[brief, cache].concat())).ends_with(0);
    };
    let log = |run: &str| String::from_utf8(place.read(&format!("{run}/train.log"))).unwrap();
    run("run");
    let first = log("run");
    assert!(first.contains("length cache") && first.contains(" reused=0 "), "{first}");
    let place_of = |what: &str| first.find(what).unwrap_or_else(|| panic!("no {what} in {first}"));
    let (lengths, start) = (place_of(" lengths "), place_of(" start "));
    assert!(lengths < start && first[lengths..start].contains("too_long"), "{first}");
    assert!(place_of(" plan of one epoch ") < start);
    assert!(place.names("lengths").iter().any(|name| name.contains(".arrow")));
    let rejects = place.rows("run/rejects.jsonl");
    assert!(rejects.iter().any(|row| row["reason"] == "too_long"));
    run("again");
    let again = log("again");
    assert!(again.contains("length cache") && !again.contains(" reused=0 "), "{again}");
    assert_same(&place, "again", "run", 6, 0);
}

#[test]
fn many_rows_train_the_same_whether_they_are_measured_or_not() {
    let place = place();
    let rows = String::from_utf8(place.read("rows.jsonl")).unwrap();
    let rows = rows.trim_end().to_owned() + "\n";
    place.write("rows.jsonl", &rows.repeat(33_000 / rows.lines().count() + 1));
    let run = |output: &str, more: &[&str]| {
        let folder = format!("output_dir={output}");
        let brief = ["--set", "data.max_length=40", "--set", "train.max_steps=4", "--set", &folder];
        let cache = ["--set", "data.cache_dir=lengths"];
        place.trainer(&sft(&[&brief[..], &cache, more].concat())).ends_with(0);
        String::from_utf8(place.read(&format!("{output}/train.log"))).unwrap()
    };
    let log = run("run", &["--set", "data.length_cache=off"]);
    assert!(!log.contains(" lengths ") && !place.path("lengths").exists(), "{log}");
    assert!(run("next", &[]).contains(" reused=0 "));
    let log = run("last", &[]);
    assert!(log.contains("length cache") && !log.contains(" reused=0 "), "{log}");
    for again in ["next", "last"] {
        assert_same(&place, again, "run", 4, 0);
    }
}

#[test]
fn bf16_with_master_weights_continues_equal_to_the_bit() {
    let place = place();
    let config = String::from_utf8(place.read("config.yaml")).unwrap();
    place.write("config.yaml", &config.replace("path: model}", "path: model, precision: bf16}"));
    place.trainer(&sft(&[])).ends_with(0);
    assert_equal_from(&place, [1, 5, 12, 19].into_iter());
}

#[test]
fn lean_optimizers_continue_equal_to_the_bit() {
    for optim in [
        "master: none, moments: bf16",
        "master: none, kind: adamw_8bit",
        "kind: muon",
        "kind: adafactor",
    ] {
        let place = place();
        let config = String::from_utf8(place.read("config.yaml")).unwrap();
        let config = config.replace("path: model}", "path: model, precision: bf16}");
        let lean = format!("optim: {{{optim}, ");
        place.write("config.yaml", &config.replace("optim: {", &lean));
        place.trainer(&sft(&[])).ends_with(0);
        assert_equal_from(&place, [1, 12, 19].into_iter());
    }
}

#[test]
fn a_run_with_frozen_parts_continues_equal_to_the_bit() {
    let place = place();
    let config = String::from_utf8(place.read("config.yaml")).unwrap();
    let config = config.replace("path: model}", "path: model, freeze: [vision]}");
    let config =
        config.replace("weight_decay: 0.1", "weight_decay: 0.1, lr_multipliers: {merger: 0.5}");
    place.write("config.yaml", &config);
    place.trainer(&sft(&[])).ends_with(0);
    assert_equal_from(&place, [2, 7, 13].into_iter());
    // Frozen parameters keep their values and have no state.
    let is_frozen = |name: &str| name.starts_with("model.visual.") && !name.contains("merger");
    let [start, end] =
        ["model", "run/final"].map(|of| tensors(&place, &format!("{of}/model.safetensors")));
    let (start, end) = (bits(&start), bits(&end));
    let mut frozen = start.iter().filter(|(name, _)| is_frozen(name)).peekable();
    assert!(frozen.peek().is_some());
    assert!(frozen.all(|(name, before)| end[name] == *before));
    let state = format!("run/checkpoints/step-{STEPS:08}/optimizer.safetensors");
    let state = tensors(&place, &state);
    let mut params = state.keys().map(|name| name.split_once('.').unwrap().1);
    assert!(!state.is_empty() && !params.any(is_frozen));
}

#[test]
fn neither_workers_nor_threads_change_a_bit() {
    let place = place();
    let variants =
        [("run", "1", "1"), ("run-2", "4", "1"), ("run-3", "1", "3"), ("run-4", "7", "2")];
    for (run, workers, threads) in variants {
        let (output, workers) = (format!("output_dir={run}"), format!("data.workers={workers}"));
        let rare = ["--set", "checkpoint.every_steps=0", "--set", &output, "--set", &workers];
        finish(place.command(&sft(&rare)).env("RAYON_NUM_THREADS", threads)).ends_with(0);
        assert_same(&place, run, "run", STEPS, 0);
    }
}

/// Number of steps of runs that are interrupted; enough that the signal arrives before the end.
const LONG: u64 = 40;

fn long<'a>(more: &[&'a str]) -> Vec<&'a str> {
    sft(&[&["--set", "train.max_steps=40"], more].concat())
}

/// Waits until the run has written the row of `step`.
fn wait_for(place: &Place, step: usize, child: &mut Child) {
    let started = Instant::now();
    let rows = || fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
    while rows().lines().filter(|line| line.starts_with("{\"step\"")).count() < step {
        assert!(started.elapsed() < Duration::from_mins(1), "no step {step} in a minute");
        assert!(child.try_wait().unwrap().is_none(), "the run ended before step {step}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn send(signal: &str, child: &Child) {
    let kill = format!("kill -{signal} {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

#[test]
fn a_signal_saves_the_run_and_the_same_command_resumes_it() {
    let place = place();
    place.trainer(&long(&["--set", "output_dir=whole"])).ends_with(0);
    let mut interrupted = 0;
    for (signal, step) in [("TERM", 3), ("INT", 9)] {
        let mut child = place.start(&long(&["--set", "checkpoint.every_steps=7"]));
        wait_for(&place, step, &mut child);
        send(signal, &child);
        assert_eq!(child.wait().unwrap().code(), Some(75));
        let rows = steps(&place.rows("run/metrics.jsonl"));
        let saved = format!("run/checkpoints/step-{:08}/manifest.json", rows.last().unwrap());
        assert!(place.path(&saved).is_file(), "the step of the signal is saved: {saved}");
        assert!(rows.len() > interrupted, "the run did not continue");
        interrupted = rows.len();
    }
    place.trainer(&long(&[])).ends_with(0).says("resume from_step=");
    assert_same(&place, "run", "whole", LONG, 0);
    assert!(!place.path("run/previous-1").exists());
}

#[test]
fn a_run_killed_at_any_time_resumes_and_ends_equal_to_the_bit() {
    let place = place();
    place.trainer(&long(&["--set", "output_dir=whole"])).ends_with(0);
    let mut random = 12345_u64;
    let mut below = |bound: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % bound
    };
    for kill in 0..5 {
        let mut child = place.start(&long(&[]));
        if kill > 0 {
            wait_for(&place, (6 * kill + below(5)) as usize, &mut child);
        }
        std::thread::sleep(Duration::from_millis(below(40)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "the run ended before its kill");
    }
    place.trainer(&long(&[])).ends_with(0).says("resume from_step=");
    assert_same(&place, "run", "whole", LONG, 0);
    for folder in ["run", "run/checkpoints"] {
        let hidden = place.names(folder).into_iter().find(|name| name.starts_with('.'));
        assert_eq!(hidden, None, "{folder} is clean again");
    }
}

/// A finished run of a few steps.
fn short() -> Place {
    let place = place();
    let config = String::from_utf8(place.read("config.yaml")).unwrap();
    place.write("config.yaml", &config.replace("max_steps: 20", "max_steps: 4"));
    place.trainer(&sft(&[])).ends_with(0).says("start from_step=0");
    place
}

#[test]
fn a_finished_run_that_is_run_again_does_no_step_and_changes_nothing() {
    let place = short();
    let read = || {
        let rows = rows_after(&place, "run/metrics.jsonl", 0);
        let rejects = place.read("run/rejects.jsonl");
        let files = place.names("run/final").into_iter();
        let content: Vec<_> = files.map(|name| place.read(&format!("run/final/{name}"))).collect();
        (rows, rejects, content, place.names("run/checkpoints"))
    };
    let before = read();
    let again = place.trainer(&sft(&[])).ends_with(0).says("all steps of this run are done");
    assert!(!again.stderr.contains("INFO train step="), "{}", again.stderr);
    assert!(read() == before, "{:?}", read().0);
    // The last checkpoint is enough for that.
    for step in 1..4 {
        fs::remove_dir_all(place.path(&format!("run/checkpoints/step-0000000{step}"))).unwrap();
    }
    fs::remove_dir_all(place.path("run/final")).unwrap();
    place.trainer(&sft(&[])).ends_with(0);
    assert!(read().2 == before.2);
}

#[test]
fn another_config_starts_a_new_run_and_keeps_the_old_one() {
    let place = short();
    let old = place.read("run/final/model.safetensors");
    for (number, more) in [
        (1, &["--set", "optim.lr=3e-3"][..]),
        (2, &["--set", "optim.lr=3e-3", "--resume", "never"]),
        (3, &["--set", "optim.lr=3e-3", "--set", "seed=7"]),
    ] {
        place.trainer(&sft(more)).ends_with(0).says("start from_step=0").says("previous-");
        let aside = format!("run/previous-{number}");
        let logs = ["metrics.jsonl", "rejects.jsonl", "report.html", "samples.jsonl"];
        let logs = [&logs[..], &["starts.jsonl", "train.log"]].concat();
        let all = [&["checkpoints", "config.yaml", "eval.jsonl", "final"], &logs[..]].concat();
        assert_eq!(place.names(&aside), all);
        assert_eq!(place.names(&format!("{aside}/checkpoints")).len(), 4);
        let rows = place.rows("run/metrics.jsonl");
        assert_eq!(steps(&rows), [1, 2, 3, 4]);
    }
    assert!(place.read("run/previous-1/final/model.safetensors") == old);
    let two = ["run/previous-2/final/model.safetensors", "run/previous-3/final/model.safetensors"];
    assert!(place.read(two[0]) == place.read(two[1]), "`never` starts the same run again");
}

#[test]
fn keys_that_change_no_result_and_the_number_of_steps_may_change_on_resume() {
    let place = short();
    let neutral = [
        "model.use_rmpad=false",
        "model.attention=masked",
        "model.recompute=full",
        "data.workers=3",
        "data.eval=[]",
        "data.max_rejected=0.9",
        "eval.every_steps=0",
        "log.every_steps=2",
        "checkpoint={every_steps: 2, keep: 2}",
        "train.max_steps=7",
    ];
    let sets: Vec<&str> = neutral.iter().flat_map(|set| ["--set", *set]).collect();
    place.trainer(&sft(&sets)).ends_with(0).says("resume from_step=4 steps=7");
    assert_eq!(steps(&place.rows("run/metrics.jsonl")), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(place.names("run/checkpoints"), ["step-00000006", "step-00000007"]);
    assert!(!place.path("run/previous-1").exists());
}

#[test]
fn changed_training_rows_are_rejected_and_nothing_is_lost() {
    let place = short();
    let names = || (place.names("run"), place.names("run/checkpoints"));
    let before = names();
    let rows = String::from_utf8(place.read("rows.jsonl")).unwrap();
    place.write("rows.jsonl", &rows.replacen("moon", "moot", 1));
    let longer = ["--set", "train.max_steps=6"];
    let refused = place.trainer(&sft(&longer)).ends_with(65);
    refused.says("the training files changed").says("hint: ").says("--resume never");
    assert_eq!(names(), before);
    place.write("rows.jsonl", &rows);
    place.trainer(&sft(&longer)).ends_with(0).says("resume from_step=4");
}

#[test]
fn a_damaged_checkpoint_is_skipped_with_a_warning() {
    for file in
        ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"]
    {
        let place = short();
        copy_folder(&place.path("run"), &place.path("whole"));
        let damaged = format!("run/checkpoints/step-00000004/{file}");
        let mut bytes = place.read(&damaged);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        // Not in place, because the weights in `final/` are a hard link to this file.
        fs::remove_file(place.path(&damaged)).unwrap();
        write(&place.path(&damaged), &bytes);
        let said = place.trainer(&sft(&[])).ends_with(0).says("resume from_step=3");
        said.says("WARN").says("skipped a checkpoint").says("step-00000004");
        assert_same(&place, "run", "whole", 4, 0);
        // A damaged checkpoint that is named explicitly is an error.
        write(&place.path(&damaged), &bytes);
        let by_name = sft(&["--resume", "run/checkpoints/step-00000004"]);
        place.trainer(&by_name).ends_with(65).says("is damaged").says("hint: ");
    }
}

#[test]
fn resuming_from_another_folder_moves_older_files_of_output_dir_aside() {
    let place = short();
    place.trainer(&sft(&["--set", "output_dir=other", "--set", "train.max_steps=3"])).ends_with(0);
    let from = ["--set", "output_dir=other", "--resume", "run/checkpoints/step-00000002"];
    place.trainer(&sft(&from)).ends_with(0).says("other/previous-1");
    assert_same(&place, "other", "run", 4, 2);
    assert_eq!(steps(&place.rows("other/previous-1/metrics.jsonl")), [1, 2, 3]);
}

#[test]
fn a_model_without_optimizer_state_cannot_be_resumed() {
    let place = short();
    let refused = place.trainer(&sft(&["--resume", "run/final"])).ends_with(65);
    refused.says("optimizer.safetensors").says("model.path");
    assert!(place.path("run/final/model.safetensors").is_file());
    let other = sft(&["--resume", "run/checkpoints/step-00000002", "--set", "optim.lr=1e-4"]);
    place.trainer(&other).ends_with(64).says("another config").says("hint: ");
}

#[test]
fn a_run_that_ended_before_its_first_step_is_not_kept() {
    let place = place();
    fs::create_dir(place.path("run")).unwrap();
    for file in ["config.yaml", "train.log", "metrics.jsonl", "rejects.jsonl"] {
        place.write(&format!("run/{file}"), if file == "train.log" { "a line\n" } else { "" });
    }
    place.trainer(&sft(&["--set", "train.max_steps=1"])).ends_with(0);
    assert!(!place.names("run").iter().any(|name| name.starts_with("previous")));
    assert_eq!(steps(&place.rows("run/metrics.jsonl")), [1]);
}
