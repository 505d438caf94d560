//! Spatial merge: neighbouring rows become one token of the language model, or one row of the later
//! blocks.
//!
//! The norm is before the merge or after it.

use super::config::{MergerParts, NormPlace};
use super::gelu_mlp::backward_of_gelu;
use super::input::TableRows;
use crate::nn::{Linear, Norm, ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor};
use kernels::Gelu;

/// The mean of each four rows that follow each other.
pub(super) struct MeanOfFour {
    pub(super) rows: TableRows,   // [M, 4] the four rows
    pub(super) spread: TableRows, // [4 * M, 4] for each row, its mean
}

impl MeanOfFour {
    /// Returns `y` plus the means of `x`; `[M, Dv]` and `[4 * M, Dv]`.
    pub(super) fn add_to(&self, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        kernels::interpolate_rows_add(x, &self.rows.index, &self.rows.weight, y)
    }

    /// The gradient of `x`, `[4 * M, Dv]`: a quarter of that of its mean.
    pub(super) fn input_grad(&self, dy: &Tensor) -> Result<Tensor> {
        kernels::interpolate_rows(dy, &self.spread.index, &self.spread.weight)
    }
}

/// Norm, spatial merge, two-layer MLP with a GELU.
pub(super) struct Merger {
    norm: Norm,
    place: NormPlace,
    fc1: Linear,
    fc2: Linear,
    act: Gelu,
    merged: usize, // number of rows that become one
}

impl Merger {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        parts: &MergerParts,
        act: Gelu,
        merged: usize,
    ) -> std::result::Result<Self, WeightError> {
        let [norm, fc1, fc2] = parts.layers.map(|part| format!("{name}.{part}"));
        Ok(Self {
            norm: parts.norm.build(params, &norm, parts.eps)?,
            place: parts.place,
            fc1: Linear::with_bias(params, &fc1)?,
            fc2: Linear::with_bias(params, &fc2)?,
            act,
            merged,
        })
    }

    fn merged(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        x.reshape((rows / self.merged, self.merged * width)) // [M, 4 * Dv], the same memory
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
        let y = self.fc2.forward(&kernels::gelu(&hidden, self.act)?, pass)?; // [M, D]
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
        let d_hidden = backward_of_gelu(hidden, &dy, self.act, &self.fc2, pass)?; // as `hidden`
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
                let (tokens, width) = d_merged.dims2()?;
                dx.reshape((tokens * self.merged, width / self.merged)).map(Some) // [P, Dv]
            }
        }
    }
}
