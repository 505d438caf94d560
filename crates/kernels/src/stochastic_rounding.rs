//! Moments and weights in `bf16`, updated with stochastic rounding, so that the rounding error is
//! zero on average.
//!
//! With `beta2` 0.999 the second moment changes by about 0.1 % a step, while neighbouring `bf16`
//! values are 0.4 % to 0.8 % apart. With rounding to nearest it would stop growing at a quarter to
//! a third of the squared gradient. A weight without a master copy would not change at all if the
//! learning rate is small: neighbouring values are 0.4 % to 0.8 % apart there too. The random
//! numbers depend on step, tensor and element only, so a run gives the same bits on any number of
//! threads, on any device, and after a resume.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::simd::kernels;
use super::stored::Seed;
use half::bf16;

/// A bijection on 32-bit integers; each bit of the result depends on all bits of `x`.
#[inline(always)]
pub(super) fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Seed of an optimizer step, from which [`tensor_seed`] derives the seed of each tensor.
pub(super) fn step_seed(step: u64) -> u32 {
    mix(step as u32 ^ 0x9e37_79b9).wrapping_add((step >> 32) as u32)
}

/// Seed of the tensor at `index` in the list of tensors that a step updates.
pub(super) fn tensor_seed(step_seed: u32, index: usize) -> u32 {
    mix(step_seed.wrapping_add(index as u32))
}

/// Stochastic rounding: returns one of the two `bf16` neighbours of `x`, the nearer one with the
/// higher probability. `random` is uniform in 16 bits. Not a number stays so: the sum would make a
/// zero of the NaN of a GPU, whose bits are all ones.
#[inline(always)]
fn round_at_random(x: f32, random: u32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(random) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x0040;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded })
}

/// The value of an element that random numbers round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Draw {
    First,
    Second,
    Weight,
}

impl Draw {
    /// 16 random bits from the number of an element.
    #[inline(always)]
    fn of(self, element: u32) -> u32 {
        match self {
            Self::First => element & 0xffff,
            Self::Second => element >> 16,
            Self::Weight => mix(element) & 0xffff,
        }
    }
}

kernels! {
    /// Rounds the values of consecutive elements.
    pub(super) fn round_block(seed: Seed, draw: Draw, x: &[f32], y: &mut [bf16]) {
        let n = x.len();
        let y = &mut y[..n];
        for i in 0..n {
            let element = mix(seed.seed ^ seed.first.wrapping_add(i as u32));
            y[i] = round_at_random(x[i], draw.of(element));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, device, message, random, values, with_threads};
    use super::super::{AdamW, AdamWTensors, AdamWUpdate};
    use super::super::{adamw_step, clipped_update, sums_of_squares};
    use super::*;
    use candle_core::{DType, Tensor};

    const HYPER: AdamW = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };

    fn zeros(n: usize, dtype: DType) -> Tensor {
        Tensor::zeros(n, dtype, &device()).unwrap()
    }

    #[test]
    fn stochastic_rounding_keeps_the_mean_and_returns_neighbours() {
        for x in [1.0f32, 1.001, -3.3e-5, 1.996_093_8, 7e20, 1e-40] {
            let count = 1 << 16;
            let rounded = (0..count).map(|i| round_at_random(x, mix(i) & 0xffff));
            let sum: f64 = rounded
                .inspect(|r| {
                    let step = (r.to_f32() - x).abs() / x.abs();
                    assert!(step < 0.0079 || x.abs() < 1e-38, "{x} became {r}");
                })
                .map(bf16::to_f64)
                .sum();
            let mean = sum / f64::from(count);
            let bound = if x.abs() < 1e-38 { 1e-3 } else { 1e-4 }; // subnormals
            assert!((mean / f64::from(x) - 1.0).abs() < bound, "{x}: {mean}");
        }
    }

    #[test]
    fn stochastic_rounding_makes_no_number_of_nan_and_infinity() {
        for bits in [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xff80_0001, 0x7fc0_0000] {
            let x = Tensor::full(f32::from_bits(bits), 300, &device()).unwrap();
            let y = Tensor::zeros(300, DType::BF16, &device()).unwrap();
            let seed = Seed { seed: 1, first: 0 };
            super::super::muon::combine("test", (1.0, &x), (0.0, &y), Some(seed)).unwrap();
            assert!(values(&y).iter().all(|y| y.is_nan()), "{bits:x}");
        }
        for random in [0, 1, 0xffff] {
            assert_eq!(round_at_random(f32::INFINITY, random), bf16::INFINITY);
            assert_eq!(round_at_random(f32::NEG_INFINITY, random), bf16::NEG_INFINITY);
        }
    }

    #[test]
    fn the_second_moment_reaches_the_square_of_a_constant_gradient() {
        let n = 1000;
        let grad = (random(1, &[n]).abs().unwrap() + 0.1).unwrap();
        let (weight, m, v) = (zeros(n, DType::F32), zeros(n, DType::BF16), zeros(n, DType::BF16));
        let tensors = AdamWTensors {
            weight: &weight,
            master: None,
            exp_avg: &m,
            exp_avg_sq: &v,
            absmax: None,
            grad: &grad,
        };
        let steps = 3000;
        for step in 1..=steps {
            adamw_step(&HYPER, &tensors, 1e-3, 0.0, step, 1.0).unwrap();
        }
        let reached = 1.0 - HYPER.beta2.powf(steps as f64);
        let mean_of = |t: &Tensor, power: i32, of: f64| {
            let ratios =
                values(t).into_iter().zip(values(&grad)).map(|(x, g)| x / g.powi(power) / of);
            ratios.sum::<f64>() / n as f64
        };
        assert!((mean_of(&m, 1, 1.0) - 1.0).abs() < 5e-3, "{}", mean_of(&m, 1, 1.0));
        assert!((mean_of(&v, 2, reached) - 1.0).abs() < 5e-3, "{}", mean_of(&v, 2, reached));
        // With unbiased moments of a steady gradient, each step moves a weight by the learning
        // rate.
        let moved = values(&weight).into_iter().sum::<f64>() / (n as f64 * -1e-3 * steps as f64);
        assert!((moved - 1.0).abs() < 5e-3, "{moved}");
    }

    #[test]
    fn bf16_updates_are_close_to_f32_updates_and_do_not_depend_on_the_number_of_threads() {
        let sizes = [1, 5, 2048, 65_537, 70_001];
        let run = |dtype: DType, threads: usize| {
            let state: Vec<[Tensor; 4]> = sizes
                .iter()
                .map(|n| [random(1, &[*n]), zeros(*n, dtype), zeros(*n, dtype), random(2, &[*n])])
                .collect();
            let updates: Vec<AdamWUpdate<'_>> = state
                .iter()
                .enumerate()
                .map(|(index, [weight, exp_avg, exp_avg_sq, grad])| AdamWUpdate {
                    index,
                    first: 0,
                    tensors: AdamWTensors {
                        weight,
                        master: None,
                        exp_avg,
                        exp_avg_sq,
                        absmax: None,
                        grad,
                    },
                    lr: 1e-2,
                    weight_decay: 0.1,
                })
                .collect();
            with_threads(threads, || {
                for step in 1..=4 {
                    let grads: Vec<&Tensor> = updates.iter().map(|u| u.tensors.grad).collect();
                    let squares = sums_of_squares(&grads).unwrap();
                    clipped_update(&HYPER, &updates, step, &squares, 1.0).unwrap();
                }
            });
            drop(updates);
            state
        };
        let (one, three, wide) = (run(DType::BF16, 1), run(DType::BF16, 3), run(DType::F32, 2));
        for ((one, three), wide) in one.iter().zip(&three).zip(&wide) {
            for (one, three) in one.iter().zip(three) {
                assert_eq!(bits(one), bits(three));
            }
            for (got, want) in values(&one[0]).iter().zip(values(&wide[0])) {
                assert!((got - want).abs() < 1e-3, "{got} {want}"); // steps have size 1e-2
            }
        }
    }

    /// Weight, moments and gradient.
    fn state(n: usize, weight: DType) -> [Tensor; 4] {
        let moment = |seed| random(seed, &[n]).abs().unwrap().to_dtype(DType::BF16).unwrap();
        [random(1, &[n]).to_dtype(weight).unwrap(), moment(2), moment(3), random(4, &[n])]
    }

    fn part_update(state: &[Tensor; 4], first: usize) -> AdamWUpdate<'_> {
        let [weight, exp_avg, exp_avg_sq, grad] = state.each_ref();
        let tensors =
            AdamWTensors { weight, master: None, exp_avg, exp_avg_sq, absmax: None, grad };
        AdamWUpdate { tensors, index: 3, first, lr: 1e-2, weight_decay: 0.1 }
    }

    #[test]
    fn a_parameter_that_is_updated_in_parts_has_the_bits_of_the_whole() {
        // No part starts at a vector boundary except for the first.
        let cuts = [0, 1, 6, 1030, 65_537, 131_075, 140_001];
        let n = *cuts.last().unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let (whole, divided) = (state(n, dtype), state(n, dtype));
            let part = |start: usize, end: usize| {
                [0, 1, 2, 3].map(|of: usize| divided[of].narrow(0, start, end - start).unwrap())
            };
            let parts: Vec<[Tensor; 4]> = cuts.windows(2).map(|cut| part(cut[0], cut[1])).collect();
            let squares = sums_of_squares(&[&whole[3]]).unwrap();
            clipped_update(&HYPER, &[part_update(&whole, 0)], 5, &squares, 1.0).unwrap();
            // More parts than one launch accepts, most of them empty.
            let empty = part(0, 0);
            let mut updates = vec![part_update(&empty, 7); 60];
            updates.extend(parts.iter().zip(cuts).map(|(part, first)| part_update(part, first)));
            clipped_update(&HYPER, &updates, 5, &squares, 1.0).unwrap();
            for (whole, divided) in whole.iter().zip(&divided) {
                assert!(bits(whole) == bits(divided));
            }
        }
    }

    /// Moves weights to a target 2 % away: the gradient of a weight is its distance. Returns the
    /// mean distance after all steps, in percent. `round` changes the weight after each step.
    fn distance(dtype: DType, round: impl Fn(&Tensor) -> Tensor) -> f64 {
        let n = 2000;
        let start = (random(1, &[n]).abs().unwrap() + 0.5).unwrap();
        let start = start.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        let target = (&start * 1.02).unwrap();
        let mut weight = start.to_dtype(dtype).unwrap();
        let (m, v) = (zeros(n, DType::F32), zeros(n, DType::F32));
        for step in 1..=400 {
            let grad = (weight.to_dtype(DType::F32).unwrap() - &target).unwrap();
            let tensors = AdamWTensors {
                weight: &weight,
                master: None,
                exp_avg: &m,
                exp_avg_sq: &v,
                absmax: None,
                grad: &grad,
            };
            adamw_step(&HYPER, &tensors, 1e-4, 0.0, step, 1.0).unwrap();
            weight = round(&weight);
        }
        let mean: f64 = values(&weight).iter().sum::<f64>() / values(&target).iter().sum::<f64>();
        100.0 * (mean - 1.0).abs()
    }

    #[test]
    fn bf16_weights_without_masters_learn_where_rounding_to_nearest_stops_them() {
        let nearest =
            |weight: &Tensor| weight.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        let exact = distance(DType::F32, Tensor::clone);
        let at_random = distance(DType::BF16, Tensor::clone);
        let to_nearest = distance(DType::F32, nearest);
        assert!(exact < 0.5 && at_random < 0.5, "{exact} {at_random}");
        assert!((at_random - exact).abs() < 0.1, "{at_random} {exact}");
        assert!(to_nearest > 1.9, "{to_nearest}"); // steps of 1e-4 change nothing
    }

    #[test]
    fn moments_of_different_dtypes_are_rejected() {
        let (weight, grad) = (random(1, &[3]), random(2, &[3]));
        let (m, v) = (zeros(3, DType::BF16), zeros(3, DType::F32));
        let tensors = AdamWTensors {
            weight: &weight,
            master: None,
            exp_avg: &m,
            exp_avg_sq: &v,
            absmax: None,
            grad: &grad,
        };
        let error = message(adamw_step(&HYPER, &tensors, 0.1, 0.0, 1, 1.0));
        assert!(error.contains("`exp_avg_sq` is F32, but `exp_avg` is BF16"), "{error}");
    }
}
