//! SwiGLU: `y = silu(gate) * up`, elementwise; `gate`, `up` and `y` have one shape.

use super::cpu::blocks::{Full, Slots, elementwise};
use super::cpu::in_place::{Again, change};
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{compute_dtype, distinct, expect_shape, read};
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

    fn backward_again(gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
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

/// `silu(gate) * up`.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let op = "swiglu";
    let dtype = compute_dtype(op, &[("gate", gate), ("up", up)])?;
    expect_shape(op, "up", up, gate.dims())?;
    return_if_on_gpu!(gate => swiglu(gate, up));
    let shape = gate.shape().clone();
    let (gate, up) = (read(op, "gate", gate)?, read(op, "up", up)?);
    let (gate, up) = (gate.values()?, up.values()?);
    let y = elementwise(shape.elem_count(), dtype, |at, y| {
        forward(&gate.lend(at.clone()), &up.lend(at), y)
    });
    y.tensor(shape)
}

/// `(dgate, dup, y)` in the memory of `gate`, `up` and `dy`: the caller gives them up, with all their clones. `y` is
/// there if asked for.
pub fn swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    again: Again,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "swiglu_backward";
    compute_dtype(op, &[("gate", &gate), ("up", &up), ("dy", &dy)])?;
    expect_shape(op, "up", &up, gate.dims())?;
    expect_shape(op, "dy", &dy, gate.dims())?;
    let inputs = [("gate", &gate), ("up", &up)];
    distinct(op, "gate", &gate, &[("up", &up), ("dy", &dy)])?;
    distinct(op, "up", &up, &[("dy", &dy)])?;
    return_if_on_gpu!(&gate => swiglu_backward(gate, up, dy, again));
    match again {
        Again::Nothing => {
            let dy = read(op, "dy", &dy)?;
            let dy = dy.values()?;
            change(op, inputs, |span, [gate, up]| backward(gate, up, &dy.lend(span)))?;
        }
        Again::Output => {
            let [gate, up] = inputs;
            change(op, [gate, up, ("dy", &dy)], |_, [gate, up, dy]| backward_again(gate, up, dy))?;
        }
    }
    Ok((gate, up, (again == Again::Output).then_some(dy)))
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
                let (dgate, dup, again) = given_up(t, dy, Again::Output)?;
                let (dgate_alone, dup_alone, nothing) = given_up(t, dy, Again::Nothing)?;
                assert_eq!(bits(&again.unwrap()), bits(&y), "the output again");
                assert_eq!(bits(&dgate), bits(&dgate_alone));
                assert_eq!(bits(&dup), bits(&dup_alone));
                assert!(nothing.is_none());
                Ok((y, vec![dgate, dup]))
            });
        }
    }

    /// The backward of copies.
    fn given_up(
        t: &[Tensor],
        dy: &Tensor,
        again: Again,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let copy = |t: &Tensor| operand(t, t.dtype());
        swiglu_backward(copy(&t[0])?, copy(&t[1])?, copy(dy)?, again)
    }

    #[test]
    fn operands_that_are_one_tensor_are_refused() {
        let x = random(1, &[4, 4]);
        let dy = random(2, &[4, 4]);
        for again in [Again::Output, Again::Nothing] {
            let shared = message(swiglu_backward(x.clone(), x.clone(), dy.clone(), again));
            assert!(shared.contains("`gate`") && shared.contains("`up`"), "{shared}");
            let shared = message(swiglu_backward(dy.clone(), x.clone(), x.clone(), again));
            assert!(shared.contains("`up`") && shared.contains("`dy`"), "{shared}");
        }
    }

    #[test]
    fn large_gates_saturate_and_a_nan_stays_one() {
        let gate = Tensor::new(&[200f32, -200.0, f32::NAN], &device()).unwrap();
        let up = gate.ones_like().unwrap();
        let y = swiglu(&gate, &up).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(y[0], 200.0);
        assert!(y[1].abs() < 1e-30, "{}", y[1]);
        assert!(y[2].is_nan());
    }
}
