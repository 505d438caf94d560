//! Linear layer of few outputs whose input has dropout, `u = drop(x) A^T`, and its gradients: the
//! first half of an adapter.
//!
//! Shapes: `x [N, K]`, `a [r, K]`, `u [N, r]`. In `f32` on the CPU the kernels of `cpu::narrow`
//! drop elements while they compute, so no dropped copy of `x` exists. Otherwise an op for dropout
//! and one for the product compute the same.

use super::cpu::narrow::{LANES, Narrow, Wide, add_kept_product};
use super::cpu::{self, distinct, expect_f32, expect_shape, read};
use super::{
    DropoutMask, dropout, dropout_add, linear, linear_backward_input, linear_backward_input_add,
    linear_backward_weight,
};
use candle_core::{DType, Device, Result, Tensor};

/// Maximum rank of products that drop elements while they compute. For higher ranks the dropped
/// copy is a small part of the work.
const MAX_RANK: usize = 4 * LANES;

/// Whether the kernels of `cpu::narrow` compute products of `x` and `a [r, K]`. They divide rows
/// only among threads, so that without dropout the `gemm` crate is better on many cores.
fn is_fused(x: &Tensor, a: &Tensor, mask: Option<DropoutMask>) -> bool {
    let is_narrow = a.elem_count() > 0 && a.dims()[0] <= MAX_RANK && x.elem_count() > 0;
    let is_f32 = [x, a].iter().all(|t| t.dtype() == DType::F32);
    let is_f32 = is_f32 && !super::launch::on_gpu(x);
    mask.is_some() && is_narrow && is_f32
}

fn dropped(x: &Tensor, mask: Option<DropoutMask>) -> Result<Tensor> {
    mask.map_or_else(|| Ok(x.clone()), |mask| dropout(x, mask))
}

/// The factor of the elements that are kept.
fn scale(mask: Option<DropoutMask>) -> f32 {
    mask.map_or(1.0, |mask| mask.scale())
}

/// Returns `drop(x) a^T`, `[N, r]`.
pub fn dropout_linear(x: &Tensor, a: &Tensor, mask: Option<DropoutMask>) -> Result<Tensor> {
    expect_shape("dropout_linear", "a", a, &[a.dim(0)?, x.dim(1)?])?;
    if is_fused(x, a, mask) {
        return fused("dropout_linear", x, a, mask, None);
    }
    linear(&dropped(x, mask)?, a, None)
}

/// Adds the gradient `du^T drop(x)` to `da` (`f32`), for the gradient `du [N, r]`. Returns `drop(x)
/// a^T` again, which the gradients of later layers need.
pub fn dropout_linear_backward(
    x: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    du: &Tensor,
    da: &Tensor,
) -> Result<Tensor> {
    if is_fused(x, a, mask) {
        return fused("dropout_linear_backward", x, a, mask, Some((du, da)));
    }
    let x = dropped(x, mask)?;
    linear_backward_weight(&x, du, da)?;
    linear(&x, a, None)
}

/// Both of the above.
fn fused(
    op: &'static str,
    x: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    grads: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor> {
    let ((n, k), (rank, _)) = (x.dims2()?, a.dims2()?);
    expect_shape(op, "a", a, &[rank, k])?;
    let (x_read, a_read) = (read(op, "x", x)?, read(op, "a", a)?);
    let drops = mask.map(|mask| mask.drops());
    let x_wide = Wide { x: x_read.slice()?, width: k, drops };
    let w = Narrow::columns(a_read.slice()?, rank);
    let d = match grads {
        Some((du, da)) => {
            expect_f32(op, "du", du, &[n, rank])?;
            expect_f32(op, "da", da, &[rank, k])?;
            distinct(op, "da", da, &[("x", x), ("a", a), ("du", du)])?;
            Some(Narrow::rows(read(op, "du", du)?.slice()?, rank))
        }
        None => None,
    };
    let (mut u, dw) = x_wide.products(rank, Some(&w), d.as_ref());
    let factor = scale(mask);
    for u in &mut u {
        *u *= factor;
    }
    if let Some((_, da)) = grads {
        cpu::write(op, "da", da, |da| dw.add_columns(factor, da))?;
    }
    Tensor::from_vec(u, (n, rank), &Device::Cpu)
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
    if !is_fused(&dx, a, Some(mask)) || du.dtype() != DType::F32 {
        dropout_add(&linear_backward_input(du, a)?, mask, &dx)?;
        return Ok(dx);
    }
    distinct(op, "dx", &dx, &[("du", du), ("a", a)])?;
    let scaled: Vec<f32> =
        read(op, "du", du)?.slice::<f32>()?.iter().map(|du| du * mask.scale()).collect();
    let a = read(op, "a", a)?;
    let a = a.slice()?;
    cpu::write(op, "dx", &dx, |dx| add_kept_product(&scaled, a, mask.drops(), dx, rank))?;
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
        [dropped.matmul(&a.t().unwrap()).unwrap(), da, (dx + x).unwrap()]
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
                    let u = dropout_linear(&x, &a, mask).unwrap();
                    let again = dropout_linear_backward(&x, &a, mask, &du, &da).unwrap();
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
        let error = message(dropout_linear(&x, &a, Some(mask())));
        assert!(error.contains("`a` is [2, 11], expected [2, 12]"), "{error}");
        let du = random(3, &[4, 2]);
        let error =
            message(dropout_linear_backward_input_add(&du, &random(2, &[2, 12]), Some(mask()), x));
        assert!(error.contains("`du` is [4, 2], expected [5, 2]"), "{error}");
    }
}
