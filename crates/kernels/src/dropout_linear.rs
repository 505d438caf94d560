//! Linear layer of few outputs whose input has dropout, `u = factor drop(x) A^T`, and its gradients:
//! the first half of an adapter.
//!
//! Shapes: `x [N, K]`, `a [r, K]`, `u [N, r]`. In `f32` on the CPU, a block of rows exists at a time
//! without its dropped elements, in the caches. Otherwise an op for dropout and one for the product
//! compute the same.

use super::cpu::blocks::Scratch;
use super::cpu::products::{Matrix, Store, Threads, multiply};
use super::cpu::{self, distinct, expect_f32, expect_shape, read};
use super::dropout::{add_kept, keep};
use super::{
    DropoutMask, dropout, dropout_add, linear_backward_input, linear_backward_input_add,
    linear_backward_weight, linear_times,
};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// Maximum rank of products of blocks without their dropped elements. For higher ranks the dropped
/// copy of a matrix is a small part of the work.
const MAX_RANK: usize = 32;
/// Number of rows of a task.
const TASK_ROWS: usize = 64;
/// Number of elements of the rows of which a gradient is computed at a time.
const BLOCK: usize = 1 << 18;

/// The mask, if products of `x` and `a [r, K]` are computed in blocks of rows.
fn mask_in_blocks(x: &Tensor, a: &Tensor, mask: Option<DropoutMask>) -> Option<DropoutMask> {
    let is_narrow = a.elem_count() > 0 && a.dims()[0] <= MAX_RANK && x.elem_count() > 0;
    let is_f32 = [x, a].iter().all(|t| t.dtype() == DType::F32);
    mask.filter(|_| is_narrow && is_f32 && !super::launch::on_gpu(x))
}

fn dropped(x: &Tensor, mask: Option<DropoutMask>) -> Result<Tensor> {
    mask.map_or_else(|| Ok(x.clone()), |mask| dropout(x, mask))
}

/// Returns `factor drop(x) a^T`, `[N, r]`.
pub fn dropout_linear(
    x: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    factor: f64,
) -> Result<Tensor> {
    expect_shape("dropout_linear", "a", a, &[a.dim(0)?, x.dim(1)?])?;
    if let Some(mask) = mask_in_blocks(x, a, mask) {
        return in_blocks("dropout_linear", x, a, mask, None)? * factor;
    }
    linear_times(&dropped(x, mask)?, a, factor)
}

/// Adds the gradient `du^T drop(x)` to `da` (`f32`), for the gradient `du [N, r]` of `drop(x) a^T`.
/// Returns `factor drop(x) a^T` again, which the gradients of later layers need.
pub fn dropout_linear_backward(
    x: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    (du, factor): (&Tensor, f64),
    da: &Tensor,
) -> Result<Tensor> {
    if let Some(mask) = mask_in_blocks(x, a, mask) {
        return in_blocks("dropout_linear_backward", x, a, mask, Some((du, da)))? * factor;
    }
    let x = dropped(x, mask)?;
    linear_backward_weight(&x, du, da)?;
    linear_times(&x, a, factor)
}

/// Both of the above.
fn in_blocks(
    op: &'static str,
    x: &Tensor,
    a: &Tensor,
    mask: DropoutMask,
    grads: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor> {
    let ((n, k), (rank, _)) = (x.dims2()?, a.dims2()?);
    expect_shape(op, "a", a, &[rank, k])?;
    let (x_read, a_read) = (read(op, "x", x)?, read(op, "a", a)?);
    let products = Products { x: x_read.slice()?, a: a_read.slice()?, k, rank, mask };
    let u = match grads {
        Some((du, da)) => {
            expect_f32(op, "du", du, &[n, rank])?;
            expect_f32(op, "da", da, &[rank, k])?;
            distinct(op, "da", da, &[("x", x), ("a", a), ("du", du)])?;
            let du = scaled(op, du, mask)?;
            cpu::write(op, "da", da, |da| products.compute(Some((&du, da))))?
        }
        None => products.compute(None),
    };
    Tensor::from_vec(u, (n, rank), &Device::Cpu)
}

/// The gradient of the kept elements.
fn scaled(op: &'static str, du: &Tensor, mask: DropoutMask) -> Result<Vec<f32>> {
    Ok(read(op, "du", du)?.slice::<f32>()?.iter().map(|du| du * mask.scale()).collect())
}

/// The products of `x [N, k]`.
struct Products<'a> {
    x: &'a [f32],
    /// `[rank, k]`.
    a: &'a [f32],
    k: usize,
    rank: usize,
    mask: DropoutMask,
}

impl Products<'_> {
    /// Returns `drop(x) a^T`, `[N, rank]`, and adds the product of `du^T`, scaled, with the kept
    /// elements of `x` to `da`.
    fn compute(&self, mut grads: Option<(&[f32], &mut [f32])>) -> Vec<f32> {
        let &Self { x, a, k, rank, mask } = self;
        let drops = mask.drops();
        let rows = (BLOCK / k).max(1).next_multiple_of(TASK_ROWS);
        let mut kept = Scratch::of(rows.min(x.len() / k) * k);
        let mut u = vec![0f32; x.len() / k * rank];
        for (block, (x, u)) in x.chunks(rows * k).zip(u.chunks_mut(rows * rank)).enumerate() {
            let kept = &mut kept.all()[..x.len()];
            let tasks = x.par_chunks(TASK_ROWS * k).zip(kept.par_chunks_mut(TASK_ROWS * k));
            let tasks = tasks.zip(u.par_chunks_mut(TASK_ROWS * rank)).enumerate();
            tasks.for_each(|(task, ((x, kept), u))| {
                keep(drops, block * rows + task * TASK_ROWS, k, x, kept);
                let (size, a) = ((x.len() / k, rank, k), Matrix::rows(a, k).t());
                let kept = Matrix::rows(&*kept, k);
                multiply(size, (&mut *u, rank), Store::Overwrite, kept, a, Threads::One);
                for u in u {
                    *u *= mask.scale();
                }
            });
            if let Some((du, da)) = &mut grads {
                let du = &du[block * rows * rank..][..x.len() / k * rank];
                let (du, kept) = (Matrix::rows(du, rank).t(), Matrix::rows(&*kept, k));
                let size = (rank, k, x.len() / k);
                multiply(size, (&mut **da, k), Store::Add, du, kept, Threads::All);
            }
        }
        u
    }
}

/// Returns `dx + drop(du a)`, `[N, K]`: the gradient of `x` for the gradient `du [N, r]`. It may
/// reuse the memory of `dx`, so `dx` and its clones must not be used afterwards.
pub fn dropout_linear_backward_input_add(
    du: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    dx: Tensor,
) -> Result<Tensor> {
    let op = "dropout_linear_backward_input_add";
    let ((n, k), (rank, _)) = (dx.dims2()?, a.dims2()?);
    expect_shape(op, "a", a, &[rank, k])?;
    expect_shape(op, "du", du, &[n, rank])?;
    let Some(mask) = mask else { return linear_backward_input_add(du, a, dx) };
    if mask_in_blocks(&dx, a, Some(mask)).is_none() || du.dtype() != DType::F32 {
        dropout_add(&linear_backward_input(du, a)?, mask, &dx)?;
        return Ok(dx);
    }
    distinct(op, "dx", &dx, &[("du", du), ("a", a)])?;
    let du = scaled(op, du, mask)?;
    let a = read(op, "a", a)?;
    let a = a.slice::<f32>()?;
    cpu::write(op, "dx", &dx, |dx| {
        let tasks = dx.par_chunks_mut(TASK_ROWS * k).zip(du.par_chunks(TASK_ROWS * rank));
        tasks.enumerate().for_each(|(task, (dx, du))| {
            let mut product = Scratch::of(dx.len());
            let (size, dst) = ((dx.len() / k, k, rank), (product.all(), k));
            let (du, a) = (Matrix::rows(du, rank), Matrix::rows(a, k));
            multiply(size, dst, Store::Overwrite, du, a, Threads::One);
            add_kept(mask.drops(), task * TASK_ROWS, k, product.all(), dx);
        });
    })?;
    Ok(dx)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Tolerance, added, assert_close, gradient_buffer, message, random};
    use super::*;

    fn mask() -> DropoutMask {
        DropoutMask { seed: 7, first_row: 3, probability: 0.3 }
    }

    /// The results of dropout and products as separate ops.
    fn separate(x: &Tensor, a: &Tensor, du: &Tensor, mask: Option<DropoutMask>) -> [Tensor; 3] {
        let dropped = mask.map_or(x.clone(), |mask| dropout(x, mask).unwrap());
        let product = du.matmul(a).unwrap();
        let dx = mask.map_or(product.clone(), |mask| dropout(&product, mask).unwrap());
        let da = du.t().unwrap().matmul(&dropped).unwrap();
        let u = (dropped.matmul(&a.t().unwrap()).unwrap() * 1.5).unwrap();
        [u, da, (dx + x).unwrap()]
    }

    #[test]
    fn products_with_dropout_are_those_of_dropout_and_products_as_separate_ops() {
        for (n, k, r) in [(1, 1, 1), (30, 300, 8), (270, 33, 5), (50, 520, 32), (9, 40, 33)] {
            let (x, a, du) = (random(1, &[n, k]), random(2, &[r, k]), random(3, &[n, r]));
            for mask in [None, Some(mask())] {
                for (dtype, tolerance) in
                    [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)]
                {
                    let [x, a, du] = [&x, &a, &du].map(|t| t.to_dtype(dtype).unwrap());
                    let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
                    let want = separate(&wide(&x), &wide(&a), &wide(&du), mask);
                    let da = gradient_buffer(&[r, k]);
                    let u = dropout_linear(&x, &a, mask, 1.5).unwrap();
                    let with_factor = (&du, 1.5);
                    let again = dropout_linear_backward(&x, &a, mask, with_factor, &da).unwrap();
                    let dx = x.copy().unwrap();
                    let dx = dropout_linear_backward_input_add(&du, &a, mask, dx).unwrap();
                    let what = format!("{n} x {k} x {r} {dtype:?} {mask:?}");
                    assert_close(&what, &u, &want[0], tolerance);
                    assert_close(&what, &again, &want[0], tolerance);
                    assert_close(&what, &added(&da), &want[1], tolerance);
                    assert_close(&what, &dx, &want[2], tolerance);
                }
            }
        }
    }

    #[test]
    fn errors_name_the_operand_with_the_wrong_shape() {
        let (x, a) = (random(1, &[5, 12]), random(2, &[2, 11]));
        let error = message(dropout_linear(&x, &a, Some(mask()), 1.0));
        assert!(error.contains("`a` is [2, 11], expected [2, 12]"), "{error}");
        let du = random(3, &[4, 2]);
        let error =
            message(dropout_linear_backward_input_add(&du, &random(2, &[2, 12]), Some(mask()), x));
        assert!(error.contains("`du` is [4, 2], expected [5, 2]"), "{error}");
    }
}
