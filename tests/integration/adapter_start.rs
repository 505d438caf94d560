//! Runs of adapters that start from a part of the weights: PiSSA and OLoRA.

use super::adapter_runs::{eval, losses, results};
use super::harness::Place;
use super::ranks::{config, place, train};
use serde_json::Value;

fn setting(kind: &str, init: &str) -> String {
    // few layers, because an unoptimised build takes a second for each
    let few = "target: ['*.layers.1.*.[kv]_proj', '*.merger.linear_fc2'], parts: [llm, merger]";
    format!("adapter={{kind: {kind}, init: {init}, rank: 4, dropout: 0.2, {few}}}")
}

#[test]
fn a_run_that_starts_from_a_part_of_the_weights_resumes_equal_to_the_bit_on_any_ranks() {
    let place = place();
    for (kind, init, precision) in [("lora", "pissa", "bf16"), ("dora", "olora", "f32")] {
        let adapter = setting(kind, init);
        let precision = format!("model.precision={precision}");
        let no_eval = "data.eval=[]";
        train(&config(&place, init, &[&adapter, &precision, no_eval]), 1, None);
        for (world, shard, stop) in [(1, "none", 2), (2, "gradients", 1), (2, "full", 3)] {
            let output = format!("{init}-{world}-{shard}");
            let shard = format!("distributed.shard={shard}");
            let config = config(&place, &output, &[&adapter, &precision, &shard, no_eval]);
            train(&config, world, Some(stop));
            train(&config, 1, None);
            assert!(results(&place, &output) == results(&place, init), "{output} differs");
        }
    }
}

fn config_of(place: &Place, folder: &str) -> Value {
    serde_json::from_slice(&place.read(&format!("{folder}/adapter_config.json"))).unwrap()
}

#[test]
fn the_adapter_of_a_run_that_starts_from_a_part_of_the_weights_fits_the_original_model() {
    let place = place();
    for (kind, init) in [("lora", "pissa"), ("dora", "pissa"), ("lora", "olora")] {
        let output = format!("{kind}-{init}");
        let once = ["optim.lr=1.0e-2", "adapter.dropout=0", "eval.every_steps=0", "eval.show=0"];
        let of_run =
            config(&place, &output, &[&[setting(kind, init).as_str()], &once[..]].concat());
        train(&of_run, 1, None);
        let evals = place.rows(&format!("{output}/eval.jsonl"));
        let last = evals.last().unwrap();
        let trained = last["loss"].as_f64().unwrap();
        let with_adapter = eval(&place, &["--adapter", &format!("{output}/final")]);
        assert!((with_adapter - trained).abs() < 1e-5, "{output}: {with_adapter} {trained}");
        assert!((with_adapter - eval(&place, &[])).abs() > 1e-3, "the adapter has an effect");
        let peft = config_of(&place, &format!("{output}/final"));
        assert_eq!((&peft["r"], &peft["lora_alpha"]), (&8.into(), &64.0.into()));
        assert_eq!(peft["init_lora_weights"], true);
        // at the start, the model computes what it computes without an adapter
        let first = losses(&place, &output)[0];
        let plain = format!("{output}-plain");
        train(
            &config(&place, &plain, &["adapter={}", "train.max_steps=1", "data.eval=[]"]),
            1,
            None,
        );
        assert!((losses(&place, &plain)[0] - first).abs() < 1e-4, "{output}: {first}");
    }
}

#[test]
fn an_adapter_that_cannot_start_from_a_part_of_the_weights_is_refused() {
    let place = place();
    config(&place, "run", &[]);
    let yaml = place.path("ranks.yaml").display().to_string();
    let refused = |setting: &str, problem: &str, hint: &str| {
        let arguments = ["sft", "--config", &yaml, "--set", setting];
        place.trainer(&arguments).ends_with(64).says(problem).says(hint);
    };
    refused("adapter={init: pissa, rank: 4000}", "singular values", "smaller `adapter.rank`");
    refused("adapter={init: olora, quantize: nf4}", "`adapter.init` is `olora`", "quantised");
    // an adapter of other weights, as PEFT saves it by default
    train(&config(&place, "other", &["adapter={}", "train.max_steps=1"]), 1, None);
    let json = String::from_utf8(place.read("other/final/adapter_config.json")).unwrap();
    let json = json.replace("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"");
    place.write("other/final/adapter_config.json", &json);
    let start = format!("adapter={{start_from: {}}}", place.path("other/final").display());
    refused(&start, "`init_lora_weights`", "path_initial_model_for_weight_conversion");
}
