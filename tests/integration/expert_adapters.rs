//! Adapters of experts: agreement with PEFT, runs, files, merging, bad input.
//!
//! `scripts/golden/expert_adapters.py` has made the folders and the curves.

use super::adapter_runs::{eval, losses, results};
use super::experts::place_with;
use super::harness::{Place, bits, copy_folder, golden, tensors};
use super::parity::{
    PLAIN, Variant, assert_all_variants_follow, assert_follows, assert_gradient_norms, golden_json,
    rows_for, runner_of,
};
use super::ranks::{config, train};
use candle_core::Tensor;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use trainer::train::Precision;

/// Adapters of all linear layers of the decoder and of its experts.
const ALL: &str = "adapter={rank: 2, alpha: 8, dropout: 0, target: ['*']}";
const MODELS: [&str; 3] = ["moe-vl", "moe-text", "moe-qwen35"];

fn curve(name: &str) -> Value {
    golden_json("expert_adapters.json")[name].take()
}

#[test]
fn adapters_of_experts_follow_peft_in_every_layout() {
    assert_all_variants_follow(&curve("image_exact_experts-vl"));
    for name in ["text_experts-vl", "text_experts-text", "text_experts-one"] {
        let golden = curve(name);
        assert_follows(&golden, PLAIN);
        assert_follows(&golden, Variant { samples_a_row: 8, ..PLAIN });
    }
}

#[test]
fn a_folder_of_peft_with_transformers_4_has_the_same_curve() {
    let mut golden = curve("text_experts-vl");
    golden["args"]["adapter"] = "experts-vl-4".into();
    assert_follows(&golden, PLAIN);
}

#[test]
fn gradient_norms_of_every_tensor_of_an_adapter_of_experts_equal_pefts() {
    for name in ["text_experts-vl", "image_exact_experts-vl", "text_experts-one"] {
        let golden = curve(name);
        let norms = &golden["grad_norms_step1"];
        assert!(norms.as_object().unwrap().keys().any(|name| name.contains("mlp.experts.lora_A")));
        let (model, data) = (golden["model"].as_str().unwrap(), golden["data"].as_str().unwrap());
        let rows = rows_for(model, data.trim_end_matches(".jsonl"));
        assert_gradient_norms(&rows, &runner_of(&golden, PLAIN, Precision::F32), norms);
    }
}

#[test]
fn ranks_shards_recomputation_and_quantised_experts_change_no_bit() {
    for (model, more) in [
        ("moe-vl", &["model.precision=f32"][..]),
        ("moe-text", &["model.precision=bf16"]),
        ("moe-qwen35", &["adapter.quantize=nf4"]),
    ] {
        let place = place_with(model);
        let run = |output: &str, world: usize, settings: &[&str]| {
            let once = ["data.eval=[]", "eval.every_steps=0"];
            let settings = [&[ALL], more, &once, settings].concat();
            train(&config(&place, output, &settings), world, None);
            results(&place, output)
        };
        let one = run("one", 1, &[]);
        assert!(run("recomputed", 1, &["model.recompute=full"]) == one, "{model}");
        let shard = if more[0].contains("nf4") { "gradients" } else { "full" };
        let shard = format!("distributed.shard={shard}");
        assert!(run("shards", 2, &[&shard]) == one, "{model}");
        assert!(run("ranks", 4, &[]) == one, "{model}");
    }
}

#[test]
fn a_run_that_was_stopped_continues_to_the_same_bits() {
    for (model, more) in [("moe-vl", "model.precision=bf16"), ("moe-text", "adapter.quantize=nf4")]
    {
        let place = place_with(model);
        let settings = [ALL, more];
        train(&config(&place, "whole", &settings), 1, None);
        let whole = losses(&place, "whole");
        for stop in [1, 3] {
            let output = format!("parts-{stop}");
            let config = config(&place, &output, &settings);
            train(&config, 1, Some(stop));
            train(&config, 1, None);
            assert!(results(&place, &output) == results(&place, "whole"), "{model}, {stop}");
            assert_eq!(losses(&place, &output), whole, "{model}, {stop}");
        }
    }
}

/// A folder with rows that the model can read, also for evaluations.
fn place_of(model: &str) -> Place {
    let place = place_with(model);
    if model == "moe-text" {
        let text = std::fs::read_to_string(golden("data/text.jsonl")).unwrap();
        place.write("eval.jsonl", &text.lines().take(5).collect::<Vec<_>>().join("\n"));
    }
    place
}

/// Trains an adapter with a high learning rate and returns the loss of the rows of `data.eval`.
fn trained(place: &Place, output: &str, adapter: &str) -> f64 {
    train(&config(place, output, &[adapter, "optim.lr=2.0e-2"]), 1, None);
    place.rows(&format!("{output}/eval.jsonl")).last().unwrap()["loss"].as_f64().unwrap()
}

#[test]
fn a_merged_model_computes_what_model_and_adapter_compute() {
    for model in MODELS {
        let place = place_of(model);
        let last = trained(&place, "run", ALL);
        let arguments = ["export", "--adapter", "run/final", "--merge", "--out", "merged"];
        let report = place.trainer(&arguments).ends_with(0).stdout;
        let report: Value = serde_json::from_str(&report).unwrap();
        let with_adapter = eval(&place, &["--adapter", "run/final"]);
        assert!((with_adapter - last).abs() < 1e-6, "{model}: {with_adapter} {last}");
        let inside = eval(&place, &["--checkpoint", "merged"]);
        assert!((with_adapter - inside).abs() < 1e-5, "{model}: {with_adapter} {inside}");
        assert!((with_adapter - eval(&place, &[])).abs() > 1e-3, "{model}");
        // the experts, too
        let [start, merged] =
            ["model", "merged"].map(|of| tensors(&place, &format!("{of}/model.safetensors")));
        assert_eq!(
            start.keys().collect::<BTreeSet<_>>(),
            merged.keys().collect::<BTreeSet<_>>(),
            "{model}"
        );
        for (name, weight) in start.iter().filter(|(name, _)| name.contains(".mlp.experts.")) {
            assert_eq!(weight.dims(), merged[name].dims(), "{model}: {name}");
            let change = (weight - &merged[name]).unwrap().abs().unwrap().sum_all().unwrap();
            assert!(change.to_scalar::<f32>().unwrap() > 0.0, "{model}: {name}");
        }
        assert!(report["merged"].as_u64().unwrap() > 8, "{report}");
        // another run starts where the first ended
        let folder = place.path("run/final");
        let start = format!("adapter={{dropout: 0, start_from: {}}}", folder.display());
        train(&config(&place, "next", &[&start, "train.max_steps=1", "optim.lr=0"]), 1, None);
        let next = place.rows("next/eval.jsonl").last().unwrap()["loss"].as_f64().unwrap();
        assert!((with_adapter - next).abs() < 1e-6, "{model}: {with_adapter} {next}");
    }
}

#[test]
fn folders_name_the_tensors_and_parameters_as_peft_does() {
    let config_of = |folder: &str, place: &Place| -> Value {
        serde_json::from_slice(&place.read(&format!("{folder}/adapter_config.json"))).unwrap()
    };
    for (adapter, model) in [("experts-vl", "moe-vl"), ("experts-one", "moe-text")] {
        let place = place_of(model);
        copy_folder(&golden("adapters").join(adapter), &place.path("peft"));
        let peft = config_of("peft", &place);
        let targets = if adapter == "experts-one" { "*.gate_up_proj" } else { "*" };
        let adapter =
            format!("adapter={{rank: {}, alpha: 8, dropout: 0, target: ['{targets}']}}", peft["r"]);
        trained(&place, "run", &adapter);
        let found = config_of("run/final", &place);
        for key in ["r", "lora_alpha", "lora_dropout", "use_rslora"] {
            let [found, expected] = [&found, &peft].map(|config| config[key].as_f64());
            assert_eq!(found, expected, "{key}");
        }
        let sorted = |of: &Value, key: &str| -> BTreeSet<String> {
            serde_json::from_value(of[key].clone()).unwrap()
        };
        for key in ["target_modules", "target_parameters"] {
            assert_eq!(sorted(&found, key), sorted(&peft, key), "{key}");
        }
        let shapes = |folder: &str| {
            let tensors = tensors(&place, &format!("{folder}/adapter_model.safetensors"));
            let shape = |(name, tensor): (String, Tensor)| (name, tensor.dims().to_vec());
            tensors.into_iter().map(shape).collect::<BTreeSet<_>>()
        };
        assert_eq!(shapes("run/final"), shapes("peft"));
        assert_eq!(found["base_model_name_or_path"], place.path("model").display().to_string());
    }
}

#[test]
fn an_adapter_is_exported_as_peft_has_it_with_transformers_4() {
    let place = place_with("moe-vl");
    for name in ["experts-vl", "experts-vl-4", "experts-text"] {
        copy_folder(&golden("adapters").join(name), &place.path(name));
    }
    let export = |from: &str| {
        let out = format!("{from}-out");
        place.trainer(&["export", "--adapter", from, "--transformers-4", "--out", &out])
    };
    export("experts-vl").ends_with(0);
    let [found, expected] = ["experts-vl-out", "experts-vl-4"]
        .map(|folder| tensors(&place, &format!("{folder}/adapter_model.safetensors")));
    assert!(bits(&found) == bits(&expected));
    let same = |(name, tensor): (&String, &Tensor)| tensor.dims() == expected[name].dims();
    assert!(found.iter().all(same), "{found:?}");
    export("experts-text").ends_with(64).says("transformers 4").says("without `--transformers-4`");
}

#[test]
fn experts_of_some_layers_have_their_full_names() {
    let place = place_of("moe-text");
    let adapter = "adapter={dropout: 0, rank: 2, target: ['*.layers.3.mlp.experts.*', '*.q_proj']}";
    trained(&place, "run", adapter);
    let text = place.read("run/final/adapter_config.json");
    let found: Value = serde_json::from_slice(&text).unwrap();
    let experts = |part: &str| format!("model.layers.3.mlp.experts.{part}");
    let expected = json!([experts("gate_up_proj"), experts("down_proj")]);
    assert_eq!(found["target_parameters"], expected);
    assert_eq!(found["target_modules"], json!(["q_proj"]));
    let folder = place.path("run/final");
    let start = format!("adapter={{dropout: 0, start_from: {}}}", folder.display());
    train(&config(&place, "next", &[&start, "train.max_steps=1"]), 1, None);
}

#[test]
fn settings_that_an_adapter_of_experts_cannot_have_are_refused() {
    let place = place_with("moe-vl");
    config(&place, "run", &[]);
    let yaml = place.path("ranks.yaml").display().to_string();
    let refused = |setting: &str, problem: &str, hint: &str| {
        for command in ["sft", "plan"] {
            let arguments = [command, "--config", &yaml, "--set", setting];
            place.trainer(&arguments).ends_with(64).says(problem).says(hint);
        }
    };
    let experts = "target: ['*.mlp.experts.*']";
    refused(
        &format!("adapter={{{experts}}}"),
        "`adapter.dropout` is `0.05`, which an adapter of the experts \
         `model.language_model.layers.0.mlp.experts.gate_up_proj` cannot have",
        "set `adapter.dropout: 0`",
    );
    for (setting, problem, hint) in [
        ("kind: dora", "`adapter.kind` is `dora`", "`adapter.kind: lora`"),
        ("init: pissa", "`adapter.init` is `pissa`", "`adapter.init: default`"),
        ("init: olora", "`adapter.init` is `olora`", "`adapter.init: default`"),
    ] {
        refused(&format!("adapter={{{experts}, dropout: 0, {setting}}}"), problem, hint);
    }
    copy_folder(&golden("adapters").join("experts-vl"), &place.path("peft"));
    let start = format!("adapter={{start_from: {}}}", place.path("peft").display());
    refused(&start, "`adapter.dropout` is `0.05`", "set `adapter.dropout: 0`");
    refused(
        "adapter={train_also: ['*.mlp.experts.*']}",
        "cannot have whole experts",
        "name the experts in `adapter.target`",
    );
    // a tensor of another shape
    let path = place.path("peft/adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    super::harness::write(&path, text.replace("\"mlp.experts.down_proj\"", "\"x.y\"").as_bytes());
    let start = format!("adapter={{dropout: 0, start_from: {}}}", place.path("peft").display());
    let arguments = ["sft", "--config", &yaml, "--set", &start];
    place.trainer(&arguments).ends_with(64).says("does not have");
}
