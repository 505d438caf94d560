//! Weights in bf16 without master copies train as in f32 with stochastic rounding, and hardly at all
//! with rounding to nearest.

use crate::parity::{PLAIN, TEXT_ONLY, runner_of};
use candle_core::{DType, Tensor};
use serde_json::json;
use trainer::batch::{EncodedSample, SampleId};
use trainer::train::{Precision, StepRunner};

const STEPS: u64 = 80;
/// Smaller than half the distance of neighbouring bf16 values for weights above 0.008.
const LR: f64 = 2e-5;

/// A part of an endless count from 0 to 39.
fn counting(first: u64) -> EncodedSample {
    let ids: Vec<u32> = (first..first + 24).map(|number| 100 + (number % 40) as u32).collect();
    EncodedSample {
        id: SampleId { file: std::path::Path::new("counting").into(), line: first },
        labels: ids.iter().map(|id| i64::from(*id)).collect(),
        weights: None,
        position_ids: (0..24).map(|at| [at; 3]).collect(),
        segment_starts: Vec::new(),
        vision_rows: Vec::new(),
        media: Vec::new(),
        input_ids: ids,
    }
}

/// Mean loss of the first and the last eight steps.
fn train(precision: Precision, master: &str, after_step: impl Fn(&StepRunner)) -> [f64; 2] {
    let settings = json!({ "model": TEXT_ONLY, "args": { "master": master } });
    let runner = runner_of(&settings, PLAIN, precision);
    let run = |step: u64| {
        let samples: Vec<_> = (0..4).map(|part| counting(7 * step + 10 * part)).collect();
        let outcome = runner.run(PLAIN.micro_batches(&samples), LR, step).unwrap();
        after_step(&runner);
        outcome.loss
    };
    let losses: Vec<f64> = (1..=STEPS).map(run).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    [mean(&losses[..8]), mean(&losses[losses.len() - 8..])]
}

/// Makes the master weights equal to their bf16 copies, which are rounded to nearest.
fn forget_masters(runner: &StepRunner) {
    for state in runner.optimizer.states() {
        let rounded = state.weight().unwrap().to_dtype(DType::F32).unwrap();
        state.tensor("master").unwrap().slice_set(&rounded, 0, 0).unwrap();
    }
}

#[test]
fn masters_start_from_the_unrounded_values_of_the_folder() {
    let settings = json!({ "model": TEXT_ONLY });
    let [exact, rounded] =
        [Precision::F32, Precision::Bf16].map(|of| runner_of(&settings, PLAIN, of));
    let values = |tensor: &Tensor| {
        let flat = tensor.to_dtype(DType::F32).and_then(|tensor| tensor.flatten_all());
        flat.and_then(|flat| flat.to_vec1::<f32>()).unwrap()
    };
    let mut num_rounded = 0;
    let states = exact.optimizer.states().iter().zip(rounded.optimizer.states());
    for (exact, state) in states {
        let exact = values(&exact.weight().unwrap());
        assert_eq!(values(state.tensor("master").unwrap()), exact);
        num_rounded += usize::from(values(&state.weight().unwrap()) != exact);
    }
    assert!(num_rounded > 10, "the folder has bf16 values");
}

#[test]
fn stochastic_rounding_follows_f32_where_rounding_to_nearest_stands_still() {
    let exact = train(Precision::F32, "f32", |_| ());
    let at_random = train(Precision::Bf16, "none", |_| ());
    let to_nearest = train(Precision::Bf16, "f32", forget_masters);
    println!("f32 {exact:?}, at random {at_random:?}, to nearest {to_nearest:?}");
    let learned = |[first, last]: [f64; 2]| first - last;
    let share = |losses| learned(losses) / learned(exact);
    assert!((share(at_random) - 1.0).abs() < 0.02, "{}", share(at_random));
    assert!(share(to_nearest) < 0.5, "{}", share(to_nearest));
}
