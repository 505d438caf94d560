//! Adapters train as in PEFT: losses and gradient norms of 20 steps from the folders in
//! `tests/golden/adapters`, which `scripts/golden/adapters.py` writes.

use super::parity::{
    PLAIN, Variant, assert_all_variants_follow, assert_follows, assert_gradient_norms, golden_json,
    rows_for, runner_of,
};
use serde_json::Value;
use trainer::train::{Precision, RecomputeChoice};

fn curve(name: &str) -> Value {
    golden_json("curves.json")[name].take()
}

#[test]
fn lora_follows_peft() {
    let golden = curve("text_small-tied_lora");
    assert_follows(&golden, PLAIN);
    assert_follows(&golden, Variant { samples_a_row: 8, ..PLAIN });
}

#[test]
fn lora_scaled_by_the_root_of_its_rank_follows_peft() {
    assert_follows(&curve("text_small-tied_rslora"), PLAIN);
}

#[test]
fn dora_follows_peft_with_any_recomputation_and_micro_batches() {
    let golden = curve("text_small-tied_dora");
    assert_follows(&golden, PLAIN);
    assert_follows(&golden, Variant { recompute: RecomputeChoice::Full, ..PLAIN });
    assert_follows(&golden, Variant { micro_batches: 4, ..PLAIN });
}

#[test]
fn lora_of_decoder_vision_encoder_and_mergers_follows_peft_in_every_layout() {
    assert_all_variants_follow(&curve("image_exact_small-tied_lora-vision"));
}

#[test]
fn gradient_norms_of_every_tensor_of_an_adapter_equal_pefts() {
    for (data, name) in [
        ("text", "text_small-tied_lora"),
        ("text", "text_small-tied_dora"),
        ("image_exact", "image_exact_small-tied_lora-vision"),
    ] {
        let golden = curve(name);
        let runner = runner_of(&golden, PLAIN, Precision::F32);
        assert_gradient_norms(&rows_for("small-tied", data), &runner, &golden["grad_norms_step1"]);
    }
}

#[test]
fn adapters_that_start_from_a_part_of_the_weights_follow_peft() {
    for init in ["pissa", "olora"] {
        let golden = curve(&format!("text_small-tied_{init}"));
        assert_follows(&golden, Variant { micro_batches: 4, ..PLAIN });
    }
}
