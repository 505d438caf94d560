//! SwiGLU: `y = silu(gate) * up`, elementwise.
//!
//! Shapes: `gate`, `up`, `y` and their gradients have the same shape, of any rank.

use super::cpu::blocks::{Full, Slots, elementwise};
use super::cpu::in_place::{RecomputeInput, change};
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{compute_dtype, distinct, expect_shape, read};
use super::launch::{empty, launch_elementwise, on_gpu};
use candle_core::{Result, Tensor};

kernels! {
    fn forward<'b>(gate: &[f32], up: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let n = y.len();
        let (gate, up) = (&gate[..n], &up[..n]);
        y.fill(|i| gate[i] * sigmoid(gate[i]) * up[i])
    }

    fn backward(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        let n = dy.len();
        let (gate, up) = (&mut gate[..n], &mut up[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let silu = gate[i] * s;
            gate[i] = dy[i] * up[i] * (s + silu * (1.0 - s));
            up[i] = dy[i] * silu;
        }
    }

    fn backward_recompute(gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
        let n = dy.len();
        let (gate, up) = (&mut gate[..n], &mut up[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let silu = gate[i] * s;
            gate[i] = dy[i] * up[i] * (s + silu * (1.0 - s));
            let dup = dy[i] * silu;
            dy[i] = silu * up[i];
            up[i] = dup;
        }
    }
}

/// Returns `silu(gate) * up` in the shape and dtype of `gate`.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let op = "swiglu";
    let dtype = compute_dtype(op, &[("gate", gate), ("up", up)])?;
    expect_shape(op, "up", up, gate.dims())?;
    if on_gpu(gate) {
        let y = empty(gate.shape(), dtype, gate)?;
        launch_elementwise!(op; gate, up, &y)?;
        return Ok(y);
    }
    let shape = gate.shape().clone();
    let (gate, up) = (read(op, "gate", gate)?, read(op, "up", up)?);
    let (gate, up) = (gate.values()?, up.values()?);
    let y = elementwise(shape.elem_count(), dtype, |at, y| {
        forward(&gate.view(at.clone()), &up.view(at), y)
    });
    y.tensor(shape)
}

/// Returns `(dgate, dup, y)`, all in the shape of `gate`, in the memory of `gate`, `up` and `dy`.
/// The operands and all their clones are overwritten. `y` is `None` unless `recompute` is `Yes`.
pub fn swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "swiglu_backward";
    compute_dtype(op, &[("gate", &gate), ("up", &up), ("dy", &dy)])?;
    expect_shape(op, "up", &up, gate.dims())?;
    expect_shape(op, "dy", &dy, gate.dims())?;
    let inputs = [("gate", &gate), ("up", &up)];
    distinct(op, "gate", &gate, &[("up", &up), ("dy", &dy)])?;
    distinct(op, "up", &up, &[("dy", &dy)])?;
    match recompute {
        _ if on_gpu(&gate) => launch_elementwise!(recompute.kernel(op); &gate, &up, &dy)?,
        RecomputeInput::No => {
            let dy = read(op, "dy", &dy)?;
            let dy = dy.values()?;
            change(op, inputs, |span, [gate, up]| backward(gate, up, &dy.view(span)))?;
        }
        RecomputeInput::Yes => {
            let [gate, up] = inputs;
            change(op, [gate, up, ("dy", &dy)], |_, [gate, up, dy]| {
                backward_recompute(gate, up, dy);
            })?;
        }
    }
    Ok((gate, up, (recompute == RecomputeInput::Yes).then_some(dy)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, check, device, message, operand, random};
    use super::*;

    #[test]
    fn swiglu_and_its_gradients_match_the_reference() {
        let plain = |t: &[Tensor]| {
            let sigmoid = ((t[0].neg()?.exp()? + 1.0)?).recip()?;
            (&t[0] * sigmoid)? * &t[1]
        };
        for dims in [[1, 1], [7, 9], [3, 64], [257, 130]] {
            let inputs = [(random(1, &dims) * 3.0).unwrap(), random(2, &dims)];
            check(&format!("swiglu {dims:?}"), &inputs, plain, |t, dy| {
                let y = swiglu(&t[0], &t[1])?;
                let (dgate, dup, recomputed) = backward_of_copies(t, dy, RecomputeInput::Yes)?;
                let (dgate_alone, dup_alone, nothing) =
                    backward_of_copies(t, dy, RecomputeInput::No)?;
                assert_eq!(bits(&recomputed.unwrap()), bits(&y), "recomputed output");
                assert_eq!(bits(&dgate), bits(&dgate_alone));
                assert_eq!(bits(&dup), bits(&dup_alone));
                assert!(nothing.is_none());
                Ok((y, vec![dgate, dup]))
            });
        }
    }

    /// Calls the backward on copies of the operands.
    fn backward_of_copies(
        t: &[Tensor],
        dy: &Tensor,
        recompute: RecomputeInput,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let copy = |t: &Tensor| operand(t, t.dtype());
        swiglu_backward(copy(&t[0])?, copy(&t[1])?, copy(dy)?, recompute)
    }

    #[test]
    fn operands_that_share_memory_are_rejected() {
        let x = random(1, &[4, 4]);
        let dy = random(2, &[4, 4]);
        for recompute in [RecomputeInput::Yes, RecomputeInput::No] {
            let shared = message(swiglu_backward(x.clone(), x.clone(), dy.clone(), recompute));
            assert!(shared.contains("`gate`") && shared.contains("`up`"), "{shared}");
            let shared = message(swiglu_backward(dy.clone(), x.clone(), x.clone(), recompute));
            assert!(shared.contains("`up`") && shared.contains("`dy`"), "{shared}");
        }
    }

    #[test]
    fn large_gates_saturate_and_nan_propagates() {
        let gate = Tensor::new(&[200f32, -200.0, f32::NAN], &device()).unwrap();
        let up = gate.ones_like().unwrap();
        let y = swiglu(&gate, &up).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(y[0], 200.0);
        assert!(y[1].abs() < 1e-30, "{}", y[1]);
        assert!(y[2].is_nan());
    }
}
