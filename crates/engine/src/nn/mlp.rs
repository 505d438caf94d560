//! The second half of a decoder layer, and of a block of some vision encoders: RMS norm, SwiGLU,
//! residual.

use super::linear::{Linear, backward_of};
use super::norm::RmsNorm;
use super::params::WeightError;
use crate::tape::{CheapTensors, GradSink, Param};
use candle_core::{Result, Tensor};
use kernels::RecomputeInput;

/// `x + down(silu(gate(norm(x))) * up(norm(x)))`.
pub(crate) struct MlpBlock {
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The tensors that backward needs.
pub(crate) struct SavedMlp {
    x: Tensor,                 // [T, D]
    rstd: Tensor,              // [T]
    gate: Tensor,              // [T, F]
    up: Tensor,                // [T, F]
    activated: Option<Tensor>, // [T, F]
}

impl MlpBlock {
    /// `linear` makes a linear layer from the last part of its name.
    pub(crate) fn new(
        norm: RmsNorm,
        linear: impl Fn(&str) -> std::result::Result<Linear, WeightError>,
    ) -> std::result::Result<Self, WeightError> {
        let (gate, up) = (linear("gate_proj")?, linear("up_proj")?);
        Ok(Self { norm, gate, up, down: linear("down_proj")? })
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        let linears = [&self.gate, &self.up, &self.down];
        std::iter::once(self.norm.param()).chain(linears.into_iter().flat_map(Linear::params))
    }

    /// `x: [T, D]` to `[T, D]`.
    pub(crate) fn forward(&self, x: &Tensor, cheap: CheapTensors) -> Result<(Tensor, SavedMlp)> {
        let (normed, rstd) = self.norm.normed(x)?;
        let (gate, up) = (self.gate.forward(&normed)?, self.up.forward(&normed)?); // [T, F]
        let activated = kernels::swiglu(&gate, &up)?; // [T, F]
        let y = self.down.forward_add(&activated, x)?; // [T, D]
        let activated = (cheap == CheapTensors::Keep).then_some(activated);
        Ok((y, SavedMlp { x: x.clone(), rstd, gate, up, activated }))
    }

    /// Returns `dx: [T, D]`. Each buffer is dropped after its last use, to lower peak memory.
    pub(crate) fn backward(
        &self,
        SavedMlp { x, rstd, gate, up, activated }: SavedMlp,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let d_down = self.down.output_grad(dy)?;
        let d_activated = self.down.backward_input(&d_down)?; // [T, F]
        let recompute = match &activated {
            Some(_) => RecomputeInput::No,
            None => self.down.recompute_input(grads),
        };
        let (d_gate, d_up, again) = kernels::swiglu_backward(gate, up, d_activated, recompute)?; // [T, F]
        if let Some(activated) = activated.or(again) {
            self.down.backward_params(&activated, dy, &d_down, grads)?;
        }
        let normed = self.norm.apply(&x, &rstd)?; // [T, D]
        let layers = [&self.gate, &self.up];
        let d_normed = backward_of(layers, &normed, [d_gate, d_up], grads)?; // [T, D]
        drop(normed);
        self.norm.backward_add(&x, &rstd, &d_normed, Some(dy), grads) // [T, D]
    }
}
