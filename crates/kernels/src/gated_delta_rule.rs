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
//! On a GPU, keys have at most 128 dims, and a call needs temporary memory: for each value head of a
//! `bf16` model, 33 KiB per chunk of 64 tokens, and in the backward pass also two states in `bf16`
//! and `512 dv` bytes per chunk. With `dk = dv = 128` these are 2.5 KiB per token and value
//! head (7.9 KiB in `f32`, with chunks of 32). A call computes as many key heads at a time as fit
//! into 1 GiB ([`GPU_DELTA_BYTES`]).

use super::cpu::delta_rule::{DeltaRuleSizes, Inputs, forward};
use super::cpu::delta_rule_backward::backward;
use super::cpu::{compute_dtype, distinct, expect_f32, expect_shape, read, tensor, write};
use super::cuda::select::delta_stages;
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

/// How the CUDA kernels compute, as in their `Precision`: tokens of a chunk, and numbers of parts of
/// operands, of intermediate results and of saved states.
struct GpuPrecision {
    chunk: usize,
    inputs: usize,
    sums: usize,
    saved: usize,
    /// Steps over the columns of the states that the kernel of the gradients has at a time.
    stages: usize,
}

fn gpu_precision(dtype: DType) -> GpuPrecision {
    match dtype {
        DType::F32 => GpuPrecision { chunk: 32, inputs: 3, sums: 3, saved: 3, stages: 1 },
        _ => GpuPrecision { chunk: 64, inputs: 1, sums: 2, saved: 1, stages: 2 },
    }
}

/// Number of tokens of a chunk on a GPU.
pub(super) fn gpu_chunk(dtype: DType) -> usize {
    gpu_precision(dtype).chunk
}

/// Maximum bytes of temporary memory of a call on a GPU, unless one key head needs more.
pub const GPU_DELTA_BYTES: usize = 1 << 30;

impl DeltaHeads {
    /// Numbers of `bf16` elements of a chunk and head in the temporary tensors: of the matrices with
    /// the factors of the tokens, of a state, and of values.
    fn gpu_elements(self, dtype: DType) -> [usize; 3] {
        let GpuPrecision { chunk, sums, saved, .. } = gpu_precision(dtype);
        let (width, columns) =
            (self.key_dim.next_multiple_of(16), self.value_dim.next_multiple_of(16));
        [
            2 * sums * chunk * chunk + 8 * (chunk + 1),
            saved * width * columns,
            sums * columns * chunk,
        ]
    }

    /// Temporary memory of a key head on a GPU for the matrices of `chunks`, which is all that the
    /// forward pass needs.
    pub(super) fn gpu_matrices(self, chunks: usize, dtype: DType) -> usize {
        self.value_heads / self.key_heads * chunks * 2 * self.gpu_elements(dtype)[0]
    }

    /// Temporary memory of a key head in the backward pass on a GPU.
    pub(super) fn gpu_backward(self, chunks: usize, dtype: DType) -> usize {
        let [matrices, state, values] = self.gpu_elements(dtype);
        self.value_heads / self.key_heads * chunks * 2 * (matrices + 2 * (state + values))
    }

    /// Number of key heads at a time on a GPU, if each needs `bytes` and all may take `most`.
    pub(super) fn gpu_key_heads(self, bytes: usize, most: usize) -> usize {
        let fit = (most / bytes.max(1)).clamp(1, self.key_heads);
        self.key_heads.div_ceil(self.key_heads.div_ceil(fit))
    }

    /// Bytes of temporary memory per token of a key head in the backward pass on a GPU, for
    /// segments that are much longer than a chunk.
    pub fn gpu_bytes_per_token(self, dtype: DType) -> f64 {
        self.gpu_backward(1, dtype) as f64 / gpu_chunk(dtype) as f64
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

/// `THREADS` and `BLOCK_COLUMNS` of the CUDA kernels, except for those of the gradients.
const DELTA_THREADS: usize = 128;
const COLUMNS: usize = 64;
/// Columns of the states that the kernel of the gradients has at a time.
const STEP: usize = 16;
const MAX_KEY_DIM: usize = 128;

/// Returns the tokens of the chunks, `[chunks, (first, end)]`.
fn chunks(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static CHUNKS: Uploaded<(CuSeqlens, usize)> = Uploaded::new();
    let of_chunk = gpu_chunk(on.dtype());
    CHUNKS.get((cu_seqlens.clone(), of_chunk), 2, on, |(cu_seqlens, of_chunk)| {
        let chunks = cu_seqlens.segments().flat_map(|segment| {
            let end = segment.end;
            segment.step_by(*of_chunk).map(move |first| [first, end.min(first + of_chunk)])
        });
        chunks.flatten().map(|token| token as u32).collect()
    })
}

/// Returns `[segments, (first token, end, first chunk, index)]`, longest segments first.
fn segments(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static SEGMENTS: Uploaded<(CuSeqlens, usize)> = Uploaded::new();
    let of_chunk = gpu_chunk(on.dtype());
    SEGMENTS.get((cu_seqlens.clone(), of_chunk), 4, on, |(cu_seqlens, of_chunk)| {
        let mut chunk = 0;
        let each = cu_seqlens.segments().enumerate().map(|(index, segment)| {
            let first_chunk = chunk;
            chunk += segment.len().div_ceil(*of_chunk);
            [segment.start, segment.end, first_chunk, index].map(|n| n as u32)
        });
        let mut segments: Vec<[u32; 4]> = each.collect();
        segments.sort_by_key(|[start, end, ..]| std::cmp::Reverse(end - start));
        segments.concat()
    })
}

/// Bytes of shared memory of the blocks, as in the structs of tiles of the CUDA kernels.
struct SharedBytes {
    matrices: usize,
    /// A chunk of a pass over the states, with and without outputs.
    pass: [usize; 2],
    grads: usize,
}

fn shared_bytes(dtype: DType) -> SharedBytes {
    let GpuPrecision { chunk, inputs, sums, saved, stages } = gpu_precision(dtype);
    let tile = |parts: usize, rows: usize, columns: usize| 2 * parts * rows * (columns + 8);
    let (units, matrix) = (tile(inputs, chunk, MAX_KEY_DIM), tile(sums, chunk, chunk));
    let less = units + tile(inputs, chunk, COLUMNS) + matrix + 16 * (chunk + 1);
    let states = 2 * tile(saved, STEP, MAX_KEY_DIM);
    let stage = states + 2 * tile(sums, STEP, chunk) + tile(inputs, chunk, STEP);
    SharedBytes {
        matrices: 2 * units + 4 * DELTA_THREADS * (chunk + 4),
        pass: [less + units + matrix, less],
        grads: 2 * units + stages * stage,
    }
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

    /// Allocates a temporary tensor of `elements` in `bf16` for each chunk and value head.
    fn temporary(&self, elements: usize) -> Result<Tensor> {
        let blocks = (self.chunks.dim(0)?, self.launched * self.group(), elements / 2);
        empty(blocks, DType::F32, self.inputs.qkv)
    }

    /// Launches a kernel with `blocks` blocks on `tensors`.
    fn run(
        &self,
        kernel: &str,
        (blocks, threads, shared): (usize, usize, usize),
        stages: usize,
        tensors: &[Option<&Tensor>],
    ) -> Result<()> {
        let DeltaHeads { key_heads, key_dim, value_dim, .. } = self.heads;
        let launch = Launch::new(kernel, self.inputs.qkv.dtype()).grid(blocks);
        let launch = launch.threads(threads as u32).shared(shared);
        let group = self.group();
        let sizes = [key_heads, group, key_dim, value_dim, self.first, self.launched, stages, 0];
        let pairs = sizes.chunks(2).map(|pair| pair[0] as u64 | (pair[1] as u64) << 32);
        launch!(self.op, launch; tensors, Words(pairs.collect()))
    }

    fn matrices(&self) -> Result<Tensor> {
        let DeltaInputs { qkv, g, beta } = self.inputs;
        let matrices = self.temporary(self.heads.gpu_elements(qkv.dtype())[0])?;
        let blocks = self.chunks.dim(0)? * self.launched;
        let tensors = [qkv, g, beta, self.chunks, &matrices].map(Some);
        let shared = shared_bytes(qkv.dtype()).matrices;
        self.run("delta_rule_matrices", (blocks, DELTA_THREADS, shared), 1, &tensors)?;
        Ok(matrices)
    }

    /// Launches a pass over the states. `has_outputs`: its blocks also have queries and P.
    fn pass(
        &self,
        kernel: &str,
        has_outputs: bool,
        matrices: &Tensor,
        tensors: &[Option<&Tensor>],
    ) -> Result<()> {
        let qkv = self.inputs.qkv;
        let heads = self.launched * self.group();
        let blocks = self.segments.dim(0)? * heads * self.heads.value_dim.div_ceil(COLUMNS);
        let shared = shared_bytes(qkv.dtype()).pass[usize::from(!has_outputs)];
        let stages = delta_stages(qkv.device(), blocks, shared)?;
        let all = [&[Some(qkv), Some(matrices), Some(self.segments)], tensors].concat();
        self.run(kernel, (blocks, DELTA_THREADS, stages * shared), stages, &all)
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
    let bytes = |chunks| heads.gpu_matrices(chunks, qkv.dtype());
    for_parts("gated_delta_rule", operands, most, bytes, |part| {
        let matrices = part.matrices()?;
        part.pass("delta_rule_outputs", true, &matrices, &[state, Some(&o)])
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
    let bytes = |chunks| heads.gpu_backward(chunks, qkv.dtype());
    for_parts("gated_delta_rule_backward", operands, most, bytes, |part| {
        let [_, of_state, of_values] = heads.gpu_elements(qkv.dtype());
        let (matrices, states) = (part.matrices()?, part.temporary(of_state)?);
        let (dstates, n, dr) =
            (part.temporary(of_state)?, part.temporary(of_values)?, part.temporary(of_values)?);
        part.pass("delta_rule_states", false, &matrices, &[Some(&states), Some(&n)])?;
        let tensors = [d_o, &grads.dqkv, &dstates, &dr].map(Some);
        part.pass("delta_rule_state_grads", true, &matrices, &tensors)?;
        drop(matrices);
        let tensors = [qkv, g, beta, d_o, part.chunks, &states, &dstates, &n, &dr];
        let outputs = [&grads.dqkv, &grads.dg, &grads.dbeta];
        let tensors: Vec<Option<&Tensor>> = tensors.into_iter().chain(outputs).map(Some).collect();
        let blocks = part.chunks.dim(0)? * part.launched;
        let (threads, shared) = (4 * gpu_chunk(qkv.dtype()), shared_bytes(qkv.dtype()).grads);
        part.run("delta_rule_grads", (blocks, threads, shared), 1, &tensors)
    })?;
    Ok(grads)
}

#[cfg(test)]
mod tests;
