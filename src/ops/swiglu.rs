//! SwiGLU: `y = silu(gate) * up`, elementwise; `gate`, `up` and `y` have one shape.

#![expect(unsafe_code, reason = "new memory counts as elements once the kernels have written it")]

use super::cpu::{self, BLOCK, compute_dtype, expect_shape, read};
use super::output::Output;
use super::simd::{kernels, sigmoid};
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::mem::MaybeUninit;

kernels! {
    fn forward(gate: &[f32], up: &[f32], y: &mut [MaybeUninit<f32>]) {
        let n = y.len();
        let (gate, up) = (&gate[..n], &up[..n]);
        for i in 0..n {
            y[i].write(gate[i] * sigmoid(gate[i]) * up[i]);
        }
    }

    fn backward(
        gate: &[f32],
        up: &[f32],
        dy: &[f32],
        dgate: &mut [MaybeUninit<f32>],
        dup: &mut [MaybeUninit<f32>],
    ) {
        let n = dgate.len();
        let (gate, up, dy, dup) = (&gate[..n], &up[..n], &dy[..n], &mut dup[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let silu = gate[i] * s;
            dup[i].write(dy[i] * silu);
            dgate[i].write(dy[i] * up[i] * (s + silu * (1.0 - s)));
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
    let (gate, up) = (gate.f32()?, up.f32()?);
    let mut y = Output::new(gate.len());
    y.blocks(BLOCK)
        .zip(gate.par_chunks(BLOCK))
        .zip(up.par_chunks(BLOCK))
        .for_each(|((y, gate), up)| forward(gate, up, y));
    // SAFETY: each kernel writes its whole block, and the operands are as long as the result.
    cpu::tensor(unsafe { y.finish() }, shape, dtype)
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
    let (gate, up, dy) = (gate.f32()?, up.f32()?, dy.f32()?);
    let (mut dgate, mut dup) = (Output::new(gate.len()), Output::new(gate.len()));
    dgate
        .blocks(BLOCK)
        .zip(dup.blocks(BLOCK))
        .zip(gate.par_chunks(BLOCK))
        .zip(up.par_chunks(BLOCK))
        .zip(dy.par_chunks(BLOCK))
        .for_each(|((((dgate, dup), gate), up), dy)| backward(gate, up, dy, dgate, dup));
    // SAFETY: each kernel writes its whole blocks, and the operands are as long as the results.
    let (dgate, dup) = unsafe { (dgate.finish(), dup.finish()) };
    Ok((cpu::tensor(dgate, shape.clone(), dtype)?, cpu::tensor(dup, shape, dtype)?))
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
