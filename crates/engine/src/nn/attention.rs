//! The first half of a decoder layer: RMS norm, grouped-query attention with q/k norm or biases and
//! rotary positions, residual. In some models a gate multiplies the output of each head.

use super::config::{AttentionSpec, DecoderConfig};
use super::context::DecoderContext;
use super::kv_cache::{KvCache, for_each_sample};
use super::linear::{Linear, backward_of};
use super::mixer::Mixer;
use super::norm::Norm;
use super::own_heads::{attend, attend_backward};
use super::params::{ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor, bail};
use kernels::{AttentionBackend, NormScale, Qkv, QkvGrad, Scores};
use std::sync::Arc;

/// `x + o(attention(norm(x)))`, causal inside each sample, perhaps with a window.
pub(super) struct AttentionBlock {
    norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<Param>, // [Dh]
    k_norm: Option<Param>, // [Dh]
    norm_scale: NormScale,
    eps: f64,
    num_key_value_heads: usize,
    head_dim: usize,
    has_gate: bool,
    scores: Scores,
    backend: Arc<dyn AttentionBackend>,
}

/// Queries or keys, rotated, `[T, H, Dh]`, and `rstd: [T, H]` of their norm if there is one.
type Rotated = (Tensor, Option<Tensor>);

/// What backward needs of queries or keys: the projection `[T, H * Dh]` if they have a norm, and
/// the rotated ones and `rstd`, which backward otherwise computes again.
fn saved_heads(projection: Tensor, rotated: Rotated, recompute: Recompute) -> [Option<Tensor>; 3] {
    match (rotated, recompute) {
        ((rotated, None), _) => [None, Some(rotated), None],
        ((rotated, rstd), Recompute::Nothing) => [Some(projection), Some(rotated), rstd],
        (_, Recompute::Cheap | Recompute::Stage) => [Some(projection), None, None],
    }
}

impl AttentionBlock {
    /// `name` is the prefix of the layer's parameter names.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        (config, spec): (&DecoderConfig, AttentionSpec),
        backend: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let name_of = |part: &str| format!("{name}.self_attn.{part}");
        let linear = |part: &str| {
            let linear = if spec.qkv_bias {
                Linear::with_bias(params, &name_of(part))?
            } else {
                Linear::without_bias(params, &name_of(part))?
            };
            Ok::<_, WeightError>(linear.of_decoder(params))
        };
        let head_norm = |part: &str| {
            let name = spec.qk_norm.then(|| name_of(part));
            name.map(|name| params.get(&name)).transpose()
        };
        let norm = format!("{name}.input_layernorm");
        Ok(Self {
            norm: Norm::of_decoder(params, &norm, config)?,
            q: linear("q_proj")?,
            k: linear("k_proj")?,
            v: linear("v_proj")?,
            o: Linear::without_bias(params, &name_of("o_proj"))?.of_decoder(params),
            q_norm: head_norm("q_norm.weight")?,
            k_norm: head_norm("k_norm.weight")?,
            norm_scale: config.norm_scale,
            eps: config.rms_norm_eps,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            has_gate: spec.output_gate,
            scores: config.scores(spec),
            backend,
        })
    }

    /// Norm and rotation of a projection `[T, H * Dh]`.
    fn rotate(
        &self,
        x: &Tensor,
        norm: Option<&Param>,
        context: &DecoderContext,
        pass: &Pass<'_>,
    ) -> Result<Rotated> {
        let Some(norm) = norm else {
            return Ok((kernels::rope_heads(x, self.head_dim, &context.rope)?, None));
        };
        let weight = pass.weight(norm)?;
        let (y, rstd) =
            kernels::qk_norm_rope(x, &weight, self.norm_scale, self.eps, &context.rope)?;
        Ok((y, Some(rstd)))
    }

    /// The rotated heads from what [`saved_heads`] has returned, and the projection if there is one.
    fn rotated(
        &self,
        [projection, rotated, rstd]: [Option<Tensor>; 3],
        norm: Option<&Param>,
        context: &DecoderContext,
        pass: &Pass<'_>,
    ) -> Result<(Option<Tensor>, Rotated)> {
        let rotated = match (&projection, rotated) {
            (_, Some(rotated)) => (rotated, rstd),
            (Some(projection), None) => self.rotate(projection, norm, context, pass)?,
            (None, None) => bail!("neither queries and keys nor their projections were saved"),
        };
        Ok((projection, rotated))
    }

    /// Backward of [`Self::rotate`]: the gradient of the projection, `[T, H * Dh]`.
    #[expect(clippy::needless_pass_by_value, reason = "frees `dy` before the next op")]
    fn rotate_backward(
        &self,
        projection: Option<Tensor>,
        rstd: Option<Tensor>,
        norm: Option<&Param>,
        context: &DecoderContext,
        dy: Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let (Some(x), Some(norm), Some(rstd)) = (projection, norm, rstd) else {
            return kernels::rope_heads_backward(&dy, &context.rope);
        };
        let (weight, dw) = (pass.weight(norm)?, pass.grad(norm));
        kernels::qk_norm_rope_backward(&x, &rstd, &weight, self.norm_scale, &context.rope, &dy, dw)
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

    /// The output projection of `o: [T, H, Dh]`, gated, and the residual `x: [T, D]`.
    fn output(
        &self,
        x: &Tensor,
        o: &Tensor,
        gate: Option<&Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let o = o.flatten_from(1)?; // [T, H * Dh]
        match gate {
            Some(gate) => self.o.forward_add(&kernels::sigmoid_gate(gate, &o)?, x, pass), // [T, D]
            None => self.o.forward_add(&o, x, pass),
        }
    }

    /// Backward of [`Self::output`] without the residual: the gradients of `o` and of the gate.
    fn output_backward(
        &self,
        o: &Tensor,
        gate: Option<Tensor>,
        dy: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (shape, o) = (o.shape(), o.flatten_from(1)?);
        let Some(gate) = gate else {
            return Ok((self.o.backward(&o, dy, pass)?.reshape(shape)?, None));
        };
        let d_out = self.o.output_grad(dy, pass)?;
        let d_gated = self.o.backward_input(&d_out, pass)?;
        let recompute = self.o.recompute_input(pass);
        // The op overwrites its operands, and the backward of attention needs `o`.
        let (d_gate, d_o, gated) =
            kernels::sigmoid_gate_backward(gate, o.copy()?, d_gated, recompute)?;
        if let Some(gated) = gated {
            self.o.backward_params(&gated, dy, &d_out, pass)?;
        }
        Ok((d_o.reshape(shape)?, Some(d_gate)))
    }
}

/// Bytes that backward needs of a token.
pub(super) fn saved_bytes(
    config: &DecoderConfig,
    spec: AttentionSpec,
    element: f64,
    recompute: Recompute,
) -> f64 {
    let (q, kv) = (config.num_attention_heads, config.num_key_value_heads);
    let gate = if spec.output_gate { q } else { 0 };
    let heads = 2 * q + 2 * kv + gate; // `q`, `o`, `k`, `v`
    let floats = 1 + q; // `rstd` and `lse`
    let bytes = |heads: usize, floats: usize| {
        element * (heads * config.head_dim) as f64 + 4.0 * floats as f64
    };
    let saved = element * config.hidden_size as f64 + bytes(heads, floats);
    match recompute {
        // the rotated `q` and `k`, and the `rstd` of their norms
        Recompute::Nothing if spec.qk_norm => saved + bytes(q + kv, q + kv),
        _ => saved,
    }
}

impl Stage for AttentionBlock {
    type Context = DecoderContext;

    fn params(&self) -> Vec<&Param> {
        let norms = self.norm.params().chain(&self.q_norm).chain(&self.k_norm);
        let linears = [&self.q, &self.k, &self.v, &self.o];
        norms.chain(linears.into_iter().flat_map(Linear::params)).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [T, D]
        context: &DecoderContext,
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, rstd) = self.norm.normed(x, pass)?; // [T, D]
        let (q_proj, gate) = self.queries(self.q.forward(&normed, pass)?)?; // [T, H * Dh]
        let k_proj = self.k.forward(&normed, pass)?; // [T, Hkv * Dh]
        let v = self.v.forward(&normed, pass)?.reshape(self.kv_shape(x)?)?; // [T, Hkv, Dh]
        let q = self.rotate(&q_proj, self.q_norm.as_ref(), context, pass)?; // [T, H, Dh]
        let k = self.rotate(&k_proj, self.k_norm.as_ref(), context, pass)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q.0, k: &k.0, v: &v };
        let (o, lse) = attend(&*self.backend, heads, (&context.segments, self.scores), pass)?; // [T, H, Dh], [H, T]
        let [q_proj, q, q_rstd] = saved_heads(q_proj, q, recompute);
        let [k_proj, k, k_rstd] = saved_heads(k_proj, k, recompute);
        let y = self.output(x, &o, gate.as_ref(), pass)?;
        let saved = Saved::new([x.clone(), rstd, v, o, lse]);
        Ok((y, saved.with_optional([gate, q_proj, q, q_rstd, k_proj, k, k_rstd])))
    }

    /// Each buffer is dropped after its last use, to lower peak memory.
    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [T, D]
        context: &DecoderContext,
        input_grad: InputGrad,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, rstd, v, o, lse] = saved.tensors()?;
        let [gate, q_proj, q, q_rstd, k_proj, k, k_rstd] = saved.optional()?;
        let (d_o, d_gate) = self.output_backward(&o, gate, &dy, pass)?;
        let (q_norm, k_norm) = (self.q_norm.as_ref(), self.k_norm.as_ref());
        let (q_proj, (q, q_rstd)) = self.rotated([q_proj, q, q_rstd], q_norm, context, pass)?; // [T, H, Dh]
        let (k_proj, (k, k_rstd)) = self.rotated([k_proj, k, k_rstd], k_norm, context, pass)?; // [T, Hkv, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let scores = (&context.segments, self.scores);
        let d_heads = attend_backward(&*self.backend, heads, [&o, &lse, &d_o], scores, pass)?;
        let QkvGrad { dq, dk, dv } = d_heads;
        let d_v = dv.flatten_from(1)?; // [T, Hkv * Dh]
        drop((q, k, v, o, lse, d_o));
        let d_q = self.rotate_backward(q_proj, q_rstd, q_norm, context, dq, pass)?; // [T, H * Dh]
        let d_q = self.queries_grad(d_q, d_gate.as_ref())?;
        let d_k = self.rotate_backward(k_proj, k_rstd, k_norm, context, dk, pass)?; // [T, Hkv * Dh]
        let normed = self.norm.apply(&x, &rstd, pass)?; // [T, D]
        let layers = [&self.q, &self.k, &self.v];
        if input_grad == InputGrad::Skip && !self.norm.is_trained(pass) {
            for (layer, dy) in layers.into_iter().zip([&d_q, &d_k, &d_v]) {
                layer.backward_params(&normed, dy, &layer.output_grad(dy, pass)?, pass)?;
            }
            return Ok(None);
        }
        let d_normed = backward_of(layers, &normed, [d_q, d_k, d_v], pass)?; // [T, D]
        self.norm.backward_add(&x, &rstd, &d_normed, Some(&dy), pass).map(Some)
    }
}

impl Mixer for AttentionBlock {
    fn decode(
        &self,
        layer: usize,
        x: &Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let (normed, _) = self.norm.normed(x, pass)?;
        let (q_proj, gate) = self.queries(self.q.forward(&normed, pass)?)?;
        let (q, _) = self.rotate(&q_proj, self.q_norm.as_ref(), context, pass)?; // [N, H, Dh]
        let k_proj = self.k.forward(&normed, pass)?;
        let (k, _) = self.rotate(&k_proj, self.k_norm.as_ref(), context, pass)?; // [N, Hkv, Dh]
        let v = self.v.forward(&normed, pass)?.reshape(self.kv_shape(x)?)?; // [N, Hkv, Dh]
        let o = for_each_sample(caches, context.segments.cu_seqlens(), |cache, tokens| {
            let own = |x: &Tensor| x.narrow(0, tokens.start, tokens.len()); // n of the N rows
            let (keys, values) = cache.append(layer, &own(&k)?, &own(&v)?)?; // [S, Hkv, Dh]
            kernels::decode_attention(&own(&q)?, &keys, &values, cache.len(), self.scores) // [n, H, Dh]
        })?; // [N, H, Dh]
        self.output(x, &o, gate.as_ref(), pass)
    }
}
