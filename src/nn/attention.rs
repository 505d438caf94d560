//! The first half of a decoder layer: RMS norm, grouped-query attention with q/k norm and rotary
//! positions, residual.

use super::config::DecoderConfig;
use super::context::DecoderContext;
use super::linear::Linear;
use super::norm::RmsNorm;
use super::params::{ParamMap, WeightError};
use crate::ops::{self, AttentionBackend, Masking, Qkv, QkvGrad};
use crate::tape::{GradSink, InputGrad, Param};
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// `x + o(attention(norm(x)))`, causal inside each sample.
pub(super) struct AttentionBlock {
    norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Param, // [Dh]
    k_norm: Param, // [Dh]
    eps: f64,
    num_key_value_heads: usize,
    head_dim: usize,
    backend: Arc<dyn AttentionBackend>,
}

/// The tensors that backward needs. Backward computes the rotated q and k again from their
/// projections, which is cheap.
pub(super) struct SavedAttention {
    x: Tensor,      // [T, D]
    rstd: Tensor,   // [T]
    q_proj: Tensor, // [T, H * Dh]
    k_proj: Tensor, // [T, Hkv * Dh]
    v: Tensor,      // [T, Hkv, Dh]
    o: Tensor,      // [T, H, Dh]
    lse: Tensor,    // [H, T]
}

impl AttentionBlock {
    /// `name` is the prefix of the layer's parameter names.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        config: &DecoderConfig,
        backend: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let linear = |part: &str| Linear::without_bias(params, &format!("{name}.self_attn.{part}"));
        let norm = format!("{name}.input_layernorm");
        Ok(Self {
            norm: RmsNorm::new(params, &norm, config.rms_norm_eps)?,
            q: linear("q_proj")?,
            k: linear("k_proj")?,
            v: linear("v_proj")?,
            o: linear("o_proj")?,
            q_norm: params.get(&format!("{name}.self_attn.q_norm.weight"))?,
            k_norm: params.get(&format!("{name}.self_attn.k_norm.weight"))?,
            eps: config.rms_norm_eps,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            backend,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        let norms = [self.norm.param(), &self.q_norm, &self.k_norm];
        let linears = [&self.q, &self.k, &self.v, &self.o];
        norms.into_iter().chain(linears.into_iter().flat_map(Linear::params))
    }

    /// Norm and rotation of a projection `[T, H * Dh]`: `[T, H, Dh]`, and `rstd: [T, H]`.
    fn rotate(
        &self,
        x: &Tensor,
        norm: &Param,
        context: &DecoderContext,
    ) -> Result<(Tensor, Tensor)> {
        ops::qk_norm_rope(x, &norm.tensor(), self.eps, &context.rope)
    }

    fn kv_shape(&self, x: &Tensor) -> Result<(usize, usize, usize)> {
        Ok((x.dim(0)?, self.num_key_value_heads, self.head_dim))
    }

    /// Rotated q and k, and v, for generation.
    pub(super) fn project(
        &self,
        x: &Tensor,
        context: &DecoderContext,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (normed, _) = self.norm.normed(x)?;
        let (q, _) = self.rotate(&self.q.forward(&normed)?, &self.q_norm, context)?; // [T, H, Dh]
        let (k, _) = self.rotate(&self.k.forward(&normed)?, &self.k_norm, context)?; // [T, Hkv, Dh]
        let v = self.v.forward(&normed)?.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        Ok((q, k, v))
    }

    /// The output projection of `o: [T, H, Dh]` and the residual `x: [T, D]`.
    pub(super) fn output(&self, x: &Tensor, o: &Tensor) -> Result<Tensor> {
        self.o.forward_add(&o.flatten_from(1)?, x) // [T, D]
    }

    /// `x: [T, D]` to `[T, D]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        context: &DecoderContext,
    ) -> Result<(Tensor, SavedAttention)> {
        let (normed, rstd) = self.norm.normed(x)?; // [T, D]
        let q_proj = self.q.forward(&normed)?; // [T, H * Dh]
        let k_proj = self.k.forward(&normed)?; // [T, Hkv * Dh]
        let v = self.v.forward(&normed)?.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        let (o, lse) = {
            let (q, _) = self.rotate(&q_proj, &self.q_norm, context)?; // [T, H, Dh]
            let (k, _) = self.rotate(&k_proj, &self.k_norm, context)?; // [T, Hkv, Dh]
            let heads = Qkv { q: &q, k: &k, v: &v };
            self.backend.forward(heads, &context.segments, Masking::Causal)?
        };
        let y = self.output(x, &o)?;
        Ok((y, SavedAttention { x: x.clone(), rstd, q_proj, k_proj, v, o, lse }))
    }

    /// Returns `dx: [T, D]`. Each buffer is dropped after its last use, to lower peak memory.
    pub(super) fn backward(
        &self,
        saved: SavedAttention,
        dy: &Tensor,
        context: &DecoderContext,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        let SavedAttention { x, rstd, q_proj, k_proj, v, o, lse } = saved;
        let d_o = self.o.backward(&o.flatten_from(1)?, dy, grads)?.reshape(o.shape())?;
        let (q, q_rstd) = self.rotate(&q_proj, &self.q_norm, context)?; // [T, H, Dh]
        let (k, k_rstd) = self.rotate(&k_proj, &self.k_norm, context)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let segments = &context.segments;
        let d_heads = self.backend.backward(heads, &o, &lse, &d_o, segments, Masking::Causal)?;
        drop((q, k, v, o, lse, d_o));
        let QkvGrad { dq, dk, dv } = d_heads;
        let unrotate = |x: Tensor, rstd: Tensor, norm: &Param, dy: Tensor| {
            let dw = grads.buffer(norm);
            ops::qk_norm_rope_backward(&x, &rstd, &norm.tensor(), &context.rope, &dy, dw)
        };
        let d_q = unrotate(q_proj, q_rstd, &self.q_norm, dq)?; // [T, H * Dh]
        let d_k = unrotate(k_proj, k_rstd, &self.k_norm, dk)?; // [T, Hkv * Dh]
        let d_v = dv.flatten_from(1)?; // [T, Hkv * Dh]
        let normed = self.norm.apply(&x, &rstd)?; // [T, D]
        if input_grad == InputGrad::Skip && grads.buffer(self.norm.param()).is_none() {
            self.q.backward_params(&normed, &d_q, &self.q.output_grad(&d_q)?, grads)?;
            self.k.backward_params(&normed, &d_k, &self.k.output_grad(&d_k)?, grads)?;
            self.v.backward_params(&normed, &d_v, &self.v.output_grad(&d_v)?, grads)?;
            return Ok(None);
        }
        let d_normed = self.q.backward(&normed, &d_q, grads)?; // [T, D]
        let d_normed = self.k.backward_add(&normed, &d_k, d_normed, grads)?;
        let d_normed = self.v.backward_add(&normed, &d_v, d_normed, grads)?;
        self.norm.backward_add(&x, &rstd, &d_normed, Some(dy), grads).map(Some)
    }
}
