//! Spatial merge: four neighbouring patches become one token of the language model.
//!
//! The norm is before the merge or after it.

use super::config::{MergerParts, NormPlace};
use super::gelu_mlp::backward_of_gelu;
use crate::nn::{Linear, Norm, ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor};
use kernels::Gelu;

/// Norm, spatial merge, two-layer MLP with an exact GELU.
pub(super) struct Merger {
    norm: Norm,
    place: NormPlace,
    fc1: Linear,
    fc2: Linear,
    patches_per_token: usize,
}

impl Merger {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        parts: &MergerParts,
        patches_per_token: usize,
    ) -> std::result::Result<Self, WeightError> {
        let [norm, fc1, fc2] = parts.layers.map(|part| format!("{name}.{part}"));
        Ok(Self {
            norm: parts.norm.build(params, &norm, parts.eps)?,
            place: parts.place,
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

    fn params(&self) -> Vec<&Param> {
        self.norm.params().chain(self.fc1.params()).chain(self.fc2.params()).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [P, Dv]
        (): &(),
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let x = match self.place {
            NormPlace::BeforeMerge => x.clone(),
            NormPlace::AfterMerge => self.merged(x)?,
        };
        let (normed, stats) = self.norm.normed(&x, pass)?;
        let normed = match self.place {
            NormPlace::BeforeMerge => self.merged(&normed)?, // [M, 4 * Dv]
            NormPlace::AfterMerge => normed,
        };
        let hidden = self.fc1.forward(&normed, pass)?; // [M, 4 * Dv] or [M, D]
        let y = self.fc2.forward(&kernels::gelu(&hidden, Gelu::Erf)?, pass)?; // [M, D]
        Ok((y, Saved::new([x, stats, hidden])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [M, D]
        (): &(),
        input_grad: InputGrad,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, stats, hidden] = saved.tensors()?;
        let d_hidden = backward_of_gelu(hidden, &dy, Gelu::Erf, &self.fc2, pass)?; // as `hidden`
        let normed = self.norm.apply(&x, &stats, pass)?;
        let merged = match self.place {
            NormPlace::BeforeMerge => self.merged(&normed)?,
            NormPlace::AfterMerge => normed,
        };
        let d_merged = self.fc1.backward(&merged, &d_hidden, pass)?; // [M, 4 * Dv]
        let d_normed = d_merged.reshape(x.shape())?;
        let dx = self.norm.backward_add(&x, &stats, &d_normed, None, pass)?;
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
