//! The sums and the direction of Adafactor, made of ops of candle.

use candle_core::{Result, Tensor};

/// As the function of this name in `crate::adafactor`.
pub(crate) fn mean_squares(grad: &Tensor, scale: f32) -> Result<[Tensor; 2]> {
    let squares = (grad * f64::from(scale))?.sqr()?;
    Ok([squares.mean(2)?.flatten_all()?, squares.mean(1)?.flatten_all()?])
}

/// As the function of this name in `crate::adafactor`.
pub(crate) fn direction(
    grad: &Tensor,
    scale: f32,
    of_rows: &Tensor,
    of_columns: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let (matrices, rows, columns) = grad.dims3()?;
    let of_rows = of_rows.reshape((matrices, rows, 1))?;
    let of_columns = of_columns.reshape((matrices, 1, columns))?;
    let root = of_rows.broadcast_mul(&of_columns)?.maximum(eps * eps)?.sqrt()?;
    (grad * f64::from(scale))? / root
}
