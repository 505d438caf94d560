//! The second half of a vision block: norm, MLP, residual.

use super::config::VisionKind;
use super::norm::Norm;
use crate::nn::{Linear, MlpBlock, ParamMap, RmsNorm, SavedMlp, WeightError};
use crate::tape::{CheapTensors, GradSink, Param};
use candle_core::{Result, Tensor, bail};
use kernels::Gelu;

/// `x + mlp(norm(x))`.
#[expect(clippy::large_enum_variant, reason = "a model has one of them for each vision block")]
pub(super) enum VisionMlp {
    Gelu { norm: Norm, fc1: Linear, fc2: Linear, act: Gelu },
    SwiGlu(MlpBlock),
}

/// The tensors that the backward of a [`VisionMlp`] needs.
pub(super) enum SavedVisionMlp {
    Gelu {
        x: Tensor,      // [P, Dv]
        stats: Tensor,  // [P, 2]
        hidden: Tensor, // [P, F], before the GELU
    },
    SwiGlu(SavedMlp),
}

impl VisionMlp {
    /// `name` is the prefix of the block's parameter names.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        kind: &VisionKind,
    ) -> std::result::Result<Self, WeightError> {
        let norm = format!("{name}.norm2");
        let linear = |part: &str| Linear::with_bias(params, &format!("{name}.mlp.{part}"));
        Ok(match kind {
            VisionKind::Learned { hidden_act, .. } => Self::Gelu {
                norm: Norm::new(params, &norm, kind)?,
                fc1: linear("linear_fc1")?,
                fc2: linear("linear_fc2")?,
                act: *hidden_act,
            },
            VisionKind::Windowed { .. } => {
                let norm = RmsNorm::new(params, &norm, super::norm::EPS)?;
                Self::SwiGlu(MlpBlock::new(norm, linear)?)
            }
        })
    }

    pub(super) fn params(&self) -> Vec<&Param> {
        match self {
            Self::Gelu { norm, fc1, fc2, .. } => {
                norm.params().into_iter().chain(fc1.params()).chain(fc2.params()).collect()
            }
            Self::SwiGlu(block) => block.params().collect(),
        }
    }

    /// `x: [P, Dv]` to `[P, Dv]`.
    pub(super) fn forward(&self, x: Tensor) -> Result<(Tensor, SavedVisionMlp)> {
        match self {
            Self::Gelu { norm, fc1, fc2, act } => {
                let (normed, stats) = norm.forward(&x)?;
                let hidden = fc1.forward(&normed)?; // [P, F]
                let y = fc2.forward_add(&kernels::gelu(&hidden, *act)?, &x)?; // [P, Dv]
                Ok((y, SavedVisionMlp::Gelu { x, stats, hidden }))
            }
            Self::SwiGlu(block) => {
                let (y, saved) = block.forward(&x, CheapTensors::Recompute)?;
                Ok((y, SavedVisionMlp::SwiGlu(saved)))
            }
        }
    }

    /// Returns `dx: [P, Dv]`.
    pub(super) fn backward(
        &self,
        saved: SavedVisionMlp,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        match (self, saved) {
            (Self::Gelu { norm, fc1, fc2, act }, SavedVisionMlp::Gelu { x, stats, hidden }) => {
                let d_fc2 = fc2.output_grad(dy)?;
                let d_activated = fc2.backward_input(&d_fc2)?; // [P, F]
                let recompute = fc2.recompute_input(grads);
                let (d_hidden, activated) =
                    kernels::gelu_backward(hidden, d_activated, *act, recompute)?;
                if let Some(activated) = activated {
                    fc2.backward_params(&activated, dy, &d_fc2, grads)?;
                }
                let normed = norm.apply(&x, &stats)?;
                let d_normed = fc1.backward(&normed, &d_hidden, grads)?; // [P, Dv]
                norm.backward(&x, &stats, &d_normed, Some(dy), grads)
            }
            (Self::SwiGlu(block), SavedVisionMlp::SwiGlu(saved)) => {
                block.backward(saved, dy, grads)
            }
            _ => bail!("the saved tensors belong to a block of another kind"),
        }
    }
}
