//! The folder `best`, and the end of a run whose evaluations no longer improve.

use super::harness::{Place, copy_folder, without_measured};
use super::ranks::{config, place, train};
use serde_json::Value;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use trainer::config::RunConfig;
use trainer::metrics::{EvalMetrics, StepMetrics};
use trainer::run::{Run, RunOptions};
use trainer::train::{Observer, TrainOutcome};

/// Four steps, each with an evaluation. The loss falls, so that `max` keeps the first one and then
/// ends the run.
fn settings(place: &Place, output: &str, best: &str) -> RunConfig {
    let best = format!("checkpoint.best={best}");
    let short = ["train.epochs=null", "train.max_steps=4", "eval.every_steps=1"];
    let early = ["eval.early_stopping={patience: 2}", "checkpoint.every_steps=2", &best];
    config(place, output, &[&short[..], &early[..]].concat())
}

/// Weights of the folder `best`, its state, the evaluations, and the weights of the end.
fn results(place: &Place, output: &str) -> (Vec<u8>, Value, Vec<Value>, Vec<u8>) {
    let read = |file: &str| place.read(&format!("{output}/{file}"));
    let state: Value = serde_json::from_slice(&read("best/trainer_state.json")).unwrap();
    let evals = without_measured(place.rows(&format!("{output}/eval.jsonl")));
    let weights = [read("best/model.safetensors"), read("final/model.safetensors")];
    let [best, last] = weights;
    (best, state["evals"].clone(), evals, last)
}

/// The run ends with or without early stopping; returns whether with it.
fn finish(config: &RunConfig, world: usize) -> bool {
    let Some(TrainOutcome::Finished { stopped_early, .. }) = train(config, world, None).pop()
    else {
        panic!("the run was stopped");
    };
    stopped_early.is_some()
}

#[test]
fn a_run_stopped_after_every_step_keeps_the_same_best_model_and_ends_at_the_same_step() {
    for (mode, last, best, ends_early) in [("min", 4, 4, false), ("max", 3, 1, true)] {
        let place = place();
        let best_config = format!("{{metric: eval.loss, mode: {mode}}}");
        let whole = settings(&place, "whole", &best_config);
        assert_eq!(finish(&whole, 1), ends_early);
        let expected = results(&place, "whole");
        assert_eq!(expected.1["best"]["step"], best, "{:?}", expected.2);
        let rows = &expected.2;
        assert_eq!(rows.last().unwrap()["step"], last);
        assert_eq!(rows.last().unwrap()["early_stop"], ends_early);
        let kept: Vec<_> = rows.iter().filter(|row| row["best"] == true).collect();
        assert_eq!(kept.last().unwrap()["step"], best);

        let parts = settings(&place, "parts", &best_config);
        for step in 1..last {
            let outcome = train(&parts, 1, Some(step)).pop().unwrap();
            assert!(matches!(outcome, TrainOutcome::Stopped { .. }), "{mode}: after step {step}");
        }
        assert_eq!(finish(&parts, 1), ends_early);
        assert!(results(&place, "parts") == expected, "{mode}: stopped after every step");

        // killed after later steps than that of its checkpoint, when `best` was of a later step
        copy_folder(&place.path("whole"), &place.path("killed"));
        fs::remove_dir_all(place.path("killed/final")).unwrap();
        for name in place.names("killed/checkpoints") {
            if name != "step-00000002" {
                fs::remove_dir_all(place.path(&format!("killed/checkpoints/{name}"))).unwrap();
            }
        }
        let killed = settings(&place, "killed", &best_config);
        assert_eq!(finish(&killed, 1), ends_early);
        assert!(results(&place, "killed") == expected, "{mode}: killed");

        // a finished run that is run again
        assert_eq!(finish(&killed, 1), ends_early);
        assert!(results(&place, "killed") == expected, "{mode}: run again");
    }
}

#[test]
fn ranks_keep_the_same_best_model() {
    let place = place();
    let best = "{metric: eval.loss}";
    for world in [1, 2] {
        finish(&settings(&place, &format!("of-{world}"), best), world);
    }
    assert!(results(&place, "of-1") == results(&place, "of-2"));
}

#[test]
fn a_run_resumed_into_another_folder_takes_the_best_model_along() {
    let place = place();
    let best = "checkpoint.best={metric: eval.loss, mode: max}";
    let with = |output: &str, more: &[&str]| {
        config(&place, output, &[&["eval.every_steps=1", best][..], more].concat())
    };
    train(&with("one", &["train.max_steps=2"]), 1, None);
    let options = trainer::run::RunOptions {
        resume: trainer::run::Resume::From(place.path("one/checkpoints/step-00000002")),
        ..Default::default()
    };
    let other = with("other", &["train.max_steps=3"]);
    trainer::run::Run::with_options(&other, &options).unwrap().train(&mut ()).unwrap();
    let read = |file: &str| place.read(&format!("{file}/best/model.safetensors"));
    assert!(read("one") == read("other"), "both are of step 1");
}

#[test]
fn answers_of_evaluations_are_written_once_and_have_the_means_of_the_evaluation() {
    let place = place();
    let mut rows = place.rows("eval.jsonl");
    rows[0].as_object_mut().unwrap().remove("id");
    rows[1].as_object_mut().unwrap().insert("id".to_owned(), 17.into());
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    place.write("eval.jsonl", &lines.join("\n"));
    let generate = "eval.generate={max_new_tokens: 3, metrics: [exact, rouge_l], rows: 4}";
    let best = "checkpoint.best={metric: eval.rouge_l}";
    let with = |output: &str| {
        let short = ["train.epochs=null", "train.max_steps=2", "eval.every_steps=1"];
        config(&place, output, &[&short[..], &[generate, best]].concat())
    };
    finish(&with("run"), 1);
    let answers = place.rows("run/predictions.jsonl");
    let steps: Vec<u64> = answers.iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!((&answers[0]["id"], &answers[1]["id"]), (&Value::Null, &"17".into()));
    assert!(answers[1]["row"].as_str().unwrap().ends_with("eval.jsonl:2"), "{}", answers[1]);
    for (eval, answers) in place.rows("run/eval.jsonl").iter().zip(answers.chunks(4)) {
        assert_eq!(eval["num_answers"], 4);
        for score in ["exact", "rouge_l"] {
            let sum: f64 = answers.iter().map(|row| row[score].as_f64().unwrap()).sum();
            assert!((eval[score].as_f64().unwrap() - sum / 4.0).abs() < 1e-12, "{eval}");
        }
    }
    let read = |output: &str| place.read(&format!("{output}/predictions.jsonl"));
    finish(&with("two"), 2);
    assert!(read("two") == read("run"), "of two ranks");
    train(&with("parts"), 1, Some(1));
    finish(&with("parts"), 1);
    assert!(read("parts") == read("run"), "stopped and resumed");

    let yaml = place.path("ranks.yaml").display().to_string();
    let eval = ["eval", "--config", &yaml, "--checkpoint", "run/final", "--set", generate];
    let answered = ["--per-sample", "scores.jsonl", "--answers"];
    let summary = place.trainer(&[&eval[..], &answered].concat()).ends_with(0).stdout;
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["rouge_l"], place.rows("run/eval.jsonl")[1]["rouge_l"]);
    let scores = place.rows("scores.jsonl");
    assert_eq!((scores.len(), &scores[1]["row_id"]), (5, &"17".into()));
    assert_eq!(scores[1]["answered"], answers[5]["answered"]);
    assert!(scores[4]["answered"].is_null(), "only four rows are answered");
}

/// Stops a run while it generates answers: when the first of four is complete.
struct StopAtAnswer {
    stop: Arc<AtomicBool>,
    num_done: usize,
}

impl Observer for StopAtAnswer {
    fn step(&mut self, _: &StepMetrics, _: u64) {}

    fn evaluating(&mut self, done: usize, total: usize) {
        if total == 4 {
            self.num_done = done;
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

#[test]
fn answers_at_the_same_time_do_not_depend_on_ranks_and_stops() {
    let place = place();
    // a text and a row that cannot be used
    let mut rows = place.rows("eval.jsonl");
    rows[1]["images"] = serde_json::json!(["none.png"]);
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    place.write("eval.jsonl", &lines.join("\n"));
    let with = |output: &str, batch: usize| {
        let generate = format!(
            "eval.generate={{max_new_tokens: 6, metrics: [rouge_l], rows: 4, batch: {batch}}}"
        );
        let short = ["train.epochs=null", "train.max_steps=2", "eval.every_steps=1", "eval.show=0"];
        config(&place, output, &[&short[..], &[&generate]].concat())
    };
    let read = |output: &str| place.read(&format!("{output}/predictions.jsonl"));
    for (output, batch, world) in [("one", 1, 1), ("three", 3, 1), ("ranks", 3, 2), ("many", 64, 1)]
    {
        finish(&with(output, batch), world);
    }
    let answered = |output: &str| -> Vec<Value> {
        let rows = place.rows(&format!("{output}/predictions.jsonl"));
        assert_eq!(rows.len(), 6, "the row without its image has no answer");
        rows.into_iter().map(|row| row["answered"].clone()).collect()
    };
    for output in ["three", "many"] {
        assert_eq!(answered(output), answered("one"), "{output}");
    }
    assert!(read("ranks") == read("three"), "of two ranks");

    let divided = |output: &str| {
        let mut config = with(output, 3);
        config.distributed.shard = trainer::dist::Shard::Full;
        config
    };
    for world in [2, 4] {
        let output = format!("divided-{world}");
        finish(&divided(&output), world);
        assert!(
            read(&output) == read("three"),
            "of {world} ranks with a share of the weights each"
        );
    }
    // A signal to one rank ends the evaluation of all.
    let config = divided("divided-stopped");
    std::thread::scope(|scope| {
        for group in trainer::dist::threads(2).unwrap() {
            let config = &config;
            scope.spawn(move || {
                let stop = Arc::new(AtomicBool::new(false));
                let own = if group.rank.rank == 1 { Arc::default() } else { stop.clone() };
                let options = RunOptions { stop: own, ..RunOptions::default() };
                let mut watch = StopAtAnswer { stop, num_done: 0 };
                let mut run = Run::with_group(config, &options, Some(group)).unwrap();
                let outcome = run.train(&mut watch).unwrap();
                assert!(matches!(outcome, TrainOutcome::Stopped { .. }), "{outcome:?}");
            });
        }
    });
    assert_eq!(place.rows("divided-stopped/predictions.jsonl"), [Value::Null; 0]);
    finish(&config, 2);
    assert!(read("divided-stopped") == read("three"), "stopped and resumed");

    let stop = Arc::new(AtomicBool::new(false));
    let options = RunOptions { stop: stop.clone(), ..RunOptions::default() };
    let mut watch = StopAtAnswer { stop, num_done: 0 };
    let stopped = with("stopped", 3);
    let outcome = Run::with_options(&stopped, &options).unwrap().train(&mut watch).unwrap();
    assert!(matches!(outcome, TrainOutcome::Stopped { .. }), "{outcome:?}");
    assert_eq!(watch.num_done, 1, "one row cannot be used, and the others have no answer");
    assert_eq!(place.rows("stopped/predictions.jsonl"), [Value::Null; 0]);
    finish(&stopped, 1);
    assert!(read("stopped") == read("three"), "stopped and resumed");
}

#[test]
fn a_best_model_of_an_earlier_run_does_not_become_that_of_a_new_one() {
    let place = place();
    let short = ["train.epochs=null", "train.max_steps=2", "eval.every_steps=1"];
    let max = "checkpoint.best={metric: eval.loss, mode: max}";
    finish(&config(&place, "one", &[&short[..], &[max]].concat()), 1);
    let best = |output: &str| place.read(&format!("{output}/best/model.safetensors"));
    for name in ["new", "resumed"] {
        copy_folder(&place.path("one/final"), &place.path(&format!("{name}/best")));
    }
    assert!(best("one") != best("resumed"), "step 1 is the best one");
    // the run keeps no best model
    finish(&config(&place, "new", &short), 1);
    assert!(!place.path("new/best").exists() && place.path("new/previous-1/best").is_dir());
    // the run brings the one of its checkpoint
    let options = trainer::run::RunOptions {
        resume: trainer::run::Resume::From(place.path("one/checkpoints/step-00000002")),
        ..Default::default()
    };
    let longer = [&short[..], &[max, "train.max_steps=3"]].concat();
    let resumed = config(&place, "resumed", &longer);
    trainer::run::Run::with_options(&resumed, &options).unwrap().train(&mut ()).unwrap();
    assert!(best("one") == best("resumed"), "both are of step 1");
}

#[test]
fn a_best_model_of_a_later_step_without_an_evaluation_is_moved_aside() {
    let place = place();
    let with = |more: &[&str]| {
        let short = ["train.epochs=null", "checkpoint.best={metric: eval.loss}"];
        config(&place, "run", &[&short[..], more].concat())
    };
    finish(&with(&["train.max_steps=4", "eval.every_steps=1"]), 1);
    for name in ["step-00000003", "step-00000004"] {
        fs::remove_dir_all(place.path(&format!("run/checkpoints/{name}"))).unwrap();
    }
    let step = |folder: &str| -> Value {
        let manifest = place.read(&format!("run/{folder}/manifest.json"));
        serde_json::from_slice::<Value>(&manifest).unwrap()["step"].clone()
    };
    assert_eq!(step("best"), 4);
    // step 4 is evaluated again
    train(&with(&["train.max_steps=4", "eval.every_steps=4"]), 1, Some(3));
    assert_eq!(step("best"), 4);
    fs::remove_dir_all(place.path("run/checkpoints/step-00000003")).unwrap();
    // it is not
    train(&with(&["train.max_steps=5", "eval.every_steps=5"]), 1, Some(3));
    assert_eq!(step("previous-1/best"), 4);
    assert!(!place.path("run/best").exists());
    finish(&with(&["train.max_steps=5", "eval.every_steps=5"]), 1);
    assert_eq!(step("best"), 5);
}
