//! Random weights from a seed, in the distribution that transformers uses for new models.

use super::params::ParamSpec;
use candle_core::{Device, Result, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use sha2::{Digest, Sha256};
use std::ops::Range;

/// The random values of a tensor, as in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Init {
    /// Normal with the standard deviation `initializer_range`.
    Normal,
    /// Zeros.
    Zero,
    /// Ones.
    One,
    /// The logarithm of a number that is uniform between 0.01 and 16.
    LogDecay,
}

/// The tensor of `spec`, drawn as [`ParamSpec::init`] says.
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

/// The elements `part` of the flat tensor that [`random_tensor`] returns. Does not store the
/// others.
pub fn random_part(
    spec: &ParamSpec,
    initializer_range: f64,
    seed: u64,
    part: Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    let count = part.len();
    let values: Vec<f32> = match spec.init {
        Init::Zero => vec![0.0; count],
        Init::One => vec![1.0; count],
        Init::Normal => {
            let mut rng = stream(seed, &spec.name);
            let normal =
                Normal::new(0.0f32, initializer_range as f32).map_err(candle_core::Error::wrap)?;
            (0..part.end).map(|_| normal.sample(&mut rng)).skip(part.start).collect()
        }
        Init::LogDecay => {
            let mut rng = stream(seed, &spec.name);
            let uniform = Uniform::new(0.01f32, 16.0).map_err(candle_core::Error::wrap)?;
            (0..part.end).map(|_| uniform.sample(&mut rng).ln()).skip(part.start).collect()
        }
    };
    Tensor::from_vec(values, count, device)
}

/// The random numbers of a tensor.
fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(name.as_bytes());
    ChaCha8Rng::from_seed(hash.finalize().into())
}

/// The distribution of the matrix `A [r, K]` of a new adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AdapterDraw {
    /// Uniform between `-1 / sqrt(K)` and `1 / sqrt(K)`.
    Uniform,
    /// Normal with the standard deviation `1 / r`.
    Normal,
}

/// The elements `part` of the flat matrix `A` of `shape` with the name `name`.
pub fn random_adapter_part(
    draw: AdapterDraw,
    (name, shape): (&str, [usize; 2]),
    seed: u64,
    part: Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    let (count, mut rng) = (part.len(), stream(seed, name));
    let [rank, inputs] = shape;
    let values: Vec<f32> = match draw {
        AdapterDraw::Uniform => {
            let bound = 1.0 / (inputs as f32).sqrt();
            let uniform = Uniform::new(-bound, bound).map_err(candle_core::Error::wrap)?;
            (0..part.end).map(|_| uniform.sample(&mut rng)).skip(part.start).collect()
        }
        AdapterDraw::Normal => {
            let normal =
                Normal::new(0.0f32, 1.0 / rank as f32).map_err(candle_core::Error::wrap)?;
            (0..part.end).map(|_| normal.sample(&mut rng)).skip(part.start).collect()
        }
    };
    Tensor::from_vec(values, count, device)
}
