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
use super::launch::{Launch, Words, empty, launch, on_gpu};
use super::uploaded::Uploaded;
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
    if on_gpu(qkv) {
        return forward_on_gpu(GPU_DELTA_BYTES, inputs, heads, cu_seqlens, state);
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
    if on_gpu(qkv) {
        return backward_on_gpu(GPU_DELTA_BYTES, inputs, heads, cu_seqlens, d_o);
    }
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

// On a GPU, forward: the matrices of all chunks, then the pass over the states. Backward: the
// matrices, the states that enter the chunks, the gradients of the states that leave them, then the
// gradients of each chunk.

/// `THREADS`, `COLUMNS` and `STRIDE` of the CUDA kernels.
const DELTA_THREADS: u32 = 128;
const COLUMNS: usize = 32;
const STRIDE: usize = 36;
const MAX_KEY_DIM: usize = 128;

/// Returns the tokens of the chunks, `[chunks, (first, end)]`.
fn chunks(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static CHUNKS: Uploaded<CuSeqlens> = Uploaded::new();
    CHUNKS.get(cu_seqlens.clone(), 2, on, |cu_seqlens| {
        let chunks = cu_seqlens.segments().flat_map(|segment| {
            let end = segment.end;
            segment.step_by(GPU_CHUNK).map(move |first| [first, end.min(first + GPU_CHUNK)])
        });
        chunks.flatten().map(|token| token as u32).collect()
    })
}

/// Returns `[segments, (first token, end, first chunk, index)]`, longest segments first.
fn segments(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static SEGMENTS: Uploaded<CuSeqlens> = Uploaded::new();
    SEGMENTS.get(cu_seqlens.clone(), 4, on, |cu_seqlens| {
        let mut chunk = 0;
        let each = cu_seqlens.segments().enumerate().map(|(index, segment)| {
            let first_chunk = chunk;
            chunk += segment.len().div_ceil(GPU_CHUNK);
            [segment.start, segment.end, first_chunk, index].map(|n| n as u32)
        });
        let mut segments: Vec<[u32; 4]> = each.collect();
        segments.sort_by_key(|[start, end, ..]| std::cmp::Reverse(end - start));
        segments.concat()
    })
}

/// Some of the key heads, which one launch of each kernel computes.
struct HeadRange<'a> {
    op: &'a str,
    inputs: DeltaInputs<'a>,
    heads: DeltaHeads,
    /// First key head.
    first: usize,
    /// Number of key heads.
    launched: usize,
    chunks: &'a Tensor,
    segments: &'a Tensor,
}

impl HeadRange<'_> {
    fn group(&self) -> usize {
        self.heads.value_heads / self.heads.key_heads
    }

    /// Allocates a temporary tensor of rows of `values` for each of `count` and each value head.
    fn temporary(&self, count: usize, values: usize) -> Result<Tensor> {
        empty((count, self.launched * self.group(), values), DType::F32, self.inputs.qkv)
    }

    /// Launches a kernel with `blocks` blocks for each key head, on the inputs and `tensors`. A
    /// block has the units of a chunk, `states` columns of states, and `tiles`, in shared memory.
    fn run(
        &self,
        kernel: &str,
        blocks: usize,
        (states, tiles): (usize, usize),
        tensors: &[Option<&Tensor>],
    ) -> Result<()> {
        let DeltaHeads { key_heads, key_dim, value_dim, .. } = self.heads;
        let width = key_dim.next_multiple_of(32);
        let rows = 2 * GPU_CHUNK * (width + 4) + (states * width + tiles * GPU_CHUNK) * STRIDE;
        let DeltaInputs { qkv, g, beta } = self.inputs;
        let launch = Launch::new(kernel, qkv.dtype()).grid(blocks * self.launched);
        let launch = launch.threads(DELTA_THREADS).shared(4 * rows);
        let sizes = [key_heads, self.group(), key_dim, value_dim, self.first, self.launched];
        let pairs = sizes.chunks(2).map(|pair| pair[0] as u64 | (pair[1] as u64) << 32);
        launch!(self.op, launch; qkv, g, beta, tensors, Words(pairs.collect()))
    }

    fn matrices(&self) -> Result<Tensor> {
        let num_chunks = self.chunks.dim(0)?;
        let matrices = self.temporary(num_chunks, 2 * GPU_CHUNK * GPU_CHUNK)?;
        let tensors = [Some(self.chunks), Some(&matrices)];
        self.run("delta_rule_matrices", num_chunks, (0, 4), &tensors)?;
        Ok(matrices)
    }

    /// Number of blocks of a pass over the states, for each key head.
    fn strands(&self) -> Result<usize> {
        Ok(self.segments.dim(0)? * self.group() * self.heads.value_dim.div_ceil(COLUMNS))
    }
}

/// Calls `run` for parts of the key heads, each with at most `most` bytes of temporary memory, or
/// with one key head. `bytes` returns those of a key head for a number of chunks.
fn for_parts(
    op: &str,
    (inputs, heads, cu_seqlens): (DeltaInputs<'_>, DeltaHeads, &CuSeqlens),
    most: usize,
    bytes: impl Fn(usize) -> usize,
    run: impl Fn(&HeadRange<'_>) -> Result<()>,
) -> Result<()> {
    if heads.key_dim > MAX_KEY_DIM {
        bail!("{op}: keys have {} dims, expected at most {MAX_KEY_DIM} on a GPU", heads.key_dim);
    }
    if cu_seqlens.num_tokens() == 0 {
        return Ok(());
    }
    let (chunks, segments) = (chunks(cu_seqlens, inputs.qkv)?, segments(cu_seqlens, inputs.qkv)?);
    let launched = heads.gpu_key_heads(bytes(chunks.dim(0)?), most);
    for first in (0..heads.key_heads).step_by(launched) {
        let launched = launched.min(heads.key_heads - first);
        let (chunks, segments) = (&chunks, &segments);
        run(&HeadRange { op, inputs, heads, first, launched, chunks, segments })?;
    }
    Ok(())
}

/// [`gated_delta_rule`] with at most `most` bytes of temporary memory, if one key head needs no
/// more.
pub(crate) fn forward_on_gpu(
    most: usize,
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    state: Option<&Tensor>,
) -> Result<Tensor> {
    let (t, qkv) = (cu_seqlens.num_tokens(), inputs.qkv);
    let o = empty((t, heads.value_heads * heads.value_dim), qkv.dtype(), qkv)?;
    let operands = (inputs, heads, cu_seqlens);
    let bytes = |chunks| heads.gpu_matrices(chunks);
    for_parts("gated_delta_rule", operands, most, bytes, |part| {
        let matrices = part.matrices()?;
        let tensors = [Some(&matrices), Some(part.segments), state, Some(&o)];
        part.run("delta_rule_outputs", part.strands()?, (1, 5), &tensors)
    })?;
    Ok(o)
}

/// [`gated_delta_rule_backward`] with at most `most` bytes of temporary memory, if one key head
/// needs no more.
pub(crate) fn backward_on_gpu(
    most: usize,
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    d_o: &Tensor,
) -> Result<DeltaGrad> {
    let DeltaInputs { qkv, g, beta } = inputs;
    let grads = DeltaGrad {
        dqkv: empty(qkv.shape(), qkv.dtype(), qkv)?,
        dg: empty(g.shape(), DType::F32, qkv)?,
        dbeta: empty(beta.shape(), DType::F32, qkv)?,
    };
    let operands = (inputs, heads, cu_seqlens);
    let t = cu_seqlens.num_tokens();
    let bytes = |chunks| heads.gpu_backward(chunks, t);
    for_parts("gated_delta_rule_backward", operands, most, bytes, |part| {
        let num_chunks = part.chunks.dim(0)?;
        let state = || part.temporary(num_chunks, heads.key_dim * heads.value_dim);
        let values = || part.temporary(t, heads.value_dim);
        let (matrices, states, dstates) = (part.matrices()?, state()?, state()?);
        let (n, dr) = (values()?, values()?);
        let each = [Some(&matrices), Some(part.segments)];
        let strands = part.strands()?;
        let tensors = [each[0], each[1], Some(&states), Some(&n)];
        part.run("delta_rule_states", strands, (1, 5), &tensors)?;
        let tensors = [each[0], each[1], Some(d_o), Some(&dstates), Some(&dr)];
        part.run("delta_rule_state_grads", strands, (1, 5), &tensors)?;
        drop(matrices);
        let tensors = [d_o, part.chunks, &states, &dstates, &n, &dr];
        let outputs = [&grads.dqkv, &grads.dg, &grads.dbeta];
        let tensors: Vec<Option<&Tensor>> = tensors.into_iter().chain(outputs).map(Some).collect();
        part.run("delta_rule_grads", num_chunks, (2, 3), &tensors)
    })?;
    Ok(grads)
}

#[cfg(test)]
mod tests;
