//! Ranks that compute parts of the same micro-batches train like one rank.

use super::experts::place_with;
use super::harness::Place;
use super::qwen35::qwen35;
use super::ranks::{config, place, train};
use fault::Fault;
use serde_json::Value;
use std::thread;
use trainer::dist::{Group, threads};
use trainer::run::{Run, RunError, RunOptions};
use trainer::train::TrainOutcome;

/// Largest relative difference of a loss or of a gradient norm from that of one rank.
const TOLERANCE: f64 = 2e-6;

/// Settings of 20 steps. With the default `eps`, rounding changes the sign of the first update of a
/// weight whose gradient is almost zero, and 20 steps make that a difference of 1e-5.
const SETTINGS: [&str; 8] = [
    "model.weights=random",
    "train.epochs=null",
    "train.max_steps=20",
    "optim.lr=1e-3",
    "optim.eps=1e-3",
    "checkpoint.every_steps=0",
    "eval.every_steps=10",
    "train.gradient_accumulation_steps=2",
];

/// Gives the model as many key-value heads as query heads, and as many key heads of linear attention as
/// value heads.
fn many_heads(place: Place) -> Place {
    let text = String::from_utf8(place.read("model/config.json")).unwrap();
    let mut model: Value = serde_json::from_str(&text).unwrap();
    let heads = [
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ];
    for (many, few) in heads {
        let Some(heads) = model["text_config"].get(many).cloned() else { continue };
        assert!(heads.as_u64().unwrap().is_multiple_of(4), "{heads}");
        model["text_config"][few] = heads;
    }
    place.write("model/config.json", &model.to_string());
    place
}

/// Asserts that each row of metrics has the same counts, and values within the tolerance.
#[track_caller]
fn assert_same_curve(what: &str, found: &[Value], expected: &[Value]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    assert!(expected.iter().filter(|row| row["grad_norm"].is_f64()).count() == 20);
    for (found, expected) in found.iter().zip(expected) {
        for key in ["step", "num_tokens", "num_target_tokens", "num_samples", "accuracy"] {
            assert_eq!(found[key], expected[key], "{what}: `{key}` in {found} and {expected}");
        }
        let mut keys = vec!["loss"];
        keys.extend(expected["grad_norm"].is_f64().then_some("grad_norm"));
        for key in keys {
            let [found, expected] = [found, expected].map(|row| row[key].as_f64().unwrap());
            let error = (found - expected).abs() / expected.abs();
            assert!(
                error <= TOLERANCE,
                "{what}: `{key}` is {found}, expected {expected}: {error:e}"
            );
        }
    }
}

fn curve(place: &Place, name: &str, world: usize, settings: &[&str]) -> Vec<Value> {
    let settings = [&SETTINGS[..], settings].concat();
    let outcomes = train(&config(place, name, &settings), world, None);
    assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })));
    ["metrics", "eval"]
        .iter()
        .flat_map(|file| place.rows(&format!("{name}/{file}.jsonl")))
        .collect()
}

#[test]
fn groups_of_2_and_4_ranks_have_the_curve_of_one_rank() {
    assert_groups_have_the_curve_of_one_rank(&many_heads(place()));
}

#[test]
fn groups_share_linear_attention() {
    let place = many_heads(qwen35());
    assert_groups_have_the_curve_of_one_rank(&place);
    // Two value heads for each key head.
    let place = qwen35();
    let recompute = ["model.recompute=full", "model.freeze=['*layers.0.linear_attn.conv1d*']"];
    let alone = curve(&place, "alone", 1, &recompute);
    let two = [&recompute[..], &["distributed.sequence=2"]].concat();
    assert_same_curve("two", &curve(&place, "two", 2, &two), &alone);
}

/// The auxiliary loss depends on the choices for all tokens of a step, also for those of other ranks.
#[test]
fn groups_share_the_tokens_of_experts_and_know_the_auxiliary_loss_of_the_step() {
    let place = place_with("moe-vl");
    let steps = |name: &str, world: usize, settings: &[&str]| {
        let short =
            ["train.epochs=null", "train.max_steps=3", "data.eval=[]", "eval.every_steps=0"];
        let settings = [&short[..], &["model.aux_loss=0.1"], settings].concat();
        train(&config(&place, name, &settings), world, None);
        place.rows(&format!("{name}/metrics.jsonl"))
    };
    let alone = steps("alone", 1, &[]);
    assert_eq!(alone.len(), 3);
    for (name, world, shard) in [("two", 2, "none"), ("groups", 4, "none"), ("full", 4, "full")] {
        let shard = format!("distributed.shard={shard}");
        let found = steps(name, world, &["distributed.sequence=2", &shard]);
        for (found, expected) in found.iter().zip(&alone) {
            for key in ["loss", "grad_norm", "aux_loss", "expert_load", "experts_idle"] {
                let [found, expected] = [found, expected].map(|row| row[key].as_f64().unwrap());
                let error = (found - expected).abs() / expected.abs().max(1e-3);
                assert!(error <= 1e-5, "{name}: `{key}` is {found}, expected {expected}");
            }
        }
        assert_eq!(found.len(), alone.len(), "{name}");
    }
}

#[track_caller]
fn assert_groups_have_the_curve_of_one_rank(place: &Place) {
    let alone = curve(place, "alone", 1, &[]);
    let two = ["distributed.sequence=2", "distributed.shard=none"];
    let full = ["distributed.sequence=2", "distributed.shard=full"];
    let four = ["distributed.sequence=4", "distributed.shard=none"];
    for (name, world, settings) in
        [("two", 2, two), ("groups", 4, two), ("four", 4, four), ("full", 4, full)]
    {
        assert_same_curve(name, &curve(place, name, world, &settings), &alone);
    }
}

/// No weight changes, so answers cannot differ by rounding.
#[test]
fn ranks_that_share_the_tokens_of_micro_batches_answer_eval_rows_like_one_rank() {
    for place in [place(), qwen35()] {
        let answers = |name: &str, world: usize, settings: &[&str]| {
            let same = ["train.max_steps=2", "optim.lr=0", "eval.every_steps=2"];
            let generate = ["eval.generate={max_new_tokens: 6, batch: 2}"];
            let settings = [&SETTINGS[..], &same, &generate, settings].concat();
            train(&config(&place, name, &settings), world, None);
            place.rows(&format!("{name}/predictions.jsonl"))
        };
        let alone = answers("alone", 1, &[]);
        assert!(
            alone.len() > 2 && alone.iter().all(|row| row["answered"].is_string()),
            "{alone:?}"
        );
        for (name, world, shard) in [("two", 2, "none"), ("full", 2, "full"), ("groups", 4, "full")]
        {
            let shard = format!("distributed.shard={shard}");
            let settings = ["distributed.sequence=2", shard.as_str()];
            assert_eq!(answers(name, world, &settings), alone, "{name}");
        }
    }
}

#[test]
fn losses_of_data_sets_and_rejected_rows_are_counted_once() {
    let place = place();
    let path = |name: &str| place.path(name).display().to_string();
    let sets =
        format!("data.train=[{{path: {0}, name: a}}, {{path: {0}, name: b}}]", path("rows.jsonl"));
    let settings = [sets.as_str(), "data.packing=false", "model.use_rmpad=false"];
    let settings = [&settings[..], &["train.batch_size=2", "train.max_steps=4"]].concat();
    let runs = [("alone", 1, "distributed.sequence=1"), ("two", 4, "distributed.sequence=2")];
    let [alone, two] = runs.map(|(name, world, sequence)| {
        let rows = curve(&place, name, world, &[&settings[..], &[sequence]].concat());
        (rows, place.rows(&format!("{name}/rejects.jsonl")))
    });
    assert_eq!(alone.1, two.1, "rejects.jsonl");
    for (alone, two) in alone.0.iter().zip(&two.0) {
        for (key, value) in alone.as_object().unwrap() {
            let of_set = key.contains('/') || key.starts_with("rejected");
            match value.as_f64().filter(|_| of_set) {
                Some(value) if key.starts_with("loss") => {
                    let found = two[key].as_f64().unwrap();
                    assert!(
                        (found - value).abs() <= TOLERANCE * value,
                        "`{key}`: {found}, {value}"
                    );
                }
                _ if of_set => assert_eq!(two[key], *value, "`{key}`"),
                _ => {}
            }
        }
    }
}

#[test]
fn degrees_that_do_not_fit_are_refused_with_those_that_do() {
    let place = place();
    let refused = |world: usize, sequence: usize| {
        let settings = [format!("distributed.sequence={sequence}")];
        let config = config(&place, "run", &[settings[0].as_str()]);
        let group = threads(world).unwrap().remove(0);
        let error = Run::with_group(&config, &RunOptions::default(), Some(group)).err().unwrap();
        (error.to_string(), error.hint().unwrap_or_default(), error.keys().unwrap().join("."))
    };
    let (error, hint, key) = refused(3, 2);
    assert_eq!(error, "`distributed.sequence` is 2, which does not divide the number of ranks, 3");
    assert_eq!(hint, "start a multiple of 2 ranks, or set `distributed.sequence` to 1");
    assert_eq!(key, "distributed.sequence");
    let (error, hint, key) = refused(6, 2); // 4 micro-batches
    assert!(error.ends_with("which 6 ranks in groups of 2 cannot share evenly"), "{error}");
    assert!(hint.starts_with("start 4 or 8 ranks, or set"), "{hint}");
    assert_eq!(key, "train.gradient_accumulation_steps");
}

#[test]
fn ranks_that_cannot_share_the_heads_are_refused_with_numbers_that_fit() {
    // models with 2 key-value heads
    let of_both = "2 key-value heads and 2 key heads of linear attention evenly";
    for (place, ending) in [(place(), "2 key-value heads evenly"), (qwen35(), of_both)] {
        assert_four_ranks_are_refused(&place, ending);
    }
}

fn assert_four_ranks_are_refused(place: &Place, ending: &str) {
    let config = config(place, "run", &["distributed.sequence=4", "model.weights=random"]);
    let refused = |group: Group| {
        let error = Run::with_group(&config, &RunOptions::default(), Some(group)).err().unwrap();
        assert!(matches!(error, RunError::SequenceHeads { sequence: 4, .. }), "{error}");
        assert!(error.to_string().ends_with(ending), "{error}");
        assert_eq!(error.keys().unwrap().join("."), "distributed.sequence");
        error.hint().unwrap().into_owned()
    };
    let hints: Vec<String> = thread::scope(|scope| {
        let groups = threads(4).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(|| refused(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(hints, vec!["this model fits: 1, 2"; 4]);
}
