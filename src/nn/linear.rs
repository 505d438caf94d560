//! A linear layer and its backward. `Linear` skips the gradients of frozen parameters, so other
//! blocks need no check.

use super::adapter::{Adapter, OutputGrad};
use super::params::{ParamMap, WeightError};
use crate::ops::{self, RecomputeInput};
use crate::tape::{GradSink, Param};
use candle_core::{Result, Tensor};

/// `y = x W^T (+ b)`, `W: [M, K]`, with or without an adapter.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Param,
    bias: Option<Param>,
    adapter: Option<Adapter>,
}

impl Linear {
    /// A layer with the parameters `<name>.weight` and `<name>.bias`.
    pub(crate) fn with_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let bias = Some(params.get(&format!("{name}.bias"))?);
        Ok(Self { bias, ..Self::without_bias(params, name)? })
    }

    /// A layer with the parameter `<name>.weight` and no bias.
    pub(crate) fn without_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        Ok(Self { weight, bias: None, adapter: Adapter::find(params, name)? })
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        let adapter = self.adapter.iter().flat_map(Adapter::params);
        std::iter::once(&self.weight).chain(&self.bias).chain(adapter)
    }

    fn compute(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let (weight, bias) = (self.weight.tensor(), self.bias.as_ref().map(Param::tensor));
        match (&self.adapter, residual) {
            (Some(adapter), _) => adapter.forward(x, &weight, bias.as_ref(), residual),
            (None, Some(residual)) => ops::linear_add(x, &weight, bias.as_ref(), residual),
            (None, None) => ops::linear(x, &weight, bias.as_ref()),
        }
    }

    /// Returns `y: [N, M]` for `x: [N, K]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x, None)
    }

    /// `y + residual`, both `[N, M]`.
    pub(crate) fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.compute(x, Some(residual))
    }

    /// Whether the backward of the elementwise op that computes `x` must also compute `x` again:
    /// only parameter gradients need it.
    pub(crate) fn recompute_input(&self, grads: &dyn GradSink) -> RecomputeInput {
        let trains = self.params().any(|param| grads.buffer(param).is_some());
        if trains { RecomputeInput::Yes } else { RecomputeInput::No }
    }

    /// What both halves of the backward need of `dy: [N, M]`.
    pub(crate) fn output_grad(&self, dy: &Tensor) -> Result<OutputGrad> {
        match &self.adapter {
            Some(adapter) => adapter.output_grad(dy, &self.weight.tensor()),
            None => Ok(OutputGrad { product: dy.clone(), adapter: None }),
        }
    }

    /// Returns `dx: [N, K]`, without parameter gradients.
    pub(crate) fn backward_input(&self, d: &OutputGrad) -> Result<Tensor> {
        self.input_gradient(d, None)
    }

    /// The gradient of the input, `[N, K]`, added to `dx` in place if given.
    fn input_gradient(&self, d: &OutputGrad, dx: Option<Tensor>) -> Result<Tensor> {
        let weight = self.weight.tensor();
        match (&self.adapter, &d.adapter, dx) {
            (Some(adapter), Some(of), dx) => adapter.backward_input(&d.product, of, &weight, dx),
            (_, _, Some(dx)) => ops::linear_backward_input_add(&d.product, &weight, dx),
            (_, _, None) => ops::linear_backward_input(&d.product, &weight),
        }
    }

    /// Adds the parameter gradients for `x: [N, K]` and `dy: [N, M]`, without `dx`.
    pub(crate) fn backward_params(
        &self,
        x: &Tensor,
        dy: &Tensor,
        d: &OutputGrad,
        grads: &dyn GradSink,
    ) -> Result<()> {
        if let Some(dw) = grads.buffer(&self.weight) {
            ops::linear_backward_weight(x, &d.product, dw)?;
        }
        if let Some(db) = self.bias.as_ref().and_then(|bias| grads.buffer(bias)) {
            ops::bias_backward(dy, db)?;
        }
        if let (Some(adapter), Some(of)) = (&self.adapter, &d.adapter) {
            let weight = self.weight.tensor();
            adapter.backward_params(x, dy, (&d.product, of), &weight, grads)?;
        }
        Ok(())
    }

    /// Adds the parameter gradients and returns `dx: [N, K]`.
    pub(crate) fn backward(&self, x: &Tensor, dy: &Tensor, grads: &dyn GradSink) -> Result<Tensor> {
        let d = self.output_grad(dy)?;
        self.backward_params(x, dy, &d, grads)?;
        self.backward_input(&d)
    }

    /// Adds the parameter gradients, and adds `dy W` to `dx` in place.
    pub(crate) fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        dx: Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let d = self.output_grad(dy)?;
        self.backward_params(x, dy, &d, grads)?;
        self.input_gradient(&d, Some(dx))
    }
}
