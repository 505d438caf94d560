//! Loss of the supervised rows: head and cross-entropy run in chunks of rows, so that the logits of
//! all rows never exist at one time.

use super::Targets;
use crate::tape::{Param, Pass};
use candle_core::{Result, Tensor};

pub struct LossOutput {
    /// Negative log likelihood of each target, not multiplied by its weight, `[S]`, `f32`, on the
    /// device.
    pub nll: Tensor,
    /// Gradient of the hidden states, `[T, D]`.
    pub d_hidden: Tensor,
}

/// Losses of the targets of one micro-batch, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetLosses {
    /// Negative log likelihood of each target, `[S]`.
    pub nll: Vec<f32>,
    /// Weight of each target, `[S]`; `None`: 1 for all.
    pub weights: Option<Vec<f32>>,
}

impl TargetLosses {
    /// `(nll, weight)` of each target.
    pub fn pairs(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let weight = |at: usize| self.weights.as_ref().map_or(1.0, |weights| weights[at].into());
        self.nll.iter().enumerate().map(move |(at, nll)| (f64::from(*nll), weight(at)))
    }

    /// Sum of `weight * nll` over all targets.
    pub fn sum(&self) -> f64 {
        self.pairs().map(|(nll, weight)| nll * weight).sum()
    }
}

/// Loss and greedy predictions, without gradients.
pub struct Scores {
    /// Negative log likelihood of each target, `[S]`.
    pub nll: Vec<f32>,
    /// The most likely token of each supervised row, `[S]`.
    pub argmax: Vec<u32>,
}

/// Gradient of the sum of `weight * nll / target_weight`; `target_weight` is the sum of the weights
/// of all targets of the step, over all micro-batches and ranks.
///
/// `hidden: [T, D]`, `lm_head: [V, D]`. Adds the gradient of the head to those of `pass`. Returns `None` if
/// the micro-batch has no targets.
pub fn loss_and_gradient(
    hidden: &Tensor,
    lm_head: &Param,
    targets: &Targets,
    target_weight: f64,
    pass: &Pass<'_>,
) -> Result<Option<LossOutput>> {
    if targets.is_empty() {
        return Ok(None);
    }
    let device = hidden.device();
    let rows = kernels::upload(targets.rows.clone(), targets.len(), device)?; // [S]
    let ids = kernels::upload(targets.ids.clone(), targets.len(), device)?; // [S]
    let selected = kernels::gather_rows(hidden, &rows)?; // [S, D]
    let factor = (1.0 / target_weight) as f32;
    let weights = targets.weights.clone();
    let weights =
        weights.map(|weights| kernels::upload(weights, targets.len(), device)).transpose()?; // [S]
    let scale = kernels::LossScale { factor, weights: weights.as_ref() };
    let (weight, dw) = (pass.weight(lm_head)?, pass.grad(lm_head));
    let (nll, d_selected) =
        kernels::linear_cross_entropy_backward(&selected, &weight, &ids, scale, dw, true)?;
    let d_selected = d_selected
        .ok_or_else(|| candle_core::Error::msg("the op returned no gradient of its input"))?;
    let d_hidden = kernels::scatter_rows(&d_selected, &rows, hidden.dim(0)?)?; // [T, D]
    Ok(Some(LossOutput { nll, d_hidden }))
}

/// Scores of the supervised rows of `hidden: [T, D]`.
pub fn scores(
    hidden: &Tensor,
    lm_head: &Param,
    targets: &Targets,
    pass: &Pass<'_>,
) -> Result<Scores> {
    if targets.is_empty() {
        return Ok(Scores { nll: vec![], argmax: vec![] });
    }
    let device = hidden.device();
    let rows = kernels::upload(targets.rows.clone(), targets.len(), device)?;
    let ids = kernels::upload(targets.ids.clone(), targets.len(), device)?;
    let selected = kernels::gather_rows(hidden, &rows)?; // [S, D]
    let (nll, argmax) = kernels::linear_cross_entropy(&selected, &pass.weight(lm_head)?, &ids)?;
    Ok(Scores { nll: nll.to_vec1()?, argmax: argmax.to_vec1()? })
}
