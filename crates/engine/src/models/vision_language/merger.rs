//! Spatial merge: four neighbouring patches become one token of the language model.
//!
//! The main merger normalises before the merge, a deepstack merger after it.

use super::config::VisionKind;
use super::norm::Norm;
use crate::nn::{Linear, ParamMap, WeightError};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};
use kernels::Gelu;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormPlace {
    /// `[P, Dv]`, as the main merger has it.
    BeforeMerge,
    /// `[M, 4 * Dv]`, as the deepstack mergers have it.
    AfterMerge,
}

/// Names of the norm and of the two linear layers of a merger.
pub(super) fn merger_parts(kind: &VisionKind) -> [&'static str; 3] {
    match kind {
        VisionKind::Learned { .. } => ["norm", "linear_fc1", "linear_fc2"],
        VisionKind::Windowed { .. } => ["ln_q", "mlp.0", "mlp.2"],
    }
}

/// Norm, spatial merge, two-layer MLP with an exact GELU.
pub(super) struct Merger {
    norm: Norm,
    place: NormPlace,
    fc1: Linear,
    fc2: Linear,
    patches_per_token: usize,
}

/// The tensors that the backward of a merger needs.
pub(super) struct SavedMerger {
    x: Tensor, // [P, Dv] or [M, 4 * Dv], the norm's input
    stats: Tensor,
    hidden: Tensor, // [M, 4 * Dv], before the GELU
}

impl Merger {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        place: NormPlace,
        kind: &VisionKind,
        patches_per_token: usize,
    ) -> std::result::Result<Self, WeightError> {
        let [norm, fc1, fc2] = merger_parts(kind).map(|part| format!("{name}.{part}"));
        Ok(Self {
            norm: Norm::new(params, &norm, kind)?,
            place,
            fc1: Linear::with_bias(params, &fc1)?,
            fc2: Linear::with_bias(params, &fc2)?,
            patches_per_token,
        })
    }

    fn merged(&self, x: &Tensor) -> Result<Tensor> {
        let n = self.patches_per_token;
        let (patches, width) = x.dims2()?;
        x.reshape((patches / n, n * width)) // [M, 4 * Dv], the same memory
    }
}

impl Stage for Merger {
    type Context = ();
    type Saved = SavedMerger;

    fn params(&self) -> Vec<&Param> {
        self.norm.params().into_iter().chain(self.fc1.params()).chain(self.fc2.params()).collect()
    }

    fn forward(&self, x: &Tensor, (): &()) -> Result<(Tensor, SavedMerger)> {
        let x = match self.place {
            NormPlace::BeforeMerge => x.clone(),
            NormPlace::AfterMerge => self.merged(x)?,
        };
        let (normed, stats) = self.norm.forward(&x)?;
        let normed = match self.place {
            NormPlace::BeforeMerge => self.merged(&normed)?, // [M, 4 * Dv]
            NormPlace::AfterMerge => normed,
        };
        let hidden = self.fc1.forward(&normed)?;
        let y = self.fc2.forward(&kernels::gelu(&hidden, Gelu::Erf)?)?; // [M, D]
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
        let d_fc2 = self.fc2.output_grad(&dy)?;
        let d_activated = self.fc2.backward_input(&d_fc2)?; // [M, 4 * Dv]
        let recompute = self.fc2.recompute_input(grads);
        let (d_hidden, activated) =
            kernels::gelu_backward(hidden, d_activated, Gelu::Erf, recompute)?;
        if let Some(activated) = activated {
            self.fc2.backward_params(&activated, &dy, &d_fc2, grads)?;
        }
        let normed = self.norm.apply(&x, &stats)?;
        let merged = match self.place {
            NormPlace::BeforeMerge => self.merged(&normed)?,
            NormPlace::AfterMerge => normed,
        };
        let d_merged = self.fc1.backward(&merged, &d_hidden, grads)?; // [M, 4 * Dv]
        let d_normed = d_merged.reshape(x.shape())?;
        let dx = self.norm.backward(&x, &stats, &d_normed, None, grads)?;
        match input_grad {
            InputGrad::Skip => Ok(None),
            InputGrad::Needed => {
                let n = self.patches_per_token;
                let (tokens, width) = d_merged.dims2()?;
                dx.reshape((tokens * n, width / n)).map(Some) // [P, Dv]
            }
        }
    }
}
