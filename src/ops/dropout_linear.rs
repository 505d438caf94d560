//! Linear layer of few outputs whose input has dropout, `u = drop(x) A^T`, and its gradients: the
//! first half of an adapter.
//!
//! Shapes: `x [N, K]`, `a [r, K]`, `u [N, r]`. In `f32` on the CPU the kernels of [`narrow`] drop
//! elements while they compute, so no dropped copy of `x` exists. Otherwise an op for dropout and one
//! for the product compute the same.

use super::cpu::narrow::{LANES, Narrow, Wide, add_kept_product};
use super::cpu::{self, distinct, expect_f32, expect_shape, read};
use super::{
    DropoutMask, dropout, dropout_add, linear, linear_backward_input, linear_backward_input_add,
    linear_backward_weight,
};
use candle_core::{DType, Device, Result, Tensor};

/// Maximum rank of products that drop elements while they compute. A higher one costs more than the
/// dropped copy.
const MAX_RANK: usize = 4 * LANES;

/// Whether the kernels of this module compute products of `x` and `a [r, K]`. Without dropout, the
/// `gemm` crate is faster for ranks above [`LANES`].
fn is_fused(x: &Tensor, a: &Tensor, mask: Option<DropoutMask>) -> bool {
    let max = if mask.is_some() { MAX_RANK } else { LANES };
    let is_narrow = a.elem_count() > 0 && a.dims()[0] <= max && x.elem_count() > 0;
    let is_f32 = [x, a].iter().all(|t| t.dtype() == DType::F32);
    is_narrow && is_f32 && matches!(x.device(), Device::Cpu)
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
    u.iter_mut().for_each(|u| *u *= factor);
    if let Some((_, da)) = grads {
        cpu::write(op, "da", da, |da| dw.add_columns(factor, da))?;
    }
    Tensor::from_vec(u, (n, rank), &Device::Cpu)
}

/// Returns `dx + drop(du a)`, `[N, K]`: the gradient of `x` for the gradient `du [N, r]`. It may reuse
/// the memory of `dx`, so `dx` and its clones must not be used afterwards.
pub fn dropout_linear_backward_input_add(
    du: &Tensor,
    a: &Tensor,
    mask: Option<DropoutMask>,
    dx: Tensor,
) -> Result<Tensor> {
    let op = "dropout_linear_backward_input_add";
    let Some(mask) = mask else { return linear_backward_input_add(du, a, dx) };
    if !is_fused(&dx, a, Some(mask)) || du.dtype() != DType::F32 {
        dropout_add(&linear_backward_input(du, a)?, mask, &dx)?;
        return Ok(dx);
    }
    let ((n, k), (rank, _)) = (dx.dims2()?, a.dims2()?);
    expect_shape(op, "a", a, &[rank, k])?;
    expect_shape(op, "du", du, &[n, rank])?;
    distinct(op, "dx", &dx, &[("du", du), ("a", a)])?;
    let scaled: Vec<f32> =
        read(op, "du", du)?.slice::<f32>()?.iter().map(|du| du * mask.scale()).collect();
    let a = read(op, "a", a)?;
    let a = a.slice()?;
    cpu::write(op, "dx", &dx, |dx| add_kept_product(&scaled, a, mask.drops(), dx, rank))?;
    Ok(dx)
}
