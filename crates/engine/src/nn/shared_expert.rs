//! The expert of Qwen3.5 that computes every token, times the sigmoid of a gate.
//!
//! Shapes: `T` tokens, `D` hidden size, `F` width of the expert.
//!
//! ```text
//! s = sigmoid(h W_gate^T)                  [T, 1], in f32
//! y = down(s silu(gate(h)) up(h))          [T, D]
//! ```

use super::linear::Linear;
use super::params::{ParamMap, WeightError};
use crate::tape::{Param, Pass, Saved};
use candle_core::{D, DType, Result, Tensor};
use kernels::RecomputeInput;

pub(super) struct SharedExpert {
    gate: Linear,
    up: Linear,
    down: Linear,
    /// `[1, D]`.
    sigmoid: Linear,
}

impl SharedExpert {
    /// The expert with the module `name`, and the linear layer `gate` of its gate.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        gate: &str,
    ) -> std::result::Result<Self, WeightError> {
        let linear = |part: &str| {
            let linear = Linear::without_bias(params, &format!("{name}.{part}"))?;
            Ok::<_, WeightError>(linear.of_decoder(params))
        };
        Ok(Self {
            gate: linear("gate_proj")?,
            up: linear("up_proj")?,
            down: linear("down_proj")?,
            sigmoid: Linear::without_bias(params, gate)?,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        [&self.gate, &self.up, &self.down, &self.sigmoid].into_iter().flat_map(Linear::params)
    }

    /// The output for `h: [T, D]`, added to `y: [T, D]`.
    pub(super) fn forward_add(
        &self,
        h: &Tensor,
        y: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let gate = self.gate.forward(h, pass)?; // [T, F]
        let up = self.up.forward(h, pass)?; // [T, F]
        let share = sigmoid(&self.sigmoid.forward(h, pass)?.to_dtype(DType::F32)?)?; // [T, 1]
        let activated = times(&kernels::swiglu(&gate, &up)?, &share)?; // [T, F]
        let y = self.down.forward_add(&activated, y, pass)?; // [T, D]
        Ok((y, Saved::new([gate, up, share])))
    }

    /// Adds the gradients of the parameters, and adds that of `h: [T, D]` to `dh`.
    pub(super) fn backward_add(
        &self,
        mut saved: Saved,
        h: &Tensor,
        dy: &Tensor,
        dh: Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let [gate, up, share] = saved.tensors()?;
        let activated = kernels::swiglu(&gate, &up)?; // [T, F]
        let d_down = self.down.output_grad(dy, pass)?;
        let d_scaled = self.down.backward_input(&d_down, pass)?; // [T, F]
        self.down.backward_params(&times(&activated, &share)?, dy, &d_down, pass)?;
        let wide = |x: &Tensor| x.to_dtype(DType::F32);
        let d_share = (wide(&d_scaled)? * wide(&activated)?)?.sum_keepdim(D::Minus1)?; // [T, 1]
        drop(activated);
        let slope = (&share * (1.0 - &share)?)?;
        let d_sigmoid = (d_share * slope)?.to_dtype(h.dtype())?; // [T, 1]
        let d_activated = times(&d_scaled, &share)?; // [T, F]
        drop(d_scaled);
        let (d_gate, d_up, _) =
            kernels::swiglu_backward(gate, up, d_activated, RecomputeInput::No)?; // [T, F]
        let dh = self.gate.backward_add(h, &d_gate, dh, pass)?;
        let dh = self.up.backward_add(h, &d_up, dh, pass)?;
        self.sigmoid.backward_add(h, &d_sigmoid, dh, pass)
    }
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// Rows of `x [T, F]` times `share [T, 1]`, in the dtype of `x`.
fn times(x: &Tensor, share: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.broadcast_mul(share)?.to_dtype(x.dtype())
}
