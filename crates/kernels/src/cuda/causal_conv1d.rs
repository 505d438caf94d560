use super::launch::{Launch, address, empty, vectors};
use super::norm::add_columns;
use super::uploaded::Uploaded;
use crate::CONV_TAPS;
use batch::CuSeqlens;
use candle_core::{DType, Result, Tensor};

const THREADS: usize = 128;
/// Number of tokens of a thread in the forward pass.
const FORWARD_RANGE: usize = 32;
/// Maximum number of ranges of tokens in the backward pass. Each has its own weight gradient
/// `[C, 4]`.
const RANGES: usize = 64;

/// First token of the segment of each token.
fn starts(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static STARTS: Uploaded<CuSeqlens> = Uploaded::new();
    STARTS.get(cu_seqlens.clone(), 1, on, |cu_seqlens| {
        let each = cu_seqlens.segments();
        each.flat_map(|segment| std::iter::repeat_n(segment.start as u32, segment.len())).collect()
    })
}

/// Launch for threads that have `range` tokens each. `rows` lists the operands with channels.
fn launch(op: &str, (t, c): (usize, usize), range: usize, rows: &[&Tensor]) -> Result<Launch> {
    let (dtype, chunks) = (rows[0].dtype(), vectors(c, rows)?);
    let name = if chunks { op.to_owned() } else { format!("{op}_single") };
    let channels = if chunks { 16 / dtype.size_in_bytes() } else { 1 };
    let grid = [t.div_ceil(range), c.div_ceil(channels * THREADS), 1];
    Ok(Launch::new(&name, dtype).grid3(grid).threads(THREADS as u32))
}

pub(crate) fn causal_conv1d(x: &Tensor, w: &Tensor, cu_seqlens: &CuSeqlens) -> Result<Tensor> {
    let op = "causal_conv1d";
    let (t, c) = x.dims2()?;
    let y = empty((t, c), x.dtype(), x)?;
    if t == 0 {
        return Ok(y);
    }
    let starts = starts(cu_seqlens, x)?;
    let mut launch = launch(op, (t, c), FORWARD_RANGE, &[x, &y])?;
    for (name, tensor) in [("x", x), ("w", w), ("starts", &starts), ("y", &y)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.int(t).int(c).int(FORWARD_RANGE).run(x)?;
    Ok(y)
}

pub(crate) fn causal_conv1d_backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    cu_seqlens: &CuSeqlens,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "causal_conv1d_backward";
    let (t, c) = x.dims2()?;
    let dx = empty((t, c), x.dtype(), x)?;
    if t == 0 {
        return Ok(dx);
    }
    let starts = starts(cu_seqlens, x)?;
    let range = t.div_ceil(RANGES).max(FORWARD_RANGE);
    let shares =
        dw.map(|_| empty((t.div_ceil(range), c * CONV_TAPS), DType::F32, x)).transpose()?;
    let mut launch = launch(op, (t, c), range, &[x, dy, &dx])?;
    for (name, tensor) in [("x", x), ("w", w), ("dy", dy), ("starts", &starts), ("dx", &dx)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.optional(op, "shares", shares.as_ref())?.int(t).int(c).int(range).run(x)?;
    if let (Some(shares), Some(dw)) = (&shares, dw) {
        add_columns(op, shares, dw)?;
    }
    Ok(dx)
}
