//! The three SIMD levels of the binary give bit-identical results.

use crate::harness::{Output, Place, finish, golden};

const LEVELS: [&str; 3] = ["avx512", "avx2", "baseline"];

fn config(precision: &str) -> String {
    let images = golden("data").display().to_string();
    format!(
        "device: cpu\n\
         model: {{path: model, precision: {precision}}}\n\
         data:\n\
         \x20 train: [{{path: rows.jsonl, image_root: '{images}'}}]\n\
         \x20 packing_length: 192\n\
         \x20 max_rejected: 1.0\n\
         train: {{max_steps: 3}}\n"
    )
}

/// Trains with each level that the CPU has, and asserts that the weights are equal.
fn assert_levels_are_equal(place: &Place, name: &str, more: &[&str]) {
    let train = |level: &str| -> Output {
        let folder = format!("output_dir={name}-{level}");
        let mut sft = vec!["sft", "--config", "run.yaml", "--set", &folder];
        for set in more {
            sft.extend(["--set", set]);
        }
        finish(place.command(&sft).env("TRAINER_SIMD", level))
    };
    let weights = |level: &str| place.read(&format!("{name}-{level}/final/model.safetensors"));
    train("").ends_with(0);
    let want = weights("");
    for level in LEVELS {
        let run = train(level);
        if run.code == 64 {
            // A level that the CPU lacks is an error; it is not replaced by a lower one.
            run.says("the best level of this CPU is");
            println!("this CPU does not support `{level}`: not compared");
            continue;
        }
        run.ends_with(0).says(&format!("simd={level}")).says("attention=flash, cpu");
        assert!(weights(level) == want, "{name}: {level} trained other weights");
    }
}

#[test]
fn every_level_that_the_cpu_has_trains_the_same_weights() {
    let place = Place::with_model_and_rows();
    for precision in ["f32", "bf16"] {
        place.write("run.yaml", &config(precision));
        assert_levels_are_equal(&place, precision, &[]);
    }
}

#[test]
fn every_level_trains_the_same_weights_of_other_families() {
    let place = Place::with_model_and_rows();
    place.write("run.yaml", &config("f32"));
    for model in [
        "small-qwen25vl",
        "small-qwen2vl",
        "small-internvl",
        "small-minicpm",
        "small-qwen35",
        "moe-vl",
        "moe-qwen35",
    ] {
        let path = format!("model.path={}", golden(&format!("models/{model}")).display());
        assert_levels_are_equal(&place, model, &[&path, "train.max_steps=2"]);
    }
}

#[test]
fn an_unknown_simd_level_is_rejected() {
    let place = Place::empty();
    let output = finish(place.command(&["bench", "--ops"]).env("TRAINER_SIMD", "sse9"));
    output.ends_with(64).says("`TRAINER_SIMD` is `sse9`, expected `avx512`").says("hint: unset it");
}
