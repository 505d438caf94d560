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
    Zero,
    One,
    /// 0.1, as in published encoders.
    LayerScale,
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
        Init::LayerScale => vec![0.1; count],
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

#[cfg(test)]
mod tests {
    use super::super::params::{Component, Inputs, Stored};
    use super::*;

    const CPU: &Device = &Device::Cpu;

    fn spec(name: &str, init: Init) -> ParamSpec {
        let component = Component { name: "llm", inputs: Inputs::All };
        let (name, shape) = (name.to_owned(), vec![4, 40]);
        ParamSpec { name, shape, component, init, stored: Stored::Whole }
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The numbers must not change: older builds have drawn the weights of runs that are resumed.
    #[test]
    fn a_seed_and_a_name_give_the_numbers_of_older_builds() {
        let drawn = |name: &str, init| {
            let name = format!("model.language_model.layers.0.{name}");
            values(&random_tensor(&spec(&name, init), 0.02, 7, CPU).unwrap())
        };
        let bits = |values: &[f32]| values[..4].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let normal = drawn("mlp.up_proj.weight", Init::Normal);
        assert_eq!(bits(&normal), [0xbd09_2dbe, 0xbc3a_b27c, 0xbb09_0798, 0xbccd_e5c0]);
        let name = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight";
        let of = (name, [2, 128]);
        let uniform = random_adapter_part(AdapterDraw::Uniform, of, 7, 0..4, CPU).unwrap();
        let expected: [u32; 4] = [0x3b55_7ec0, 0xbda9_df85, 0x3c42_96c8, 0x3d46_1b6a];
        assert_eq!(bits(&values(&uniform)), expected);
        // logarithms of different libraries may differ in the last digit
        let decays = drawn("linear_attn.A_log", Init::LogDecay);
        let expected: [f32; 4] = [2.169_474, 2.337_079, 2.618_361, 2.745_529];
        for (found, expected) in decays.iter().zip(expected) {
            assert!((found - expected).abs() < 2e-6, "{found} not {expected}");
        }
        assert_eq!(drawn("norm.weight", Init::One), [1.0; 160]);
        assert_eq!(drawn("norm.bias", Init::Zero), [0.0; 160]);
    }

    #[test]
    fn a_part_has_the_elements_of_the_whole_and_another_name_or_seed_has_others() {
        for init in [Init::Normal, Init::LogDecay] {
            let whole =
                |name, seed| values(&random_tensor(&spec(name, init), 0.02, seed, CPU).unwrap());
            let part = random_part(&spec("a", init), 0.02, 1, 37..93, CPU).unwrap();
            assert_eq!(values(&part), whole("a", 1)[37..93], "{init:?}");
            for (name, seed) in [("b", 1), ("a", 2)] {
                assert_ne!(whole(name, seed), whole("a", 1), "{init:?}, {name}, {seed}");
            }
        }
    }
}
