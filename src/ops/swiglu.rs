//! SwiGLU: `y = silu(gate) * up`, elementwise; `gate`, `up` and `y` have one shape.

use super::blocks::filled;
use super::cpu::{BLOCK, compute_dtype, expect_shape, read};
use super::simd::{kernels, sigmoid};
use candle_core::{Result, Tensor};

kernels! {
    fn forward(gate: &[f32], up: &[f32], y: &mut [f32]) {
        let n = y.len();
        let (gate, up) = (&gate[..n], &up[..n]);
        for i in 0..n {
            y[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
    }

    fn backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        let n = dgate.len();
        let (gate, up, dy, dup) = (&gate[..n], &up[..n], &dy[..n], &mut dup[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let silu = gate[i] * s;
            dup[i] = dy[i] * silu;
            dgate[i] = dy[i] * up[i] * (s + silu * (1.0 - s));
        }
    }
}

/// `silu(gate) * up`.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let op = "swiglu";
    let dtype = compute_dtype(op, &[("gate", gate), ("up", up)])?;
    expect_shape(op, "up", up, gate.dims())?;
    gpu!(gate => swiglu(gate, up));
    let shape = gate.shape().clone();
    let (gate, up) = (read(op, "gate", gate)?, read(op, "up", up)?);
    let (gate, up) = (gate.values()?, up.values()?);
    let [y] = filled(shape.elem_count(), BLOCK, [(1, dtype)], |at, [y]| {
        forward(&gate.lend(at.clone()), &up.lend(at), y);
    });
    y.tensor(shape)
}

/// `(dgate, dup)`.
pub fn swiglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let op = "swiglu_backward";
    let dtype = compute_dtype(op, &[("gate", gate), ("up", up), ("dy", dy)])?;
    expect_shape(op, "up", up, gate.dims())?;
    expect_shape(op, "dy", dy, gate.dims())?;
    gpu!(gate => swiglu_backward(gate, up, dy));
    let shape = gate.shape().clone();
    let (gate, up, dy) = (read(op, "gate", gate)?, read(op, "up", up)?, read(op, "dy", dy)?);
    let (gate, up, dy) = (gate.values()?, up.values()?, dy.values()?);
    let outputs = [(1, dtype); 2];
    let [dgate, dup] = filled(shape.elem_count(), BLOCK, outputs, |at, [dgate, dup]| {
        let (gate, up) = (gate.lend(at.clone()), up.lend(at.clone()));
        backward(&gate, &up, &dy.lend(at), dgate, dup);
    });
    Ok((dgate.tensor(shape.clone())?, dup.tensor(shape)?))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, random};
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
                let (dgate, dup) = swiglu_backward(&t[0], &t[1], dy)?;
                Ok((swiglu(&t[0], &t[1])?, vec![dgate, dup]))
            });
        }
    }

    #[test]
    fn large_gates_saturate_and_a_nan_stays_one() {
        let gate = Tensor::new(&[200f32, -200.0, f32::NAN], &candle_core::Device::Cpu).unwrap();
        let up = gate.ones_like().unwrap();
        let y = swiglu(&gate, &up).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(y[0], 200.0);
        assert!(y[1].abs() < 1e-30, "{}", y[1]);
        assert!(y[2].is_nan());
    }
}
