//! Random weights: what transformers draws for a new model, from a seed of ours.

use super::{ModelConfig, ParamSpec};
use candle_core::{Device, Result, Tensor};
use rand::SeedableRng;
use rand_distr::{Distribution, Normal};

/// Norm weights are 1, biases 0, everything else normal with `initializer_range`.
///
/// Each tensor has its own stream, seeded by `seed` and its name: the order of tensors, and
/// whether another tensor exists, change nothing.
pub fn random_tensor(
    spec: &ParamSpec,
    config: &ModelConfig,
    seed: u64,
    device: &Device,
) -> Result<Tensor> {
    let count = spec.shape.iter().product();
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
        let normal = Normal::new(0.0f32, config.initializer_range as f32)
            .map_err(candle_core::Error::wrap)?;
        (0..count).map(|_| normal.sample(&mut rng)).collect()
    };
    Tensor::from_vec(values, spec.shape.as_slice(), device)
}
