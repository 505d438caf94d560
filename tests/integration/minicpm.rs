//! Runs of MiniCPM-V: ranks, shards, adapters, and the mode without the early merger. `parity` and
//! `laws` compare its other values.

use super::harness::Place;
use super::published_folders;
use super::qwen2::{assert_adapters_merge, assert_ranks_agree, place_with};
use serde_json::{Value, json};

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
