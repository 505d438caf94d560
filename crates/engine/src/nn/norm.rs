use super::config::DecoderConfig;
use super::params::{ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor};
use kernels::NormScale;

/// A norm of rows: a layer norm if it has a bias, otherwise an RMS norm. As a stage, it is the
/// decoder's final norm.
pub(crate) struct Norm {
    weight: Param,       // [D]
    bias: Option<Param>, // [D]
    scale: NormScale,
    eps: f64,
}

impl Norm {
    pub(super) fn of_decoder(
        params: &ParamMap<'_>,
        name: &str,
        config: &DecoderConfig,
    ) -> std::result::Result<Self, WeightError> {
        let norm = Self::rms(params, name, config.rms_norm_eps)?;
        Ok(Self { scale: config.norm_scale, ..norm })
    }

    /// An RMS norm that multiplies by `<name>.weight`.
    pub(crate) fn rms(
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        Ok(Self { weight, bias: None, scale: NormScale::Weight, eps })
    }

    /// A layer norm with `<name>.weight` and `<name>.bias`.
    pub(crate) fn layer(
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Self, WeightError> {
        let bias = Some(params.get(&format!("{name}.bias"))?);
        Ok(Self { bias, ..Self::rms(params, name, eps)? })
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    /// Whether a parameter has a gradient buffer.
    pub(super) fn is_trained(&self, pass: &Pass<'_>) -> bool {
        self.params().any(|param| pass.grad(param).is_some())
    }

    /// Dtype of the weight.
    pub(super) fn dtype(&self) -> candle_core::DType {
        self.weight.dtype()
    }

    fn bias(&self, pass: &Pass<'_>) -> Result<Option<Tensor>> {
        self.bias.as_ref().map(|bias| pass.weight(bias)).transpose()
    }

    /// Returns the normalised rows, and their statistics for backward: `rstd [T]` of an RMS norm,
    /// mean and `rstd`, `[T, 2]`, of a layer norm.
    pub(crate) fn normed(&self, x: &Tensor, pass: &Pass<'_>) -> Result<(Tensor, Tensor)> {
        let weight = pass.weight(&self.weight)?;
        match self.bias(pass)? {
            Some(bias) => kernels::layer_norm(x, &weight, &bias, self.eps),
            None => kernels::rms_norm(x, &weight, self.scale, self.eps),
        }
    }

    /// Recomputes the normalised rows from saved statistics.
    pub(crate) fn apply(&self, x: &Tensor, stats: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let weight = pass.weight(&self.weight)?;
        match self.bias(pass)? {
            Some(bias) => kernels::layer_norm_apply(x, stats, &weight, &bias),
            None => kernels::rms_norm_apply(x, stats, &weight, self.scale),
        }
    }

    /// `dx + residual`. Adds the gradients of the parameters.
    pub(crate) fn backward_add(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let (weight, dw) = (pass.weight(&self.weight)?, pass.grad(&self.weight));
        match &self.bias {
            Some(bias) => {
                let db = pass.grad(bias);
                kernels::layer_norm_backward(x, stats, &weight, dy, residual, dw, db)
            }
            None => kernels::rms_norm_backward(x, stats, &weight, self.scale, dy, residual, dw),
        }
    }
}

impl Stage for Norm {
    type Context = ();

    fn params(&self) -> Vec<&Param> {
        Self::params(self).collect()
    }

    fn forward(
        &self,
        x: &Tensor,
        (): &(),
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (y, stats) = self.normed(x, pass)?;
        Ok((y, Saved::new([x.clone(), stats])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor,
        (): &(),
        _input_grad: InputGrad, // one pass over the rows computes both gradients
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, stats] = saved.tensors()?;
        self.backward_add(&x, &stats, &dy, None, pass).map(Some)
    }
}
