//! Launches of the kernels in `attention_*.cu`.
//!
//! A task is the work of one block: a range of rows (queries or keys) of one segment, and the range
//! of the rows of the other side. The host builds the list of tasks and uploads it.

use super::launch::{Address, Launch, address, empty, vectors};
use super::select::{AttentionKernels, AttentionLaunch, Gpu, Own, PLAIN_ROWS, PLAIN_THREADS};
use super::tensor_map::head_maps;
use super::uploaded::Uploaded;
use crate::attention::{Masking, Qkv, QkvGrad};
use batch::CuSeqlens;
use candle_core::{DType, Error, Result, Tensor};

/// Inputs from which a list of tasks is built.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Segments of the queries.
    queries: CuSeqlens,
    /// Number of keys before the first query. If it is not 0, there is only one segment.
    num_past: usize,
    own: Own,
    rows: usize,
}

impl Plan {
    /// Returns `(first, end, other_first, other_end)` for each task. Long segments come first. The
    /// tasks of a segment are adjacent, so that its keys stay in L2; within a segment the tasks
    /// with the most work under a causal mask come first.
    fn tasks(&self) -> Vec<u32> {
        let ends = self.queries.as_slice().windows(2);
        let mut segments: Vec<(u32, u32)> = ends.map(|pair| (pair[0], pair[1])).collect();
        segments.sort_by_key(|(start, end)| std::cmp::Reverse(end - start));
        let mut tasks = Vec::new();
        for (start, end) in segments {
            let keys_end = end + self.num_past as u32;
            let firsts = (start..end).step_by(self.rows);
            match self.own {
                Own::Queries => {
                    tasks.extend(firsts.rev().flat_map(|first| [first, end, start, keys_end]));
                }
                Own::Keys => tasks.extend(firsts.flat_map(|first| [first, keys_end, start, end])),
            }
        }
        tasks
    }

    /// Returns the list `[tasks, 4]` on the device of `on`.
    fn upload(self, on: &Tensor) -> Result<Tensor> {
        static PLANS: Uploaded<Plan> = Uploaded::new();
        PLANS.get(self, 4, on, Self::tasks)
    }
}

/// Returns `t` if it is 16-byte aligned, otherwise an aligned copy.
fn aligned(op: &str, name: &str, t: &Tensor) -> Result<Tensor> {
    let Address(at) = address(op, name, t)?;
    if at % 16 == 0 { Ok(t.clone()) } else { t.force_contiguous() }
}

/// Adds operand `t` of a kernel: its tensor maps for boxes of `rows` rows, or its address.
fn with_operand(
    launch: Launch,
    (op, name): (&str, &str),
    t: &Tensor,
    rows: Option<usize>,
) -> Result<Launch> {
    match rows {
        Some(rows) => Ok(launch.words(head_maps(op, name, t, rows)?)),
        None => Ok(launch.address(address(op, name, t)?)),
    }
}

/// Computes `o` and `lse [H, N]` for the queries between `ends`. With `num_past > 0` there is one
/// segment, and `num_past` keys precede its first query.
fn attend(
    op: &str,
    gpu: Gpu,
    qkv: Qkv<'_>,
    queries: CuSeqlens,
    num_past: usize,
    masking: Masking,
) -> Result<(Tensor, Tensor)> {
    let ((n, h, dh), hkv) = (qkv.q.dims3()?, qkv.k.dim(1)?);
    let dtype = qkv.q.dtype();
    let kernels = AttentionKernels::choose(op, dtype, dh, gpu)?;
    let (o, lse) = (empty((n, h, dh), dtype, qkv.q)?, empty((h, n), DType::F32, qkv.q)?);
    if n == 0 {
        return Ok((o, lse));
    }
    let block = kernels.forward();
    kernels.expect_room(op, &block)?;
    let AttentionLaunch { name, rows, threads, shared, boxes } = block;
    let plan = Plan { queries, num_past, own: Own::Queries, rows };
    let tasks = plan.upload(qkv.q)?;
    // Keep the copies alive until the kernel is in the stream.
    let (q, k, v) = (aligned(op, "q", qkv.q)?, aligned(op, "k", qkv.k)?, aligned(op, "v", qkv.v)?);
    let mut launch = Launch::new(&name, dtype);
    launch = launch.grid(tasks.dim(0)? * h).threads(threads).shared(shared);
    let own = boxes.map(|_| rows);
    for (name, tensor, rows) in [("q", &q, own), ("k", &k, boxes), ("v", &v, boxes)] {
        launch = with_operand(launch, (op, name), tensor, rows)?;
    }
    for (name, tensor) in [("o", &o), ("lse", &lse), ("tasks", &tasks)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.int(n).int(h).int(hkv).int(dh).float(1.0 / (dh as f32).sqrt());
    launch.flag(masking == Masking::Causal).run(&o)?;
    Ok((o, lse))
}

pub(crate) fn flash_attention(
    qkv: Qkv<'_>,
    cu_seqlens: &CuSeqlens,
    masking: Masking,
) -> Result<(Tensor, Tensor)> {
    flash_attention_on(Gpu::of(qkv.q.device())?, qkv, cu_seqlens, masking)
}

/// [`flash_attention`] with the kernels for `gpu`.
pub(super) fn flash_attention_on(
    gpu: Gpu,
    qkv: Qkv<'_>,
    cu_seqlens: &CuSeqlens,
    masking: Masking,
) -> Result<(Tensor, Tensor)> {
    attend("flash_attention", gpu, qkv, cu_seqlens.clone(), 0, masking)
}

pub(crate) fn decode_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    num_past: usize,
) -> Result<Tensor> {
    let one = CuSeqlens::from_lengths(&[q.dim(0)? as u32]).map_err(Error::wrap)?;
    let (gpu, qkv) = (Gpu::of(q.device())?, Qkv { q, k, v });
    let (o, _) = attend("decode_attention", gpu, qkv, one, num_past, Masking::Causal)?;
    Ok(o)
}

pub(crate) fn flash_attention_backward(
    qkv: Qkv<'_>,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &CuSeqlens,
    masking: Masking,
) -> Result<QkvGrad> {
    let gpu = Gpu::of(qkv.q.device())?;
    flash_attention_backward_on(gpu, qkv, o, lse, d_o, cu_seqlens, masking)
}

/// [`flash_attention_backward`] with the kernels for `gpu`.
pub(super) fn flash_attention_backward_on(
    gpu: Gpu,
    qkv: Qkv<'_>,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &CuSeqlens,
    masking: Masking,
) -> Result<QkvGrad> {
    let op = "flash_attention_backward";
    let ((t, h, dh), hkv, dtype) = (qkv.q.dims3()?, qkv.k.dim(1)?, qkv.q.dtype());
    let kernels = AttentionKernels::choose(op, dtype, dh, gpu)?;
    let [dq, dk, dv] = [h, hkv, hkv].map(|heads| empty((t, heads, dh), dtype, qkv.q));
    let grads = QkvGrad { dq: dq?, dk: dk?, dv: dv? };
    if t == 0 {
        return Ok(grads);
    }
    let delta = empty((h, t), DType::F32, qkv.q)?;
    Launch::new("attention_row_products", dtype)
        .grid(t.div_ceil(PLAIN_ROWS) * h)
        .threads(PLAIN_THREADS)
        .address(address(op, "o", o)?)
        .address(address(op, "d_o", d_o)?)
        .address(address(op, "delta", &delta)?)
        .int(t)
        .int(h)
        .int(dh)
        .flag(vectors(dh, &[o, d_o])?)
        .run(&delta)?;
    let (q, d_o) = (aligned(op, "q", qkv.q)?, aligned(op, "d_o", d_o)?);
    let (k, v) = (aligned(op, "k", qkv.k)?, aligned(op, "v", qkv.v)?);
    // Own operands, other operands, gradients of the own operands. Keys come first, because their
    // blocks run longest.
    for (own, operands, own_grads, heads) in [
        (Own::Keys, [&k, &v, &q, &d_o], [&grads.dk, &grads.dv], hkv),
        (Own::Queries, [&q, &d_o, &k, &v], [&grads.dq; 2], h),
    ] {
        let block = kernels.backward(own);
        kernels.expect_room(op, &block)?;
        let AttentionLaunch { name, rows, threads, shared, boxes } = block;
        let plan = Plan { queries: cu_seqlens.clone(), num_past: 0, own, rows };
        let tasks = plan.upload(&q)?;
        let mut launch =
            Launch::new(&name, dtype).grid(tasks.dim(0)? * heads).threads(threads).shared(shared);
        let own_boxes = boxes.map(|_| rows);
        let rows_of_boxes = [own_boxes, own_boxes, boxes, boxes];
        for (tensor, rows) in operands.into_iter().zip(rows_of_boxes) {
            launch = with_operand(launch, (op, "operand"), tensor, rows)?;
        }
        for tensor in [lse, &delta, own_grads[0], own_grads[1], &tasks] {
            launch = launch.address(address(op, "operand", tensor)?);
        }
        launch = launch.int(t).int(h).int(hkv).int(dh).float(1.0 / (dh as f32).sqrt());
        launch.flag(masking == Masking::Causal).run(&q)?;
    }
    Ok(grads)
}
