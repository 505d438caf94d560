//! GELU, elementwise, in the three forms that vision encoders use.
//!
//! Shapes: `x`, `y`, `dx` and `dy` have the same shape, of any rank.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::blocks::{Full, Slots, elementwise};
use super::cpu::in_place::{RecomputeInput, change};
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{compute_dtype, distinct, expect_shape, read};
use super::launch::{empty, launch_elementwise, on_gpu};
use candle_core::{Result, Tensor};

/// Form of the GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gelu {
    /// Tanh approximation, `gelu_pytorch_tanh`: `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`.
    Tanh,
    /// Exact form: `x (1 + erf(x / sqrt 2)) / 2`.
    Erf,
    /// Sigmoid approximation, `quick_gelu`: `x sigmoid(1.702 x)`.
    Quick,
}

impl Gelu {
    /// The CUDA kernel of the forward pass.
    fn kernel(self) -> &'static str {
        match self {
            Self::Tanh => "gelu_tanh",
            Self::Erf => "gelu_erf",
            Self::Quick => "gelu_quick",
        }
    }
}

/// `2 sqrt(2/pi)`, used with the identity `(1 + tanh u) / 2 = sigmoid(2 u)`.
const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_1;
const CUBIC: f32 = 0.044_715;
/// Factor of `x` in the sigmoid approximation.
const QUICK: f32 = 1.702;
/// Rational approximation of an odd function: `x P(x^2) / Q(x^2)` for `|x| <= end`, and `1/2` with
/// the sign of `x` beyond. It is cheaper than an exponential with a fit of `erfc`.
#[derive(Clone, Copy)]
struct Odd {
    end: f32,
    numerator: [f32; 6],   // highest power first
    denominator: [f32; 5], // likewise, without the last, which is 1
}

/// Fit of `erf(x / sqrt 2) / 2`, absolute error below 2e-7.
const HALF_ERF: Odd = Odd {
    end: 5.5,
    numerator: [
        2.274_933_3e-8,
        6.352_106_5e-6,
        1.688_256_2e-4,
        4.677_26e-3,
        0.033_852_654,
        0.398_942_23,
    ],
    denominator: [1.197_502_1e-6, 7.364_742_8e-5, 1.884_444_6e-3, 0.028_645_873, 0.251_521_94],
};

/// Fit of the derivative of the exact GELU minus 1/2, absolute error below 4e-7.
const SLOPE: Odd = Odd {
    end: 5.8,
    numerator: [
        1.929_28e-7,
        3.595_584_9e-5,
        1.922_196_7e-5,
        0.014_230_297,
        -0.030_995_79,
        0.797_885_36,
    ],
    denominator: [8.952_377e-6, 1.920_366_2e-4, 3.523_035_6e-3, 0.040_980_23, 0.294_494_12],
};

/// Value of the approximation at `x`. Propagates NaN.
#[inline(always)]
fn odd(f: Odd, x: f32) -> f32 {
    let u = x * x;
    let (mut p, mut q) = (f.numerator[0], f.denominator[0]);
    let mut i = 1;
    while i < 5 {
        p = p.mul_add(u, f.numerator[i]);
        q = q.mul_add(u, f.denominator[i]);
        i += 1;
    }
    let inside = x * p.mul_add(u, f.numerator[5]) / q.mul_add(u, 1.0);
    let up_to_end = if x > f.end { 0.5 } else { inside };
    if x < -f.end { -0.5 } else { up_to_end }
}

/// Computes `(1 + tanh u) / 2` at `u = sqrt(2/pi) (x + 0.044715 x^3)`.
#[inline(always)]
fn tanh_gate(x: f32) -> f32 {
    sigmoid(TWICE_SQRT_2_OVER_PI * x * (CUBIC * x).mul_add(x, 1.0))
}

/// Derivative of the tanh form at `x`, given `s = tanh_gate(x)`.
#[inline(always)]
fn tanh_slope(x: f32, s: f32) -> f32 {
    let slope = TWICE_SQRT_2_OVER_PI * (3.0 * CUBIC * x).mul_add(x, 1.0);
    (x * s * (1.0 - s)).mul_add(slope, s)
}

/// Derivative of the sigmoid approximation at `x`, given `s = sigmoid(1.702 x)`.
#[inline(always)]
fn quick_slope(x: f32, s: f32) -> f32 {
    (QUICK * x * s).mul_add(1.0 - s, s)
}

kernels! {
    fn tanh_forward<'b>(x: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let x = &x[..y.len()];
        y.fill(|i| x[i] * tanh_gate(x[i]))
    }

    fn tanh_backward(x: &mut [f32], dy: &[f32]) {
        for (x, &dy) in x.iter_mut().zip(dy) {
            *x = dy * tanh_slope(*x, tanh_gate(*x));
        }
    }

    fn tanh_backward_recompute(x: &mut [f32], dy: &mut [f32]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let s = tanh_gate(*x);
            let y = *x * s;
            *x = *dy * tanh_slope(*x, s);
            *dy = y;
        }
    }

    fn erf_forward<'b>(x: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let x = &x[..y.len()];
        y.fill(|i| x[i] * (0.5 + odd(HALF_ERF, x[i])))
    }

    fn erf_backward(x: &mut [f32], dy: &[f32]) {
        for (x, &dy) in x.iter_mut().zip(dy) {
            *x = dy * (0.5 + odd(SLOPE, *x));
        }
    }

    fn erf_backward_recompute(x: &mut [f32], dy: &mut [f32]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let y = *x * (0.5 + odd(HALF_ERF, *x));
            *x = *dy * (0.5 + odd(SLOPE, *x));
            *dy = y;
        }
    }

    fn quick_forward<'b>(x: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let x = &x[..y.len()];
        y.fill(|i| x[i] * sigmoid(QUICK * x[i]))
    }

    fn quick_backward(x: &mut [f32], dy: &[f32]) {
        for (x, &dy) in x.iter_mut().zip(dy) {
            *x = dy * quick_slope(*x, sigmoid(QUICK * *x));
        }
    }

    fn quick_backward_recompute(x: &mut [f32], dy: &mut [f32]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let s = sigmoid(QUICK * *x);
            let y = *x * s;
            *x = *dy * quick_slope(*x, s);
            *dy = y;
        }
    }
}

/// Returns `gelu(x)` in the shape and dtype of `x`.
pub fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    let op = "gelu";
    let dtype = compute_dtype(op, &[("x", x)])?;
    if on_gpu(x) {
        let y = empty(x.shape(), dtype, x)?;
        launch_elementwise!(kind.kernel(); x, &y)?;
        return Ok(y);
    }
    let shape = x.shape().clone();
    let x = read(op, "x", x)?;
    let x = x.values()?;
    let y = elementwise(shape.elem_count(), dtype, |at, y| match kind {
        Gelu::Tanh => tanh_forward(&x.view(at), y),
        Gelu::Erf => erf_forward(&x.view(at), y),
        Gelu::Quick => quick_forward(&x.view(at), y),
    });
    y.tensor(shape)
}

/// Returns `(dx, y)` in the memory of `x` and `dy`, which are overwritten together with their
/// clones. `y` is `None` unless `recompute` is `Yes`.
pub fn gelu_backward(
    x: Tensor,
    dy: Tensor,
    kind: Gelu,
    recompute: RecomputeInput,
) -> Result<(Tensor, Option<Tensor>)> {
    let op = "gelu_backward";
    compute_dtype(op, &[("x", &x), ("dy", &dy)])?;
    expect_shape(op, "dy", &dy, x.dims())?;
    distinct(op, "x", &x, &[("dy", &dy)])?;
    match recompute {
        _ if on_gpu(&x) => {
            let kernel = recompute.kernel(&format!("{}_backward", kind.kernel()));
            launch_elementwise!(kernel; &x, &dy)?;
        }
        RecomputeInput::No => {
            let dy = read(op, "dy", &dy)?;
            let dy = dy.values()?;
            change(op, [("x", &x)], |span, [x]| match kind {
                Gelu::Tanh => tanh_backward(x, &dy.view(span)),
                Gelu::Erf => erf_backward(x, &dy.view(span)),
                Gelu::Quick => quick_backward(x, &dy.view(span)),
            })?;
        }
        RecomputeInput::Yes => change(op, [("x", &x), ("dy", &dy)], |_, [x, dy]| match kind {
            Gelu::Tanh => tanh_backward_recompute(x, dy),
            Gelu::Erf => erf_backward_recompute(x, dy),
            Gelu::Quick => quick_backward_recompute(x, dy),
        })?,
    }
    Ok((x, (recompute == RecomputeInput::Yes).then_some(dy)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, check, device, operand, random, values};
    use super::*;

    /// Output and gradient, after checking that both variants of the backward give the same bits.
    fn forward_and_backward(x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<(Tensor, Vec<Tensor>)> {
        let y = gelu(x, kind)?;
        let copy = |t: &Tensor| operand(t, t.dtype());
        let (dx, recomputed) = gelu_backward(copy(x)?, copy(dy)?, kind, RecomputeInput::Yes)?;
        let (alone, nothing) = gelu_backward(copy(x)?, copy(dy)?, kind, RecomputeInput::No)?;
        assert_eq!(bits(&recomputed.unwrap()), bits(&y), "recomputed output");
        assert_eq!(bits(&dx), bits(&alone));
        assert!(nothing.is_none());
        Ok((y, vec![dx]))
    }

    /// Derivative at `x`.
    fn slope(x: &Tensor, kind: Gelu) -> Tensor {
        let ones = x.ones_like().unwrap();
        gelu_backward(x.copy().unwrap(), ones, kind, RecomputeInput::No).unwrap().0
    }

    #[test]
    fn tanh_gelu_and_its_gradient_match_the_reference() {
        let plain = |t: &[Tensor]| {
            let inner =
                ((&t[0] + (t[0].powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            (&t[0] * 0.5)? * (inner.tanh()? + 1.0)?
        };
        for dims in [[1, 1], [7, 9], [257, 130]] {
            let inputs = [(random(1, &dims) * 2.0).unwrap()];
            check(&format!("gelu tanh {dims:?}"), &inputs, plain, |t, dy| {
                forward_and_backward(&t[0], dy, Gelu::Tanh)
            });
        }
    }

    #[test]
    fn erf_gelu_and_its_gradient_match_the_reference() {
        let plain = |t: &[Tensor]| {
            let erf = (&t[0] * std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
            (&t[0] * 0.5)? * (erf + 1.0)?
        };
        for dims in [[1, 1], [7, 9], [257, 130]] {
            let inputs = [(random(1, &dims) * 2.0).unwrap()];
            check(&format!("gelu erf {dims:?}"), &inputs, plain, |t, dy| {
                forward_and_backward(&t[0], dy, Gelu::Erf)
            });
        }
    }

    #[test]
    fn quick_gelu_and_its_gradient_match_the_reference() {
        let plain = |t: &[Tensor]| {
            let sigmoid = ((&t[0] * -1.702)?.exp()? + 1.0)?.recip()?;
            &t[0] * sigmoid
        };
        for dims in [[1, 1], [7, 9], [257, 130]] {
            let inputs = [(random(1, &dims) * 2.0).unwrap()];
            check(&format!("gelu quick {dims:?}"), &inputs, plain, |t, dy| {
                forward_and_backward(&t[0], dy, Gelu::Quick)
            });
        }
    }

    #[test]
    fn large_values_saturate_and_nan_propagates() {
        let x = Tensor::new(&[100f32, -100.0, f32::NAN], &device()).unwrap();
        for kind in [Gelu::Tanh, Gelu::Erf, Gelu::Quick] {
            let y = gelu(&x, kind).unwrap().to_vec1::<f32>().unwrap();
            let slope = slope(&x, kind).to_vec1::<f32>().unwrap();
            assert_eq!((y[0], slope[0]), (100.0, 1.0), "{kind:?}");
            assert!(y[1].abs() < 1e-30 && slope[1].abs() < 1e-30, "{kind:?} {y:?} {slope:?}");
            assert!(y[2].is_nan() && slope[2].is_nan(), "{kind:?}");
        }
    }

    #[test]
    fn all_forms_have_an_error_below_1e_6_on_the_whole_range() {
        let x: Vec<f64> = (-12_000..=12_000).map(|i| f64::from(i) * 1e-3).collect();
        let t = Tensor::new(x.as_slice(), &device()).unwrap();
        let narrow = t.to_dtype(candle_core::DType::F32).unwrap();
        let wide = narrow.to_dtype(candle_core::DType::F64).unwrap();
        let wide_x = values(&wide);
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let u = ((&wide + (wide.powf(3.0).unwrap() * 0.044715).unwrap()).unwrap() * root).unwrap();
        let erf = (&wide * std::f64::consts::FRAC_1_SQRT_2).unwrap().erf().unwrap();
        // `(1 + tanh(0.851 x)) / 2 = sigmoid(1.702 x)`
        let quick = (&wide * 0.851).unwrap().tanh().unwrap();
        for (kind, step) in
            [(Gelu::Tanh, u.tanh().unwrap()), (Gelu::Erf, erf), (Gelu::Quick, quick)]
        {
            let want = values(&((&wide * 0.5).unwrap() * (step + 1.0).unwrap()).unwrap());
            let got = values(&gelu(&narrow, kind).unwrap());
            let slopes = values(&slope(&narrow, kind));
            for i in 1..x.len() - 1 {
                // The error of the central difference is below 1e-6.
                let difference = (want[i + 1] - want[i - 1]) / (wide_x[i + 1] - wide_x[i - 1]);
                assert!((slopes[i] - difference).abs() <= 2e-6, "{kind:?} {}: {}", x[i], slopes[i]);
            }
            for ((got, want), x) in got.iter().zip(&want).zip(&x) {
                assert!(
                    (got - want).abs() <= 1e-6 * (1.0 + want.abs()),
                    "{kind:?} {x}: {got} {want}"
                );
            }
        }
    }
}
