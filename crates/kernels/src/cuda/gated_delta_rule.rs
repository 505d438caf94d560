//! Launches of the kernels in `delta_rule_*.cu`.
//!
//! Forward: the matrices of all chunks, then the pass over the states. Backward: the matrices, the
//! states that enter the chunks, the gradients of the states that leave them, then the gradients of
//! each chunk. Temporary memory: see `ops/gated_delta_rule.rs`.

use super::launch::{Launch, address, empty};
use super::uploaded::Uploaded;
use crate::gated_delta_rule::{GPU_CHUNK, GPU_DELTA_BYTES};
use crate::{DeltaGrad, DeltaHeads, DeltaInputs};
use batch::CuSeqlens;
use candle_core::{DType, Result, Tensor, bail};

/// `THREADS`, `COLUMNS` and `STRIDE` of the kernels.
const THREADS: u32 = 128;
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
        let mut launch = Launch::new(kernel, self.inputs.qkv.dtype())
            .grid(blocks * self.launched)
            .threads(THREADS)
            .shared(4 * rows);
        let DeltaInputs { qkv, g, beta } = self.inputs;
        for (name, tensor) in [("qkv", qkv), ("g", g), ("beta", beta)] {
            launch = launch.address(address(self.op, name, tensor)?);
        }
        for tensor in tensors {
            launch = launch.optional(self.op, "operand", *tensor)?;
        }
        let sizes = [key_heads, self.group(), key_dim, value_dim, self.first, self.launched];
        let pairs = sizes.chunks(2).map(|pair| pair[0] as u64 | (pair[1] as u64) << 32);
        launch.words(pairs.collect()).run(qkv)
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

pub(crate) fn gated_delta_rule(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    state: Option<&Tensor>,
) -> Result<Tensor> {
    gated_delta_rule_within(GPU_DELTA_BYTES, inputs, heads, cu_seqlens, state)
}

/// [`gated_delta_rule`] with at most `most` bytes of temporary memory, if one key head needs no
/// more.
pub(super) fn gated_delta_rule_within(
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

pub(crate) fn gated_delta_rule_backward(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    cu_seqlens: &CuSeqlens,
    d_o: &Tensor,
) -> Result<DeltaGrad> {
    gated_delta_rule_backward_within(GPU_DELTA_BYTES, inputs, heads, cu_seqlens, d_o)
}

/// [`gated_delta_rule_backward`] with at most `most` bytes of temporary memory, if one key head
/// needs no more.
pub(super) fn gated_delta_rule_backward_within(
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
