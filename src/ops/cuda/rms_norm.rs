//! Launches of `rms_norm.cu`.

use super::launch::{Launch, address, empty, vectors};
use candle_core::{DType, Result, Tensor};

const OP: &str = "rms_norm";
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of a backward pass, and so the shares of a weight's gradient: fixed, so that its sum is.
pub(super) const SHARES: usize = 256;

pub(in crate::ops) fn rms_norm(x: &Tensor, w: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (n, d) = x.dims2()?;
    let (y, rstd) = (empty((n, d), x.dtype(), x)?, empty(n, DType::F32, x)?);
    let mut launch = Launch::new("rms_norm", x.dtype()).grid(n).threads(THREADS);
    for (name, tensor) in [("x", x), ("w", w), ("y", &y), ("rstd", &rstd)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(d).float(eps as f32).flag(vectors(d, &[x, w, &y])?).run(x)?;
    Ok((y, rstd))
}

pub(in crate::ops) fn rms_norm_apply(x: &Tensor, rstd: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (n, d) = x.dims2()?;
    let y = empty((n, d), x.dtype(), x)?;
    let mut launch = Launch::new("rms_norm_apply", x.dtype()).grid(n).threads(THREADS);
    for (name, tensor) in [("x", x), ("rstd", rstd), ("w", w), ("y", &y)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(d).flag(vectors(d, &[x, w, &y])?).run(x)?;
    Ok(y)
}

pub(in crate::ops) fn rms_norm_backward(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "rms_norm_backward";
    let (n, d) = x.dims2()?;
    let dx = empty((n, d), x.dtype(), x)?;
    let blocks = SHARES.min(n);
    let shares = dw.map(|_| empty((blocks, d), DType::F32, x)).transpose()?;
    let mut launch = Launch::new(op, x.dtype()).grid(blocks).threads(THREADS).shared(4 * d);
    for (name, tensor) in [("x", x), ("rstd", rstd), ("w", w), ("dy", dy)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "residual", residual)?;
    launch = launch.address(address(op, "dx", &dx)?);
    launch = launch.optional(op, "dw", shares.as_ref())?;
    let mut rows = vec![x, w, dy, &dx];
    rows.extend(residual);
    launch.int(n).int(d).flag(vectors(d, &rows)?).run(x)?;
    if let (Some(shares), Some(dw)) = (&shares, dw) {
        add_columns(op, shares, dw)?;
    }
    Ok(dx)
}

/// `sums [D] += ` the column sums of `shares [N, D]`, rows first to last.
pub(super) fn add_columns(op: &'static str, shares: &Tensor, sums: &Tensor) -> Result<()> {
    let (n, d) = shares.dims2()?;
    Launch::new("add_columns", DType::F32)
        .grid(d.div_ceil(THREADS as usize))
        .threads(THREADS)
        .address(address(op, "shares", shares)?)
        .address(address(op, "sums", sums)?)
        .int(n)
        .int(d)
        .run(shares)
}
