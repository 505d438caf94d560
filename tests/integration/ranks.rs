//! Any number of ranks trains the same weights, and resumes the checkpoints of any other number.
//!
//! The ranks are threads of this process. `scripts/dist/test.sh` does the same with processes.

use super::harness::{Place, copy_folder, device_name, golden, is_long, without_measured, write};
use fault::Fault;
use serde_json::Value;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use trainer::config::{self, RunConfig};
use trainer::dist::{Group, slow_threads, threads};
use trainer::metrics::{EvalMetrics, StepMetrics};
use trainer::run::{Run, RunError, RunOptions, SetupObserver, SetupWork};
use trainer::train::{Observer, TrainOutcome};

/// A folder with a model, and with rows of text and images, some of which are unusable: one of them
/// only when its image is decoded.
pub(super) fn place() -> Place {
    let place = Place::with_model_and_rows();
    copy_folder(&golden("data/images"), &place.path("images"));
    let image = place.read("images/exact_astronaut_64x64.png");
    write(&place.path("cut.png"), &image[..image.len() - image.len() / 4]);
    let mut rows = String::from_utf8(place.read("rows.jsonl")).unwrap();
    // The order of the rows depends on their bytes: a path of this folder would change it, and with it
    // the rounding of every result, from run to run.
    for question in ["what", "why"] {
        let row = serde_json::json!({"messages": [
            {"role": "user", "content": format!("<image>{question}?")},
            {"role": "assistant", "content": "Nothing."},
        ], "images": ["cut.png"]});
        rows = format!("{row}\n{rows}");
    }
    place.write("rows.jsonl", &rows);
    let eval = fs::read_to_string(golden("data/image_exact.jsonl")).unwrap();
    let eval: Vec<&str> = eval.lines().skip(30).take(5).collect();
    place.write("eval.jsonl", &eval.join("\n"));
    place
}

pub(super) fn config(place: &Place, output: &str, more: &[&str]) -> RunConfig {
    let path = |name: &str| place.path(name).display().to_string();
    let images = golden("data").display().to_string();
    let text = format!(
        "output_dir: {}\n\
         model: {{path: {}}}\n\
         device: {}\n\
         data:\n\
         \x20 train: [{{path: {}}}]\n\
         \x20 eval: [{{path: {}, image_root: '{images}'}}]\n\
         \x20 packing_length: 192\n\
         \x20 max_rejected: 1.0\n\
         train: {{gradient_accumulation_steps: 4, epochs: 2}}\n\
         optim: {{lr: 2.0e-3, weight_decay: 0.1}}\n\
         checkpoint: {{every_steps: 1, keep: 100}}\n\
         eval: {{every_steps: 2}}\n\
         distributed: {{exact: {}}}\n",
        path(output),
        path("model"),
        device_name(),
        path("rows.jsonl"),
        path("eval.jsonl"),
        // on GPUs, `auto` is not exact
        if device_name() == "cpu" { "auto" } else { "true" },
    );
    place.write("ranks.yaml", &text);
    let more: Vec<String> = more.iter().map(|setting| (*setting).to_owned()).collect();
    config::load(&place.path("ranks.yaml"), &more).unwrap()
}

/// Sets the flag of its rank after some step.
struct StopAfter {
    step: u64,
    stop: Arc<AtomicBool>,
}

impl Observer for StopAfter {
    fn step(&mut self, metrics: &StepMetrics, _: u64) {
        if metrics.step == self.step {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

/// Trains on `world` ranks. Rank `world - 1` alone is stopped after step `stop`.
pub(super) fn train(config: &RunConfig, world: usize, stop: Option<u64>) -> Vec<TrainOutcome> {
    train_on(config, slow_threads(world, world, Duration::ZERO).unwrap(), stop)
}

fn train_on(config: &RunConfig, groups: Vec<Group>, stop: Option<u64>) -> Vec<TrainOutcome> {
    let world = groups.len();
    let rank = |group: Group| {
        let last = group.rank.rank + 1 == world;
        let flag = Arc::new(AtomicBool::new(false));
        let options = RunOptions { stop: flag.clone(), ..RunOptions::default() };
        let group = (world > 1).then_some(group);
        let mut run = Run::with_group(config, &options, group).unwrap();
        let step = stop.filter(|_| last).unwrap_or(u64::MAX);
        run.train(&mut StopAfter { step, stop: flag }).unwrap()
    };
    thread::scope(|scope| {
        let rank = &rank;
        let groups = groups.into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Rows of a file without times, memory and values of single ranks.
fn rows(place: &Place, file: &str) -> Vec<Value> {
    let mut rows = without_measured(place.rows(file));
    for row in &mut rows {
        row.as_object_mut().unwrap().remove("ranks");
    }
    rows
}

#[track_caller]
pub(super) fn assert_same(place: &Place, found: &str, expected: &str) {
    let names = place.names(&format!("{expected}/checkpoints"));
    assert_eq!(place.names(&format!("{found}/checkpoints")), names);
    for file in ["metrics.jsonl", "eval.jsonl", "rejects.jsonl"] {
        let [found, expected] = [found, expected].map(|run| rows(place, &format!("{run}/{file}")));
        assert_eq!(found, expected, "{file}");
    }
    let last = names.last().unwrap();
    for file in [
        "final/model.safetensors".to_owned(),
        format!("checkpoints/{last}/optimizer.safetensors"),
        format!("checkpoints/{last}/trainer_state.json"),
    ] {
        let read = |run: &str| place.read(&format!("{run}/{file}"));
        assert!(read(found) == read(expected), "{found}: {file} differs from {expected}'s");
    }
}

#[test]
fn every_number_of_ranks_trains_the_same_weights() {
    let place = place();
    for (index, settings) in [
        vec![],
        vec!["optim.moments=bf16"],
        vec!["model.precision=bf16"],
        vec!["model.precision=bf16", "optim.moments=bf16"],
        vec!["model.precision=bf16", "optim.master=none", "optim.kind=adamw_8bit"],
        vec!["optim.kind=muon"],
        vec!["optim.kind=adafactor", "optim.lr=1.0e-2"],
        vec!["data.packing=false", "train.batch_size=2"],
        vec!["data.balance=cost"],
        vec!["model.freeze=[vision]", "train.epochs=null", "train.max_steps=5"],
    ]
    .into_iter()
    .enumerate()
    {
        let name = |world| format!("run-{index}-{world}");
        let worlds = if is_long() || index == 0 { &[2, 4][..] } else { &[4] };
        for world in [&[1][..], worlds].concat() {
            let outcomes = train(&config(&place, &name(world), &settings), world, None);
            assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })));
        }
        for world in worlds {
            assert_same(&place, &name(*world), &name(1));
        }
        let metrics = place.rows(&format!("{}/metrics.jsonl", name(4)));
        assert_eq!(metrics[0]["ranks"]["world"], 4);
        assert!(metrics.len() >= 4, "{} steps", metrics.len());
        if index == 0 {
            // The last step of an epoch has fewer than 4 micro-batches.
            let tokens: Vec<u64> =
                metrics.iter().map(|row| row["num_tokens"].as_u64().unwrap()).collect();
            let most = tokens.iter().max().unwrap();
            assert!(4 * tokens[tokens.len() - 1] <= 3 * most, "tokens of steps: {tokens:?}");
        }
    }
    let rejected = place.rows("run-0-4/rejects.jsonl");
    let broken = rejected.iter().filter(|row| row["reason"] == "image_broken").count();
    assert_eq!(broken, 4, "two rows in two epochs: {rejected:?}");
}

#[test]
fn a_checkpoint_of_any_number_of_ranks_resumes_on_any_other() {
    let place = place();
    train(&config(&place, "whole", &[]), 1, None);
    // state that ranks read together: codes, factors, and master weights
    let lean = ["model.precision=bf16", "optim.kind=adamw_8bit"];
    let factored = ["model.precision=bf16", "optim.kind=adafactor", "optim.lr=1.0e-2"];
    for (index, settings) in [&lean[..], &factored, &["optim.kind=muon"]].into_iter().enumerate() {
        let names = ["whole", "parts"].map(|name| format!("{name}-{index}"));
        train(&config(&place, &names[0], settings), 2, None);
        train(&config(&place, &names[1], settings), 2, Some(2));
        train(&config(&place, &names[1], settings), 4, None);
        assert_same(&place, &names[1], &names[0]);
    }
    for (first, then) in [(4, 1), (4, 2), (1, 4), (2, 4)] {
        let name = format!("from-{first}-to-{then}");
        // a signal to the last rank alone stops all of them after the same step
        let stopped = train(&config(&place, &name, &[]), first, Some(2));
        assert_eq!(stopped.len(), first);
        for outcome in stopped {
            let TrainOutcome::Stopped { folder } = outcome else { panic!("{outcome:?}") };
            let folder = folder.as_ref().unwrap();
            assert!(folder.ends_with("step-00000002") && folder.is_dir(), "{folder:?}");
        }
        train(&config(&place, &name, &[]), then, None);
        assert_same(&place, &name, "whole");
    }
}

/// Records the numbers of rows that a rank measures.
#[derive(Default)]
struct Measured(Mutex<Vec<u64>>);

impl SetupObserver for Measured {
    fn begin(&self, work: SetupWork, total: u64) -> Box<dyn Fn(u64) + '_> {
        assert_eq!(work, SetupWork::MeasureRows);
        self.0.lock().unwrap().push(total);
        Box::new(|_| ())
    }
}

/// The numbers of rows that each of two ranks measures when a run starts.
fn measured_rows(config: &RunConfig) -> Vec<Vec<u64>> {
    let totals = |group: Group| {
        let measured = Measured::default();
        let options = RunOptions { observer: &measured, ..RunOptions::default() };
        drop(Run::with_group(config, &options, Some(group)).unwrap());
        measured.0.into_inner().unwrap()
    };
    thread::scope(|scope| {
        let totals = &totals;
        let groups = threads(2).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || totals(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const STEPS_ALONE: [&str; 2] = ["train.epochs=null", "train.max_steps=4"];

#[test]
fn ranks_divide_the_measuring_of_rows_at_the_start_and_when_they_resume() {
    let place = place();
    // one row is not JSON
    let chats =
        place.read("rows.jsonl").split(|byte| *byte == b'\n').filter(|row| !row.is_empty()).count()
            as u64;
    // rank 0 joins the two parts
    let divided = [vec![chats / 2, chats], vec![chats.div_ceil(2)]];
    for (name, steps) in [("epochs", &[][..]), ("steps", &STEPS_ALONE)] {
        let settings = [steps, &["data.eval=[]"]].concat();
        let config = config(&place, name, &settings);
        assert_eq!(measured_rows(&config), divided, "{name}");
        train(&config, 2, Some(1));
        assert_eq!(measured_rows(&config), [[0; 0]; 2], "{name}, resumed with a complete cache");
        fs::remove_dir_all(config.cache_dir()).unwrap();
        assert_eq!(measured_rows(&config), divided, "{name}, resumed without a cache");
    }
}

const SHARDS: [&str; 3] = ["optimizer", "gradients", "full"];

#[test]
fn every_division_of_the_state_trains_the_same_weights() {
    let place = place();
    for (index, settings) in [
        vec![],
        vec!["model.precision=bf16", "optim.moments=bf16"],
        vec!["model.precision=bf16", "optim.master=none", "optim.kind=adamw_8bit"],
        vec!["model.freeze=[vision]", "model.recompute=full"],
        // one part of the vision encoder is trained, and the parts around it are frozen
        vec!["model.freeze=[vision, llm, '*deepstack*']", "train.epochs=1"],
    ]
    .into_iter()
    .enumerate()
    {
        let run = |name: &str, shard: &str, world, shard_group| {
            let shard = format!("distributed.shard={shard}");
            let mut settings = settings.clone();
            settings.push(&shard);
            let config = config(&place, name, &settings);
            // Waits that are missing give wrong values if the exchanges are slow.
            let delay = if world == 2 { Duration::from_micros(500) } else { Duration::ZERO };
            let groups = slow_threads(world, shard_group, delay).unwrap();
            let outcomes = train_on(&config, groups, None);
            assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })));
        };
        let alone = format!("alone-{index}");
        run(&alone, "none", 1, 1);
        for (at, shard) in SHARDS.into_iter().enumerate() {
            let groups = [(2, 2), (4, 4), (4, 2)];
            // with the first settings all of them, otherwise each once with one division
            let one = [groups[(at + index) % groups.len()]];
            let groups = if is_long() || index == 0 { &groups[..] } else { &one };
            for (world, shard_group) in groups.iter().copied() {
                let name = format!("{shard}-{index}-{world}-{shard_group}");
                run(&name, shard, world, shard_group);
                assert_same(&place, &name, &alone);
            }
        }
    }
}

/// There is enough memory for `least`, which needs more than `none`.
#[test]
fn every_choice_of_recomputation_trains_the_same_weights() {
    let place = place();
    train(&config(&place, "none", &[]), 1, None);
    for (name, world) in [("least", 1), ("auto", 1), ("auto", 2), ("auto", 4)] {
        let (run, choice) = (format!("{name}-{world}"), format!("model.recompute={name}"));
        train(&config(&place, &run, &[&choice]), world, None);
        assert_same(&place, &run, "none");
    }
    let predicted = |run: &str| {
        place.rows(&format!("{run}/metrics.jsonl"))[0]["predicted_memory_bytes"].as_u64().unwrap()
    };
    assert!(predicted("least-1") > predicted("none"));
    assert_eq!(predicted("auto-1"), predicted("least-1"));
}

#[test]
fn a_checkpoint_of_any_division_resumes_with_any_other() {
    let place = place();
    let lean = ["model.precision=bf16", "optim.master=none", "optim.kind=adamw_8bit"];
    for (whole, settings) in [("whole", &[][..]), ("lean", &lean)] {
        train(&config(&place, whole, settings), 1, None);
    }
    let all = ["none", "optimizer", "gradients", "full"];
    let is_tried = |first: usize, then: usize| match (then + 4 - first) % 4 {
        0 => false,
        3 => is_long(),
        _ => true,
    };
    for (first, from) in all.into_iter().enumerate() {
        for (then, to) in all.into_iter().enumerate().filter(|(then, _)| is_tried(first, *then)) {
            let name = format!("from-{from}-to-{to}");
            let shards = [from, to].map(|shard| format!("distributed.shard={shard}"));
            // each division occurs with different numbers of ranks, and with a lean optimizer
            let (before, after) = if (first + then) % 2 == 0 { (2, 4) } else { (4, 2) };
            let (whole, settings) = match then % 2 {
                0 => ("whole", &[][..]),
                _ => ("lean", &lean[..]),
            };
            let [before_that, after_that] =
                shards.each_ref().map(|shard| [settings, &[shard.as_str()]].concat());
            train(&config(&place, &name, &before_that), before, Some(2));
            train(&config(&place, &name, &after_that), after, None);
            assert_same(&place, &name, whole);
        }
    }
}

#[test]
fn ranks_that_cannot_share_a_step_evenly_are_refused_with_numbers_that_fit() {
    let place = place();
    let config = config(&place, "run", &["train.gradient_accumulation_steps=4"]);
    let group = threads(3).unwrap().remove(0);
    let error = Run::with_group(&config, &RunOptions::default(), Some(group)).err().unwrap();
    assert!(matches!(error, RunError::World { world: 3, slots: 4, .. }), "{error}");
    assert_eq!(error.keys().unwrap().join("."), "train.gradient_accumulation_steps");
    let hint = error.hint().unwrap();
    assert!(hint.starts_with("start 2 or 4 ranks, or set"), "{hint}");
}

#[test]
fn a_rank_that_fails_ends_the_others_with_its_number() {
    let place = place();
    let config = config(&place, "run", &[]);
    let rank = |group: Group| {
        let is_last = group.rank.rank == 1;
        let options = RunOptions::default();
        let mut run = Run::with_group(&config, &options, Some(group)).unwrap();
        if is_last {
            return None; // its connections close
        }
        let error = run.train(&mut ()).unwrap_err();
        Some(error.to_string())
    };
    let errors: Vec<Option<String>> = thread::scope(|scope| {
        let rank = &rank;
        let groups = threads(2).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(errors[0].as_deref(), Some("rank 1 was lost: it has ended"));
}

#[test]
fn ranks_with_different_configs_are_refused() {
    let place = place();
    let configs = ["1e-3", "2e-3"]
        .map(|lr| config(&place, "run", &[&format!("optim.lr={lr}"), "checkpoint.every_steps=0"]));
    let errors: Vec<String> = thread::scope(|scope| {
        let ranks: Vec<_> = threads(2)
            .unwrap()
            .into_iter()
            .zip(&configs)
            .map(|(group, config)| {
                scope.spawn(|| {
                    let run = Run::with_group(config, &RunOptions::default(), Some(group));
                    run.err().unwrap().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in errors {
        let expected = "rank 1 cannot take part: its config differs from that of rank 0";
        assert_eq!(error, expected);
    }
}
