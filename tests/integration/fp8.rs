//! Runs whose linear layers multiply operands in FP8.

use super::harness::{Place, without_measured};
use super::ranks::{config, place, train};
use serde_json::Value;
use trainer::config::RunConfig;

const FORMATS: [&str; 3] = ["model.matmul=fp8", "model.matmul=fp8_all", "model.matmul=fp8_fast"];

fn setting(place: &Place, output: &str, more: &[&str]) -> RunConfig {
    let common = ["model.precision=bf16", "data.eval=[]", "train.max_steps=4"];
    config(place, output, &[&common[..], more].concat())
}

fn weights(place: &Place, output: &str) -> Vec<u8> {
    place.read(&format!("{output}/final/model.safetensors"))
}

#[test]
fn ranks_recomputation_and_a_resumed_run_change_no_bit_in_fp8() {
    for format in FORMATS {
        let place = place();
        let run = |output: &str, world: usize, more: &[&str]| {
            train(&setting(&place, output, &[&[format], more].concat()), world, None);
            weights(&place, output)
        };
        let one = run("one", 1, &[]);
        let resumed = setting(&place, "resumed", &[format]);
        super::harness::copy_folder(
            &place.path("one/checkpoints/step-00000002"),
            &place.path("resumed/checkpoints/step-00000002"),
        );
        train(&resumed, 1, None);
        assert!(weights(&place, "resumed") == one, "{format}: the resumed run differs");
        let moments = "checkpoints/step-00000004/optimizer.safetensors";
        let read = |output: &str| place.read(&format!("{output}/{moments}"));
        assert!(read("resumed") == read("one"), "{format}: moments differ");
        for (output, world, setting) in [
            ("recomputed", 1, "model.recompute=full"),
            ("two", 2, "distributed.shard=none"),
            ("full", 2, "distributed.shard=full"),
        ] {
            assert!(run(output, world, &[setting]) == one, "{format}: {output} differs");
        }
        assert!(run("native", 1, &["model.matmul=native"]) != one, "{format} changes nothing");
    }
}

#[test]
fn the_losses_of_a_run_in_fp8_are_close_to_those_in_bf16() {
    let place = place();
    let losses = |output: &str, more: &[&str]| -> Vec<f64> {
        let more = [&["train.max_steps=12"], more].concat();
        train(&setting(&place, output, &more), 1, None);
        let rows: Vec<Value> = without_measured(place.rows(&format!("{output}/metrics.jsonl")));
        rows.iter().map(|row| row["loss"].as_f64().unwrap()).collect()
    };
    let native = losses("native", &[]);
    for format in FORMATS {
        let found = losses(format, &[format]);
        assert_eq!(found.len(), native.len());
        for (step, (found, native)) in found.iter().zip(&native).enumerate() {
            assert!((found / native - 1.0).abs() < 0.02, "{format} {step}: {found} {native}");
        }
    }
}

#[test]
fn fp8_with_an_adapter_is_refused() {
    let place = place();
    setting(&place, "run", &[]);
    for format in FORMATS {
        let more = ["sft", "--config", "ranks.yaml", "--set", format, "--set", "adapter={}"];
        place.trainer(&more).ends_with(64).says("`model.matmul`").says("not in FP8");
    }
}
