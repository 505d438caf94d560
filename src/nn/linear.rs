//! A linear layer and its backward. `Linear` skips the gradients of frozen parameters, so other
//! blocks need no check.

use super::params::{ParamMap, WeightError};
use crate::ops::{self, RecomputeInput};
use crate::tape::{GradSink, Param};
use candle_core::{Result, Tensor};

/// `y = x W^T (+ b)`, `W: [M, K]`.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Param,
    bias: Option<Param>,
}

impl Linear {
    /// A layer with the parameters `<name>.weight` and `<name>.bias`.
    pub(crate) fn with_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let bias = Some(params.get(&format!("{name}.bias"))?);
        Ok(Self { weight: params.get(&format!("{name}.weight"))?, bias })
    }

    /// A layer with the parameter `<name>.weight` and no bias.
    pub(crate) fn without_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        Ok(Self { weight: params.get(&format!("{name}.weight"))?, bias: None })
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    fn bias(&self) -> Option<Tensor> {
        self.bias.as_ref().map(Param::tensor)
    }

    /// Returns `y: [N, M]` for `x: [N, K]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, &self.weight.tensor(), self.bias().as_ref())
    }

    /// `y + residual`, both `[N, M]`.
    pub(crate) fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        ops::linear_add(x, &self.weight.tensor(), self.bias().as_ref(), residual)
    }

    /// Whether the backward of the elementwise op that computes `x` must also compute `x` again:
    /// only parameter gradients need it.
    pub(crate) fn recompute_input(&self, grads: &dyn GradSink) -> RecomputeInput {
        let trains = self.params().any(|param| grads.buffer(param).is_some());
        if trains { RecomputeInput::Yes } else { RecomputeInput::No }
    }

    /// Returns `dx: [N, K]`, without parameter gradients.
    pub(crate) fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        ops::linear_backward_input(dy, &self.weight.tensor())
    }

    /// Adds the parameter gradients for `x: [N, K]` and `dy: [N, M]`, without `dx`.
    pub(crate) fn backward_params(
        &self,
        x: &Tensor,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<()> {
        if let Some(dw) = grads.buffer(&self.weight) {
            ops::linear_backward_weight(x, dy, dw)?;
        }
        if let Some(db) = self.bias.as_ref().and_then(|bias| grads.buffer(bias)) {
            ops::bias_backward(dy, db)?;
        }
        Ok(())
    }

    /// Adds the parameter gradients and returns `dx: [N, K]`.
    pub(crate) fn backward(&self, x: &Tensor, dy: &Tensor, grads: &dyn GradSink) -> Result<Tensor> {
        self.backward_params(x, dy, grads)?;
        self.backward_input(dy)
    }

    /// Adds the parameter gradients, and adds `dy W` to `dx` in place.
    pub(crate) fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        dx: Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        self.backward_params(x, dy, grads)?;
        ops::linear_backward_input_add(dy, &self.weight.tensor(), dx)
    }
}
