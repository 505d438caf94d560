use super::launch::{address, empty};
use super::norm::{Geometry, Pass, add_columns};
use candle_core::{DType, Result, Tensor};

const OP: &str = "layer_norm";

pub(crate) fn layer_norm(x: &Tensor, w: &Tensor, b: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (n, d) = x.dims2()?;
    let (y, stats) = (empty((n, d), x.dtype(), x)?, empty((n, 2), DType::F32, x)?);
    let geometry = Geometry::new(OP, Pass::Forward, n, d, &[x, w, b, &y])?;
    let mut launch = geometry.launch(OP, x.dtype());
    for (name, tensor) in [("x", x), ("w", w), ("b", b), ("y", &y), ("stats", &stats)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(n).int(d).int(geometry.warps()).float(eps as f32).run(x)?;
    Ok((y, stats))
}

pub(crate) fn layer_norm_apply(
    x: &Tensor,
    stats: &Tensor,
    w: &Tensor,
    b: &Tensor,
) -> Result<Tensor> {
    let (n, d) = x.dims2()?;
    let y = empty((n, d), x.dtype(), x)?;
    let geometry = Geometry::new(OP, Pass::Forward, n, d, &[x, w, b, &y])?;
    let mut launch = geometry.launch("layer_norm_apply", x.dtype());
    for (name, tensor) in [("x", x), ("stats", stats), ("w", w), ("b", b), ("y", &y)] {
        launch = launch.address(address(OP, name, tensor)?);
    }
    launch.int(n).int(d).int(geometry.warps()).run(x)?;
    Ok(y)
}

/// One pass computes `dx` and the partial sums of `dw` and `db`.
pub(crate) fn layer_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dw: Option<&Tensor>,
    db: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "layer_norm_backward";
    let (n, d) = x.dims2()?;
    let dx = empty((n, d), x.dtype(), x)?;
    let mut rows = vec![x, w, dy, &dx];
    rows.extend(residual);
    let pass = Pass::Backward { resident: 768 };
    let geometry = Geometry::new(op, pass, n, d, &rows)?;
    let shares =
        |of: Option<&Tensor>| of.map(|_| empty((geometry.shares(), d), DType::F32, x)).transpose();
    let (dw_shares, db_shares) = (shares(dw)?, shares(db)?);
    let mut launch = geometry.launch(op, x.dtype());
    for (name, tensor) in [("x", x), ("stats", stats), ("w", w), ("dy", dy)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "residual", residual)?;
    launch = launch.address(address(op, "dx", &dx)?);
    launch = launch.optional(op, "shares", dw_shares.as_ref())?;
    launch = launch.optional(op, "shares", db_shares.as_ref())?;
    launch.int(n).int(d).int(geometry.warps()).run(x)?;
    for (shares, sums) in [(&dw_shares, dw), (&db_shares, db)] {
        if let (Some(shares), Some(sums)) = (shares, sums) {
            add_columns(op, shares, sums)?;
        }
    }
    Ok(dx)
}
