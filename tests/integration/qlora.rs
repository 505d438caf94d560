//! Runs with an adapter of a model whose weights are stored in NF4.

use super::adapter_runs::eval;
use super::harness::Place;
use super::ranks::{config, place, train};
use serde_json::Value;

const NF4: &str = "adapter={rank: 4, dropout: 0.2, parts: [llm, vision, merger], quantize: nf4}";

fn adapter(place: &Place, output: &str) -> Vec<u8> {
    place.read(&format!("{output}/final/adapter_model.safetensors"))
}

#[test]
fn ranks_and_recomputation_change_no_bit_of_an_adapter_of_a_quantised_model() {
    let place = place();
    let run = |output: &str, adapter: &str, world: usize, more: &[&str]| {
        train(&config(&place, output, &[&[adapter], more].concat()), world, None);
    };
    run("one", NF4, 1, &[]);
    run("plain", NF4, 1, &["adapter.quantize=none"]);
    assert_ne!(adapter(&place, "plain"), adapter(&place, "one"));
    let trained = place.rows("one/eval.jsonl").last().unwrap()["loss"].as_f64();
    let found = eval(&place, &["--adapter", "one/final"]);
    assert!((found - trained.unwrap()).abs() < 1e-6, "the model is rounded: {found} {trained:?}");
    run("recomputed", NF4, 1, &["model.recompute=full"]);
    run("two", NF4, 2, &["distributed.shard=gradients"]);
    for output in ["recomputed", "two"] {
        assert!(adapter(&place, output) == adapter(&place, "one"), "{output} differs");
    }
}

/// A rank quantises the weights whose magnitudes it reads before all ranks read the weights together.
#[test]
fn ranks_change_no_bit_of_the_magnitudes_of_a_quantised_model() {
    let place = place();
    let dora = "adapter={kind: dora, rank: 4, parts: [llm, vision], quantize: nf4}";
    for (output, world, shard) in [("one", 1, "none"), ("two", 2, "none"), ("four", 4, "gradients")]
    {
        let shard = format!("distributed.shard={shard}");
        train(&config(&place, output, &[dora, &shard]), world, None);
        assert!(adapter(&place, output) == adapter(&place, "one"), "{output} differs");
    }
}

/// `export` with these arguments, and its report.
fn export(place: &Place, arguments: &[&str]) -> Value {
    let output = place.trainer(&[&["export"], arguments].concat()).ends_with(0);
    serde_json::from_str(&output.stdout).unwrap()
}

#[test]
fn a_folder_in_nf4_has_the_codes_that_training_quantises_to() {
    let place = place();
    let of_base = config(&place, "base", &[NF4, "train.max_steps=2", "data.eval=[]"]);
    train(&of_base, 1, None);
    let report = export(&place, &["--model", "model", "--dtype", "nf4", "--out", "four"]);
    assert_eq!(report["quantized"], 26, "{report}");
    let path = format!("model.path={}", place.path("four").display());
    train(
        &config(&place, "four-bits", &[NF4, "train.max_steps=2", "data.eval=[]", &path]),
        1,
        None,
    );
    assert!(adapter(&place, "four-bits") == adapter(&place, "base"));
    place
        .trainer(&["export", "--adapter", "base/final", "--out", "clean"])
        .ends_with(0)
        .says("trained on a model in 4 bits");
    // a folder in NF4 keeps its codes
    export(&place, &["--model", "four", "--dtype", "nf4", "--out", "again"]);
    assert!(place.read("four/model.safetensors") == place.read("again/model.safetensors"));
    assert!(place.read("four/config.json") == place.read("again/config.json"));
    let json: Value = serde_json::from_slice(&place.read("four/config.json")).unwrap();
    assert_eq!(json["quantization_config"]["bnb_4bit_quant_type"], "nf4");
}

#[test]
fn a_merged_model_in_nf4_computes_with_its_dequantised_weights() {
    let place = place();
    train(
        &config(&place, "run", &["adapter={rank: 4}", "optim.lr=1.0e-2", "data.eval=[]"]),
        1,
        None,
    );
    let merge = ["--adapter", "run/final", "--merge", "--dtype", "nf4", "--out", "four"];
    let report = export(&place, &merge);
    assert_eq!((&report["merged"], &report["quantized"]), (&14.into(), &26.into()), "{report}");
    export(&place, &["--model", "four", "--out", "plain"]);
    export(&place, &["--adapter", "run/final", "--merge", "--out", "merged"]);
    let loss = |folder: &str| eval(&place, &["--checkpoint", folder]);
    assert_eq!(loss("four"), loss("plain"));
    let off = (loss("four") - loss("merged")).abs();
    assert!((1e-6..0.1).contains(&off), "{off}");
    let json: Value = serde_json::from_slice(&place.read("plain/config.json")).unwrap();
    assert!(json.get("quantization_config").is_none(), "{json}");
    place
        .trainer(&["export", "--adapter", "run/final", "--dtype", "nf4", "--out", "other"])
        .ends_with(64)
        .says("stores models")
        .says("--merge");
}
