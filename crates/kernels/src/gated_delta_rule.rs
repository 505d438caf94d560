//! The gated delta rule of linear attention. Each value head has a state `S [dk, dv]`, which is
//! zero before the first token of a segment. With `u` for a vector divided by its length, a token
//! does
//!
//! ```text
//! S <- exp(g) S;   e = beta (v - S^T u_k);   S <- S + u_k e^T;   o = S^T u_q / sqrt(dk)
//! ```
//!
//! Shapes: `T` tokens, `Hk` key heads, `Hv` value heads (`Hv % Hk == 0`); key head `j` serves the
//! value heads from `j * Hv / Hk` on. `qkv: [T, 2*Hk*dk + Hv*dv]` holds the queries of all heads,
//! then the keys, then the values. `g`, `beta`: `[T, Hv]` (`f32`); `o`, `d_o`: `[T, Hv*dv]`. States
//! are `f32`. The length of a vector is `sqrt(x.x + 1e-6)`.
//!
//! Tokens are processed in chunks. The first chunk of a segment begins at its first token, so no
//! segment changes a bit of another.
//!
//! On a GPU, keys have at most 128 dims, and a call needs temporary memory: for each value head,
//! 8 KiB per chunk of 32 tokens, and in the backward pass also two states per chunk and `8 dv`
//! bytes per token. With `dk = dv = 128` these are 5.25 KiB per token and value head. A call
//! computes as many key heads at a time as fit into 1 GiB ([`GPU_DELTA_BYTES`]).

use super::cpu::delta_rule::{DeltaRuleSizes, Inputs, forward};
use super::cpu::delta_rule_backward::backward;
use super::cpu::{compute_dtype, distinct, expect_f32, expect_shape, read, tensor, write};
use batch::CuSeqlens;
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

/// Number of tokens of a chunk on a GPU.
pub(super) const GPU_CHUNK: usize = 32;
/// Maximum bytes of temporary memory of a call on a GPU, unless one key head needs more.
pub const GPU_DELTA_BYTES: usize = 1 << 30;

impl DeltaHeads {
    /// Temporary memory of a key head on a GPU for the matrices of `chunks`, which is all that the
    /// forward pass needs.
    pub(super) fn gpu_matrices(self, chunks: usize) -> usize {
        self.value_heads / self.key_heads * chunks * 2 * GPU_CHUNK * GPU_CHUNK * size_of::<f32>()
    }

    /// Temporary memory of a key head in the backward pass on a GPU.
    pub(super) fn gpu_backward(self, chunks: usize, tokens: usize) -> usize {
        let group = self.value_heads / self.key_heads;
        let values = 2 * (chunks * self.key_dim + tokens) * self.value_dim;
        self.gpu_matrices(chunks) + group * values * size_of::<f32>()
    }

    /// Number of key heads at a time on a GPU, if each needs `bytes` and all may take `most`.
    #[cfg(any(feature = "cuda", feature = "cuda-emulation", test))]
    pub(super) fn gpu_key_heads(self, bytes: usize, most: usize) -> usize {
        let fit = (most / bytes.max(1)).clamp(1, self.key_heads);
        self.key_heads.div_ceil(self.key_heads.div_ceil(fit))
    }

    /// Bytes of temporary memory per token of a key head in the backward pass on a GPU, for
    /// segments that are much longer than 32 tokens.
    pub fn gpu_bytes_per_token(self) -> f64 {
        self.gpu_backward(1, GPU_CHUNK) as f64 / GPU_CHUNK as f64
    }
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
) -> Result<(DeltaRuleSizes, DType)> {
    let DeltaHeads { key_heads, value_heads, key_dim: dk, value_dim: dv } = heads;
    if key_heads == 0 || value_heads == 0 || dk == 0 || dv == 0 || value_heads % key_heads != 0 {
        bail!("{op}: found {heads:?}, expected positive sizes and `Hv` to be a multiple of `Hk`");
    }
    let sizes = DeltaRuleSizes { key_heads, group: value_heads / key_heads, dk, dv };
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
/// `state [segments, Hv, dk, dv]` (`f32`), if given, holds the states before the first token of
/// each segment, and receives those after the last one. Generation continues a sequence with it.
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
    return_if_on_gpu!(qkv => gated_delta_rule(inputs, heads, cu_seqlens, state));
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
    return_if_on_gpu!(qkv => gated_delta_rule_backward(inputs, heads, cu_seqlens, d_o));
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
