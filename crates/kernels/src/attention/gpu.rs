//! Launches of the kernels in `attention_*.cu`.
//!
//! A task is the work of one block: a range of rows (queries or keys) of one segment, and the range
//! of the rows of the other side. The host builds the list of tasks and uploads it.

use super::{Masking, Qkv, QkvGrad, Scores};
use crate::cuda::select::{
    AttentionKernels, AttentionLaunch, Gpu, Own, PLAIN_ROWS, PLAIN_THREADS, QUERIES,
};
use crate::cuda::tensor_map::head_maps;
use crate::launch::{Address, KernelArgument, Launch, Words, address, empty, launch, vectors};
use crate::uploaded::Uploaded;
use batch::CuSeqlens;
use candle_core::{DType, Result, Tensor};

/// Maximum bytes of the sums of `dq` in f32 of a launch, unless one head of keys needs more. A model of
/// four billion parameters needs 256 MiB for 16,384 tokens. In tests, some calls need several launches.
const SUMS_BYTES: usize = if cfg!(test) { 5 << 17 } else { 1 << 29 };

/// Number of tiles of queries of a segment to whose `dq` several blocks of `rows` keys add.
fn tiles_with_sums(len: usize, rows: usize) -> usize {
    if len > rows { len.div_ceil(QUERIES) } else { 0 }
}

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
    /// with the most work under a causal mask come first. Tasks of [`Own::KeysOfAll`] have no
    /// `end`, which is `other_end`. In its place they have the number of the first tile with sums of
    /// the segment.
    fn tasks(&self) -> Vec<u32> {
        let ends = self.queries.as_slice().windows(2);
        let mut segments: Vec<(u32, u32)> = ends.map(|pair| (pair[0], pair[1])).collect();
        segments.sort_by_key(|(start, end)| std::cmp::Reverse(end - start));
        let (mut tasks, mut tiles) = (Vec::new(), 0);
        for (start, end) in segments {
            let keys_end = end + self.num_past as u32;
            let firsts = (start..end).step_by(self.rows);
            match self.own {
                Own::Queries => {
                    tasks.extend(firsts.rev().flat_map(|first| [first, end, start, keys_end]));
                }
                Own::Keys => tasks.extend(firsts.flat_map(|first| [first, keys_end, start, end])),
                Own::KeysOfAll => {
                    tasks.extend(firsts.flat_map(|first| [first, tiles, start, end]));
                    tiles += tiles_with_sums((end - start) as usize, self.rows) as u32;
                }
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

/// An operand of a kernel: tensor maps for boxes of this number of rows, or its address.
struct OperandBoxes<'a>(&'static str, &'a Tensor, Option<usize>);

impl KernelArgument for OperandBoxes<'_> {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        match *self {
            Self(name, t, Some(rows)) => Words(head_maps(of.0, name, t, rows)?).add_to(launch, of),
            Self(name, t, None) => (name, t).add_to(launch, of),
        }
    }
}

/// Number of keys up to its own position that a query attends to; 0 if it attends to all keys.
fn window(masking: Masking) -> usize {
    // More keys than a segment has. The sum of this number and a position below it fits into an `i32`.
    const ALL_BEFORE: usize = 1 << 30;
    match masking {
        Masking::Causal => ALL_BEFORE,
        Masking::Window(window) => window.get().min(ALL_BEFORE),
        Masking::Full => 0,
    }
}

/// Computes `o` and `lse [H, N]` for the queries with the kernels for `gpu`. With `num_past > 0` there
/// is one segment, and `num_past` keys precede its first query.
pub(crate) fn attend(
    op: &str,
    gpu: Gpu,
    qkv: Qkv<'_>,
    queries: CuSeqlens,
    num_past: usize,
    scores: Scores,
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
    let items = tasks.dim(0)? * h;
    let launch = Launch::new(&name, dtype).threads(threads).shared(shared).on(&o);
    let q = OperandBoxes("q", &q, boxes.map(|_| rows));
    let [k, v] = [("k", &k), ("v", &v)].map(|(name, t)| OperandBoxes(name, t, boxes));
    let (scale, window) = (scores.scale, window(scores.masking));
    if let Some(blocks) = kernels.blocks_that_take(items) {
        let (launch, taken) = (launch.grid(blocks), Tensor::zeros(1, DType::U32, o.device())?);
        launch!(op, launch; q, k, v, o, lse, tasks, taken, items, n, h, hkv, dh, scale, window)?;
    } else {
        let launch = launch.grid(items);
        launch!(op, launch; q, k, v, o, lse, tasks, n, h, hkv, dh, scale, window)?;
    }
    Ok((o, lse))
}

/// Computes the gradients with the kernels for `gpu`.
pub(crate) fn attend_backward(
    op: &str,
    gpu: Gpu,
    qkv: Qkv<'_>,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &CuSeqlens,
    scores: Scores,
) -> Result<QkvGrad> {
    let ((t, h, dh), hkv, dtype) = (qkv.q.dims3()?, qkv.k.dim(1)?, qkv.q.dtype());
    let kernels = AttentionKernels::choose(op, dtype, dh, gpu)?;
    let [dq, dk, dv] = [h, hkv, hkv].map(|heads| empty((t, heads, dh), dtype, qkv.q));
    let grads = QkvGrad { dq: dq?, dk: dk?, dv: dv? };
    if t == 0 {
        return Ok(grads);
    }
    let delta = empty((h, t), DType::F32, qkv.q)?;
    let launch = Launch::new("attention_row_products", dtype);
    let launch = launch.grid(t.div_ceil(PLAIN_ROWS) * h).threads(PLAIN_THREADS);
    launch!(op, launch; o, d_o, delta, t, h, dh, vectors(dh, &[o, d_o])?)?;
    let (q, d_o) = (aligned(op, "q", qkv.q)?, aligned(op, "d_o", d_o)?);
    let (k, v) = (aligned(op, "k", qkv.k)?, aligned(op, "v", qkv.v)?);
    let (scale, window) = (scores.scale, window(scores.masking));
    for own in kernels.passes() {
        let block = kernels.backward(*own);
        kernels.expect_room(op, &block)?;
        let AttentionLaunch { name, rows, threads, shared, boxes } = block;
        let plan = Plan { queries: cu_seqlens.clone(), num_past: 0, own: *own, rows };
        let tasks = plan.upload(&q)?;
        let num_tasks = tasks.dim(0)?;
        let (own_keys, own_boxes) = (*own != Own::Queries, boxes.map(|_| rows));
        let [of_keys, of_queries] = if own_keys { [own_boxes, boxes] } else { [boxes, own_boxes] };
        let keys = [("k", &k), ("v", &v)].map(|(name, t)| OperandBoxes(name, t, of_keys));
        let queries = [("q", &q), ("d_o", &d_o)].map(|(name, t)| OperandBoxes(name, t, of_queries));
        let launch = |heads: usize| {
            let launch = Launch::new(&name, dtype).grid(num_tasks * heads);
            launch.threads(threads).shared(shared).on(&q)
        };
        // Own operands, other operands, gradients of the own operands.
        let QkvGrad { dq, dk, dv } = &grads;
        match own {
            Own::Keys => launch!(
                op, launch(hkv);
                keys, queries, lse, delta, dk, dv, tasks, t, h, hkv, dh, scale, window
            )?,
            Own::Queries => launch!(
                op, launch(h);
                queries, keys, lse, delta, dq, dq, tasks, t, h, hkv, dh, scale, window
            )?,
            Own::KeysOfAll => {
                let tiles = cu_seqlens.segments().map(|of| tiles_with_sums(of.len(), rows));
                let tiles: usize = tiles.sum();
                let head = tiles * QUERIES * kernels.columns() * (h / hkv);
                let launches = hkv.div_ceil((SUMS_BYTES / (4 * head).max(1)).max(1));
                let heads = hkv.div_ceil(launches);
                let sums = empty((heads * head).max(1), DType::F32, &q)?;
                for first in (0..hkv).step_by(heads) {
                    let heads = heads.min(hkv - first);
                    // The ticket of the next block, and how many blocks have added to each tile.
                    let counters = 1 + tiles * heads * (h / hkv);
                    let counters = Tensor::zeros(counters, DType::U32, q.device())?;
                    launch!(
                        op, launch(heads);
                        keys, queries, lse, delta, dk, dv, dq, sums, counters, tasks, t, h, hkv, dh, scale,
                        window, first, heads
                    )?;
                }
            }
        }
    }
    Ok(grads)
}
