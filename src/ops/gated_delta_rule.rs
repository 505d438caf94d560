//! The gated delta rule of linear attention. Each value head has a state `S [dk, dv]`, which is zero
//! before the first token of a segment. With `u` for a vector divided by its length, a token does
//!
//! ```text
//! S <- exp(g) S;   e = beta (v - S^T u_k);   S <- S + u_k e^T;   o = S^T u_q / sqrt(dk)
//! ```
//!
//! Shapes: `T` tokens, `Hk` key heads, `Hv` value heads (`Hv % Hk == 0`); key head `j` serves the
//! value heads from `j * Hv / Hk` on. `qkv: [T, 2*Hk*dk + Hv*dv]` holds the queries of all heads, then
//! the keys, then the values. `g`, `beta`: `[T, Hv]` (`f32`); `o`, `d_o`: `[T, Hv*dv]`. States are
//! `f32`. The length of a vector is `sqrt(x.x + 1e-6)`.
//!
//! Tokens are processed in chunks. The first chunk of a segment begins at its first token, so no
//! segment changes a bit of another.

use super::cpu::delta_rule::{Inputs, Sizes, forward};
use super::cpu::delta_rule_backward::backward;
use super::cpu::{compute_dtype, distinct, expect_f32, expect_shape, read, tensor, write};
use crate::batch::CuSeqlens;
use candle_core::{DType, Result, Tensor, bail};
use std::ops::Range;

/// Numbers of heads and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of heads of the queries and of the keys.
    pub key_heads: usize,
    /// Number of heads of the values, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Size of a query and of a key.
    pub key_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
}

/// Operands of the gated delta rule.
#[derive(Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values, `[T, 2*Hk*dk + Hv*dv]`.
    pub qkv: &'a Tensor,
    /// Logarithms of the decays, `[T, Hv]`, `f32`, at most 0.
    pub g: &'a Tensor,
    /// Strengths of the writes, `[T, Hv]`, `f32`.
    pub beta: &'a Tensor,
}

/// Gradients of the operands, in their shapes and dtypes.
#[derive(Debug)]
pub struct DeltaGrad {
    /// Gradient of the queries, keys and values.
    pub dqkv: Tensor,
    /// Gradient of the logarithms of the decays.
    pub dg: Tensor,
    /// Gradient of the strengths of the writes.
    pub dbeta: Tensor,
}

/// Validates the operands, and returns the sizes and the compute dtype.
fn check(
    op: &str,
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
) -> Result<(Sizes, DType)> {
    let DeltaHeads { key_heads, value_heads, key_dim: dk, value_dim: dv } = heads;
    if key_heads == 0 || value_heads == 0 || dk == 0 || dv == 0 || value_heads % key_heads != 0 {
        bail!("{op}: found {heads:?}, expected positive sizes and `Hv` to be a multiple of `Hk`");
    }
    let sizes = Sizes { key_heads, group: value_heads / key_heads, dk, dv };
    let (t, _) = inputs.qkv.dims2()?;
    let dtype = compute_dtype(op, &[("qkv", inputs.qkv)])?;
    expect_shape(op, "qkv", inputs.qkv, &[t, sizes.qkv_width()])?;
    expect_f32(op, "g", inputs.g, &[t, value_heads])?;
    expect_f32(op, "beta", inputs.beta, &[t, value_heads])?;
    let num_tokens = cu_seqlens.num_tokens();
    if num_tokens != t {
        bail!("{op}: `cu_seqlens` ends at {num_tokens}, but `qkv` has {t} tokens");
    }
    Ok((sizes, dtype))
}

/// Returns `o [T, Hv*dv]`.
///
/// `state [segments, Hv, dk, dv]` (`f32`), if given, holds the states before the first token of each
/// segment, and receives those after the last one. Generation continues a sequence with it.
pub fn gated_delta_rule(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    state: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "gated_delta_rule";
    let (sizes, dtype) = check(op, inputs, heads, cu_seqlens)?;
    let DeltaInputs { qkv, g, beta } = inputs;
    if let Some(state) = state {
        let shape = [cu_seqlens.num_segments(), heads.value_heads, sizes.dk, sizes.dv];
        expect_f32(op, "state", state, &shape)?;
        distinct(op, "state", state, &[("qkv", qkv), ("g", g), ("beta", beta)])?;
    }
    let segments: Vec<Range<usize>> = cu_seqlens.segments().collect();
    let shape = (cu_seqlens.num_tokens(), sizes.width());
    let (qkv, g, beta) = (read(op, "qkv", qkv)?, read(op, "g", g)?, read(op, "beta", beta)?);
    let qkv = qkv.f32()?;
    let inputs = Inputs { qkv: &qkv, g: g.slice()?, beta: beta.slice()? };
    let o = match state {
        Some(state) => {
            write(op, "state", state, |state| forward(sizes, inputs, &segments, Some(state)))?
        }
        None => forward(sizes, inputs, &segments, None),
    };
    tensor(o, shape, dtype)
}

/// Returns the gradients of the operands, for segments that start with states of zero. Computes the
/// states again.
pub fn gated_delta_rule_backward(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    d_o: &Tensor,
) -> Result<DeltaGrad> {
    let op = "gated_delta_rule_backward";
    let (sizes, dtype) = check(op, inputs, heads, cu_seqlens)?;
    let DeltaInputs { qkv, g, beta } = inputs;
    compute_dtype(op, &[("qkv", qkv), ("d_o", d_o)])?;
    expect_shape(op, "d_o", d_o, &[cu_seqlens.num_tokens(), sizes.width()])?;
    let segments: Vec<Range<usize>> = cu_seqlens.segments().collect();
    let (shape, gates) = (qkv.dims2()?, g.dims2()?);
    let (qkv, g, beta) = (read(op, "qkv", qkv)?, read(op, "g", g)?, read(op, "beta", beta)?);
    let d_o = read(op, "d_o", d_o)?;
    let (qkv, d_o) = (qkv.f32()?, d_o.f32()?);
    let inputs = Inputs { qkv: &qkv, g: g.slice()?, beta: beta.slice()? };
    let grads = backward(sizes, inputs, &segments, &d_o);
    Ok(DeltaGrad {
        dqkv: tensor(grads.qkv, shape, dtype)?,
        dg: tensor(grads.g, gates, DType::F32)?,
        dbeta: tensor(grads.beta, gates, DType::F32)?,
    })
}

#[cfg(test)]
mod tests;
