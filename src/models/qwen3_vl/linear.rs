//! A projection and its backward: which gradients are due is asked of the sink, once, here.

use super::params::{ParamMap, WeightError};
use crate::ops::{self, RecomputeInput};
use crate::tape::{GradSink, Param};
use candle_core::{Result, Tensor};

/// `y = x W^T (+ b)`, `W: [M, K]`.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    weight: Param,
    bias: Option<Param>,
}

impl Linear {
    /// `<name>.weight` and `<name>.bias`.
    pub(super) fn with_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let bias = Some(params.get(&format!("{name}.bias"))?);
        Ok(Self { weight: params.get(&format!("{name}.weight"))?, bias })
    }

    /// `<name>.weight` alone.
    pub(super) fn without_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        Ok(Self { weight: params.get(&format!("{name}.weight"))?, bias: None })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(Param::tensor)
    }

    /// `x: [N, K]` to `[N, M]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, self.weight.tensor(), self.bias())
    }

    /// The same, added to `residual: [N, M]`.
    pub(super) fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        ops::linear_add(x, self.weight.tensor(), self.bias(), residual)
    }

    /// What the elementwise op that gives `x` computes again in its backward: `x`, if a parameter gradient is due.
    pub(super) fn input_again(&self, grads: &dyn GradSink) -> RecomputeInput {
        let trains = self.params().any(|param| grads.buffer(param).is_some());
        if trains { RecomputeInput::Yes } else { RecomputeInput::No }
    }

    /// `dx: [N, K]` alone.
    pub(super) fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        ops::linear_backward_input(dy, self.weight.tensor())
    }

    /// Parameter gradients alone, for `x: [N, K]` and `dy: [N, M]`.
    pub(super) fn backward_params(
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

    /// Parameter gradients, and `dx: [N, K]`.
    pub(super) fn backward(&self, x: &Tensor, dy: &Tensor, grads: &dyn GradSink) -> Result<Tensor> {
        self.backward_params(x, dy, grads)?;
        self.backward_input(dy)
    }

    /// Parameter gradients, and `dx + dy W` in the memory of `dx`.
    pub(super) fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        dx: Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        self.backward_params(x, dy, grads)?;
        ops::linear_backward_input_add(dy, self.weight.tensor(), dx)
    }
}
