//! The decoder: pre-norm layers with q/k norm, interleaved M-RoPE, grouped-query attention and SwiGLU.

use super::TextConfig;
use super::input::TextContext;
use super::linear::Linear;
use super::params::{ParamMap, WeightError};
use crate::ops::{self, AttentionBackend, Masking, Qkv, QkvGrad};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// An RMS norm as a stage: the decoder's last.
pub(super) struct RmsNorm {
    weight: Param, // [D]
    eps: f64,
}

impl RmsNorm {
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Self, WeightError> {
        Ok(Self { weight: params.get(&format!("{name}.weight"))?, eps })
    }

    pub(super) fn param(&self) -> &Param {
        &self.weight
    }

    fn normed(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        ops::rms_norm(x, self.weight.tensor(), self.eps)
    }

    fn apply(&self, x: &Tensor, rstd: &Tensor) -> Result<Tensor> {
        ops::rms_norm_apply(x, rstd, self.weight.tensor())
    }

    fn backward_add(
        &self,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let dw = grads.buffer(&self.weight);
        ops::rms_norm_backward(x, rstd, self.weight.tensor(), dy, residual, dw)
    }
}

impl Stage for RmsNorm {
    type Context = TextContext;
    type Saved = (Tensor, Tensor); // x [T, D], rstd [T]

    fn forward(&self, x: &Tensor, _: &TextContext) -> Result<(Tensor, Self::Saved)> {
        let (y, rstd) = self.normed(x)?;
        Ok((y, (x.clone(), rstd)))
    }

    fn backward(
        &self,
        (x, rstd): Self::Saved,
        dy: Tensor,
        _: &TextContext,
        grads: &dyn GradSink,
        _input_grad: InputGrad, // the one pass over the rows gives both gradients
    ) -> Result<Option<Tensor>> {
        self.backward_add(&x, &rstd, &dy, None, grads).map(Some)
    }
}

/// One decoder layer.
pub(super) struct DecoderLayer {
    norm1: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Param, // [Dh]
    k_norm: Param, // [Dh]
    norm2: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    config: TextConfig,
    attention: Arc<dyn AttentionBackend>,
}

/// What a layer keeps. Rotated q and k are made again from their projections: one cheap pass.
pub(super) struct SavedLayer {
    x: Tensor,      // [T, D]
    rstd1: Tensor,  // [T]
    q_proj: Tensor, // [T, H * Dh]
    k_proj: Tensor, // [T, Hkv * Dh]
    v: Tensor,      // [T, Hkv, Dh]
    o: Tensor,      // [T, H, Dh]
    lse: Tensor,    // [H, T]
    x1: Tensor,     // [T, D], after attention
    rstd2: Tensor,  // [T]
    gate: Tensor,   // [T, F]
    up: Tensor,     // [T, F]
}

impl DecoderLayer {
    pub(super) fn new(
        params: &ParamMap<'_>,
        config: &TextConfig,
        layer: usize,
        attention: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let name = |part: &str| format!("model.language_model.layers.{layer}.{part}");
        let linear = |part: &str| Linear::without_bias(params, &name(part));
        Ok(Self {
            norm1: RmsNorm::new(params, &name("input_layernorm"), config.rms_norm_eps)?,
            q: linear("self_attn.q_proj")?,
            k: linear("self_attn.k_proj")?,
            v: linear("self_attn.v_proj")?,
            o: linear("self_attn.o_proj")?,
            q_norm: params.get(&name("self_attn.q_norm.weight"))?,
            k_norm: params.get(&name("self_attn.k_norm.weight"))?,
            norm2: RmsNorm::new(params, &name("post_attention_layernorm"), config.rms_norm_eps)?,
            gate: linear("mlp.gate_proj")?,
            up: linear("mlp.up_proj")?,
            down: linear("mlp.down_proj")?,
            config: config.clone(),
            attention,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        let norms = [self.norm1.param(), self.norm2.param(), &self.q_norm, &self.k_norm];
        let linears = [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down];
        norms.into_iter().chain(linears.into_iter().flat_map(Linear::params))
    }

    /// Norm and rotation of a projection `[T, H * Dh]`: the heads `[T, H, Dh]`, and `rstd: [T, H]`.
    fn rotate(&self, x: &Tensor, norm: &Param, context: &TextContext) -> Result<(Tensor, Tensor)> {
        ops::qk_norm_rope(x, norm.tensor(), self.config.rms_norm_eps, &context.rope)
    }

    fn kv_shape(&self, x: &Tensor) -> Result<(usize, usize, usize)> {
        Ok((x.dim(0)?, self.config.num_key_value_heads, self.config.head_dim))
    }

    /// Attention inputs of a row block, for generation: rotated q and k, and v.
    pub(super) fn project(
        &self,
        x: &Tensor,
        context: &TextContext,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (normed, _) = self.norm1.normed(x)?;
        let (q, _) = self.rotate(&self.q.forward(&normed)?, &self.q_norm, context)?; // [T, H, Dh]
        let (k, _) = self.rotate(&self.k.forward(&normed)?, &self.k_norm, context)?; // [T, Hkv, Dh]
        let v = self.v.forward(&normed)?.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        Ok((q, k, v))
    }

    /// The rest of the layer after attention gave `o: [T, H, Dh]`, for generation.
    pub(super) fn finish(&self, x: &Tensor, o: &Tensor) -> Result<Tensor> {
        let x1 = self.o.forward_add(&o.flatten_from(1)?, x)?; // [T, D]
        let (normed, _) = self.norm2.normed(&x1)?;
        let activated = ops::swiglu(&self.gate.forward(&normed)?, &self.up.forward(&normed)?)?;
        self.down.forward_add(&activated, &x1)
    }
}

impl Stage for DecoderLayer {
    type Context = TextContext;
    type Saved = SavedLayer;

    fn forward(&self, x: &Tensor, context: &TextContext) -> Result<(Tensor, SavedLayer)> {
        let (normed, rstd1) = self.norm1.normed(x)?; // [T, D]
        let q_proj = self.q.forward(&normed)?; // [T, H * Dh]
        let k_proj = self.k.forward(&normed)?; // [T, Hkv * Dh]
        let v = self.v.forward(&normed)?.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        let (o, lse) = {
            let (q, _) = self.rotate(&q_proj, &self.q_norm, context)?; // [T, H, Dh]
            let (k, _) = self.rotate(&k_proj, &self.k_norm, context)?; // [T, Hkv, Dh]
            let heads = Qkv { q: &q, k: &k, v: &v };
            self.attention.forward(heads, &context.segments, Masking::Causal)?
        };
        let x1 = self.o.forward_add(&o.flatten_from(1)?, x)?; // [T, D]
        let (normed, rstd2) = self.norm2.normed(&x1)?;
        let gate = self.gate.forward(&normed)?; // [T, F]
        let up = self.up.forward(&normed)?; // [T, F]
        let y = self.down.forward_add(&ops::swiglu(&gate, &up)?, &x1)?; // [T, D]
        let x = x.clone();
        Ok((y, SavedLayer { x, rstd1, q_proj, k_proj, v, o, lse, x1, rstd2, gate, up }))
    }

    fn backward(
        &self,
        saved: SavedLayer,
        dy: Tensor,
        context: &TextContext,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        // Each buffer goes as soon as it was used: what lives at one time is what a pack costs.
        let SavedLayer { x, rstd1, q_proj, k_proj, v, o, lse, x1, rstd2, gate, up } = saved;
        let d_activated = self.down.backward_input(&dy)?; // [T, F]
        let again = self.down.input_again(grads);
        let (d_gate, d_up, activated) = ops::swiglu_backward(gate, up, d_activated, again)?; // [T, F]
        if let Some(activated) = activated {
            self.down.backward_params(&activated, &dy, grads)?;
        }
        let normed = self.norm2.apply(&x1, &rstd2)?; // [T, D]
        let d_normed = self.gate.backward(&normed, &d_gate, grads)?; // [T, D]
        drop(d_gate);
        let d_normed = self.up.backward_add(&normed, &d_up, d_normed, grads)?;
        drop((normed, d_up));
        let dx1 = self.norm2.backward_add(&x1, &rstd2, &d_normed, Some(&dy), grads)?; // [T, D]
        drop((x1, rstd2, d_normed, dy));

        let d_o = self.o.backward(&o.flatten_from(1)?, &dx1, grads)?.reshape(o.shape())?;
        let (q, q_rstd) = self.rotate(&q_proj, &self.q_norm, context)?; // [T, H, Dh]
        let (k, k_rstd) = self.rotate(&k_proj, &self.k_norm, context)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let segments = &context.segments;
        let d_heads = self.attention.backward(heads, &o, &lse, &d_o, segments, Masking::Causal)?;
        drop((q, k, v, o, lse, d_o));
        let QkvGrad { dq, dk, dv } = d_heads;
        let unrotate = |x: Tensor, rstd: Tensor, norm: &Param, dy: Tensor| {
            let dw = grads.buffer(norm);
            ops::qk_norm_rope_backward(&x, &rstd, norm.tensor(), &context.rope, &dy, dw)
        };
        let d_q = unrotate(q_proj, q_rstd, &self.q_norm, dq)?; // [T, H * Dh]
        let d_k = unrotate(k_proj, k_rstd, &self.k_norm, dk)?; // [T, Hkv * Dh]
        let d_v = dv.flatten_from(1)?; // [T, Hkv * Dh]
        let normed = self.norm1.apply(&x, &rstd1)?; // [T, D]
        if input_grad == InputGrad::Skip && grads.buffer(self.norm1.param()).is_none() {
            self.q.backward_params(&normed, &d_q, grads)?;
            self.k.backward_params(&normed, &d_k, grads)?;
            self.v.backward_params(&normed, &d_v, grads)?;
            return Ok(None);
        }
        let d_normed = self.q.backward(&normed, &d_q, grads)?; // [T, D]
        let d_normed = self.k.backward_add(&normed, &d_k, d_normed, grads)?;
        let d_normed = self.v.backward_add(&normed, &d_v, d_normed, grads)?;
        self.norm1.backward_add(&x, &rstd1, &d_normed, Some(&dx1), grads).map(Some)
    }
}
