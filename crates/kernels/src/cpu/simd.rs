//! Vectorized inner loops.
//!
//! All SIMD levels do the same operations in the same order with fused multiply-adds, so results do
//! not depend on the CPU. Matrix products have their own module.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::Element;
pub(crate) use ::simd::kernels;

/// Coefficients of the polynomial in [`exp`], highest power first.
const EXP: [f32; 6] =
    [1.989_198e-4, 1.393_454_1e-3, 8.333_310_5e-3, 4.166_645_6e-2, 0.166_666_67, 0.5];

/// Number of independent partial sums in a reduction: four AVX-512 vectors.
const LANES: usize = 64;

/// Computes `e^x` with a relative error below 2e-7. Saturates outside [-87.3, 88.3]; propagates
/// NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding this constant leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let x = if x < -87.3 { -87.3 } else { x };
    let x = if x > 88.3 { 88.3 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    // Fitted polynomial for (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2.
    let mut p = EXP[0];
    p = p.mul_add(r, EXP[1]);
    p = p.mul_add(r, EXP[2]);
    p = p.mul_add(r, EXP[3]);
    p = p.mul_add(r, EXP[4]);
    p = p.mul_add(r, EXP[5]);
    let y = (p * r).mul_add(r, r) + 1.0;
    // 2^n: shift the integer in the low bits into the exponent and add the bias.
    y * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000))
}

/// Computes `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the sum of `x[i] * y[i]`.
#[inline(always)]
pub(crate) fn dot<E: Element>(x: &[f32], y: &[E]) -> f32 {
    let n = x.len().min(y.len());
    let (x, y) = (&x[..n], &y[..n]);
    let mut lanes = [0f32; LANES];
    let whole = n / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let (a, b) = (&x[at..at + LANES], &y[at..at + LANES]);
        for i in 0..LANES {
            lanes[i] = a[i].mul_add(b[i].widen(), lanes[i]);
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for i in whole..n {
        sum = x[i].mul_add(y[i].widen(), sum);
    }
    sum
}

/// Returns the sum of `x[i] * y[i] * z[i]`.
#[inline(always)]
pub(crate) fn dot3(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let n = x.len().min(y.len()).min(z.len());
    let (x, y, z) = (&x[..n], &y[..n], &z[..n]);
    let mut lanes = [0f32; LANES];
    let whole = n / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let (a, b, c) = (&x[at..at + LANES], &y[at..at + LANES], &z[at..at + LANES]);
        for i in 0..LANES {
            lanes[i] = (a[i] * b[i]).mul_add(c[i], lanes[i]);
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for i in whole..n {
        sum = (x[i] * y[i]).mul_add(z[i], sum);
    }
    sum
}

/// Returns the sum of `x[i]`.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = x.len() / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let a = &x[at..at + LANES];
        for i in 0..LANES {
            lanes[i] += a[i];
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for &v in &x[whole..] {
        sum += v;
    }
    sum
}

/// Returns the sum of `(x[i] - mean)^2`.
#[inline(always)]
pub(crate) fn sum_of_squared_differences(x: &[f32], mean: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = x.len() / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let a = &x[at..at + LANES];
        for i in 0..LANES {
            let d = a[i] - mean;
            lanes[i] = d.mul_add(d, lanes[i]);
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for &v in &x[whole..] {
        sum = (v - mean).mul_add(v - mean, sum);
    }
    sum
}

/// Returns the maximum of `x`, or negative infinity if `x` is empty. Ignores NaN.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let whole = x.len() / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let a = &x[at..at + LANES];
        for i in 0..LANES {
            lanes[i] = if a[i] > lanes[i] { a[i] } else { lanes[i] };
        }
        at += LANES;
    }
    let mut max = f32::NEG_INFINITY;
    for v in lanes {
        max = if v > max { v } else { max };
    }
    for &v in &x[whole..] {
        max = if v > max { v } else { max };
    }
    max
}

/// Returns the sum of `e^(x[i] - shift)`.
#[inline(always)]
pub(crate) fn sum_exp(x: &[f32], shift: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = x.len() / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let a = &x[at..at + LANES];
        for i in 0..LANES {
            lanes[i] += exp(a[i] - shift);
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for &v in &x[whole..] {
        sum += exp(v - shift);
    }
    sum
}

/// Replaces each element `x` by `e^(x * scale - shift)` and returns their sum.
#[inline(always)]
pub(crate) fn exp_in_place(x: &mut [f32], scale: f32, shift: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = x.len() / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let a = &mut x[at..at + LANES];
        for i in 0..LANES {
            let e = exp(a[i].mul_add(scale, -shift));
            a[i] = e;
            lanes[i] += e;
        }
        at += LANES;
    }
    let mut sum = fold(&lanes);
    for v in &mut x[whole..] {
        *v = exp(v.mul_add(scale, -shift));
        sum += *v;
    }
    sum
}

/// Rounds `x` to the nearest `bf16` value, ties to even, and returns it as `f32`.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000;
    if x.is_nan() { x } else { f32::from_bits(rounded) }
}

/// Sums the lanes pairwise, in a fixed order.
#[inline(always)]
fn fold(lanes: &[f32; LANES]) -> f32 {
    let mut a = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            a[i] += a[i + half];
        }
        half /= 2;
    }
    a[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut worst = 0f64;
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max(((got - want) / want).abs());
        }
        assert!(worst < 2e-7, "{worst}");
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-1e9) < 1e-37 && exp(1e9) > 1e38);
    }

    #[test]
    fn round_to_bf16_matches_the_half_crate() {
        for x in
            [0.0f32, -0.0, 1.0, 1.003_906_2, 1.011_718_8, -3.3333, 1e-40, 3.4e38, f32::INFINITY]
        {
            assert_eq!(
                round_to_bf16(x).to_bits(),
                half::bf16::from_f32(x).to_f32().to_bits(),
                "{x}"
            );
        }
        assert!(round_to_bf16(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_cover_full_and_partial_vectors() {
        for n in [0, 1, 63, 64, 65, 127, 128, 200] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let y: Vec<f32> = (0..n).map(|i| (i as f32 * 0.3).cos()).collect();
            let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-4, "{n}: {a} {b}");
            close(sum(&x), x.iter().sum());
            close(dot(&x, &y), x.iter().zip(&y).map(|(x, y)| x * y).sum());
            close(dot3(&x, &y, &y), x.iter().zip(&y).map(|(x, y)| x * y * y).sum());
            close(sum_exp(&x, 0.5), x.iter().map(|x| (x - 0.5).exp()).sum());
            close(
                sum_of_squared_differences(&x, 0.1),
                x.iter().map(|x| (x - 0.1) * (x - 0.1)).sum(),
            );
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
