//! Runs of MiniCPM-V: ranks, shards, adapters, and the mode without the early merger. `parity` and
//! `laws` compare its other values.

use super::harness::Place;
use super::parity::{
    PLAIN, assert_all_variants_follow, assert_losses, golden_json, rows_with, runner_of,
};
use super::published_folders::{self, apply};
use super::qwen2::{assert_adapters_merge, assert_ranks_agree, place_with};
use serde_json::json;
use trainer::train::{ModelSection, Precision};

const MODEL: &str = "small-minicpm";

fn place() -> Place {
    place_with(MODEL)
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    assert_ranks_agree(&place());
}

#[test]
fn an_adapter_of_all_parts_is_merged_under_the_published_names() {
    let of_decoder = "language_model.layers.0.linear_attn.in_proj_qkv";
    assert_adapters_merge(&place(), [of_decoder, "vision_tower.vit_merger.linear_1"]);
}

/// Without the early merger, an image has four times the tokens. The weights of that merger stay in
/// the files.
#[test]
fn mode_4x_follows_the_reference_in_every_layout() {
    let place = published_folders::place(MODEL);
    let mode = json!({"downsample_mode": "4x"});
    let both = json!({"image_processor": mode, "video_processor": mode});
    apply(
        &place,
        &json!({
            "config.json": mode, "preprocessor_config.json": mode, "processor_config.json": both,
        }),
    );
    let (golden, folder) = (golden_json("minicpm_4x.json"), place.path("model"));
    let rows = rows_with(&ModelSection::new(folder.clone()), "image_exact");
    let runner = runner_of(&json!({"model": folder}), PLAIN, Precision::F32);
    assert_losses(&rows, &runner, &golden["losses"]["per_sample"]);
    let mut curve = golden["curve"].clone();
    curve["model"] = json!(folder);
    assert_all_variants_follow(&curve);
    place.trainer(&["sft", "--config", "c.yaml"]).ends_with(0);
    let names = |folder: &str| {
        let file = place.path(&format!("{folder}/model.safetensors"));
        let tensors = candle_core::safetensors::load(file, &candle_core::Device::Cpu).unwrap();
        let mut names: Vec<String> = tensors.into_keys().collect();
        names.sort();
        names
    };
    assert_eq!(names("run/final"), names("model"));
}
