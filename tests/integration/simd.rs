//! The same binary at three levels of vector instructions: each level runs, and all results have
//! the same bits.
//!
//! Matrix products use the `gemm` crate, which detects the CPU itself and so behaves the same at
//! every level on one machine.

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

fn train(place: &Place, level: &str, precision: &str) -> Output {
    let folder = format!("output_dir={precision}-{level}");
    let sft = ["sft", "--config", "run.yaml", "--set", &folder];
    finish(place.command(&sft).env("TRAINER_SIMD", level))
}

#[test]
fn every_level_of_the_cpu_trains_the_same_weights() {
    let place = Place::with_model_and_rows();
    for precision in ["f32", "bf16"] {
        place.write("run.yaml", &config(precision));
        train(&place, "", precision).ends_with(0);
        let weights =
            |level: &str| place.read(&format!("{precision}-{level}/final/model.safetensors"));
        let want = weights("");
        for level in LEVELS {
            let run = train(&place, level, precision);
            if run.code == 64 {
                // The CPU does not support the level: an error, not a silent fallback.
                run.says("the best level of this CPU is");
                println!("this CPU has no `{level}`: not compared");
                continue;
            }
            run.ends_with(0).says(&format!("simd={level}")).says("attention=\"flash, cpu\"");
            assert!(weights(level) == want, "{precision}: {level} trained different weights");
        }
    }
}

#[test]
fn an_unknown_level_is_rejected() {
    let place = Place::empty();
    let output = finish(place.command(&["bench", "--ops"]).env("TRAINER_SIMD", "sse9"));
    output.ends_with(64).says("`TRAINER_SIMD` is `sse9`, expected `avx512`").says("hint: unset it");
}
