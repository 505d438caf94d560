//! Launches of the kernels in `attention_*.cu`.
//!
//! A task is the work of one block: a range of rows (queries or keys) of one segment, and the range
//! of the rows of the other side. The host builds the list of tasks and uploads it. Lists are
//! cached, because every layer of a step uses the same ones.

use super::launch::{Address, Launch, address, empty, max_shared, vectors};
use crate::ops::attention::{Masking, Qkv, QkvGrad};
use crate::ops::upload;
use candle_core::{DType, Result, Tensor, bail};
use std::sync::{Mutex, PoisonError};

/// Number of own rows (queries or keys) of a block of the tensor-core kernels.
const ROWS: usize = 128;
/// Number of own rows of a block of the plain kernels, and of other rows in a tile.
const PLAIN_ROWS: usize = 32;
/// Number of threads of a block of the plain kernels and of the row-product kernel.
const PLAIN_THREADS: u32 = 256;
/// Number of keys in a tile of the forward pass.
const FORWARD_KEYS: usize = 64;
/// Maximum head dim of the plain kernels.
const MAX_DIM: usize = 256;
/// Maximum number of cached task lists: forward and both backward passes of a few batches.
const KEPT: usize = 16;

/// Side whose rows a block owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Own {
    Queries,
    Keys,
}

/// Inputs from which a list of tasks is built.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Segment boundaries of the queries.
    ends: Vec<u32>,
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
        let mut segments: Vec<(u32, u32)> =
            self.ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
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

    /// Returns the list `[tasks, 4]` on the device of `on`, from the cache if it is there.
    fn upload(self, on: &Tensor) -> Result<Tensor> {
        static UPLOADED: Mutex<Vec<(Plan, Tensor)>> = Mutex::new(Vec::new());
        let mut uploaded = UPLOADED.lock().unwrap_or_else(PoisonError::into_inner);
        // Compare devices, not GPU ordinals: a GPU that was opened twice has two unsynchronized
        // streams.
        let device = on.device();
        let known =
            |(plan, tasks): &(Plan, Tensor)| *plan == self && tasks.device().same_device(device);
        let found = if let Some(at) = uploaded.iter().position(known) {
            uploaded.remove(at)
        } else {
            let tasks = self.tasks();
            let shape = (tasks.len() / 4, 4);
            (self, upload(tasks, shape, device)?)
        };
        let tasks = found.1.clone();
        uploaded.insert(0, found); // most recently used first
        uploaded.truncate(KEPT);
        Ok(tasks)
    }
}

/// Kernels and shared-memory layout of a call.
#[derive(Debug, Clone, Copy)]
struct Kernels {
    /// Padded head dim of the tensor-core kernel; `None` for the plain kernel.
    padded: Option<usize>,
    /// Number of bytes of a row in shared memory.
    row_bytes: usize,
}

impl Kernels {
    fn choose(op: &str, dtype: DType, dh: usize) -> Result<Self> {
        if dh > MAX_DIM {
            bail!("{op}: the head dim is {dh}, expected at most {MAX_DIM} on a GPU");
        }
        if dtype != DType::BF16 || !dh.is_multiple_of(8) || dh > 128 {
            return Ok(Self { padded: None, row_bytes: 4 * (dh | 1) });
        }
        // Same as `Rows` in attention.cuh: rows of 80 columns are padded, the others permuted.
        Ok(match dh {
            0..=64 => Self { padded: Some(64), row_bytes: 128 },
            65..=80 => Self { padded: Some(80), row_bytes: 176 },
            _ => Self { padded: Some(128), row_bytes: 256 },
        })
    }

    fn rows(self) -> usize {
        if self.padded.is_some() { ROWS } else { PLAIN_ROWS }
    }

    fn name(self, name: &str) -> String {
        match self.padded {
            Some(padded) => format!("{name}_d{padded}"),
            None => format!("{name}_plain"),
        }
    }

    fn launch(self, name: &str, dtype: DType) -> Launch {
        Launch::new(&self.name(name), dtype)
    }

    /// Number of threads and bytes of shared memory of a forward block.
    fn forward(self) -> (u32, usize) {
        match self.padded {
            Some(_) => (128, (ROWS + 3 * FORWARD_KEYS) * self.row_bytes),
            None => (PLAIN_THREADS, 3 * PLAIN_ROWS * self.row_bytes + 4 * PLAIN_ROWS * 32),
        }
    }

    /// Kernel name, number of threads and bytes of shared memory of a backward block, if a block
    /// can have `max_shared` bytes. The sizes match the shapes in `attention_backward.cu`.
    fn backward(self, own: Own, max_shared: usize) -> (String, u32, usize) {
        let name = match own {
            Own::Keys => self.name("attention_backward_keys"),
            Own::Queries => self.name("attention_backward_queries"),
        };
        let (threads, others) = match (self.padded, own) {
            (None, _) => {
                let tiles = 4 * PLAIN_ROWS * self.row_bytes;
                return (name, PLAIN_THREADS, tiles + 2 * 4 * PLAIN_ROWS * 32);
            }
            (Some(64), Own::Keys) => (128, 32),
            (Some(_), Own::Keys) => (256, 64),
            (Some(64), Own::Queries) => (128, 64),
            (Some(_), Own::Queries) => (128, 32),
        };
        // Two tiles of own rows, two stages of two tiles of other rows, and two stages of `lse` and
        // `delta`. Where two warps share rows, the blocks also exchange `p` and `ds` of a tile.
        let bytes = |others| (2 * ROWS + 4 * others) * self.row_bytes + 4 * others * 4;
        if (self.padded, own) != (Some(128), Own::Keys) {
            return (name, threads, bytes(others));
        }
        let shared = bytes(others) + 4 * ROWS * others;
        if shared <= max_shared {
            (name, threads, shared)
        } else {
            (format!("{name}_less"), threads, bytes(32))
        }
    }
}

/// Bytes of shared memory of a block in each pass, if a block can have `max_shared` bytes.
#[cfg(all(test, not(feature = "cuda")))]
pub(super) fn shared_bytes(dtype: DType, dh: usize, max_shared: usize) -> Result<[usize; 3]> {
    let kernels = Kernels::choose("attention", dtype, dh)?;
    let backward = |own| kernels.backward(own, max_shared).2;
    Ok([kernels.forward().1, backward(Own::Keys), backward(Own::Queries)])
}

/// Name of the kernel for heads of dim `dh`, for logs.
pub(in crate::ops) fn attention_kernel(dtype: DType, dh: usize) -> &'static str {
    match Kernels::choose("attention", dtype, dh) {
        Ok(Kernels { padded: Some(_), .. }) => "flash, tensor cores in bf16",
        Ok(Kernels { padded: None, .. }) => "flash, plain kernel in f32",
        Err(_) => "none on a GPU",
    }
}

/// Returns `t` if it is 16-byte aligned, otherwise an aligned copy.
fn aligned(op: &str, name: &str, t: &Tensor) -> Result<Tensor> {
    let Address(at) = address(op, name, t)?;
    if at % 16 == 0 { Ok(t.clone()) } else { t.force_contiguous() }
}

/// Computes `o` and `lse [H, N]` for the queries between `ends`. With `num_past > 0` there is one
/// segment, and `num_past` keys precede its first query.
fn attend(
    op: &str,
    qkv: Qkv<'_>,
    ends: Vec<u32>,
    num_past: usize,
    masking: Masking,
) -> Result<(Tensor, Tensor)> {
    let ((n, h, dh), hkv) = (qkv.q.dims3()?, qkv.k.dim(1)?);
    let dtype = qkv.q.dtype();
    let kernels = Kernels::choose(op, dtype, dh)?;
    let (o, lse) = (empty((n, h, dh), dtype, qkv.q)?, empty((h, n), DType::F32, qkv.q)?);
    if n == 0 {
        return Ok((o, lse));
    }
    let plan = Plan { ends, num_past, own: Own::Queries, rows: kernels.rows() };
    let tasks = plan.upload(qkv.q)?;
    // Keep the copies alive until the kernel is in the stream.
    let (q, k, v) = (aligned(op, "q", qkv.q)?, aligned(op, "k", qkv.k)?, aligned(op, "v", qkv.v)?);
    let (threads, shared) = kernels.forward();
    let mut launch = kernels.launch("attention_forward", dtype);
    launch = launch.grid(tasks.dim(0)? * h).threads(threads).shared(shared);
    for (name, tensor) in
        [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse), ("tasks", &tasks)]
    {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.int(n).int(h).int(hkv).int(dh).float(1.0 / (dh as f32).sqrt());
    launch.flag(masking == Masking::Causal).run(&o)?;
    Ok((o, lse))
}

pub(in crate::ops) fn flash_attention(
    qkv: Qkv<'_>,
    cu_seqlens: &[u32],
    masking: Masking,
) -> Result<(Tensor, Tensor)> {
    attend("flash_attention", qkv, cu_seqlens.to_vec(), 0, masking)
}

pub(in crate::ops) fn decode_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    num_past: usize,
) -> Result<Tensor> {
    let ends = vec![0, q.dim(0)? as u32];
    let (o, _) = attend("decode_attention", Qkv { q, k, v }, ends, num_past, Masking::Causal)?;
    Ok(o)
}

pub(in crate::ops) fn flash_attention_backward(
    qkv: Qkv<'_>,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &[u32],
    masking: Masking,
) -> Result<QkvGrad> {
    let max_shared = max_shared(qkv.q.device())?;
    flash_attention_backward_within(max_shared, qkv, o, lse, d_o, cu_seqlens, masking)
}

/// Same as [`flash_attention_backward`], for blocks that can have `max_shared` bytes of shared
/// memory.
pub(super) fn flash_attention_backward_within(
    max_shared: usize,
    qkv: Qkv<'_>,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    cu_seqlens: &[u32],
    masking: Masking,
) -> Result<QkvGrad> {
    let op = "flash_attention_backward";
    let ((t, h, dh), hkv, dtype) = (qkv.q.dims3()?, qkv.k.dim(1)?, qkv.q.dtype());
    let kernels = Kernels::choose(op, dtype, dh)?;
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
        let plan = Plan { ends: cu_seqlens.to_vec(), num_past: 0, own, rows: kernels.rows() };
        let tasks = plan.upload(&q)?;
        let (name, threads, shared) = kernels.backward(own, max_shared);
        let mut launch =
            Launch::new(&name, dtype).grid(tasks.dim(0)? * heads).threads(threads).shared(shared);
        for tensor in operands {
            launch = launch.address(address(op, "operand", tensor)?);
        }
        for tensor in [lse, &delta, own_grads[0], own_grads[1], &tasks] {
            launch = launch.address(address(op, "operand", tensor)?);
        }
        launch = launch.int(t).int(h).int(hkv).int(dh).float(1.0 / (dh as f32).sqrt());
        launch.flag(masking == Masking::Causal).run(&q)?;
    }
    Ok(grads)
}
