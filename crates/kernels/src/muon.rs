//! The Muon update of a matrix: momentum whose singular values are all near 1.
//!
//! The order of operations is that of `torch.optim.Muon` with Nesterov momentum 0.95, five
//! Newton-Schulz steps and `match_rms_adamw`: the learning rate times
//! `0.2 sqrt(max(rows, columns))`, so that a step has the size of one of `AdamW`. The Newton-Schulz
//! steps compute in the dtype of the weight.
//!
//! Shapes: `R` rows and `C` columns of the matrix.

use super::adamw::sum_of_squares;
use super::cpu::simd::kernels;
use super::cpu::{self, BLOCK, compute_dtype, read};
use super::launch::{ELEMENTS, Launch, Long, THREADS, Words, launch, on_gpu};
use super::stochastic_rounding::{Draw, step_seed, tensor_seed};
use super::stored::{Seed, State};
use super::{linear, linear_backward_input, linear_backward_weight};
use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

const OP: &str = "muon_step";
const MOMENTUM: f64 = 0.95;
const STEPS: usize = 5;
/// Coefficients of `x`, `(x x^T) x` and `(x x^T)^2 x` in a Newton-Schulz step.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Minimum norm that the momentum is divided by.
const EPS: f64 = 1e-7;

/// The update of a matrix. All tensors have its elements in row-major order.
#[derive(Clone, Copy)]
pub struct MuonUpdate<'a> {
    /// The weight `[R, C]`, `f32` or `bf16`; overwritten.
    pub weight: &'a Tensor,
    /// The master weight in `f32`, overwritten. Without one, a `bf16` weight is rounded at random.
    pub master: Option<&'a Tensor>,
    /// The momentum, `f32`; overwritten.
    pub momentum: &'a Tensor,
    /// Gradient, `f32`; only read.
    pub grad: &'a Tensor,
    /// Number of the parameter among the trained ones. Random rounding depends on it.
    pub index: usize,
    /// Learning rate of this parameter.
    pub lr: f64,
    /// Weight decay of this parameter; multiplied by `lr`.
    pub weight_decay: f64,
}

/// Update number `step` (from 1) of a matrix with the gradient `grad_scale * grad`. Waits for a
/// GPU.
pub fn muon_step(update: &MuonUpdate<'_>, step: u64, grad_scale: f32) -> Result<()> {
    let &MuonUpdate { weight, master, momentum, grad, index, lr, weight_decay } = update;
    let (rows, columns) = weight.dims2()?;
    let new = (1.0 - MOMENTUM) as f32 * grad_scale;
    combine(OP, (new, grad), (MOMENTUM as f32, momentum), None)?;
    let next = momentum.copy()?;
    combine(OP, (new, grad), (MOMENTUM as f32, &next), None)?;
    let norm = sum_of_squares(&next)?.sqrt().max(EPS);
    let direction = Tensor::zeros((rows, columns), weight.dtype(), weight.device())?;
    combine(OP, ((1.0 / norm) as f32, &next), (0.0, &direction), None)?;
    drop(next);
    let direction = orthogonal(direction)?;
    let size = -lr * 0.2 * (rows.max(columns) as f64).sqrt();
    let seed = Seed { seed: tensor_seed(step_seed(step), index), first: 0 };
    let keep = (1.0 - lr * weight_decay) as f32;
    let exact = master.unwrap_or(weight);
    combine(OP, (size as f32, &direction), (keep, exact), Some(seed))?;
    match master {
        Some(master) => combine(OP, (1.0, master), (0.0, weight), None),
        None => Ok(()),
    }
}

/// Moves the singular values of `x [R, C]`, at most 1, close to 1.
fn orthogonal(x: Tensor) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        // the smaller of the two products
        let gram = if rows <= columns {
            linear(&x, &x, None)? // [R, R]
        } else {
            let gram = Tensor::zeros((columns, columns), DType::F32, x.device())?;
            linear_backward_weight(&x, &x, &gram)?;
            gram.to_dtype(x.dtype())? // [C, C]
        };
        let square = linear(&gram, &gram, None)?; // it is symmetric
        combine(OP, (c, &square), (b, &gram), None)?;
        let product = if rows <= columns {
            linear_backward_input(&gram, &x)? // [R, C]
        } else {
            linear_backward_input(&x, &gram)? // [R, C]
        };
        combine(OP, (1.0, &product), (a, &x), None)?;
    }
    Ok(x)
}

/// Overwrites `y` with `a x + b y`. Both may be `f32` or `bf16`, with any shape of the same number
/// of elements. A `bf16` result is rounded to nearest, or at random with a `seed`.
pub(super) fn combine(
    op: &'static str,
    (a, x): (f32, &Tensor),
    (b, y): (f32, &Tensor),
    seed: Option<Seed>,
) -> Result<()> {
    for (name, tensor) in [("x", x), ("y", y)] {
        compute_dtype(op, &[(name, tensor)])?;
    }
    if x.elem_count() != y.elem_count() {
        bail!("{op}: `x` is {:?} and `y` is {:?}", x.dims(), y.dims());
    }
    cpu::distinct(op, "y", y, &[("x", x)])?;
    if on_gpu(y) {
        let n = y.elem_count();
        let kernel = if x.dtype() == DType::BF16 { "combine_bf16" } else { "combine_f32" };
        let launch = Launch::new(kernel, y.dtype()).grid(n.div_ceil(ELEMENTS)).threads(THREADS);
        let Seed { seed: number, first } = seed.unwrap_or_default();
        let word = Words(vec![u64::from(number) | u64::from(first) << 32]);
        return launch!(op, launch; a, x, b, y, Long(n), seed.is_some(), word);
    }
    let x = read(op, "x", x)?;
    let x = x.values()?;
    let draw = seed.map(|_| Draw::Weight);
    let y = State { name: "y", tensor: y, absmax: None, draw };
    y.write(op, |y| {
        y.blocks().into_par_iter().enumerate().for_each(|(index, mut y)| {
            let start = index * BLOCK;
            let len = y.len();
            let x = x.view(start..start + len);
            let mut values = vec![0f32; len];
            y.load(0..len, &mut values);
            combine_block(a, &x, b, &mut values);
            let seed = seed.unwrap_or_default();
            y.store(0..len, &values, Seed { first: seed.first.wrapping_add(start as u32), ..seed });
        });
        Ok(())
    })
}

kernels! {
    fn combine_block(a: f32, x: &[f32], b: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            // a value that is not finite does not stay if it is overwritten
            let kept = if b == 0.0 { 0.0 } else { b * *y };
            *y = a.mul_add(*x, kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, assert_close, bits, device, random, values, with_threads,
    };
    use super::*;

    /// The update of `torch.optim.Muon` in `f64`: weight and momentum.
    fn plain(
        [weight, momentum, grad]: [&Tensor; 3],
        lr: f64,
        weight_decay: f64,
    ) -> Result<[Tensor; 2]> {
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        let (rows, columns) = weight.dims2()?;
        let momentum = ((wide(momentum)? * 0.95)? + (wide(grad)? * 0.05)?)?;
        let next = ((&momentum * 0.95)? + (wide(grad)? * 0.05)?)?;
        let norm = next.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>()?;
        let mut x = (next / norm)?;
        for _ in 0..5 {
            let gram = x.matmul(&x.t()?.contiguous()?)?;
            let factor = ((&gram * -4.7750)? + (gram.matmul(&gram)? * 2.0315)?)?;
            x = ((&x * 3.4445)? + factor.matmul(&x)?)?;
        }
        let size = lr * 0.2 * (rows.max(columns) as f64).sqrt();
        let weight = ((wide(weight)? * (1.0 - lr * weight_decay))? - (x * size)?)?;
        Ok([weight, momentum])
    }

    #[test]
    fn wide_and_tall_matrices_match_the_equations_in_f64() -> Result<()> {
        for shape in [[24, 40], [40, 24], [1, 7], [33, 33]] {
            let [weight, momentum, grad] = [1, 2, 3].map(|seed| random(seed, &shape));
            let want = plain([&weight, &momentum, &(&grad * 0.5)?], 1e-2, 0.1)?;
            let update = MuonUpdate {
                weight: &weight,
                master: None,
                momentum: &momentum,
                grad: &grad,
                index: 0,
                lr: 1e-2,
                weight_decay: 0.1,
            };
            muon_step(&update, 1, 0.5)?;
            for (got, want) in [&weight, &momentum].into_iter().zip(&want) {
                assert_close("muon", got, &want.to_dtype(DType::F32)?, Tolerance::F32);
            }
        }
        Ok(())
    }

    #[test]
    fn a_rounded_copy_that_is_not_finite_becomes_that_of_its_master() -> Result<()> {
        let shape = [8, 8];
        let weight = Tensor::full(f32::INFINITY, &shape, &device())?.to_dtype(DType::BF16)?;
        let (master, momentum) = (random(1, &shape), Tensor::zeros(&shape, DType::F32, &device())?);
        let update = MuonUpdate {
            weight: &weight,
            master: Some(&master),
            momentum: &momentum,
            grad: &random(2, &shape),
            index: 0,
            lr: 1e-2,
            weight_decay: 0.0,
        };
        muon_step(&update, 1, 1.0)?;
        assert_eq!(bits(&weight), bits(&master.to_dtype(DType::BF16)?));
        Ok(())
    }

    #[test]
    fn bf16_weights_follow_with_and_without_masters_on_any_number_of_threads() -> Result<()> {
        let shape = [48, 40];
        let run = |dtype: DType, has_master: bool, threads: usize| -> Result<Tensor> {
            let weight = random(1, &shape).to_dtype(DType::BF16)?;
            let master = has_master.then(|| weight.to_dtype(DType::F32)).transpose()?;
            let weight = weight.to_dtype(dtype)?;
            let momentum = Tensor::zeros(&shape, DType::F32, &device())?;
            with_threads(threads, || {
                for step in 1..=4 {
                    let update = MuonUpdate {
                        weight: &weight,
                        master: master.as_ref(),
                        momentum: &momentum,
                        grad: &random(10 + step, &shape),
                        index: 3,
                        lr: 1e-2,
                        weight_decay: 0.1,
                    };
                    muon_step(&update, step, 1.0)?;
                }
                Ok(weight)
            })
        };
        let exact = run(DType::F32, false, 1)?;
        for has_master in [true, false] {
            let one = run(DType::BF16, has_master, 1)?;
            assert!(bits(&one) == bits(&run(DType::BF16, has_master, 3)?));
            assert_close("bf16", &one, &exact, Tolerance::BF16_SAVED);
        }
        assert!(values(&exact).iter().all(|weight| weight.is_finite()));
        Ok(())
    }
}
