//! The second half of a decoder layer, and of a block of some vision encoders: RMS norm, SwiGLU,
//! residual.

use super::config::DecoderConfig;
use super::linear::{Linear, backward_of};
use super::norm::Norm;
use super::params::WeightError;
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor};
use kernels::RecomputeInput;

/// `x + down(silu(gate(norm(x))) * up(norm(x)))`.
pub(crate) struct MlpBlock {
    norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl MlpBlock {
    /// `linear` makes a linear layer from the last part of its name.
    pub(crate) fn new(
        norm: Norm,
        linear: impl Fn(&str) -> std::result::Result<Linear, WeightError>,
    ) -> std::result::Result<Self, WeightError> {
        let (gate, up) = (linear("gate_proj")?, linear("up_proj")?);
        Ok(Self { norm, gate, up, down: linear("down_proj")? })
    }
}

/// Bytes that backward needs of a token.
pub(super) fn saved_bytes(config: &DecoderConfig, element: f64, recompute: Recompute) -> f64 {
    let inner = match recompute {
        Recompute::Nothing => 3, // `gate`, `up`, and the output of SwiGLU
        Recompute::Cheap | Recompute::Stage => 2,
    };
    element * (config.hidden_size + inner * config.intermediate_size) as f64 + 4.0 // and `rstd`
}

impl Stage for MlpBlock {
    type Context = ();

    fn params(&self) -> Vec<&Param> {
        let linears = [&self.gate, &self.up, &self.down];
        self.norm.params().chain(linears.into_iter().flat_map(Linear::params)).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [T, D]
        (): &(),
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, rstd) = self.norm.normed(x, pass)?;
        let gate = self.gate.forward(&normed, pass)?; // [T, F]
        let up = self.up.forward(&normed, pass)?; // [T, F]
        let activated = kernels::swiglu(&gate, &up)?; // [T, F]
        let y = self.down.forward_add(&activated, x, pass)?; // [T, D]
        let activated = (recompute == Recompute::Nothing).then_some(activated);
        Ok((y, Saved::new([x.clone(), rstd, gate, up]).with_optional([activated])))
    }

    /// Each buffer is dropped after its last use, to lower peak memory.
    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [T, D]
        (): &(),
        _input_grad: InputGrad, // always computed: the residual needs it
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, rstd, gate, up] = saved.tensors()?;
        let [activated] = saved.optional()?;
        let d_down = self.down.output_grad(&dy, pass)?;
        let d_activated = self.down.backward_input(&d_down, pass)?; // [T, F]
        let recompute = match &activated {
            Some(_) => RecomputeInput::No,
            None => self.down.recompute_input(pass),
        };
        let (d_gate, d_up, again) = kernels::swiglu_backward(gate, up, d_activated, recompute)?; // [T, F]
        if let Some(activated) = activated.or(again) {
            self.down.backward_params(&activated, &dy, &d_down, pass)?;
        }
        let normed = self.norm.apply(&x, &rstd, pass)?; // [T, D]
        let layers = [&self.gate, &self.up];
        let d_normed = backward_of(layers, &normed, [d_gate, d_up], pass)?; // [T, D]
        drop(normed);
        self.norm.backward_add(&x, &rstd, &d_normed, Some(&dy), pass).map(Some) // [T, D]
    }
}
