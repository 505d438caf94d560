//! Moments in 8 bits: each block of 256 elements has a scale, its largest absolute value, and each
//! element is the number of an entry of a table with 256 entries.
//!
//! The tables are the dynamic maps of bitsandbytes: seven decades, each of which has twice as many
//! entries as the one below it, evenly spaced. The first moment uses a map with signs, the second
//! one without. Codes and scales are those of bitsandbytes.

use super::cpu::simd::kernels;
use std::sync::LazyLock;

/// Number of elements that share a scale.
pub const EIGHT_BIT_BLOCK: usize = 256;

const DECADES: u32 = 7;

/// A table of values in ascending order.
pub(super) struct DynamicMap {
    pub(super) values: [f32; 256],
    /// The value that is as far from entry `i` as from the next.
    midpoints: [f32; 256],
    /// For the upper 16 bits of an `f32` from -1 to 1: the code of the smallest of the values with
    /// these bits. No two midpoints have the same upper bits.
    lowest: Box<[u8]>,
}

pub(super) static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| {
    let positive: Vec<f32> = positive(1).collect();
    let negative = positive.iter().rev().map(|value| -value);
    DynamicMap::new(negative.chain([0.0]).chain(positive.iter().copied()).chain([1.0]))
});
pub(super) static UNSIGNED: LazyLock<DynamicMap> =
    LazyLock::new(|| DynamicMap::new([0.0].into_iter().chain(positive(2)).chain([1.0])));

/// The entries between 0 and 1, in ascending order; the lowest decade has `first` of them.
fn positive(first: u32) -> impl Iterator<Item = f32> {
    (0..DECADES).flat_map(move |decade| {
        let count = first << decade;
        let scale = 10f64.powi(decade as i32 + 1 - DECADES as i32) as f32;
        // as `linspace` of PyTorch, which computes from the nearer end
        let step = 0.9f32 / count as f32;
        let bound = move |i: u32| {
            let from_end = count - i;
            if i < count.div_ceil(2) {
                step.mul_add(i as f32, 0.1)
            } else {
                step.mul_add(-(from_end as f32), 1.0)
            }
        };
        (0..count).map(move |i| scale * f32::midpoint(bound(i), bound(i + 1)))
    })
}

impl DynamicMap {
    fn new(entries: impl Iterator<Item = f32>) -> Self {
        let (mut values, mut midpoints) = ([0.0; 256], [f32::INFINITY; 256]);
        for (value, entry) in values.iter_mut().zip(entries) {
            *value = entry;
        }
        for (midpoint, pair) in midpoints.iter_mut().zip(values.windows(2)) {
            *midpoint = f32::midpoint(pair[0], pair[1]);
        }
        let lowest = (0..=u16::MAX).map(|upper| {
            let upper = u32::from(upper) << 16;
            let smallest = if upper >> 31 == 1 { upper | 0xffff } else { upper };
            let smallest = f32::from_bits(smallest);
            midpoints[..255].partition_point(|midpoint| *midpoint < smallest) as u8
        });
        Self { values, midpoints, lowest: lowest.collect() }
    }

    /// Writes the values of `codes`, which begin at the start of a block.
    pub(super) fn decode(&self, codes: &[u8], absmax: &[f32], values: &mut [f32]) {
        let blocks = codes.chunks(EIGHT_BIT_BLOCK).zip(values.chunks_mut(EIGHT_BIT_BLOCK));
        for ((codes, values), absmax) in blocks.zip(absmax) {
            decode_block(&self.values, *absmax, codes, values);
        }
    }

    /// Writes the codes and scales of `values`, which begin at the start of a block.
    pub(super) fn encode(&self, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
        let blocks = codes.chunks_mut(EIGHT_BIT_BLOCK).zip(values.chunks(EIGHT_BIT_BLOCK));
        for ((codes, values), absmax) in blocks.zip(absmax) {
            *absmax = largest(values);
            if *absmax > 0.0 {
                encode_block(self, *absmax, values, codes);
            } else {
                codes.fill(0);
            }
        }
    }
}

kernels! {
    fn decode_block(map: &[f32; 256], absmax: f32, codes: &[u8], values: &mut [f32]) {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = map[*code as usize] * absmax;
        }
    }

    /// The largest absolute value; NaN if one is NaN. The bits of positive floats have their order,
    /// and NaN follows infinity.
    fn largest(values: &[f32]) -> f32 {
        let mut lanes = [0u32; 32];
        for values in values.chunks(32) {
            for (lane, value) in lanes.iter_mut().zip(values) {
                let value = value.to_bits() & 0x7fff_ffff;
                *lane = if value > *lane { value } else { *lane };
            }
        }
        let mut largest = 0;
        for lane in lanes {
            largest = if lane > largest { lane } else { largest };
        }
        f32::from_bits(largest)
    }

    fn encode_block(map: &DynamicMap, absmax: f32, values: &[f32], codes: &mut [u8]) {
        for (code, value) in codes.iter_mut().zip(values) {
            let x = value / absmax;
            let lowest = map.lowest[(x.to_bits() >> 16) as usize];
            // a value on the midpoint has the lower code
            *code = lowest + u8::from(x > map.midpoints[lowest as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, device, values, with_threads};
    use super::super::{
        AdamW, AdamWTensors, AdamWUpdate, adamw_step, clipped_update, sums_of_squares,
    };
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use std::collections::HashMap;

    /// Made by `scripts/golden/eight_bit.py`: maps and updates of bitsandbytes.
    fn golden() -> HashMap<String, Tensor> {
        let bytes = include_bytes!("../../../tests/golden/eight_bit.safetensors");
        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu).unwrap();
        let moved = |(name, t): (String, Tensor)| (name, t.to_device(&device()).unwrap());
        tensors.into_iter().map(moved).collect()
    }

    fn codes(t: &Tensor) -> Vec<u8> {
        t.to_vec1().unwrap()
    }

    #[test]
    fn the_maps_are_those_of_bitsandbytes() {
        let golden = golden();
        for (name, map) in [("signed", &SIGNED), ("unsigned", &UNSIGNED)] {
            let expected: Vec<f32> = golden[name].to_vec1().unwrap();
            assert_eq!(map.values[..], expected[..], "{name}");
        }
    }

    #[test]
    fn each_value_has_the_code_of_the_nearest_entry() {
        for map in [&*SIGNED, &*UNSIGNED] {
            let near = map.values.iter().chain(&map.midpoints[..255]);
            let near = near.flat_map(|x| [x.next_down(), *x, x.next_up()]);
            let near: Vec<f32> = near.filter(|x| x.abs() <= 1.0).collect();
            let mut found = vec![0; near.len()];
            encode_block(map, 1.0, &near, &mut found);
            for (x, code) in near.iter().zip(found) {
                let off = |entry: f32| (f64::from(entry) - f64::from(*x)).abs();
                let best = map.values.iter().map(|entry| off(*entry)).fold(1.0, f64::min);
                let excess = off(map.values[code as usize]) - best;
                assert!(excess <= f64::from(x.abs()) * 2e-7, "{x}: {code}, {excess}");
            }
        }
    }

    /// Runs the updates of the golden file and calls `check` after each.
    fn replay(golden: &HashMap<String, Tensor>, check: impl Fn(usize, &[Tensor; 5])) {
        let weight = golden["weight.0"].copy().unwrap();
        let n = weight.elem_count();
        let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &device()).unwrap();
        let scales = || zeros(n.div_ceil(EIGHT_BIT_BLOCK), DType::F32);
        let state = [weight, zeros(n, DType::U8), zeros(n, DType::U8), scales(), scales()];
        for step in 1..=5 {
            let [weight, exp_avg, exp_avg_sq, absmax1, absmax2] = state.each_ref();
            let grad = &golden[&format!("grad.{step}")];
            let absmax = Some([absmax1, absmax2]);
            let tensors = AdamWTensors { weight, master: None, exp_avg, exp_avg_sq, absmax, grad };
            let update = AdamWUpdate { tensors, index: 0, first: 0, lr: 1e-2, weight_decay: 0.1 };
            let hyper = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
            let squares = sums_of_squares(&[grad]).unwrap();
            clipped_update(&hyper, &[update], step as u64, &squares, 0.0).unwrap();
            check(step, &state);
        }
    }

    /// Codes may differ by one where a value is next to a midpoint: bitsandbytes adds in another
    /// order.
    #[test]
    fn updates_follow_bitsandbytes_for_ordinary_constant_zero_tiny_and_huge_blocks() {
        let golden = golden();
        replay(&golden, |step, [weight, codes1, codes2, absmax1, absmax2]| {
            let expected = |name: &str| &golden[&format!("{name}.{step}")];
            for (found, name) in [(codes1, "codes1"), (codes2, "codes2")] {
                let pairs: Vec<_> = codes(found).into_iter().zip(codes(expected(name))).collect();
                let differ = pairs.iter().filter(|(found, expected)| found != expected).count();
                assert!(differ <= pairs.len() / 200, "step {step}: {differ} {name}");
                assert!(pairs.iter().all(|(found, expected)| found.abs_diff(*expected) <= 1));
            }
            for (found, name, bound) in
                [(weight, "weight", 2e-4), (absmax1, "absmax1", 1e-6), (absmax2, "absmax2", 1e-6)]
            {
                for (found, expected) in values(found).iter().zip(values(expected(name))) {
                    let off = (found - expected).abs();
                    assert!(
                        off <= bound * expected.abs(),
                        "step {step}, {name}: {found} {expected}"
                    );
                }
            }
        });
    }

    #[test]
    fn a_block_with_nan_decodes_to_nan_and_others_keep_their_bits() {
        let n = 3 * EIGHT_BIT_BLOCK - 5;
        let run = |at: Option<usize>| {
            let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &device()).unwrap();
            let mut grad = vec![0.5f32; n];
            if let Some(at) = at {
                grad[at] = f32::NAN;
            }
            let grad = Tensor::from_vec(grad, n, &device()).unwrap();
            let (weight, m, v) = (zeros(n, DType::F32), zeros(n, DType::U8), zeros(n, DType::U8));
            let scales = [zeros(3, DType::F32), zeros(3, DType::F32)];
            let absmax = Some(scales.each_ref());
            let tensors = AdamWTensors {
                weight: &weight,
                master: None,
                exp_avg: &m,
                exp_avg_sq: &v,
                absmax,
                grad: &grad,
            };
            let hyper = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
            adamw_step(&hyper, &tensors, 1e-2, 0.0, 1, 1.0).unwrap();
            (codes(&m), scales.map(|scales| values(&scales)))
        };
        let (codes, scales) = run(None);
        for at in [0, 256, 2 * 256 + 7, n - 1] {
            let (found, with_nan) = run(Some(at));
            for (scales, with_nan) in scales.iter().zip(with_nan) {
                for (block, scale) in with_nan.into_iter().enumerate() {
                    let is_hit = block == at / EIGHT_BIT_BLOCK;
                    assert!(if is_hit { scale.is_nan() } else { scale == scales[block] });
                }
            }
            let other = if at < 256 { 256..512 } else { 0..256 };
            assert_eq!(found[other.clone()], codes[other]);
        }
    }

    #[test]
    fn parts_at_multiples_of_a_block_have_the_bits_of_the_whole() {
        let cuts = [0, 4096, 32_768, 40_960, 70_001];
        let n = *cuts.last().unwrap();
        let state = |n: usize| {
            let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &device()).unwrap();
            let scales = || zeros(n.div_ceil(EIGHT_BIT_BLOCK), DType::F32);
            [zeros(n, DType::BF16), zeros(n, DType::U8), zeros(n, DType::U8), scales(), scales()]
        };
        let run = |cuts: &[usize], threads| {
            let parts: Vec<_> = cuts.windows(2).map(|cut| state(cut[1] - cut[0])).collect();
            with_threads(threads, || {
                for step in 1..=3 {
                    let grad = super::super::testing::random(step, &[n]);
                    let parts = parts.iter().zip(cuts.windows(2));
                    let grads: Vec<Tensor> = cuts
                        .windows(2)
                        .map(|cut| grad.narrow(0, cut[0], cut[1] - cut[0]).unwrap())
                        .collect();
                    let updates = parts.zip(&grads).map(|((state, cut), grad)| {
                        let [weight, exp_avg, exp_avg_sq, absmax1, absmax2] = state.each_ref();
                        let absmax = Some([absmax1, absmax2]);
                        let tensors = AdamWTensors {
                            weight,
                            master: None,
                            exp_avg,
                            exp_avg_sq,
                            absmax,
                            grad,
                        };
                        AdamWUpdate {
                            tensors,
                            index: 4,
                            first: cut[0],
                            lr: 1e-2,
                            weight_decay: 0.1,
                        }
                    });
                    let updates: Vec<_> = updates.collect();
                    let squares = sums_of_squares(&[&grad]).unwrap();
                    let hyper = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
                    clipped_update(&hyper, &updates, step, &squares, 1.0).unwrap();
                }
            });
            [0, 1, 2, 3, 4].map(|of: usize| {
                let parts: Vec<&Tensor> = parts.iter().map(|state| &state[of]).collect();
                bits(&Tensor::cat(&parts, 0).unwrap())
            })
        };
        let whole = run(&[0, n], 1);
        assert!(whole == run(&cuts, 2));
        assert!(whole[0].iter().any(|weight| *weight != 0));
    }
}
