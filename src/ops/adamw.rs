//! The AdamW update in one pass over weight, gradient and moments, and what clipping needs.
//!
//! Arithmetic order is that of `torch.optim.AdamW`; everything is `f32`, scalars are computed in `f64`.

use super::cpu::{self, BLOCK, Element, expect_f32, expect_shape, read};
use super::simd::kernels;
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

/// Constants of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

/// A parameter and its state; all in one shape.
#[derive(Clone, Copy)]
pub struct AdamWTensors<'a> {
    /// In the compute dtype; rewritten.
    pub weight: &'a Tensor,
    /// The weight in `f32`, rewritten; `None` if `weight` itself is `f32`.
    pub master: Option<&'a Tensor>,
    /// First moment, `f32`, rewritten.
    pub exp_avg: &'a Tensor,
    /// Second moment, `f32`, rewritten.
    pub exp_avg_sq: &'a Tensor,
    /// Gradient, `f32`, only read.
    pub grad: &'a Tensor,
}

/// One step's scalars, as `f32` arithmetic sees them.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    keep: f32,
    lerp: f32,
    beta2: f32,
    one_minus_beta2: f32,
    sqrt_correction2: f32,
    eps: f32,
    step_size: f32,
}

kernels! {
    fn update(s: Scalars, grad: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        let n = p.len();
        let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
        for i in 0..n {
            let g = grad[i] * s.grad_scale;
            let decayed = p[i] * s.keep;
            m[i] = s.lerp.mul_add(g - m[i], m[i]);
            v[i] = v[i] * s.beta2 + s.one_minus_beta2 * g * g;
            let denominator = v[i].sqrt() / s.sqrt_correction2 + s.eps;
            p[i] = decayed - s.step_size * m[i] / denominator;
        }
    }

    fn narrow(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = bf16::narrow(*x);
        }
    }

    fn sum_of_squares_block(x: &[f32]) -> f64 {
        let mut lanes = [0f64; 32];
        let whole = x.len() / 32 * 32;
        let mut at = 0;
        while at < whole {
            let a = &x[at..at + 32];
            for i in 0..32 {
                let v = a[i] as f64;
                lanes[i] = v.mul_add(v, lanes[i]);
            }
            at += 32;
        }
        let mut sum = 0.0;
        for lane in lanes {
            sum += lane;
        }
        for &v in &x[whole..] {
            sum += v as f64 * v as f64;
        }
        sum
    }
}

/// Update number `step` (from 1): decays the weight by `lr * weight_decay`, then moves it by Adam with the gradient
/// `grad_scale * grad`.
pub fn adamw_step(
    hyper: &AdamW,
    tensors: &AdamWTensors<'_>,
    lr: f64,
    weight_decay: f64,
    step: u64,
    grad_scale: f32,
) -> Result<()> {
    let op = "adamw_step";
    let &AdamWTensors { weight, master, exp_avg, exp_avg_sq, grad } = tensors;
    let dims = weight.dims();
    expect_f32(op, "exp_avg", exp_avg, dims)?;
    expect_f32(op, "exp_avg_sq", exp_avg_sq, dims)?;
    expect_f32(op, "grad", grad, dims)?;
    if step == 0 {
        bail!("{op}: steps count from 1");
    }
    let mut all = vec![("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    match (master, weight.dtype()) {
        (None, DType::F32) => {}
        (Some(master), DType::BF16) => {
            expect_f32(op, "master", master, dims)?;
            all.push(("master", master));
        }
        (_, dtype) => bail!(
            "{op}: `weight` is {dtype:?} and `master` is {}, expected F32 without or BF16 with one",
            if master.is_some() { "given" } else { "absent" }
        ),
    }
    for (i, (name, tensor)) in all.iter().enumerate() {
        cpu::distinct(op, name, tensor, &all[i + 1..])?;
        cpu::distinct(op, name, tensor, &[("grad", grad)])?;
    }
    let correction1 = 1.0 - hyper.beta1.powf(step as f64);
    let correction2 = 1.0 - hyper.beta2.powf(step as f64);
    let scalars = Scalars {
        grad_scale,
        keep: (1.0 - lr * weight_decay) as f32,
        lerp: (1.0 - hyper.beta1) as f32,
        beta2: hyper.beta2 as f32,
        one_minus_beta2: (1.0 - hyper.beta2) as f32,
        sqrt_correction2: correction2.sqrt() as f32,
        eps: hyper.eps as f32,
        step_size: (lr / correction1) as f32,
    };
    let grad = read(op, "grad", grad)?;
    let grad = grad.slice::<f32>()?;
    let f32_weight = master.unwrap_or(weight);
    cpu::write(op, "weight", f32_weight, |p: &mut [f32]| {
        cpu::write(op, "exp_avg", exp_avg, |m: &mut [f32]| {
            cpu::write(op, "exp_avg_sq", exp_avg_sq, |v: &mut [f32]| {
                p.par_chunks_mut(BLOCK)
                    .zip(m.par_chunks_mut(BLOCK))
                    .zip(v.par_chunks_mut(BLOCK))
                    .zip(grad.par_chunks(BLOCK))
                    .for_each(|(((p, m), v), grad)| update(scalars, grad, p, m, v));
            })
        })
    })???;
    if let Some(master) = master {
        let master = read(op, "master", master)?;
        let master = master.slice::<f32>()?;
        cpu::write(op, "weight", weight, |weight: &mut [bf16]| {
            weight
                .par_chunks_mut(BLOCK)
                .zip(master.par_chunks(BLOCK))
                .for_each(|(weight, master)| narrow(master, weight));
        })?;
    }
    Ok(())
}

/// Sum of the squares of an `f32` tensor, in `f64`; the same bits for every thread count.
pub fn sum_of_squares(t: &Tensor) -> Result<f64> {
    let t = read("sum_of_squares", "t", t)?;
    let t = t.slice::<f32>()?;
    let partials: Vec<f64> = t.par_chunks(BLOCK).map(sum_of_squares_block).collect();
    Ok(partials.iter().sum())
}

/// Sets all elements of an `f32` or `bf16` tensor to zero, in place.
pub fn fill_zero(t: &Tensor) -> Result<()> {
    let op = "fill_zero";
    expect_shape(op, "t", t, t.dims())?;
    match t.dtype() {
        DType::BF16 => cpu::write(op, "t", t, |t: &mut [bf16]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(bf16::ZERO));
        }),
        _ => cpu::write(op, "t", t, |t: &mut [f32]| {
            t.par_chunks_mut(BLOCK).for_each(|t| t.fill(0.0));
        }),
    }
}
