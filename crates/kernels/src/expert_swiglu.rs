//! SwiGLU of the rows of experts, times the weight of the router: `y = w silu(gate) up`.
//!
//! Shapes: `R` rows as in [`super::Routing`], `I` intermediate size, `gate_up [R, 2I]`: gate, then
//! up. The weight multiplies the activation and not the result of the next linear layer, so its
//! gradient is a sum over `I` elements that the backward pass has anyway.

use super::cpu::blocks::{Scratch, filled, to_bf16_block, to_f32_block};
use super::cpu::simd::{kernels, sigmoid, sum};
use super::cpu::{self, Element, ROWS, compute_dtype, distinct, expect_shape, read};
use super::launch::{Launch, empty, launch, on_gpu};
use super::{RecomputeInput, Routing};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

kernels! {
    fn forward(weight: f32, gate: &[f32], up: &[f32], y: &mut [f32]) {
        let n = y.len();
        let (gate, up) = (&gate[..n], &up[..n]);
        for i in 0..n {
            y[i] = weight * (gate[i] * sigmoid(gate[i]) * up[i]);
        }
    }

    /// Replaces `gate` and `up` by their gradients and `dy` by the output. Returns the gradient of
    /// the weight.
    fn backward(
        weight: f32,
        gate: &mut [f32],
        up: &mut [f32],
        dy: &mut [f32],
        products: &mut [f32],
    ) -> f32 {
        let n = dy.len();
        let (gate, up, products) = (&mut gate[..n], &mut up[..n], &mut products[..n]);
        for i in 0..n {
            let s = sigmoid(gate[i]);
            let silu = gate[i] * s;
            let activated = silu * up[i];
            products[i] = dy[i] * activated;
            let weighted = weight * dy[i];
            gate[i] = weighted * up[i] * (s + silu * (1.0 - s));
            up[i] = weighted * silu;
            dy[i] = weight * activated;
        }
        sum(products)
    }
}

/// Returns `(R, I)` of `gate_up`.
fn sizes(op: &str, gate_up: &Tensor, routing: &Routing) -> Result<(usize, usize)> {
    let rows = routing.check(op)?;
    let (_, width) = gate_up.dims2()?;
    if !width.is_multiple_of(2) {
        bail!("{op}: `gate_up` is {:?}, expected an even number of columns", gate_up.dims());
    }
    expect_shape(op, "gate_up", gate_up, &[rows, width])?;
    Ok((rows, width / 2))
}

/// Returns `w silu(gate) up`, `[R, I]`, for `gate_up: [R, 2I]`.
pub fn expert_swiglu(gate_up: &Tensor, routing: &Routing) -> Result<Tensor> {
    let op = "expert_swiglu";
    let (rows, width) = sizes(op, gate_up, routing)?;
    let dtype = compute_dtype(op, &[("gate_up", gate_up)])?;
    if on_gpu(gate_up) {
        let y = empty((rows, width), dtype, gate_up)?;
        let launch = Launch::for_rows(op, (rows, width), &[gate_up, &y])?;
        launch!(op, launch; gate_up, routing.weights, routing.order, y, rows, width)?;
        return Ok(y);
    }
    let gate_up = read(op, "gate_up", gate_up)?;
    let gate_up = gate_up.values()?;
    let (weights, order) =
        (read(op, "weights", &routing.weights)?, read(op, "order", &routing.order)?);
    let (weights, order) = (weights.slice::<f32>()?, order.slice::<u32>()?);
    let [y] = filled(rows, ROWS, [(width, dtype)], |rows, [y]| {
        for (row, y) in rows.zip(y.chunks_mut(width)) {
            let both = gate_up.view(row * 2 * width..(row + 1) * 2 * width);
            let (gate, up) = both.split_at(width);
            forward(weights[order[row] as usize], gate, up, y);
        }
    });
    y.tensor((rows, width))
}

/// Returns `(d_gate_up [R, 2I], d_weights [T, k], y)` for the gradient `d_activated: [R, I]` of the
/// output, in the memory of `gate_up` and `d_activated`, which are overwritten with all their
/// clones. `y [R, I]` is `None` unless `recompute` is `Yes`. `d_weights` is `f32`.
pub fn expert_swiglu_backward(
    gate_up: Tensor,
    routing: &Routing,
    d_activated: Tensor,
    recompute: RecomputeInput,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let op = "expert_swiglu_backward";
    let (rows, width) = sizes(op, &gate_up, routing)?;
    let dtype = compute_dtype(op, &[("gate_up", &gate_up), ("d_activated", &d_activated)])?;
    expect_shape(op, "d_activated", &d_activated, &[rows, width])?;
    distinct(op, "gate_up", &gate_up, &[("d_activated", &d_activated)])?;
    if on_gpu(&gate_up) {
        let d_weights = empty(routing.weights.shape(), DType::F32, &gate_up)?;
        let launch = Launch::for_rows(op, (rows, width), &[&gate_up, &d_activated])?;
        let (weights, order) = (&routing.weights, &routing.order);
        let again = recompute == RecomputeInput::Yes;
        launch!(op, launch; gate_up, weights, order, d_activated, d_weights, rows, width, again)?;
        return Ok((gate_up, d_weights, (recompute == RecomputeInput::Yes).then_some(d_activated)));
    }
    let (weights, order) =
        (read(op, "weights", &routing.weights)?, read(op, "order", &routing.order)?);
    let (weights, order) = (weights.slice::<f32>()?, order.slice::<u32>()?);
    let of_rows: Vec<f32> = order.iter().map(|choice| weights[*choice as usize]).collect();
    let sums = match dtype {
        DType::BF16 => change(op, [&gate_up, &d_activated], width, &of_rows, row_in_bf16)?,
        _ => change(op, [&gate_up, &d_activated], width, &of_rows, row_in_f32)?,
    };
    let mut d_weights = vec![0f32; rows];
    order.iter().zip(sums).for_each(|(choice, sum)| d_weights[*choice as usize] = sum);
    let d_weights = Tensor::from_vec(d_weights, routing.choices()?, &Device::Cpu)?;
    Ok((gate_up, d_weights, (recompute == RecomputeInput::Yes).then_some(d_activated)))
}

/// Calls `row` with the weight, `gate_up` and `d_activated` of each row, on all threads, and
/// returns the results.
fn change<T: Element>(
    op: &'static str,
    [gate_up, d_activated]: [&Tensor; 2],
    width: usize,
    weights: &[f32],
    row: impl Fn(f32, &mut [T], &mut [T]) -> f32 + Sync,
) -> Result<Vec<f32>> {
    let mut sums = vec![0f32; weights.len()];
    if width == 0 {
        return Ok(sums);
    }
    cpu::write(op, "gate_up", gate_up, |gate_up: &mut [T]| {
        cpu::write(op, "d_activated", d_activated, |dy: &mut [T]| {
            let operands = gate_up.par_chunks_mut(2 * width).zip(dy.par_chunks_mut(width));
            let rows = sums.par_iter_mut().zip(weights).zip(operands);
            rows.with_min_len(ROWS).for_each(|((sum, weight), (gate_up, dy))| {
                *sum = row(*weight, gate_up, dy);
            });
        })
    })??;
    Ok(sums)
}

fn row_in_f32(weight: f32, gate_up: &mut [f32], dy: &mut [f32]) -> f32 {
    let (gate, up) = gate_up.split_at_mut(dy.len());
    backward(weight, gate, up, dy, Scratch::of(gate.len()).all())
}

fn row_in_bf16(weight: f32, gate_up: &mut [bf16], dy: &mut [bf16]) -> f32 {
    let (mut wide_gate_up, mut wide_dy) = (Scratch::of(gate_up.len()), Scratch::of(dy.len()));
    to_f32_block(gate_up, wide_gate_up.all());
    to_f32_block(dy, wide_dy.all());
    let sum = row_in_f32(weight, wide_gate_up.all(), wide_dy.all());
    to_bf16_block(wide_gate_up.all(), gate_up);
    to_bf16_block(wide_dy.all(), dy);
    sum
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Tolerance, bits, check_within, message, operand, random, routing};
    use super::*;

    #[test]
    fn the_weighted_activation_and_its_gradients_match_the_reference() {
        for ((t, e, k), width) in [
            ((1, 1, 1), 1),
            ((9, 5, 2), 33),
            ((70, 4, 4), 64),
            ((33, 40, 3), 130),
            ((5, 3, 1), 700),
        ] {
            let (rows, base) = (t * k, routing(3, (t, e, k), 0.0));
            let inputs = [(random(1, &[rows, 2 * width]) * 2.0).unwrap(), random(2, &[t, k])];
            let plain = |x: &[Tensor]| {
                let (gate, up) = (x[0].narrow(1, 0, width)?, x[0].narrow(1, width, width)?);
                let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
                let of_rows = x[1].flatten_all()?.index_select(&base.order, 0)?.unsqueeze(1)?;
                (silu * up)?.broadcast_mul(&of_rows)
            };
            let what = format!("expert_swiglu {t} {e} {k} {width}");
            check_within(Tolerance::BF16, &what, &inputs, plain, |x, dy| {
                let weights = x[1].to_dtype(DType::F32)?;
                let routing = Routing { weights, ..base.clone() };
                let y = expert_swiglu(&x[0], &routing)?;
                let run = |recompute| {
                    let (gate_up, dy) = (operand(&x[0], dy.dtype())?, operand(dy, dy.dtype())?);
                    expert_swiglu_backward(gate_up, &routing, dy, recompute)
                };
                let (d_gate_up, d_weights, again) = run(RecomputeInput::Yes)?;
                assert_eq!(bits(&again.unwrap()), bits(&y), "recomputed output");
                let (d_gate_up_alone, d_weights_alone, nothing) = run(RecomputeInput::No)?;
                assert_eq!(bits(&d_gate_up), bits(&d_gate_up_alone));
                assert_eq!(bits(&d_weights), bits(&d_weights_alone));
                assert!(nothing.is_none());
                assert_eq!(d_weights.dtype(), DType::F32);
                Ok((y, vec![d_gate_up, d_weights]))
            });
        }
    }

    #[test]
    fn operands_of_the_wrong_shape_are_rejected() {
        let routing = routing(1, (4, 3, 2), 0.0);
        let error = message(expert_swiglu(&random(1, &[8, 7]), &routing));
        assert!(error.contains("`gate_up` is [8, 7], expected an even number"), "{error}");
        let error = message(expert_swiglu(&random(1, &[7, 6]), &routing));
        assert!(error.contains("`gate_up` is [7, 6], expected [8, 6]"), "{error}");
        let backward = |gate_up, dy| {
            message(expert_swiglu_backward(gate_up, &routing, dy, RecomputeInput::No))
        };
        let error = backward(random(1, &[8, 6]), random(2, &[8, 4]));
        assert!(error.contains("`d_activated` is [8, 4], expected [8, 3]"), "{error}");
        let both = random(1, &[8, 6]);
        let part = both.flatten_all().unwrap().narrow(0, 0, 24).unwrap().reshape((8, 3)).unwrap();
        let error = backward(both, part);
        assert!(error.contains("shares memory with `d_activated`"), "{error}");
    }
}
