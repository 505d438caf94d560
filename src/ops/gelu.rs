//! GELU, elementwise, in the two forms that the vision tower uses.

#![expect(unsafe_code, reason = "new memory counts as elements once the kernels have written it")]

use super::cpu::{self, BLOCK, compute_dtype, expect_shape, read};
use super::output::Output;
use super::simd::{kernels, normal_cdf, sigmoid};
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::mem::MaybeUninit;

/// Which GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gelu {
    /// `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`: `gelu_pytorch_tanh`.
    Tanh,
    /// `x (1 + erf(x / sqrt 2)) / 2`: the exact one.
    Erf,
}

/// `2 sqrt(2/pi)`: `(1 + tanh u) / 2` is `sigmoid(2 u)`.
const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_1;
const CUBIC: f32 = 0.044_715;
/// `1 / sqrt(2 pi)`.
const DENSITY: f32 = 0.398_942_28;

kernels! {
    fn tanh_forward(x: &[f32], y: &mut [MaybeUninit<f32>]) {
        for (y, &x) in y.iter_mut().zip(x) {
            y.write(x * sigmoid(TWICE_SQRT_2_OVER_PI * x * (CUBIC * x).mul_add(x, 1.0)));
        }
    }

    fn tanh_backward(x: &[f32], dy: &[f32], dx: &mut [MaybeUninit<f32>]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let s = sigmoid(TWICE_SQRT_2_OVER_PI * x * (CUBIC * x).mul_add(x, 1.0));
            let slope = TWICE_SQRT_2_OVER_PI * (3.0 * CUBIC * x).mul_add(x, 1.0);
            dx.write(dy * (x * s * (1.0 - s)).mul_add(slope, s));
        }
    }

    fn erf_forward(x: &[f32], y: &mut [MaybeUninit<f32>]) {
        for (y, &x) in y.iter_mut().zip(x) {
            y.write(x * normal_cdf(x).0);
        }
    }

    fn erf_backward(x: &[f32], dy: &[f32], dx: &mut [MaybeUninit<f32>]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let (cdf, gauss) = normal_cdf(x);
            dx.write(dy * (x * DENSITY).mul_add(gauss, cdf));
        }
    }
}

/// `gelu(x)`, in the shape of `x`.
pub fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    let op = "gelu";
    let dtype = compute_dtype(op, &[("x", x)])?;
    let shape = x.shape().clone();
    let x = read(op, "x", x)?;
    let x = x.f32()?;
    let mut y = Output::new(x.len());
    y.blocks(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| match kind {
        Gelu::Tanh => tanh_forward(x, y),
        Gelu::Erf => erf_forward(x, y),
    });
    // SAFETY: each kernel writes its whole block.
    cpu::tensor(unsafe { y.finish() }, shape, dtype)
}

/// `dx`, in the shape of `x`.
pub fn gelu_backward(x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor> {
    let op = "gelu_backward";
    let dtype = compute_dtype(op, &[("x", x), ("dy", dy)])?;
    expect_shape(op, "dy", dy, x.dims())?;
    let shape = x.shape().clone();
    let (x, dy) = (read(op, "x", x)?, read(op, "dy", dy)?);
    let (x, dy) = (x.f32()?, dy.f32()?);
    let mut dx = Output::new(x.len());
    dx.blocks(BLOCK).zip(x.par_chunks(BLOCK)).zip(dy.par_chunks(BLOCK)).for_each(
        |((dx, x), dy)| match kind {
            Gelu::Tanh => tanh_backward(x, dy, dx),
            Gelu::Erf => erf_backward(x, dy, dx),
        },
    );
    // SAFETY: each kernel writes its whole block.
    cpu::tensor(unsafe { dx.finish() }, shape, dtype)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, random, values};
    use super::*;
    use candle_core::Device;

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
                Ok((gelu(&t[0], Gelu::Tanh)?, vec![gelu_backward(&t[0], dy, Gelu::Tanh)?]))
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
                Ok((gelu(&t[0], Gelu::Erf)?, vec![gelu_backward(&t[0], dy, Gelu::Erf)?]))
            });
        }
    }

    #[test]
    fn both_forms_are_within_a_millionth_over_the_whole_range() {
        let x: Vec<f64> = (-12_000..=12_000).map(|i| f64::from(i) * 1e-3).collect();
        let t = Tensor::new(x.as_slice(), &Device::Cpu).unwrap();
        let narrow = t.to_dtype(candle_core::DType::F32).unwrap();
        let wide = narrow.to_dtype(candle_core::DType::F64).unwrap();
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let u = ((&wide + (wide.powf(3.0).unwrap() * 0.044715).unwrap()).unwrap() * root).unwrap();
        let erf = (&wide * std::f64::consts::FRAC_1_SQRT_2).unwrap().erf().unwrap();
        for (kind, step) in [(Gelu::Tanh, u.tanh().unwrap()), (Gelu::Erf, erf)] {
            let want = values(&((&wide * 0.5).unwrap() * (step + 1.0).unwrap()).unwrap());
            let got = values(&gelu(&narrow, kind).unwrap());
            for ((got, want), x) in got.iter().zip(&want).zip(&x) {
                assert!(
                    (got - want).abs() <= 1e-6 * (1.0 + want.abs()),
                    "{kind:?} {x}: {got} {want}"
                );
            }
        }
    }
}
