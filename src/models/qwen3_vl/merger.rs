//! Four neighbouring patches become one token of the language model.
//!
//! The main merger normalises patches before they are joined, a deepstack merger after it.

use super::linear::Linear;
use super::params::{ParamMap, WeightError};
use crate::ops::{self, Gelu};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};

/// The epsilon of every LayerNorm in the tower.
pub(super) const LAYER_NORM_EPS: f64 = 1e-6;

/// A LayerNorm with its parameters.
#[derive(Debug, Clone)]
pub(super) struct LayerNorm {
    weight: Param,
    bias: Param,
}

impl LayerNorm {
    pub(super) fn new(params: &ParamMap<'_>, name: &str) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        Ok(Self { weight, bias: params.get(&format!("{name}.bias"))? })
    }

    pub(super) fn params(&self) -> [&Param; 2] {
        [&self.weight, &self.bias]
    }

    /// Output, and the row statistics that backward needs.
    pub(super) fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        ops::layer_norm(x, self.weight.tensor(), self.bias.tensor(), LAYER_NORM_EPS)
    }

    /// The output again, from kept statistics.
    pub(super) fn apply(&self, x: &Tensor, stats: &Tensor) -> Result<Tensor> {
        ops::layer_norm_apply(x, stats, self.weight.tensor(), self.bias.tensor())
    }

    /// `dx + residual`.
    pub(super) fn backward(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let (dw, db) = (grads.buffer(&self.weight), grads.buffer(&self.bias));
        ops::layer_norm_backward(x, stats, self.weight.tensor(), dy, residual, dw, db)
    }
}

/// Whether the norm sees patches or joined patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormPlace {
    /// `[P, Dv]`, as the main merger has it.
    BeforeJoin,
    /// `[M, 4 * Dv]`, as the deepstack mergers have it.
    AfterJoin,
}

/// Norm, join, two-layer MLP with an exact GELU.
#[derive(Debug, Clone)]
pub(super) struct Merger {
    norm: LayerNorm,
    place: NormPlace,
    fc1: Linear,
    fc2: Linear,
    join: usize, // patches a token
}

/// What a merger keeps.
pub(super) struct SavedMerger {
    x: Tensor, // [P, Dv] or [M, 4 * Dv], as the norm saw it
    stats: Tensor,
    hidden: Tensor, // [M, 4 * Dv], before the GELU
}

impl Merger {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        place: NormPlace,
        join: usize,
    ) -> std::result::Result<Self, WeightError> {
        Ok(Self {
            norm: LayerNorm::new(params, &format!("{name}.norm"))?,
            place,
            fc1: Linear::with_bias(params, &format!("{name}.linear_fc1"))?,
            fc2: Linear::with_bias(params, &format!("{name}.linear_fc2"))?,
            join,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        self.norm.params().into_iter().chain(self.fc1.params()).chain(self.fc2.params())
    }

    fn joined(&self, x: &Tensor) -> Result<Tensor> {
        let (patches, width) = x.dims2()?;
        x.reshape((patches / self.join, self.join * width)) // [M, 4 * Dv], the same memory
    }
}

impl Stage for Merger {
    type Context = ();
    type Saved = SavedMerger;

    fn forward(&self, x: &Tensor, (): &()) -> Result<(Tensor, SavedMerger)> {
        let x = match self.place {
            NormPlace::BeforeJoin => x.clone(),
            NormPlace::AfterJoin => self.joined(x)?,
        };
        let (normed, stats) = self.norm.forward(&x)?;
        let normed = match self.place {
            NormPlace::BeforeJoin => self.joined(&normed)?, // [M, 4 * Dv]
            NormPlace::AfterJoin => normed,
        };
        let hidden = self.fc1.forward(&normed)?;
        let y = self.fc2.forward(&ops::gelu(&hidden, Gelu::Erf)?)?; // [M, D]
        Ok((y, SavedMerger { x, stats, hidden }))
    }

    fn backward(
        &self,
        saved: SavedMerger,
        dy: Tensor,
        (): &(),
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        let SavedMerger { x, stats, hidden } = saved;
        let d_activated = self.fc2.backward_input(&dy)?; // [M, 4 * Dv]
        let again = self.fc2.input_again(grads);
        let (d_hidden, activated) = ops::gelu_backward(hidden, d_activated, Gelu::Erf, again)?;
        if let Some(activated) = activated {
            self.fc2.backward_params(&activated, &dy, grads)?;
        }
        let normed = self.norm.apply(&x, &stats)?;
        let joined = match self.place {
            NormPlace::BeforeJoin => self.joined(&normed)?,
            NormPlace::AfterJoin => normed,
        };
        let d_joined = self.fc1.backward(&joined, &d_hidden, grads)?; // [M, 4 * Dv]
        let d_normed = d_joined.reshape(x.shape())?;
        let dx = self.norm.backward(&x, &stats, &d_normed, None, grads)?;
        match input_grad {
            InputGrad::Skip => Ok(None),
            InputGrad::Needed => {
                let (tokens, width) = d_joined.dims2()?;
                dx.reshape((tokens * self.join, width / self.join)).map(Some) // [P, Dv]
            }
        }
    }
}
