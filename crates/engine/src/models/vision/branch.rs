//! The end of a residual branch of a vision block: its last linear layer, learned factors of the
//! layer's output in some encoders, and the sum with the residual.

use crate::nn::{Linear, ParamMap, WeightError};
use crate::tape::{Param, Pass};
use candle_core::{Result, Tensor, bail};

/// `x + scale * linear(h)`, or `x + linear(h)`.
pub(super) struct BranchEnd {
    pub(super) linear: Linear,
    scale: Option<Param>, // [Dv]
}

impl BranchEnd {
    /// `scale` is the name of the factors.
    pub(super) fn new(
        linear: Linear,
        params: &ParamMap<'_>,
        scale: Option<String>,
    ) -> std::result::Result<Self, WeightError> {
        Ok(Self { linear, scale: scale.map(|name| params.get(&name)).transpose()? })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        self.linear.params().chain(&self.scale)
    }

    /// Returns the sum `[R, Dv]` for `h: [R, F]` and `x: [R, Dv]`, and the output of the layer if the
    /// gradient of the factors needs it.
    pub(super) fn forward(
        &self,
        h: &Tensor,
        x: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(scale) = &self.scale else {
            return Ok((self.linear.forward_add(h, x, pass)?, None));
        };
        let f = self.linear.forward(h, pass)?;
        let y = kernels::layer_scale_add(&f, &pass.weight(scale)?, x)?;
        Ok((y, pass.grad(scale).is_some().then_some(f)))
    }

    /// The gradient of the layer's output from that of the sum, both `[R, Dv]`. Adds the gradient of
    /// the factors; `f` is the output that [`Self::forward`] has returned.
    pub(super) fn output_grad(
        &self,
        f: Option<&Tensor>,
        dy: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let Some(scale) = &self.scale else { return Ok(dy.clone()) };
        let sums = match (f, pass.grad(scale)) {
            (Some(f), Some(d_scale)) => Some((f, d_scale)),
            (None, Some(_)) => bail!("the output that a layer scale multiplies was not saved"),
            (_, None) => None,
        };
        kernels::layer_scale_backward(&pass.weight(scale)?, dy, sums)
    }
}
