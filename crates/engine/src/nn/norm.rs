use super::config::DecoderConfig;
use super::params::{ParamMap, WeightError};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};
use kernels::NormScale;

/// RMS norm of rows. As a stage, it is the decoder's final norm.
pub(crate) struct RmsNorm {
    weight: Param, // [D]
    scale: NormScale,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn of_decoder(
        params: &ParamMap<'_>,
        name: &str,
        config: &DecoderConfig,
    ) -> std::result::Result<Self, WeightError> {
        let norm = Self::new(params, name, config.rms_norm_eps)?;
        Ok(Self { scale: config.norm_scale(), ..norm })
    }

    /// A norm that multiplies by `<name>.weight`.
    pub(crate) fn new(
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        Ok(Self { weight, scale: NormScale::Weight, eps })
    }

    pub(crate) fn param(&self) -> &Param {
        &self.weight
    }

    /// Returns the normalised rows, and `rstd: [T]` for backward.
    pub(crate) fn normed(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        kernels::rms_norm(x, &self.weight.tensor(), self.scale, self.eps)
    }

    /// Recomputes the normalised rows from a saved `rstd`.
    pub(crate) fn apply(&self, x: &Tensor, rstd: &Tensor) -> Result<Tensor> {
        kernels::rms_norm_apply(x, rstd, &self.weight.tensor(), self.scale)
    }

    /// `dx + residual`.
    pub(crate) fn backward_add(
        &self,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let dw = grads.buffer(&self.weight);
        kernels::rms_norm_backward(x, rstd, &self.weight.tensor(), self.scale, dy, residual, dw)
    }
}

impl Stage for RmsNorm {
    type Context = ();
    type Saved = (Tensor, Tensor); // x [T, D], rstd [T]

    fn params(&self) -> Vec<&Param> {
        vec![&self.weight]
    }

    fn forward(&self, x: &Tensor, (): &()) -> Result<(Tensor, Self::Saved)> {
        let (y, rstd) = self.normed(x)?;
        Ok((y, (x.clone(), rstd)))
    }

    fn backward(
        &self,
        (x, rstd): Self::Saved,
        dy: Tensor,
        (): &(),
        grads: &dyn GradSink,
        _input_grad: InputGrad, // one pass over the rows computes both gradients
    ) -> Result<Option<Tensor>> {
        self.backward_add(&x, &rstd, &dy, None, grads).map(Some)
    }
}

/// Layer norm of rows.
#[derive(Debug, Clone)]
pub(crate) struct LayerNorm {
    weight: Param,
    bias: Param,
    eps: f64,
}

impl LayerNorm {
    pub(crate) fn new(
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        Ok(Self { weight, bias: params.get(&format!("{name}.bias"))?, eps })
    }

    pub(crate) fn params(&self) -> [&Param; 2] {
        [&self.weight, &self.bias]
    }

    /// Output, and the row statistics that backward needs.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        kernels::layer_norm(x, &self.weight.tensor(), &self.bias.tensor(), self.eps)
    }

    /// Recomputes the output from saved statistics.
    pub(crate) fn apply(&self, x: &Tensor, stats: &Tensor) -> Result<Tensor> {
        kernels::layer_norm_apply(x, stats, &self.weight.tensor(), &self.bias.tensor())
    }

    /// `dx + residual`.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let (dw, db) = (grads.buffer(&self.weight), grads.buffer(&self.bias));
        kernels::layer_norm_backward(x, stats, &self.weight.tensor(), dy, residual, dw, db)
    }
}
