//! Runs of InternVL3.5: ranks, shards, adapters, the names of tensors in files, and videos, whose
//! expected values `scripts/golden/internvl_video.py` writes. `parity` and `laws` compare its other
//! values.

use super::harness::Place;
use super::published_folders;
use super::qwen2::{assert_adapters_merge, assert_ranks_agree, assert_spellings_agree, place_with};
use super::qwen2_media::{
    assert_answers_about_videos, assert_curve_with_videos, assert_rows_encode,
};
use serde_json::{Value, json};

const MODEL: &str = "small-internvl";

fn place() -> Place {
    place_with(MODEL)
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    assert_ranks_agree(&place());
}

/// Published folders have `language_model.model.*`, as has the folder of this test.
#[test]
fn folders_in_both_spellings_train_alike_and_are_saved_as_published() {
    assert_spellings_agree(&place(), |name| match name.strip_prefix("language_model.") {
        Some(rest) if rest.starts_with("lm_head.") => rest.to_owned(),
        Some(rest) => format!("model.language_model.{}", &rest["model.".len()..]),
        None => format!("model.{name}"),
    });
}

#[test]
fn an_adapter_of_all_parts_is_merged_under_the_published_names() {
    let of_vision = "vision_tower.encoder.layer.1.attention.k_proj";
    assert_adapters_merge(&place(), ["language_model.layers.2.self_attn.v_proj", of_vision]);
}

/// Frames are enlarged to tiles, and stretched to squares.
#[test]
fn rows_with_videos_of_internvl_encode_as_in_transformers() {
    assert_rows_encode(MODEL, &[]);
}

#[test]
fn internvl_with_videos_follows_the_reference_in_every_layout() {
    assert_curve_with_videos(MODEL);
}

#[test]
fn greedy_answers_of_internvl_about_videos_are_the_references() {
    assert_answers_about_videos(MODEL);
}

/// The weights of a decoder with experts are random here: no golden model has them. `laws` compares
/// the larger encoder, with RMS norms and norms of queries and keys, with the oracle.
#[test]
fn a_model_with_experts_passes_all_checks() {
    let place = published_folders::place(MODEL);
    let mut config: Value = serde_json::from_slice(&place.read("model/config.json")).unwrap();
    let experts = json!({
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true,
    });
    let text = config["text_config"].as_object_mut().unwrap();
    text.extend(experts.as_object().unwrap().clone());
    place.write("model/config.json", &config.to_string());
    let verify = ["verify", "--config", "c.yaml", "--set", "model.weights=random"];
    place.trainer(&verify).ends_with(0);
}
