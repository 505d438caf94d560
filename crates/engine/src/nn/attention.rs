//! The first half of a decoder layer: RMS norm, grouped-query attention with q/k norm or biases and
//! rotary positions, residual. With `hybrid`, a gate multiplies the output of each head.

use super::config::{DecoderConfig, Queries};
use super::context::DecoderContext;
use super::kv_cache::{KvCache, for_each_sample};
use super::linear::{Linear, backward_of};
use super::norm::RmsNorm;
use super::params::{ParamMap, WeightError};
use crate::tape::{CheapTensors, GradSink, InputGrad, Param};
use candle_core::{Result, Tensor};
use kernels::{AttentionBackend, Masking, NormScale, Qkv, QkvGrad};
use std::sync::Arc;

/// `x + o(attention(norm(x)))`, causal inside each sample.
pub(super) struct AttentionBlock {
    norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<Param>, // [Dh]
    k_norm: Option<Param>, // [Dh]
    scale: NormScale,
    eps: f64,
    num_key_value_heads: usize,
    head_dim: usize,
    has_gate: bool,
    backend: Arc<dyn AttentionBackend>,
}

/// The tensors that backward needs.
pub(super) struct SavedAttention {
    x: Tensor,    // [T, D]
    rstd: Tensor, // [T]
    q: SavedHeads,
    gate: Option<Tensor>, // [T, H * Dh]
    k: SavedHeads,
    v: Tensor,   // [T, Hkv, Dh]
    o: Tensor,   // [T, H, Dh]
    lse: Tensor, // [H, T]
}

/// Queries or keys for backward.
enum SavedHeads {
    /// The projection `[T, H * Dh]`. Backward computes the rotated ones again, which is cheap.
    Projection(Tensor),
    Kept(Tensor, Rotated),
    /// Without a norm, backward needs only these.
    Rotated(Tensor),
}

/// `[T, H, Dh]`, and `rstd: [T, H]` of the norm if there is one.
type Rotated = (Tensor, Option<Tensor>);

impl SavedHeads {
    fn new(projection: Tensor, rotated: Rotated, cheap: CheapTensors) -> Self {
        match (rotated, cheap) {
            ((rotated, None), _) => Self::Rotated(rotated),
            (rotated, CheapTensors::Keep) => Self::Kept(projection, rotated),
            (_, CheapTensors::Recompute) => Self::Projection(projection),
        }
    }
}

impl AttentionBlock {
    /// `name` is the prefix of the layer's parameter names.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        config: &DecoderConfig,
        backend: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let name_of = |part: &str| format!("{name}.self_attn.{part}");
        let linear = |part: &str| {
            let linear = match config.queries {
                Queries::Normed => Linear::without_bias(params, &name_of(part))?,
                Queries::Biased => Linear::with_bias(params, &name_of(part))?,
            };
            Ok::<_, WeightError>(linear.of_decoder(params))
        };
        let head_norm = |part: &str| match config.queries {
            Queries::Normed => params.get(&name_of(part)).map(Some),
            Queries::Biased => Ok(None),
        };
        let norm = format!("{name}.input_layernorm");
        Ok(Self {
            norm: RmsNorm::of_decoder(params, &norm, config)?,
            q: linear("q_proj")?,
            k: linear("k_proj")?,
            v: linear("v_proj")?,
            o: Linear::without_bias(params, &name_of("o_proj"))?.of_decoder(params),
            q_norm: head_norm("q_norm.weight")?,
            k_norm: head_norm("k_norm.weight")?,
            scale: config.norm_scale(),
            eps: config.rms_norm_eps,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            has_gate: config.hybrid.is_some(),
            backend,
        })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        let norms = [self.norm.param()].into_iter().chain(&self.q_norm).chain(&self.k_norm);
        let linears = [&self.q, &self.k, &self.v, &self.o];
        norms.chain(linears.into_iter().flat_map(Linear::params))
    }

    /// Norm and rotation of a projection `[T, H * Dh]`.
    fn rotate(
        &self,
        x: &Tensor,
        norm: Option<&Param>,
        context: &DecoderContext,
    ) -> Result<Rotated> {
        let Some(norm) = norm else {
            return Ok((kernels::rope_heads(x, self.head_dim, &context.rope)?, None));
        };
        let weight = norm.tensor();
        let (y, rstd) = kernels::qk_norm_rope(x, &weight, self.scale, self.eps, &context.rope)?;
        Ok((y, Some(rstd)))
    }

    /// The projection, if backward needs it, and the rotated heads.
    fn rotated(
        &self,
        saved: SavedHeads,
        norm: Option<&Param>,
        context: &DecoderContext,
    ) -> Result<(Option<Tensor>, Rotated)> {
        Ok(match saved {
            SavedHeads::Projection(x) => {
                let rotated = self.rotate(&x, norm, context)?;
                (Some(x), rotated)
            }
            SavedHeads::Kept(x, rotated) => (Some(x), rotated),
            SavedHeads::Rotated(rotated) => (None, (rotated, None)),
        })
    }

    /// Backward of [`Self::rotate`]: the gradient of the projection `x`, `[T, H * Dh]`.
    fn rotate_backward(
        &self,
        x: Option<&Tensor>,
        rstd: Option<&Tensor>,
        norm: Option<&Param>,
        context: &DecoderContext,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        let (Some(x), Some(norm), Some(rstd)) = (x, norm, rstd) else {
            return kernels::rope_heads_backward(dy, &context.rope);
        };
        let (weight, dw) = (norm.tensor(), grads.buffer(norm));
        kernels::qk_norm_rope_backward(x, rstd, &weight, self.scale, &context.rope, dy, dw)
    }

    fn kv_shape(&self, x: &Tensor) -> Result<(usize, usize, usize)> {
        Ok((x.dim(0)?, self.num_key_value_heads, self.head_dim))
    }

    /// The projection of queries, `[T, H * Dh]`, and of the output gate. The rows of a head's gate
    /// follow those of its query.
    fn queries(&self, q: Tensor) -> Result<(Tensor, Option<Tensor>)> {
        if !self.has_gate {
            return Ok((q, None));
        }
        let (num_tokens, width) = (q.dim(0)?, q.dim(1)? / 2);
        let heads = q.reshape(((), 2 * self.head_dim))?; // [T * H, 2 * Dh]
        let part = |first| {
            let part = heads.narrow(1, first, self.head_dim)?.contiguous()?;
            part.reshape((num_tokens, width))
        };
        Ok((part(0)?, Some(part(self.head_dim)?)))
    }

    /// The gradient of the projection of queries and gate.
    fn queries_grad(&self, d_q: Tensor, d_gate: Option<&Tensor>) -> Result<Tensor> {
        let Some(d_gate) = d_gate else { return Ok(d_q) };
        let heads = |d: &Tensor| d.reshape(((), self.head_dim)); // [T * H, Dh]
        Tensor::cat(&[heads(&d_q)?, heads(d_gate)?], 1)?.reshape((d_q.dim(0)?, ()))
    }

    /// The next tokens of the samples in `caches`, `x: [N, D]` to `[N, D]`.
    pub(super) fn decode(
        &self,
        layer: usize,
        x: &Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
    ) -> Result<Tensor> {
        let (normed, _) = self.norm.normed(x)?;
        let (q_proj, gate) = self.queries(self.q.forward(&normed)?)?;
        let (q, _) = self.rotate(&q_proj, self.q_norm.as_ref(), context)?; // [N, H, Dh]
        let k_proj = self.k.forward(&normed)?;
        let (k, _) = self.rotate(&k_proj, self.k_norm.as_ref(), context)?; // [N, Hkv, Dh]
        let v = self.v.forward(&normed)?.reshape(self.kv_shape(x)?)?; // [N, Hkv, Dh]
        let o = for_each_sample(caches, context.segments.cu_seqlens(), |cache, tokens| {
            let own = |x: &Tensor| x.narrow(0, tokens.start, tokens.len()); // n of the N rows
            let (keys, values) = cache.append(layer, &own(&k)?, &own(&v)?)?; // [S, Hkv, Dh]
            kernels::decode_attention(&own(&q)?, &keys, &values, cache.len()) // [n, H, Dh]
        })?; // [N, H, Dh]
        self.output(x, &o, gate.as_ref())
    }

    /// The output projection of `o: [T, H, Dh]`, gated, and the residual `x: [T, D]`.
    fn output(&self, x: &Tensor, o: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let o = o.flatten_from(1)?; // [T, H * Dh]
        match gate {
            Some(gate) => self.o.forward_add(&kernels::sigmoid_gate(gate, &o)?, x), // [T, D]
            None => self.o.forward_add(&o, x),
        }
    }

    /// Backward of [`Self::output`] without the residual: the gradients of `o` and of the gate.
    fn output_backward(
        &self,
        o: &Tensor,
        gate: Option<Tensor>,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (shape, o) = (o.shape(), o.flatten_from(1)?);
        let Some(gate) = gate else {
            return Ok((self.o.backward(&o, dy, grads)?.reshape(shape)?, None));
        };
        let d_out = self.o.output_grad(dy)?;
        let d_gated = self.o.backward_input(&d_out)?;
        let recompute = self.o.recompute_input(grads);
        // The op overwrites its operands, and the backward of attention needs `o`.
        let (d_gate, d_o, gated) =
            kernels::sigmoid_gate_backward(gate, o.copy()?, d_gated, recompute)?;
        if let Some(gated) = gated {
            self.o.backward_params(&gated, dy, &d_out, grads)?;
        }
        Ok((d_o.reshape(shape)?, Some(d_gate)))
    }

    /// `x: [T, D]` to `[T, D]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        context: &DecoderContext,
        cheap: CheapTensors,
    ) -> Result<(Tensor, SavedAttention)> {
        let (normed, rstd) = self.norm.normed(x)?; // [T, D]
        let (q_proj, gate) = self.queries(self.q.forward(&normed)?)?; // [T, H * Dh]
        let (k_proj, v) = (self.k.forward(&normed)?, self.v.forward(&normed)?); // [T, Hkv * Dh]
        let v = v.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        let q = self.rotate(&q_proj, self.q_norm.as_ref(), context)?; // [T, H, Dh]
        let k = self.rotate(&k_proj, self.k_norm.as_ref(), context)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q.0, k: &k.0, v: &v };
        let (o, lse) = self.backend.forward(heads, &context.segments, Masking::Causal)?;
        let (q, k) = (SavedHeads::new(q_proj, q, cheap), SavedHeads::new(k_proj, k, cheap));
        let y = self.output(x, &o, gate.as_ref())?;
        Ok((y, SavedAttention { x: x.clone(), rstd, q, gate, k, v, o, lse }))
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
        let SavedAttention { x, rstd, q, gate, k, v, o, lse } = saved;
        let (d_o, d_gate) = self.output_backward(&o, gate, dy, grads)?;
        let (q_norm, k_norm) = (self.q_norm.as_ref(), self.k_norm.as_ref());
        let (q_proj, (q, q_rstd)) = self.rotated(q, q_norm, context)?; // [T, H, Dh]
        let (k_proj, (k, k_rstd)) = self.rotated(k, k_norm, context)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let segments = &context.segments;
        let d_heads = self.backend.backward(heads, &o, &lse, &d_o, segments, Masking::Causal)?;
        let QkvGrad { dq, dk, dv } = d_heads;
        let d_v = dv.flatten_from(1)?; // [T, Hkv * Dh]
        drop((q, k, v, o, lse, d_o));
        let unrotate = |x: Option<Tensor>, rstd: Option<Tensor>, norm, dy: Tensor| {
            self.rotate_backward(x.as_ref(), rstd.as_ref(), norm, context, &dy, grads)
        };
        let d_q = unrotate(q_proj, q_rstd, q_norm, dq)?; // [T, H * Dh]
        let d_q = self.queries_grad(d_q, d_gate.as_ref())?;
        let d_k = unrotate(k_proj, k_rstd, k_norm, dk)?; // [T, Hkv * Dh]
        let normed = self.norm.apply(&x, &rstd)?; // [T, D]
        let layers = [&self.q, &self.k, &self.v];
        if input_grad == InputGrad::Skip && grads.buffer(self.norm.param()).is_none() {
            for (layer, dy) in layers.into_iter().zip([&d_q, &d_k, &d_v]) {
                layer.backward_params(&normed, dy, &layer.output_grad(dy)?, grads)?;
            }
            return Ok(None);
        }
        let d_normed = backward_of(layers, &normed, [d_q, d_k, d_v], grads)?; // [T, D]
        self.norm.backward_add(&x, &rstd, &d_normed, Some(dy), grads).map(Some)
    }
}
