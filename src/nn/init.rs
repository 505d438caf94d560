//! Random weights from a seed, in the distribution that transformers uses for new models.

use super::ParamSpec;
use candle_core::{Device, Result, Tensor};
use rand::SeedableRng;
use rand_distr::{Distribution, Normal};
use std::ops::Range;

/// Norm weights are 1, biases are 0. Other weights are normal with the standard deviation
/// `initializer_range`.
///
/// Each tensor has its own stream of random numbers, seeded by `seed` and the tensor's name. The
/// values therefore do not depend on the order of the tensors or on the other tensors.
pub fn random_tensor(
    spec: &ParamSpec,
    initializer_range: f64,
    seed: u64,
    device: &Device,
) -> Result<Tensor> {
    let all = 0..spec.shape.iter().product();
    random_part(spec, initializer_range, seed, all, device)?.reshape(spec.shape.as_slice())
}

/// The elements `part` of the flat tensor that [`random_tensor`] returns. Does not store the others.
pub fn random_part(
    spec: &ParamSpec,
    initializer_range: f64,
    seed: u64,
    part: Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    let count = part.len();
    let values: Vec<f32> = if spec.name.ends_with("bias") {
        vec![0.0; count]
    } else if spec.shape.len() == 1 {
        vec![1.0; count]
    } else {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        hash.update(spec.name.as_bytes());
        let mut rng = rand_chacha::ChaCha8Rng::from_seed(hash.finalize().into());
        let normal =
            Normal::new(0.0f32, initializer_range as f32).map_err(candle_core::Error::wrap)?;
        (0..part.end).map(|_| normal.sample(&mut rng)).skip(part.start).collect()
    };
    Tensor::from_vec(values, count, device)
}
