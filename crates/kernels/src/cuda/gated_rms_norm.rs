use super::launch::{address, empty};
use super::norm::{Geometry, Pass, add_columns};
use candle_core::{DType, Result, Tensor};

pub(crate) fn gated_rms_norm(
    x: &Tensor,
    z: &Tensor,
    w: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let op = "gated_rms_norm";
    let (n, d) = x.dims2()?;
    let (y, rstd) = (empty((n, d), x.dtype(), x)?, empty(n, DType::F32, x)?);
    let geometry = Geometry::new(op, Pass::Forward, n, d, &[x, z, w, &y])?;
    let mut launch = geometry.launch(op, x.dtype());
    for (name, tensor) in [("x", x), ("z", z), ("w", w), ("y", &y), ("rstd", &rstd)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.int(n).int(d).int(geometry.warps()).float(eps as f32).run(x)?;
    Ok((y, rstd))
}

pub(crate) fn gated_rms_norm_backward(
    x: &Tensor,
    z: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    dw: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let op = "gated_rms_norm_backward";
    let (n, d) = x.dims2()?;
    let (dx, dz) = (empty((n, d), x.dtype(), x)?, empty((n, d), x.dtype(), x)?);
    let pass = Pass::Backward { resident: 768 };
    let geometry = Geometry::new(op, pass, n, d, &[x, z, w, dy, &dx, &dz])?;
    let shares = dw.map(|_| empty((geometry.shares(), d), DType::F32, x)).transpose()?;
    let mut launch = geometry.launch(op, x.dtype());
    let operands = [("x", x), ("z", z), ("rstd", rstd), ("w", w), ("dy", dy)];
    for (name, tensor) in operands.into_iter().chain([("dx", &dx), ("dz", &dz)]) {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "shares", shares.as_ref())?;
    launch.int(n).int(d).int(geometry.warps()).run(x)?;
    if let (Some(shares), Some(dw)) = (&shares, dw) {
        add_columns(op, shares, dw)?;
    }
    Ok((dx, dz))
}
