use super::launch::{Launch, address, empty, rows_at, vectors};
use super::norm::{MULTIPROCESSORS, WARP, add_columns};
use super::rms_norm::added;
use crate::{NormScale, RopeTable};
use candle_core::{DType, Result, Tensor, bail};

const THREADS: usize = 256;
/// Maximum number of elements of a half head per thread if elements are accessed one by one: `P` of
/// the kernels.
const SINGLES: usize = 4;

/// Number of heads per thread of the forward pass: `HEADS` of the kernels.
const HEADS: usize = 2;

#[derive(Debug, Clone, Copy)]
struct HeadThreads {
    chunks: bool,
    /// Number of threads per head.
    lanes: usize,
}

impl HeadThreads {
    /// `tensors` are the operands whose half heads are accessed, and the table. `rotated` of the
    /// `half` pairs of dims are rotated. `stride` is the number of elements from one row of `x` to
    /// the next.
    fn new(
        op: &str,
        dtype: DType,
        [half, rotated, stride]: [usize; 3],
        tensors: &[&Tensor],
    ) -> Result<Self> {
        let mut chunks = true;
        for elements in [half, rotated, stride] {
            chunks &= vectors(elements, tensors)?;
        }
        let most = SINGLES * WARP;
        if half > most {
            bail!("{op}: a head has {} dims, but a warp supports at most {}", 2 * half, 2 * most);
        }
        let chunk = if chunks { 16 / dtype.size_in_bytes() } else { 1 };
        let lanes = half.div_ceil(chunk).next_power_of_two().min(WARP);
        Ok(Self { chunks, lanes })
    }

    /// Number of blocks for `items` heads, or groups of heads.
    fn blocks(self, items: usize) -> usize {
        items.div_ceil(THREADS / self.lanes)
    }

    fn launch(self, op: &str, dtype: DType) -> Launch {
        let kernel = if self.chunks { op.to_owned() } else { format!("{op}_single") };
        Launch::new(&kernel, dtype).threads(THREADS as u32)
    }
}

pub(crate) fn qk_norm_rope(
    x: &Tensor,
    w: &Tensor,
    scale: NormScale,
    eps: f64,
    table: &RopeTable,
) -> Result<(Tensor, Tensor)> {
    let op = "qk_norm_rope";
    let ((t, width), dh) = (x.dims2()?, w.dims1()?);
    let h = width / dh;
    let (y, rstd) = (empty((t, h, dh), x.dtype(), x)?, empty((t, h), DType::F32, x)?);
    let (cos, sin) = (&table.cos, &table.sin);
    let rotated = cos.dim(1)?;
    let (first, stride) = rows_at(op, "x", x)?;
    let heads = HeadThreads::new(op, x.dtype(), [dh / 2, rotated, stride], &[x, w, &y, cos, sin])?;
    let mut launch = heads.launch(op, x.dtype()).grid(heads.blocks(t * h.div_ceil(HEADS)));
    launch = launch.address(first);
    for (name, tensor) in [("w", w), ("cos", cos), ("sin", sin), ("y", &y), ("rstd", &rstd)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.int(t).int(h).int(dh / 2).int(rotated).int(heads.lanes);
    launch.int(added(scale)).int(stride).float(eps as f32).run(x)?;
    Ok((y, rstd))
}

pub(crate) fn qk_norm_rope_backward(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    scale: NormScale,
    table: &RopeTable,
    dy: &Tensor,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "qk_norm_rope_backward";
    let ((t, width), dh) = (x.dims2()?, w.dims1()?);
    let h = width / dh;
    // A head is read before it is written, by the same threads.
    let dx = if x.is_contiguous() { empty((t, width), x.dtype(), x)? } else { x.clone() };
    let (cos, sin) = (&table.cos, &table.sin);
    let rotated = cos.dim(1)?;
    let ((first, stride), (to, _)) = (rows_at(op, "x", x)?, rows_at(op, "dx", &dx)?);
    let tensors = [x, w, dy, &dx, cos, sin];
    let heads = HeadThreads::new(op, x.dtype(), [dh / 2, rotated, stride], &tensors)?;
    let blocks = heads.blocks(t * h).min(2 * MULTIPROCESSORS);
    let shares = dw.map(|_| empty((blocks, dh), DType::F32, x)).transpose()?;
    let mut launch = heads.launch(op, x.dtype()).grid(blocks).shared(THREADS / WARP * dh * 4);
    launch = launch.address(first);
    for (name, tensor) in [("rstd", rstd), ("w", w), ("cos", cos), ("sin", sin), ("dy", dy)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.address(to).optional(op, "shares", shares.as_ref())?;
    launch = launch.int(t).int(h).int(dh / 2).int(rotated).int(heads.lanes);
    launch.int(added(scale)).int(stride).run(x)?;
    if let (Some(shares), Some(dw)) = (&shares, dw) {
        add_columns(op, shares, dw)?;
    }
    Ok(dx)
}

pub(crate) fn rope_heads(x: &Tensor, dh: usize, table: &RopeTable) -> Result<Tensor> {
    let (t, width) = x.dims2()?;
    let y = empty((t, width / dh, dh), x.dtype(), x)?;
    let (rotated, tensors) = (table.cos.dim(1)?, [x, &y, &table.cos, &table.sin]);
    let heads = HeadThreads::new("rope_heads", x.dtype(), [dh / 2, rotated, width], &tensors)?;
    let op = "qk_norm_rope";
    let launch = heads.launch(op, x.dtype()).grid(heads.blocks(t * (width / dh).div_ceil(HEADS)));
    let launch = launch.address(address(op, "x", x)?).optional(op, "w", None)?;
    let launch = launch.address(address(op, "cos", &table.cos)?);
    let launch = launch.address(address(op, "sin", &table.sin)?).address(address(op, "y", &y)?);
    let launch = launch.optional(op, "rstd", None)?.int(t).int(width / dh).int(dh / 2);
    let launch = launch.int(rotated).int(heads.lanes).int(added(NormScale::OnePlusWeight));
    launch.int(width).float(0.0).run(x)?;
    Ok(y)
}

pub(crate) fn rope_heads_backward(dy: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let (t, h, dh) = dy.dims3()?;
    let dx = empty((t, h * dh), dy.dtype(), dy)?;
    let (rotated, tensors) = (table.cos.dim(1)?, [dy, &dx, &table.cos, &table.sin]);
    let sizes = [dh / 2, rotated, h * dh];
    let heads = HeadThreads::new("rope_heads_backward", dy.dtype(), sizes, &tensors)?;
    let op = "qk_norm_rope_backward";
    let launch = heads.launch(op, dy.dtype()).grid(heads.blocks(t * h).min(2 * MULTIPROCESSORS));
    let launch = launch.shared(THREADS / WARP * dh * 4);
    // the kernel also loads `x`, whose values it does not use
    let launch = launch.address(address(op, "x", dy)?).optional(op, "rstd", None)?;
    let launch = launch.optional(op, "w", None)?.address(address(op, "cos", &table.cos)?);
    let launch = launch.address(address(op, "sin", &table.sin)?).address(address(op, "dy", dy)?);
    let launch = launch.address(address(op, "dx", &dx)?).optional(op, "shares", None)?;
    let launch = launch.int(t).int(h).int(dh / 2).int(rotated).int(heads.lanes);
    launch.int(added(NormScale::OnePlusWeight)).int(h * dh).run(dy)?;
    Ok(dx)
}

/// Returns the number of elements per access for half heads of `parts`, and the suffix of the
/// kernels that use it.
fn chunk(half: usize, parts: &[&Tensor], table: &RopeTable) -> Result<(usize, &'static str)> {
    let dtype = parts[0].dtype();
    let mut all = parts.to_vec();
    all.extend([&table.cos, &table.sin]);
    if vectors(half, &all)? {
        return Ok((16 / dtype.size_in_bytes(), ""));
    }
    // Heads of dim 72 in bf16: the halves are aligned to 8 bytes.
    if dtype == DType::BF16 && half.is_multiple_of(4) && vectors(0, &all)? {
        return Ok((4, "_half"));
    }
    Ok((1, "_single"))
}

pub(crate) fn vision_rope_split(
    qkv: &Tensor,
    num_heads: usize,
    table: &RopeTable,
) -> Result<(Tensor, Tensor, Tensor)> {
    let op = "vision_rope_split";
    let (p, half) = table.cos.dims2()?;
    let part = || empty((p, num_heads, 2 * half), qkv.dtype(), qkv);
    let (q, k, v) = (part()?, part()?, part()?);
    let (elements, suffix) = chunk(half, &[qkv, &q, &k, &v], table)?;
    let mut launch = Launch::new(&format!("{op}{suffix}"), qkv.dtype())
        .grid((p * num_heads * (half / elements)).div_ceil(THREADS))
        .threads(THREADS as u32);
    let operands = [("qkv", qkv), ("cos", &table.cos), ("sin", &table.sin)];
    for (name, tensor) in operands.into_iter().chain([("q", &q), ("k", &k), ("v", &v)]) {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.int(p).int(num_heads).int(half).run(qkv)?;
    Ok((q, k, v))
}

pub(crate) fn vision_rope_merge_backward(
    dq: &Tensor,
    dk: &Tensor,
    dv: &Tensor,
    table: &RopeTable,
) -> Result<Tensor> {
    let op = "vision_rope_merge_backward";
    let (p, h, dh) = dq.dims3()?;
    let half = dh / 2;
    let dqkv = empty((p, 3 * h * dh), dq.dtype(), dq)?;
    let (elements, suffix) = chunk(half, &[dq, dk, dv, &dqkv], table)?;
    let mut launch = Launch::new(&format!("vision_rope_merge{suffix}"), dq.dtype())
        .grid((p * h * (half / elements)).div_ceil(THREADS))
        .threads(THREADS as u32);
    let operands = [("dq", dq), ("dk", dk), ("dv", dv), ("cos", &table.cos), ("sin", &table.sin)];
    for (name, tensor) in operands.into_iter().chain([("dqkv", &dqkv)]) {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.int(p).int(h).int(half).run(dq)?;
    Ok(dqkv)
}
