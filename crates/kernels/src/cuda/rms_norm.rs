use super::launch::{address, empty};
use super::norm::{Geometry, Pass, add_columns};
use crate::NormScale;
use candle_core::{DType, Result, Tensor};

const OP: &str = "rms_norm";

/// What the kernels add to each weight.
pub(super) fn added(scale: NormScale) -> usize {
    usize::from(scale == NormScale::OnePlusWeight)
}

pub(crate) fn rms_norm(
    x: &Tensor,
    w: &Tensor,
    scale: NormScale,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let (n, d) = x.dims2()?;
    let (y, rstd) = (empty((n, d), x.dtype(), x)?, empty(n, DType::F32, x)?);
    let geometry = Geometry::new(OP, Pass::Forward, n, d, &[x, w, &y])?;
    let mut launch = geometry.launch(OP, x.dtype());
    for (name, tensor) in [("x", x), ("w", w), ("y", &y), ("rstd", &rstd)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(n).int(d).int(geometry.warps()).int(added(scale)).float(eps as f32).run(x)?;
    Ok((y, rstd))
}

pub(crate) fn rms_norm_apply(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    scale: NormScale,
) -> Result<Tensor> {
    let (n, d) = x.dims2()?;
    let y = empty((n, d), x.dtype(), x)?;
    let geometry = Geometry::new(OP, Pass::Forward, n, d, &[x, w, &y])?;
    let mut launch = geometry.launch("rms_norm_apply", x.dtype());
    for (name, tensor) in [("x", x), ("rstd", rstd), ("w", w), ("y", &y)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(n).int(d).int(geometry.warps()).int(added(scale)).run(x)?;
    Ok(y)
}

pub(crate) fn rms_norm_backward(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    scale: NormScale,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "rms_norm_backward";
    let (n, d) = x.dims2()?;
    let dx = empty((n, d), x.dtype(), x)?;
    let mut rows = vec![x, w, dy, &dx];
    rows.extend(residual);
    let pass = Pass::Backward { resident: 1024 };
    let geometry = Geometry::new(op, pass, n, d, &rows)?;
    let shares = dw.map(|_| empty((geometry.shares(), d), DType::F32, x)).transpose()?;
    let mut launch = geometry.launch(op, x.dtype());
    for (name, tensor) in [("x", x), ("rstd", rstd), ("w", w), ("dy", dy)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "residual", residual)?;
    launch = launch.address(address(op, "dx", &dx)?);
    launch = launch.optional(op, "shares", shares.as_ref())?;
    launch.int(n).int(d).int(geometry.warps()).int(added(scale)).run(x)?;
    if let (Some(shares), Some(dw)) = (&shares, dw) {
        add_columns(op, shares, dw)?;
    }
    Ok(dx)
}
