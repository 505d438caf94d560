//! Runs with an adapter of a model whose experts are stored in NF4.

use super::adapter_runs::eval;
use super::experts::place_with;
use super::harness::Place;
use super::ranks::{config, train};
use candle_core::{Device, Tensor, safetensors};
use std::collections::HashMap;

const NF4: &str = "adapter={rank: 4, dropout: 0.2, quantize: nf4}";
/// The same, with experts that are not quantised.
const PLAIN: &str = "adapter={rank: 4, dropout: 0.2}";

/// Trains an adapter for two steps and returns its file.
fn adapter(place: &Place, output: &str, world: usize, settings: &[&str]) -> Vec<u8> {
    let settings = [&["train.epochs=null", "train.max_steps=2"], settings].concat();
    train(&config(place, output, &settings), world, None);
    place.read(&format!("{output}/final/adapter_model.safetensors"))
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn tensors(place: &Place, file: &str) -> HashMap<String, Tensor> {
    safetensors::load(place.path(file), &Device::Cpu).unwrap()
}

#[test]
fn ranks_and_recomputation_change_no_bit_of_an_adapter_of_quantised_experts() {
    for model in ["moe-vl", "moe-text", "moe-qwen35"] {
        let place = place_with(model);
        let run = |output: &str, world: usize, settings: &[&str]| {
            adapter(
                &place,
                output,
                world,
                &[&["eval.every_steps=0", "data.eval=[]"], settings].concat(),
            )
        };
        let one = run("one", 1, &[NF4]);
        assert!(run("recomputed", 1, &[NF4, "model.recompute=full"]) == one, "{model}");
        for shard in ["none", "gradients"] {
            let divided = format!("distributed.shard={shard}");
            assert!(run(shard, 2, &[NF4, &divided]) == one, "{model}, {shard}");
        }
        assert!(run("plain", 1, &[PLAIN]) != one, "{model}");
    }
}

#[test]
fn an_adapter_is_evaluated_with_the_quantised_experts_that_it_was_trained_with() {
    let place = place_with("moe-vl");
    adapter(&place, "run", 1, &[NF4]);
    let trained = place.rows("run/eval.jsonl").last().unwrap()["loss"].as_f64().unwrap();
    let found = eval(&place, &["--adapter", "run/final"]);
    assert!((found - trained).abs() < 1e-6, "{found} {trained}");
}

/// The run quantises the experts of such a folder, which has the codes of the linear layers.
#[test]
fn experts_are_quantised_in_a_folder_that_has_only_its_linear_layers_in_4_bits() {
    for model in ["moe-vl", "moe-text"] {
        let place = place_with(model);
        let of_base = adapter(&place, "base", 1, &[NF4]);
        let export = ["export", "--model", "model", "--dtype", "nf4", "--out", "four"];
        place.trainer(&export).ends_with(0).says("the experts keep their dtype");
        let path = format!("model.path={}", place.path("four").display());
        assert!(adapter(&place, "four-bits", 1, &[NF4, &path]) == of_base, "{model}");
        // without `quantize`, the linear layers have the values of NF4 and the experts do not
        assert!(adapter(&place, "linear", 1, &[PLAIN, &path]) != of_base, "{model}");
        let [start, four] =
            ["model", "four"].map(|folder| tensors(&place, &format!("{folder}/model.safetensors")));
        for (name, weight) in start.iter().filter(|(name, _)| name.contains(".mlp.experts.")) {
            assert!(values(weight) == values(&four[name]), "{model}: {name}");
        }
    }
}
