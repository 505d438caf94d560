use super::config::VisionKind;
use crate::nn::{LayerNorm, ParamMap, RmsNorm, WeightError};
use crate::tape::{GradSink, Param};
use candle_core::{Result, Tensor};

pub(super) const EPS: f64 = 1e-6;

/// A norm of rows. Its statistics are what backward needs besides the input.
pub(super) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        kind: &VisionKind,
    ) -> std::result::Result<Self, WeightError> {
        Ok(match kind {
            VisionKind::Learned { .. } => Self::Layer(LayerNorm::new(params, name, EPS)?),
            VisionKind::Windowed { .. } => Self::Rms(RmsNorm::new(params, name, EPS)?),
        })
    }

    pub(super) fn params(&self) -> Vec<&Param> {
        match self {
            Self::Layer(norm) => norm.params().to_vec(),
            Self::Rms(norm) => vec![norm.param()],
        }
    }

    /// Output and statistics.
    pub(super) fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.normed(x),
        }
    }

    /// Recomputes the output from saved statistics.
    pub(super) fn apply(&self, x: &Tensor, stats: &Tensor) -> Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.apply(x, stats),
            Self::Rms(norm) => norm.apply(x, stats),
        }
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
        match self {
            Self::Layer(norm) => norm.backward(x, stats, dy, residual, grads),
            Self::Rms(norm) => norm.backward_add(x, stats, dy, residual, grads),
        }
    }
}
