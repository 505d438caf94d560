//! Runs of MiniCPM-V: ranks, shards, adapters, the mode without the early merger, 4.7, and videos,
//! whose expected values `scripts/golden/minicpm_video.py` and `minicpm_47.py` write. `parity` and
//! `laws` compare the other values of 4.6, and the data crate compares the tokens of 4.7.

use super::generate::assert_answers;
use super::harness::{Place, golden};
use super::parity::{
    PLAIN, Variant, assert_all_variants_follow, assert_follows, assert_gradient_norms,
    assert_losses, golden_json, rows_for, rows_with, runner_of,
};
use super::published_folders::{self, apply};
use super::qwen2::{assert_adapters_merge, assert_ranks_agree, place_with};
use super::qwen2_media::{assert_curve, assert_encode, assert_short_answers};
use serde_json::{Value, json};
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

/// Files of rows with videos; slices have about 112 x 112 pixels. The frames of the second file are
/// larger.
const VIDEOS: [&str; 2] = ["video_28", "video_slices"];

fn golden_videos() -> Value {
    golden_json("minicpm_video.json")
}

#[test]
fn rows_with_videos_of_minicpm_encode_as_in_transformers() {
    let golden = golden_videos();
    let expected = |of: &str| golden[of]["rows"].as_array().unwrap();
    for data in VIDEOS {
        assert_encode(&rows_for(MODEL, data), expected(data));
    }
    let place = published_folders::place(MODEL);
    apply(&place, &golden["unsliced"]["changes"]);
    let rows = rows_with(&ModelSection::new(place.path("model")), VIDEOS[1]);
    assert_encode(&rows, expected("unsliced"));
}

#[test]
fn minicpm_with_videos_follows_the_reference_in_every_layout() {
    let golden = golden_videos();
    for data in VIDEOS {
        assert_curve(&rows_for(MODEL, data), &golden[data]["curve"]);
    }
}

#[test]
fn greedy_answers_of_minicpm_about_videos_are_the_references() {
    let golden_values = golden_videos();
    for data in VIDEOS {
        let expected = golden_values[data]["rows"].as_array().unwrap();
        assert_short_answers(golden("models").join(MODEL), data, expected);
    }
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

/// The small model with the settings of 4.7, whose positions are on a canvas, and what transformers
/// computes with it.
fn place_of_4_7(more: &Value) -> (Place, Value) {
    let (place, golden) = (published_folders::place(MODEL), golden_json("minicpm_47.json"));
    apply(&place, &golden["changes"]);
    apply(&place, more);
    (place, golden)
}

#[test]
fn minicpm_4_7_follows_the_reference_in_every_layout() {
    let (place, golden) = place_of_4_7(&json!({}));
    let folder = place.path("model");
    let section = ModelSection::new(folder.clone());
    let mut curve = golden["curve"].clone();
    curve["model"] = json!(folder);
    let runner = runner_of(&curve, PLAIN, Precision::F32);
    for data in ["text", "image_exact"] {
        let losses = &golden["losses"][data]["per_sample"];
        assert_losses(&rows_with(&section, data), &runner, losses);
    }
    let rows = rows_with(&section, "image_exact");
    assert_gradient_norms(&rows, &runner, &curve["grad_norms_step1"]);
    assert_all_variants_follow(&curve);
    place.trainer(&["sft", "--config", "c.yaml"]).ends_with(0);
}

/// Images with and without slices, next to each other and next to newlines; also without the number
/// of an image, without slices, and without the early merger.
#[test]
fn losses_and_answers_of_minicpm_4_7_about_slices_are_the_references() {
    let all = golden_json("minicpm_47.json");
    let variants = all["variants"].as_object().unwrap().values();
    for of in [&all].into_iter().chain(variants) {
        let more = if of == &all { json!({}) } else { of["changes"].clone() };
        let (place, _) = place_of_4_7(&more);
        let section = ModelSection::new(place.path("model"));
        let rows = rows_with(&section, "canvas");
        let cases = of["rows"].as_array().unwrap().iter().take(rows.rows().count());
        let mean = |case: &Value| {
            let [nll, targets] = ["nll", "targets"].map(|key| case[key].as_f64().unwrap());
            json!([case["id"], nll / targets, case["targets"]])
        };
        let losses: Vec<Value> = cases.map(mean).collect();
        let runner = runner_of(&json!({"model": section.path}), PLAIN, Precision::F32);
        assert_losses(&rows, &runner, &json!(losses));
        assert_short_answers(
            section.path,
            "canvas",
            &of["rows"].as_array().unwrap()[..losses.len()],
        );
    }
}

/// Each frame has a canvas, and no number is in front of a video. The curves of other layouts are
/// those of `minicpm_4_7_follows_the_reference_in_every_layout`.
#[test]
fn minicpm_4_7_with_videos_follows_the_reference_alone_and_packed() {
    let (place, golden) = place_of_4_7(&json!({}));
    let folder = place.path("model");
    for data in VIDEOS {
        let (rows, of) =
            (rows_with(&ModelSection::new(folder.clone()), data), &golden["videos"][data]);
        let expected = of["rows"].as_array().unwrap();
        assert_encode(&rows, expected);
        assert_short_answers(folder.clone(), data, expected);
        let mut curve = of["curve"].clone();
        curve["model"] = json!(folder);
        for samples_a_row in [1, 8] {
            assert_follows(&curve, Variant { samples_a_row, ..PLAIN });
        }
        let runner = runner_of(&curve, PLAIN, Precision::F32);
        assert_gradient_norms(&rows, &runner, &curve["grad_norms_step1"]);
    }
}

#[test]
fn greedy_answers_of_minicpm_4_7_equal_those_of_transformers() {
    let (place, golden) = place_of_4_7(&json!({}));
    assert_answers(&place.path("model"), &golden["answers"]["answers"]);
}
