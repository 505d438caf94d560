//! Squared ReLU, elementwise: `y = max(x, 0)^2`. Shapes: `x`, `y`, `dx` and `dy` have the same shape.

use super::cpu::blocks::elementwise;
use super::cpu::in_place::change;
use super::cpu::{compute_dtype, distinct, expect_shape, read};
use super::launch::{empty, launch_elementwise, on_gpu};
use candle_core::{Result, Tensor};

/// Returns `max(x, 0)^2` in the shape and dtype of `x`.
pub fn squared_relu(x: &Tensor) -> Result<Tensor> {
    let op = "squared_relu";
    let dtype = compute_dtype(op, &[("x", x)])?;
    if on_gpu(x) {
        let y = empty(x.shape(), dtype, x)?;
        launch_elementwise!(op; x, &y)?;
        return Ok(y);
    }
    let operand = read(op, "x", x)?;
    let values = operand.values()?;
    let y = elementwise(x.elem_count(), dtype, |at, y| {
        let x = values.view(at);
        y.fill(|i| x[i].max(0.0).powi(2))
    });
    y.tensor(x.shape().clone())
}

/// Returns `dx` in the memory of `x`, which is overwritten together with its clones.
pub fn squared_relu_backward(x: Tensor, dy: &Tensor) -> Result<Tensor> {
    let op = "squared_relu_backward";
    compute_dtype(op, &[("x", &x), ("dy", dy)])?;
    expect_shape(op, "dy", dy, x.dims())?;
    distinct(op, "x", &x, &[("dy", dy)])?;
    if on_gpu(&x) {
        launch_elementwise!(op; &x, dy)?;
        return Ok(x);
    }
    let operand = read(op, "dy", dy)?;
    let values = operand.values()?;
    change(op, [("x", &x)], |span, [x]| {
        for (x, dy) in x.iter_mut().zip(values.view(span).iter()) {
            *x = 2.0 * x.max(0.0) * dy;
        }
    })?;
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, operand, random};
    use super::*;

    #[test]
    fn the_square_and_its_gradient_match_the_reference() {
        for dims in [[1, 1], [7, 9], [257, 130]] {
            let plain = |t: &[Tensor]| t[0].relu()?.sqr();
            check(&format!("{dims:?}"), &[random(1, &dims)], plain, |t, dy| {
                let y = squared_relu(&t[0])?;
                Ok((y, vec![squared_relu_backward(operand(&t[0], t[0].dtype())?, dy)?]))
            });
        }
    }
}
