//! Linear layers with the same input. On a GPU, plain layers whose weights follow one another in
//! memory compute one product together instead of one each.
//!
//! Shapes: `x [T, K]`, outputs `[T, M]` with an own `M` for each layer.

use super::linear::Linear;
use crate::tape::GradSink;
use candle_core::{Result, Tensor};

/// The outputs of `layers` for `x`. On a GPU they may be columns of one matrix, which only some ops
/// accept.
pub(super) fn forward<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    if let Some(weights) = weights(layers)
        && let Some(outputs) = kernels::joined_linear(x, weights.each_ref())?
    {
        return Ok(outputs);
    }
    let outputs = layers.into_iter().map(|layer| layer.forward(x)).collect::<Result<Vec<_>>>()?;
    Ok(outputs.try_into().expect("an output of each layer"))
}

/// The weights, if all layers are only products with them.
fn weights<const N: usize>(layers: [&Linear; N]) -> Option<[Tensor; N]> {
    let plain = layers.map(Linear::plain_weight);
    let all = plain.iter().all(Option::is_some);
    all.then(|| plain.map(|weight| weight.expect("each layer has one").tensor()))
}

/// Adds the parameter gradients for the gradients `dys` of the outputs.
pub(super) fn backward_params<const N: usize>(
    layers: [&Linear; N],
    x: &Tensor,
    dys: [&Tensor; N],
    grads: &dyn GradSink,
) -> Result<()> {
    if layers.iter().all(|layer| layer.plain_weight().is_some()) {
        let dws = layers.map(|layer| grads.product_buffer(layer.plain_weight()?));
        return kernels::joined_linear_backward_weight(x, dys, dws);
    }
    for (layer, dy) in layers.into_iter().zip(dys) {
        layer.backward_params(x, dy, &layer.output_grad(dy)?, grads)?;
    }
    Ok(())
}

/// Adds the parameter gradients and returns `dx: [T, K]`. Each of `dys` is dropped after its last
/// use, to lower peak memory.
pub(super) fn backward<const N: usize>(
    layers: [&Linear; N],
    x: &Tensor,
    dys: [Tensor; N],
    grads: &dyn GradSink,
) -> Result<Tensor> {
    if let Some(weights) = weights(layers)
        && let Some(dx) = kernels::joined_linear_backward_input(dys.each_ref(), weights.each_ref())?
    {
        backward_params(layers, x, dys.each_ref(), grads)?;
        return Ok(dx);
    }
    let mut sum = None;
    for (layer, dy) in layers.into_iter().zip(dys) {
        let dy = kernels::own_columns(&dy)?;
        sum = Some(match sum {
            None => layer.backward(x, &dy, grads)?,
            Some(dx) => layer.backward_add(x, &dy, dx, grads)?,
        });
    }
    Ok(sum.expect("at least one layer"))
}

#[cfg(test)]
mod tests;
