//! `trainer plan` predicts what `sft` needs, and writes no file of a run.

use super::harness::Place;
use serde_json::Value;
use std::num::NonZeroU32;
use std::path::Path;
use trainer::config::{self, RunConfig};
use trainer::run::{Load, ModelShape, RunMemory};
use trainer::train::DeviceChoice;

fn place() -> Place {
    let place = Place::with_model_and_rows();
    place.write(
        "plan.yaml",
        "output_dir: run\ndevice: cpu\nmodel: {path: model}\ndata:\n  train: [{path: rows.jsonl}]\n  \
         packing_length: 2048\n  max_rejected: 1.0\ntrain: {max_steps: 4}\n",
    );
    place
}

/// The last line of `plan --json`.
fn plan(place: &Place, arguments: &[&str]) -> Value {
    let command = ["plan", "--config", "plan.yaml", "--json"];
    let output = place.trainer(&[&command[..], arguments].concat()).ends_with(0);
    serde_json::from_str(output.stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn the_plan_has_the_memory_that_a_run_records() {
    let place = place();
    let planned = plan(&place, &["--tokens-per-second", "100"]);
    assert_eq!(planned["steps"], 4);
    assert_eq!(planned["seconds"].as_f64(), planned["tokens"].as_f64().map(|n| n / 100.0));
    assert_eq!(place.names("run"), ["cache"], "only the length cache is written");
    let log = place.trainer(&["sft", "--config", "plan.yaml"]).ends_with(0).stderr;
    assert_eq!(log.matches("MiB predicted").count(), 2, "after three steps and at the end: {log}");
    let recorded = place.rows("run/metrics.jsonl")[0]["predicted_memory_bytes"].as_f64().unwrap();
    let all = planned["cpu_bytes"]["all"].as_f64().unwrap();
    assert!((recorded - all).abs() <= 1.0, "{recorded} {all}");
}

/// With and without lengths, the same packs are made from the same rows.
#[test]
fn a_run_without_the_length_cache_trains_the_same_and_each_resumes_the_other() {
    const OFF: &str = "data.length_cache=off";
    let place = place();
    let losses = |run: &str, settings: &[&str]| -> Vec<Value> {
        let output = format!("output_dir={run}");
        let mut command = vec![
            "sft",
            "--config",
            "plan.yaml",
            "--set",
            &output,
            "--set",
            "optim.schedule=constant",
        ];
        for setting in settings {
            command.extend(["--set", setting]);
        }
        let log = place.trainer(&command).ends_with(0).stderr;
        assert_eq!(log.contains("length cache"), !settings.contains(&OFF), "{log}");
        let rows = place.rows(&format!("{run}/metrics.jsonl"));
        rows.iter().map(|row| row["loss"].clone()).collect()
    };
    let whole = losses("cached", &[]);
    assert_eq!((losses("off", &[OFF]), whole.len()), (whole.clone(), 4));
    losses("first_off", &[OFF, "train.max_steps=2"]);
    assert_eq!(losses("first_off", &[]), whole);
    losses("then_off", &["train.max_steps=2"]);
    assert_eq!(losses("then_off", &[OFF]), whole);
    let epochs = ["sft", "--config", "plan.yaml", "--set", OFF, "--set", "train.epochs=1"];
    let error = place.trainer(&epochs).ends_with(64).stderr;
    assert!(error.contains("data.length_cache") && error.contains("train.max_steps"), "{error}");
}

#[test]
fn a_plan_has_a_time_only_from_a_measured_speed() {
    let place = place();
    let planned = plan(&place, &[]);
    assert!(planned["seconds"].is_null() && planned["tokens"].is_number(), "{planned}");
    let rows = [(1, 50, 9.0), (2, 300, 1.0), (3, 100, 1.0)].map(|(step, tokens, seconds)| {
        format!("{{\"step\":{step},\"num_tokens\":{tokens},\"step_time_s\":{seconds}}}\n")
    });
    std::fs::create_dir(place.path("earlier")).unwrap();
    place.write("earlier/metrics.jsonl", &rows.concat());
    let planned = plan(&place, &["--as-fast-as", "earlier"]);
    assert_eq!(planned["tokens_per_s"], 200.0, "without the first step");
    assert_eq!(planned["seconds"].as_f64(), planned["tokens"].as_f64().map(|n| n / 200.0));
    place.write("earlier/metrics.jsonl", &rows[0]);
    let command = ["plan", "--config", "plan.yaml", "--as-fast-as", "earlier"];
    let error = place.trainer(&command).ends_with(64).stderr;
    assert!(error.contains("`earlier/metrics.jsonl` has fewer than two steps"), "{error}");
}

#[test]
fn the_least_sharding_that_fits_divides_the_least_state() {
    let place = place();
    let rows = |memory: &str| -> Vec<Value> {
        let command = ["plan", "--config", "plan.yaml", "--json", "--gpus", "8", "--nodes", "2"];
        let settings = ["--set", "train.gradient_accumulation_steps=16", "--set", "device=cuda"];
        let search = ["--memory", memory];
        let output = place.trainer(&[&command[..], &settings, &search].concat()).ends_with(0);
        let rows = output.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
        rows.filter(|row: &Value| row["shard"].is_string()).collect()
    };
    let all = rows("1TiB");
    let key = |row: &Value| (row["shard"].as_str().unwrap().to_owned(), row["group"].as_u64());
    let order: Vec<_> = all.iter().map(key).collect();
    let expected = [
        ("none", 16),
        ("optimizer", 8),
        ("optimizer", 16),
        ("gradients", 8),
        ("gradients", 16),
        ("full", 8),
        ("full", 16),
    ];
    assert_eq!(order, expected.map(|(shard, group)| (shard.to_owned(), Some(group))));
    assert_eq!(all.iter().position(|row| row["least"] == true), Some(0));
    // less than `none` needs, and as much as the first one that divides
    let bytes = all[1]["memory_bytes"].as_f64().unwrap();
    assert!(bytes < all[0]["memory_bytes"].as_f64().unwrap(), "{all:?}");
    let memory = format!("{:.6}MiB", bytes / f64::from(1 << 20) + 0.001);
    assert_eq!(rows(&memory).iter().position(|row| row["least"] == true), Some(1));
}

#[test]
fn fp8_needs_memory_for_codes_and_sums_on_a_gpu() {
    let place = place();
    let bytes = |matmul: &str| {
        let format = format!("model.matmul={matmul}");
        // so many tokens that backward of a layer needs more memory than the logits
        let length =
            ["--set", "data.packing_length=8000000", "--images", "0", "--targets", "0.001"];
        let planned = plan(&place, &[&length[..], &["--set", &format]].concat());
        ["cpu_bytes", "gpu_bytes"].map(|of| planned[of]["all"].as_f64().unwrap())
    };
    let [native, fp8, all] = ["native", "fp8", "fp8_all"].map(bytes);
    assert_eq!([native[0], native[0]], [fp8[0], all[0]]);
    let sums = f64::from(32 << 20);
    assert!(fp8[1] > native[1] + sums && all[1] > fp8[1], "{native:?} {fp8:?} {all:?}");
}

#[test]
fn a_calibration_times_steps_and_leaves_no_file() {
    let place = place();
    let planned = plan(&place, &["--calibrate", "1"]);
    assert!(planned["seconds"].as_f64().unwrap() > 0.0, "{planned}");
    assert_eq!(place.names("run"), ["cache"], "only the length cache is written");
}

#[test]
fn a_calibration_of_a_config_that_evaluates_only_trains() {
    let place = place();
    let planned = plan(
        &place,
        &[
            "--calibrate",
            "1",
            "--set",
            "data.eval=[{path: rows.jsonl}]",
            "--set",
            "checkpoint.best={metric: eval.exact}",
            "--set",
            "eval={every_steps: 1, generate: {max_new_tokens: 2}, early_stopping: {patience: 1}}",
        ],
    );
    assert!(planned["seconds"].as_f64().unwrap() > 0.0, "{planned}");
}

#[test]
fn the_search_prints_settings_that_can_be_pasted() {
    let place = place();
    let fits = plan(&place, &["--memory", "1TiB"])["fits"].clone();
    assert_eq!(fits[0]["settings"][0], "data.packing_length=1048576");
    assert_eq!(fits[1]["settings"], Value::Array(Vec::new()), "as it is");
    let fits = plan(&place, &["--memory", "1MiB"])["fits"].clone();
    assert!(fits.as_array().unwrap().iter().all(|fit| fit["settings"].is_null()), "{fits}");
    let command = ["plan", "--config", "plan.yaml", "--memory", "1TiB"];
    let text = place.trainer(&command).ends_with(0).stdout;
    assert!(text.contains("--set data.packing_length=1048576"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() < 100), "{text}");
}

#[test]
fn missing_data_is_no_obstacle() {
    let place = place();
    let planned = plan(&place, &["--set", "data.train=[{path: none.jsonl}]"]);
    assert!(planned["packs"].is_null());
    assert!(!place.names(".").contains(&"run".to_owned()), "no folder is left");
}

/// The settings that `savings` names for a config with these values and full packs.
fn advised(place: &Place, values: &[&str]) -> Vec<String> {
    advised_for(place, values, 1)
}

/// As [`advised`], for packs that are `longer` times shorter than `data.packing_length`.
fn advised_for(place: &Place, values: &[&str], longer: u32) -> Vec<String> {
    let folder = place.path("");
    let path = |name: &str| Path::new(&folder).join(name);
    let mut values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
    values.push(format!("model.path={}", path("model").display()));
    let mut config: RunConfig = config::load(&path("plan.yaml"), &values).unwrap();
    let shape = ModelShape::read(&config).unwrap();
    let load = Load::full(&shape, &config, (0.0, 0.5));
    assert_eq!(config.device, DeviceChoice::Cpu);
    let length = config.data.packing_length.get() * longer;
    config.data.packing_length = NonZeroU32::new(length).unwrap();
    let savings = RunMemory { config, load, world: 1 }.savings().unwrap();
    assert!(savings.iter().all(|saving| saving.bytes > 0.0), "{savings:?}");
    savings.into_iter().map(|saving| saving.setting).collect()
}

#[test]
fn packing_length_is_advised_only_if_the_packs_reach_it() {
    let place = place();
    let set = ["data.packing_length=65536", "model.recompute=full", "model.precision=bf16"];
    let advises = |longer| {
        let settings = advised_for(&place, &set, longer);
        settings.iter().any(|setting| setting.starts_with("data.packing_length"))
    };
    assert!(advises(1));
    assert!(!advises(2) && !advises(16));
}

#[test]
fn a_setting_of_the_config_is_not_advised_again() {
    let place = place();
    let first = advised(&place, &["data.packing_length=65536"]);
    let recompute =
        |settings: &[String]| settings.iter().any(|setting| setting.starts_with("model.recompute"));
    assert!(first.len() == 3 && recompute(&first), "{first:?}");
    let set = ["data.packing_length=65536", "model.recompute=full", "model.precision=bf16"];
    let rest = advised(&place, &set);
    assert!(!rest.is_empty() && !recompute(&rest), "{rest:?}");
    assert!(!rest.contains(&"model.precision=bf16".to_owned()), "{rest:?}");
}

/// Keys in the order of the cost of their settings: first those that only take time, then those that
/// round, then those that train something else.
const BY_COST: [&str; 9] = [
    "train.batch_size",
    "model.recompute",
    "optim.moments",
    "optim.kind=adamw_8bit",
    "optim.master",
    "data.packing_length",
    "model.precision",
    "optim.kind=adafactor",
    "adapter",
];

#[test]
fn the_advised_settings_are_in_the_order_of_their_cost() {
    let place = place();
    let cost = |setting: &String| {
        let found = BY_COST.iter().position(|key| setting.starts_with(key));
        found.unwrap_or_else(|| panic!("`{setting}` is not in the list"))
    };
    let mut named = std::collections::BTreeSet::new();
    for values in [
        &["data.packing_length=65536"][..],
        &["data.packing_length=65536", "train.batch_size=4"],
        &["data.packing_length=512", "model.freeze=[vision]"],
        &["data.packing_length=512", "model.precision=bf16"],
        &["data.packing_length=512", "model.precision=bf16", "optim.moments=bf16"],
    ] {
        let settings = advised(&place, values);
        assert!((1..=3).contains(&settings.len()), "{values:?}: {settings:?}");
        let costs: Vec<usize> = settings.iter().map(cost).collect();
        assert!(costs.is_sorted(), "{values:?}: {settings:?}");
        named.extend(costs);
    }
    assert!(named.len() >= 4, "{named:?}");
}

#[test]
fn the_fewest_ranks_and_the_least_sharding_that_fit_are_found() {
    let place = place();
    let slots = ["--set", "train.gradient_accumulation_steps=4"];
    // Memory of a rank by number of ranks and division, in the order of the search.
    let mut all: Vec<(String, String, f64)> = Vec::new();
    for ranks in ["1", "2", "4"] {
        let command = ["plan", "--config", "plan.yaml", "--json", "--memory", "1TiB", "--gpus"];
        let output = place.trainer(&[&command[..], &[ranks], &slots].concat()).ends_with(0);
        let rows = output.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        all.extend(rows.filter(|row| row["shard"].is_string()).map(|row| {
            let [name, bytes] = ["shard", "memory_bytes"].map(|key| row[key].clone());
            (ranks.to_owned(), name.as_str().unwrap().to_owned(), bytes.as_f64().unwrap())
        }));
    }
    assert_eq!(all.len(), 1 + 4 + 4, "{all:?}");
    let mut numbers = std::collections::BTreeSet::new();
    for (_, _, bytes) in &all {
        let memory = bytes + 64.0;
        let (ranks, shard, _) = all.iter().find(|(_, _, bytes)| *bytes <= memory).unwrap();
        let text = format!("{:.4}MiB", memory / f64::from(1 << 20));
        let fits = plan(&place, &[&["--gpus", "4", "--memory", &text][..], &slots].concat());
        let fits = fits["fits"].as_array().unwrap();
        let found = fits.iter().find(|fit| fit["search"] == "fewest shards").unwrap();
        let expected =
            [format!("distributed.processes={ranks}"), format!("distributed.shard={shard}")];
        assert_eq!(found["settings"], serde_json::json!(expected), "{text}: {all:?}");
        numbers.insert(ranks);
    }
    assert!(numbers.len() >= 2, "{all:?}");
}
