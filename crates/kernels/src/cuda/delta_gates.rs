use super::launch::{Launch, address, empty};
use super::norm::{WARP, add_columns};
use crate::DeltaGatesGrad;
use candle_core::{DType, Result, Tensor};

const THREADS: usize = 256;
/// Number of tokens of a block of the backward pass.
const ROWS: usize = 64;

pub(crate) fn delta_gates(
    a: &Tensor,
    b: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let op = "delta_gates";
    let (t, h) = a.dims2()?;
    let (g, beta) = (empty((t, h), DType::F32, a)?, empty((t, h), DType::F32, a)?);
    let mut launch =
        Launch::new(op, a.dtype()).grid((t * h).div_ceil(THREADS)).threads(THREADS as u32);
    let operands = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)];
    for (name, tensor) in operands.into_iter().chain([("g", &g), ("beta", &beta)]) {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch.long(t * h).int(h).run(a)?;
    Ok((g, beta))
}

pub(crate) fn delta_gates_backward(
    [a, b, a_log, dt_bias]: [&Tensor; 4],
    dg: &Tensor,
    dbeta: &Tensor,
    da_log: Option<&Tensor>,
    ddt_bias: Option<&Tensor>,
) -> Result<DeltaGatesGrad> {
    let op = "delta_gates_backward";
    let (t, h) = a.dims2()?;
    let (da, db) = (empty((t, h), a.dtype(), a)?, empty((t, h), a.dtype(), a)?);
    let blocks = t.div_ceil(ROWS);
    let shares = |of: Option<&Tensor>| {
        of.map(|_| empty((blocks * THREADS / WARP, h), DType::F32, a)).transpose()
    };
    let (log_shares, bias_shares) = (shares(da_log)?, shares(ddt_bias)?);
    let mut launch = Launch::new(op, a.dtype()).grid(blocks).threads(THREADS as u32);
    let operands = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)];
    let grads = [("dg", dg), ("dbeta", dbeta), ("da", &da), ("db", &db)];
    for (name, tensor) in operands.into_iter().chain(grads) {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "log_shares", log_shares.as_ref())?;
    launch = launch.optional(op, "bias_shares", bias_shares.as_ref())?;
    launch.int(t).int(h).int(ROWS).run(a)?;
    for (shares, sums) in [(&log_shares, da_log), (&bias_shares, ddt_bias)] {
        if let (Some(shares), Some(sums)) = (shares, sums) {
            add_columns(op, shares, sums)?;
        }
    }
    Ok(DeltaGatesGrad { da, db })
}
