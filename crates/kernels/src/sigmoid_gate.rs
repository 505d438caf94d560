//! Output gate of attention: `y = x * sigmoid(gate)`, elementwise.
//!
//! Shapes: `gate`, `x`, `y` and their gradients have the same shape, of any rank.

use super::cpu::blocks::{Full, Slots, elementwise};
use super::cpu::in_place::{RecomputeInput, change};
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{compute_dtype, distinct, expect_shape, read};
use super::launch::{empty, launch_elementwise, on_gpu};
use candle_core::{Result, Tensor};

kernels! {
    fn forward<'b>(gate: &[f32], x: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let n = y.len();
        let (gate, x) = (&gate[..n], &x[..n]);
        y.fill(|i| x[i] * sigmoid(gate[i]))
    }

    fn backward(gate: &mut [f32], x: &mut [f32], dy: &[f32]) {
        let n = dy.len();
        let (gate, x) = (&mut gate[..n], &mut x[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            gate[i] = dy[i] * x[i] * (s * (1.0 - s));
            x[i] = dy[i] * s;
        }
    }

    fn backward_recompute(gate: &mut [f32], x: &mut [f32], dy: &mut [f32]) {
        let n = dy.len();
        let (gate, x) = (&mut gate[..n], &mut x[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let y = x[i] * s;
            gate[i] = dy[i] * x[i] * (s * (1.0 - s));
            x[i] = dy[i] * s;
            dy[i] = y;
        }
    }
}

/// Returns `x * sigmoid(gate)` in the shape and dtype of `gate`.
pub fn sigmoid_gate(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    let op = "sigmoid_gate";
    let dtype = compute_dtype(op, &[("gate", gate), ("x", x)])?;
    expect_shape(op, "x", x, gate.dims())?;
    if on_gpu(gate) {
        let y = empty(gate.shape(), dtype, gate)?;
        launch_elementwise!(op; gate, x, &y)?;
        return Ok(y);
    }
    let shape = gate.shape().clone();
    let (gate, x) = (read(op, "gate", gate)?, read(op, "x", x)?);
    let (gate, x) = (gate.values()?, x.values()?);
    let y = elementwise(shape.elem_count(), dtype, |at, y| {
        forward(&gate.view(at.clone()), &x.view(at), y)
    });
    y.tensor(shape)
}

/// Returns `(dgate, dx, y)`, all in the shape of `gate`, in the memory of `gate`, `x` and `dy`. The
/// operands and all their clones are overwritten. `y` is `None` unless `recompute` is `Yes`.
pub fn sigmoid_gate_backward(
    gate: Tensor,
    x: Tensor,
    dy: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "sigmoid_gate_backward";
    compute_dtype(op, &[("gate", &gate), ("x", &x), ("dy", &dy)])?;
    expect_shape(op, "x", &x, gate.dims())?;
    expect_shape(op, "dy", &dy, gate.dims())?;
    let inputs = [("gate", &gate), ("x", &x)];
    distinct(op, "gate", &gate, &[("x", &x), ("dy", &dy)])?;
    distinct(op, "x", &x, &[("dy", &dy)])?;
    match recompute {
        _ if on_gpu(&gate) => launch_elementwise!(recompute.kernel(op); &gate, &x, &dy)?,
        RecomputeInput::No => {
            let dy = read(op, "dy", &dy)?;
            let dy = dy.values()?;
            change(op, inputs, |span, [gate, x]| backward(gate, x, &dy.view(span)))?;
        }
        RecomputeInput::Yes => {
            let [gate, x] = inputs;
            change(op, [gate, x, ("dy", &dy)], |_, [gate, x, dy]| {
                backward_recompute(gate, x, dy);
            })?;
        }
    }
    Ok((gate, x, (recompute == RecomputeInput::Yes).then_some(dy)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, check, message, operand, random};
    use super::*;

    #[test]
    fn the_gate_and_its_gradients_match_the_reference() {
        let plain = |t: &[Tensor]| &t[1] * ((t[0].neg()?.exp()? + 1.0)?).recip()?;
        for dims in [[1, 1], [7, 9], [3, 64], [257, 130]] {
            let inputs = [(random(1, &dims) * 3.0).unwrap(), random(2, &dims)];
            check(&format!("sigmoid_gate {dims:?}"), &inputs, plain, |t, dy| {
                let y = sigmoid_gate(&t[0], &t[1])?;
                let again = |recompute| {
                    let copy = |t: &Tensor| operand(t, t.dtype());
                    sigmoid_gate_backward(copy(&t[0])?, copy(&t[1])?, copy(dy)?, recompute)
                };
                let (dgate, dx, recomputed) = again(RecomputeInput::Yes)?;
                let (dgate_alone, dx_alone, nothing) = again(RecomputeInput::No)?;
                assert_eq!(recomputed.map(|y| bits(&y)), Some(bits(&y)), "recomputed output");
                assert_eq!(bits(&dgate), bits(&dgate_alone));
                assert_eq!(bits(&dx), bits(&dx_alone));
                assert!(nothing.is_none());
                Ok((y, vec![dgate, dx]))
            });
        }
    }

    #[test]
    fn operands_that_share_memory_are_rejected() {
        let (x, dy) = (random(1, &[4, 4]), random(2, &[4, 4]));
        let shared = message(sigmoid_gate_backward(x.clone(), x, dy, RecomputeInput::No));
        assert!(shared.contains("`gate`") && shared.contains("`x`"), "{shared}");
    }
}
