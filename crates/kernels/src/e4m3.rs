//! Rounding of matrices to FP8 (e4m3) with one scale for each row or each column.
//!
//! e4m3 has 1 sign bit, 4 exponent bits and 3 mantissa bits: multiples of 2^-9 below 2^-6, then
//! 8 values per power of two up to 448, no infinity, and NaN. A scale is the smallest power of two
//! for which the largest finite absolute value of the row, divided by the scale, is at most 448. So
//! an element times its scale is exact in `bf16` and in `f32`, and products of these values in
//! `f32` are those of FP8 tensor cores, up to the order of additions.
//!
//! Scales are between 2^-117 and 2^119: the smallest element is then a normal `bf16`, and the
//! largest is finite. Beyond these limits elements become 0 or are limited to 448. NaN remains NaN,
//! and infinity becomes NaN, so that checks for values that are not finite still find them.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::blocks::{Values, filled, span};
use super::cpu::simd::kernels;
use super::cpu::{ROWS, compute_dtype, read};
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

const MAX: f32 = 448.0;
/// Smallest normal value, 2^-6. Smaller values are multiples of 2^-9.
const LEAST_NORMAL: f32 = 0.015_625;
/// Adding this rounds smaller numbers to multiples of 2^-9: neighbours in `f32` from 2^14 to 2^15
/// differ by that.
const TO_SUBNORMAL: f32 = 24_576.0;
/// Mantissa bits of `f32` that e4m3 does not have.
const DROPPED: u32 = 20;
/// Bits of positive infinity in `f32`.
const INFINITY: u32 = 0x7f80_0000;
/// Bits of an `f32` without its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// Smallest and largest exponent of a scale.
const EXPONENTS: (i32, i32) = (-117, 119);
/// Number of rows of a matrix whose column maxima are computed by one task.
const TASK_ROWS: usize = 64;

/// The e4m3 value next to `x`, of two equally near ones that with an even last bit. Larger values
/// than 448 become 448; infinity becomes NaN.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    let magnitude = f32::from_bits(x.to_bits() & MAGNITUDE);
    let bits = magnitude.to_bits();
    let half = (1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1);
    let normal = f32::from_bits(bits.wrapping_add(half) >> DROPPED << DROPPED);
    let normal = if normal < MAX { normal } else { MAX };
    let subnormal = (magnitude + TO_SUBNORMAL) - TO_SUBNORMAL;
    let value = if magnitude < LEAST_NORMAL { subnormal } else { normal };
    let value = if bits < INFINITY { value } else { f32::NAN };
    f32::from_bits(value.to_bits() | x.to_bits() & !MAGNITUDE)
}

#[cfg(any(test, all(feature = "cuda-emulation", not(feature = "cuda"))))]
pub(super) fn value(code: u8) -> f32 {
    let magnitude = match code & 127 {
        127 => f32::NAN,
        units @ 0..8 => f32::from(units) / 512.0,
        // The exponents of `f32` are larger by 120.
        normal => f32::from_bits((u32::from(normal) + (120 << 3)) << DROPPED),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Exponent of the scale of a row whose largest finite absolute value has these bits.
#[inline(always)]
fn exponent(largest: u32) -> i32 {
    // 448 is 1.75 * 2^8, and the mantissa bits of 1.75 are 0x600000.
    let above = i32::from(largest & 0x7f_ffff > 0x60_0000);
    ((largest >> 23) as i32 - 127 - 8 + above).clamp(EXPONENTS.0, EXPONENTS.1)
}

/// 2 to the power of `exponent`, which is that of a normal number.
#[inline(always)]
fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The bits of the absolute value of `x`, or 0 if it is not finite.
#[inline(always)]
fn finite_magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & MAGNITUDE;
    if bits < INFINITY { bits } else { 0 }
}

kernels! {
    /// Largest finite absolute value, as bits.
    fn largest(x: &[f32]) -> u32 {
        let mut largest = 0;
        for x in x {
            largest = finite_magnitude(*x).max(largest);
        }
        largest
    }

    /// Raises `largest` of each column to that of the row `x`.
    fn raise(x: &[f32], largest: &mut [u32]) {
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = finite_magnitude(*x).max(*largest);
        }
    }

    /// Rounds a row with the scale `2^exponent`.
    fn round_row(x: &[f32], exponent: i32, y: &mut [f32]) {
        let (scale, inverse) = (power(exponent), power(-exponent));
        for (y, x) in y.iter_mut().zip(x) {
            *y = rounded(*x * inverse) * scale;
        }
    }

    /// Rounds a row with a scale for each column.
    fn round_columns(x: &[f32], exponents: &[i32], y: &mut [f32]) {
        for ((y, x), exponent) in y.iter_mut().zip(x).zip(exponents) {
            *y = rounded(*x * power(-*exponent)) * power(*exponent);
        }
    }
}

/// Rounds `x [N, K]` (`N` may be several dims) to e4m3 with a scale for each row. Returns the
/// rounded values in the dtype and shape of `x`. A row does not depend on the others.
pub(super) fn e4m3_rows(x: &Tensor) -> Result<Tensor> {
    let op = "e4m3_rows";
    let dtype = compute_dtype(op, &[("x", x)])?;
    let [rows @ .., width] = x.dims() else {
        bail!("{op}: `x` is a scalar, expected at least one dim");
    };
    let (num_rows, width) = (rows.iter().product(), *width);
    let shape = x.shape().clone();
    let x = read(op, "x", x)?;
    let x = x.values()?;
    let [y] = filled(num_rows, ROWS, [(width, dtype)], |rows, [y]| {
        let x = x.view(span(&rows, width));
        for (y, x) in y.chunks_mut(width).zip(x.chunks(width)) {
            round_row(x, exponent(largest(x)), y);
        }
    });
    y.tensor(shape)
}

/// Rounds `w [M, K]` to e4m3 with a scale for each column. Returns the rounded values in the dtype
/// of `w`.
pub(super) fn e4m3_columns(w: &Tensor) -> Result<Tensor> {
    let op = "e4m3_columns";
    let dtype = compute_dtype(op, &[("w", w)])?;
    let (num_rows, width) = w.dims2()?;
    let w = read(op, "w", w)?;
    let w = w.values()?;
    let exponents = column_exponents(w, (num_rows, width));
    let [y] = filled(num_rows, ROWS, [(width, dtype)], |rows, [y]| {
        let w = w.view(span(&rows, width));
        for (y, w) in y.chunks_mut(width).zip(w.chunks(width)) {
            round_columns(w, &exponents, y);
        }
    });
    y.tensor((num_rows, width))
}

/// Exponents of the scales of the columns. A maximum does not depend on the order of the rows, so
/// neither do these.
fn column_exponents(w: Values<'_>, (num_rows, width): (usize, usize)) -> Vec<i32> {
    let task = |first: usize| {
        let mut maxima = vec![0; width];
        for row in first..num_rows.min(first + TASK_ROWS) {
            raise(&w.view(row * width..(row + 1) * width), &mut maxima);
        }
        maxima
    };
    let tasks = (0..num_rows).into_par_iter().step_by(TASK_ROWS).map(task);
    let maxima = tasks.reduce(
        || vec![0; width],
        |mut a, b| {
            a.iter_mut().zip(b).for_each(|(a, b)| *a = b.max(*a));
            a
        },
    );
    maxima.into_iter().map(exponent).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, with_threads};
    use super::*;
    use candle_core::{DType, Device};
    use half::bf16;

    /// Random values on the CPU, whatever the device of the tests is.
    fn random(seed: u64, dims: &[usize]) -> Tensor {
        testing::random(seed, dims).to_device(&Device::Cpu).unwrap()
    }

    /// The value of a code by the definition of the format.
    fn defined(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code < 128 { magnitude } else { -magnitude }
    }

    /// FNV-1a of the codes of all `bf16` numbers, in the order of their bits: infinity and NaN are
    /// the code 127 with their sign. PyTorch 2.15 converts to `torch.float8_e4m3fn` in the same way
    /// if numbers are first limited to 448, and so does `ml_dtypes` 0.5.
    const CODES_OF_BF16: u64 = 0x6a3f_baa9_cb61_df95;

    #[test]
    fn all_bf16_numbers_have_the_codes_of_pytorch() {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for bits in 0..=u16::MAX {
            let y = rounded(bf16::from_bits(bits).to_f32());
            let sign = u8::from(bits >> 15 == 1) << 7;
            let found = (0..127).find(|code| defined(*code) as f32 == y.abs());
            let code = sign | if y.is_nan() { 127 } else { found.unwrap() };
            hash = (hash ^ u64::from(code)).wrapping_mul(0x100_0000_01b3);
        }
        assert_eq!(hash, CODES_OF_BF16, "{hash:#x}");
    }

    /// `f32` numbers next to `x` towards 0 and away from it.
    fn neighbours(x: f32) -> [f32; 2] {
        [f32::from_bits(x.to_bits() - 1), f32::from_bits(x.to_bits() + 1)]
    }

    #[test]
    fn every_code_and_every_middle_of_two_codes_is_rounded_to_nearest_even() {
        for sign in [1.0, -1.0] {
            for code in 0..127u8 {
                let exact = defined(code) as f32;
                assert_eq!(value(code).to_bits(), exact.to_bits(), "code {code}");
                assert_eq!(value(code | 128).to_bits(), (-exact).to_bits(), "code {code}");
                let got = rounded(sign * exact);
                assert_eq!(got.to_bits(), (sign * exact).to_bits(), "code {code}");
                if code == 126 {
                    continue;
                }
                let above = defined(code + 1) as f32;
                let middle = f32::midpoint(exact, above);
                let even = if code % 2 == 0 { exact } else { above };
                let [below_middle, above_middle] = neighbours(middle);
                let cases = [(middle, even), (below_middle, exact), (above_middle, above)];
                for (x, want) in cases {
                    assert_eq!(rounded(sign * x).to_bits(), (sign * want).to_bits(), "{x}");
                }
            }
            for x in [448.0, 449.0, 464.0, 480.0, 1e30, f32::MAX] {
                assert_eq!(rounded(sign * x), sign * MAX, "{x}");
            }
            assert!(rounded(sign * f32::INFINITY).is_nan() && rounded(sign * f32::NAN).is_nan());
        }
        assert!(defined(127).is_nan() && value(127).is_nan() && value(255).is_nan());
    }

    #[test]
    fn the_scale_is_the_smallest_power_of_two_that_holds_the_largest_value() {
        for (largest, want) in [
            (448.0, 0),
            (448.1, 1),
            (224.0, -1),
            (1.75, -8),
            (1.0, -8),
            (1.76, -7),
            (0.0, EXPONENTS.0),
            (1e-40, EXPONENTS.0),
            (f32::MAX, EXPONENTS.1),
        ] {
            assert_eq!(exponent(f32::to_bits(largest)), want, "{largest}");
        }
    }

    #[test]
    fn rounded_rows_are_exact_in_bf16_and_rounding_them_again_changes_nothing() {
        for size in [1e-38f32, 1e-30, 1e-3, 1.0, 1e4, 1e37] {
            let x = (random(1, &[5, 300]) * f64::from(size)).unwrap();
            let y = e4m3_rows(&x).unwrap();
            for y in y.flatten_all().unwrap().to_vec1::<f32>().unwrap() {
                assert_eq!(bf16::from_f32(y).to_f32(), y);
            }
            let again = e4m3_rows(&y).unwrap();
            assert_eq!(again.to_vec2::<f32>().unwrap(), y.to_vec2::<f32>().unwrap(), "{size}");
        }
    }

    #[test]
    fn a_row_depends_on_itself_only() {
        let x = random(1, &[7, 65]);
        let all = e4m3_rows(&x).unwrap().to_vec2::<f32>().unwrap();
        for (row, all) in all.iter().enumerate() {
            let alone = e4m3_rows(&x.narrow(0, row, 1).unwrap()).unwrap();
            assert_eq!(&alone.to_vec2::<f32>().unwrap()[0], all);
        }
    }

    #[test]
    fn columns_are_rounded_as_the_rows_of_the_transposed_matrix_at_any_number_of_threads() {
        for (m, k) in [(1, 1), (3, 70), (200, 33)] {
            for dtype in [DType::F32, DType::BF16] {
                let w = random(2, &[m, k]).to_dtype(dtype).unwrap();
                let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
                let rows = e4m3_rows(&w.t().unwrap().contiguous().unwrap()).unwrap();
                let want = wide(&rows).t().unwrap().to_vec2::<f32>().unwrap();
                for threads in [1, 2, 5] {
                    let got = with_threads(threads, || e4m3_columns(&w).unwrap());
                    assert_eq!(wide(&got).to_vec2::<f32>().unwrap(), want, "{m} {k}");
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_become_nan_and_leave_the_other_elements_as_they_are() {
        let x = [1.0, f32::NAN, -0.3, f32::NEG_INFINITY];
        let x = Tensor::from_slice(&x, (1, 4), &Device::Cpu).unwrap();
        let y = e4m3_rows(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(y[1].is_nan() && y[3].is_nan());
        assert_eq!((y[0], y[2]), (1.0, -0.3125));
        let zeros = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let y = e4m3_rows(&zeros).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), zeros.to_vec2::<f32>().unwrap());
    }
}
