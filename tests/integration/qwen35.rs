//! Runs of Qwen3.5: ranks, shards and files. `parity` and `laws` compare its values.

use super::harness::{Place, bits, copy_folder, golden, tensors, write, write_adapter};
use super::ranks::{config, place, train};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use trainer::train::TrainOutcome;

/// Steps over rows of text and images.
const SETTINGS: [&str; 6] = [
    "train.epochs=null",
    "train.max_steps=3",
    "train.gradient_accumulation_steps=2",
    "checkpoint.every_steps=0",
    "eval.every_steps=0",
    "data.packing_length=256",
];

pub(super) fn qwen35() -> Place {
    let place = place();
    std::fs::remove_dir_all(place.path("model")).unwrap();
    copy_folder(&golden("models/small-qwen35"), &place.path("model"));
    place
}

fn trained(place: &Place, name: &str, world: usize, settings: &[&str]) -> HashMap<String, Tensor> {
    let settings = [&SETTINGS[..], settings].concat();
    let outcomes = train(&config(place, name, &settings), world, None);
    assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })), "{name}");
    tensors(place, &format!("{name}/final/model.safetensors"))
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    let place = qwen35();
    for precision in ["model.precision=f32", "model.precision=bf16"] {
        let name = |of: &str| format!("{}-{of}", &precision["model.precision=".len()..]);
        let alone = trained(&place, &name("alone"), 1, &[precision]);
        let start = tensors(&place, "model/model.safetensors");
        let moved = |name: &&String| bits(&alone)[name.as_str()].1 != bits(&start)[name.as_str()].1;
        assert!(alone.keys().filter(moved).count() > 100);
        for (of, shard) in [("two", "none"), ("gradients", "gradients"), ("full", "full")] {
            let shard = format!("distributed.shard={shard}");
            let found = trained(&place, &name(of), 2, &[precision, &shard]);
            assert_eq!(bits(&found), bits(&alone), "{precision}, {shard}");
        }
    }
}

#[test]
fn divided_weights_without_masters_are_saved_like_whole_ones() {
    let place = qwen35();
    let lean =
        ["model.precision=bf16", "optim.master=none", "model.freeze=['*layers.0.linear_attn*']"];
    let alone = trained(&place, "alone", 1, &lean);
    let divided = trained(&place, "divided", 2, &[&lean[..], &["distributed.shard=full"]].concat());
    assert_eq!(bits(&divided), bits(&alone));
}

#[test]
fn checkpoints_keep_tensors_that_training_does_not_use_and_the_dtype_of_the_decays() {
    let place = qwen35();
    let start = tensors(&place, "model/model.safetensors");
    let (_, start) = (bits(&start).len(), bits(&start));
    let bf16 = trained(&place, "bf16", 1, &["model.precision=bf16", "optim.lr=1e-3"]);
    let found = bits(&bf16);
    assert_eq!(found.keys().collect::<Vec<_>>(), start.keys().collect::<Vec<_>>());
    let kept: Vec<&str> = start.keys().copied().filter(|name| name.starts_with("mtp.")).collect();
    assert!(kept.len() > 10, "{kept:?}");
    for name in kept {
        assert_eq!(found[name], start[name], "{name}");
        assert_eq!(found[name].0, DType::BF16, "{name}");
    }
    for (name, (dtype, values)) in found.iter().filter(|(name, _)| !name.starts_with("mtp.")) {
        let is_wide = name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
        assert_eq!(*dtype, if is_wide { DType::F32 } else { DType::BF16 }, "{name}");
        if is_wide {
            assert!(values.iter().any(|bits| bits & 0xffff != 0), "{name} was rounded to bf16");
        }
    }
    // A run that continues from this folder has the master weights that it ended with.
    write(&place.path("model/model.safetensors"), &place.read("bf16/final/model.safetensors"));
    let still = ["model.precision=bf16", "optim.lr=0.0"];
    let again = trained(&place, "again", 1, &still);
    assert_eq!(bits(&again), found);
}

#[test]
fn export_writes_all_tensors_of_the_files() {
    let place = Place::empty();
    copy_folder(&golden("models/small-qwen35"), &place.path("model"));
    let read = |folder: &str| tensors(&place, &format!("{folder}/model.safetensors"));
    let start = read("model");
    // an adapter of one layer
    let layer = "model.language_model.layers.0.mlp.up_proj";
    let (outputs, inputs) = start[&format!("{layer}.weight")].dims2().unwrap();
    write_adapter(&place, layer, (outputs, inputs));

    place.trainer(&["export", "--model", "model", "--out", "copy"]).ends_with(0);
    let merge = ["export", "--model", "model", "--adapter", "peft", "--merge", "--out", "merged"];
    place.trainer(&merge).ends_with(0);
    let (copy, merged) = (read("copy"), read("merged"));
    let (start, copy, merged) = (bits(&start), bits(&copy), bits(&merged));
    assert!(start.keys().filter(|name| name.starts_with("mtp.")).count() > 10, "not used here");
    assert_eq!(copy, start);
    assert_eq!(merged.keys().collect::<Vec<_>>(), start.keys().collect::<Vec<_>>());
    let changed: Vec<&str> =
        start.keys().copied().filter(|name| merged[name] != start[name]).collect();
    assert_eq!(changed, [format!("{layer}.weight")]);
}
