//! The first half of a decoder layer with linear attention: RMS norm, projections, convolution,
//! gated delta rule, gated norm, residual.

use super::config::{DecoderConfig, LinearAttentionSpec};
use super::context::DecoderContext;
use super::kv_cache::{KvCache, LinearState, for_each_sample};
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::Norm;
use super::own_heads::OwnHeads;
use super::params::{ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use batch::CuSeqlens;
use candle_core::{DType, Error, Result, Tensor};
use kernels::{self, CONV_TAPS, DeltaGatesGrad, DeltaGrad, DeltaHeads, DeltaInputs};

/// `x + out(norm(rule(conv(qkv(norm(x)))), z(norm(x))))`. Each sample starts with an empty
/// window of the convolution and a state of zero.
pub(super) struct LinearAttentionBlock {
    norm: Norm,
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    out: Linear,
    conv: Param,       // [C, 1, 4]
    a_log: Param,      // [Hv]
    dt_bias: Param,    // [Hv]
    gated_norm: Param, // [dv]
    eps: f64,
    heads: DeltaHeads,
}

impl LinearAttentionBlock {
    /// `name` is the prefix of the layer's parameter names.
    pub(super) fn new(
        params: &ParamMap<'_>,
        name: &str,
        config: &DecoderConfig,
        sizes: &LinearAttentionSpec,
    ) -> std::result::Result<Self, WeightError> {
        let part = |part: &str| format!("{name}.linear_attn.{part}");
        let linear = |name: &str| Linear::without_bias(params, &part(name));
        Ok(Self {
            norm: Norm::of_decoder(params, &format!("{name}.input_layernorm"), config)?,
            qkv: linear("in_proj_qkv")?.of_decoder(params),
            z: linear("in_proj_z")?.of_decoder(params),
            b: linear("in_proj_b")?,
            a: linear("in_proj_a")?,
            out: linear("out_proj")?.of_decoder(params),
            conv: params.get(&part("conv1d.weight"))?,
            a_log: params.get(&part("A_log"))?,
            dt_bias: params.get(&part("dt_bias"))?,
            gated_norm: params.get(&part("norm.weight"))?,
            eps: config.rms_norm_eps,
            heads: sizes.heads(),
        })
    }

    /// The taps of the convolution, `[C, 4]`.
    fn taps(&self, pass: &Pass<'_>) -> Result<Tensor> {
        pass.weight(&self.conv)?.flatten_from(1)
    }

    /// `A_log` and `dt_bias` in `f32`, in which the decays are computed.
    fn decays(&self, pass: &Pass<'_>) -> Result<[Tensor; 2]> {
        let wide = |param: &Param| pass.weight(param)?.to_dtype(DType::F32);
        Ok([wide(&self.a_log)?, wide(&self.dt_bias)?])
    }

    /// The heads that this rank computes for all tokens, if it has `own` tokens.
    fn own_heads<'a>(
        &self,
        own: usize,
        samples: &CuSeqlens,
        pass: &Pass<'a>,
    ) -> Result<OwnHeads<'a>> {
        OwnHeads::new(self.heads, own, samples.num_tokens(), pass)
    }

    /// A tensor `[T, Hv * dv]` as `[T * Hv, dv]`.
    fn by_head(&self, x: &Tensor) -> Result<Tensor> {
        x.reshape(((), self.heads.value_dim))
    }

    /// Gated norm of each head of `o` and output projection, with the residual `x`. Also returns
    /// the `rstd` of the norm.
    fn output(
        &self,
        x: &Tensor,
        o: &Tensor,
        z: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (o, z, weight) = (self.by_head(o)?, self.by_head(z)?, pass.weight(&self.gated_norm)?);
        let (u, rstd) = kernels::gated_rms_norm(&o, &z, &weight, self.eps)?;
        let u = u.reshape((x.dim(0)?, ()))?; // [T, Hv * dv]
        Ok((self.out.forward_add(&u, x, pass)?, rstd))
    }

    /// Convolution and delta rule of the next tokens of one sample, `qkv: [n, C]` to
    /// `[n, Hv * dv]`. Changes `state` to that after them.
    fn next_tokens(
        &self,
        qkv: &Tensor,
        [g, beta]: [&Tensor; 2],
        state: &mut Option<LinearState>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let num_new = qkv.dim(0)?;
        let before = match state.take() {
            Some(state) => state,
            None => LinearState::zeros(self.heads, qkv)?,
        };
        let with_window = Tensor::cat(&[&before.window, qkv], 0)?; // [3 + n, C]
        let mixed = kernels::causal_conv1d(
            &with_window,
            &self.taps(pass)?,
            &one(CONV_TAPS - 1 + num_new)?,
        )?;
        let mixed = mixed.narrow(0, CONV_TAPS - 1, num_new)?.contiguous()?;
        let inputs = DeltaInputs { qkv: &mixed, g, beta };
        let rule = &before.rule;
        let o = kernels::gated_delta_rule(inputs, self.heads, &one(num_new)?, Some(rule))?;
        let window = with_window.narrow(0, num_new, CONV_TAPS - 1)?.contiguous()?;
        *state = Some(LinearState { window, rule: before.rule });
        Ok(o)
    }

    /// Backward of [`Self::output`] without the residual: the gradients of `o` and `z`.
    fn output_backward(
        &self,
        (o, rstd): (&Tensor, &Tensor),
        z: &Tensor,
        dy: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (shape, weight) = (o.shape().clone(), pass.weight(&self.gated_norm)?);
        let (o, z) = (self.by_head(o)?, self.by_head(z)?);
        let d_out = self.out.output_grad(dy, pass)?;
        if self.out.recompute_input(pass) == kernels::RecomputeInput::Yes {
            let (u, _) = kernels::gated_rms_norm(&o, &z, &weight, self.eps)?;
            self.out.backward_params(&u.reshape(&shape)?, dy, &d_out, pass)?;
        }
        let d_u = self.by_head(&self.out.backward_input(&d_out, pass)?)?;
        let d_weight = pass.grad(&self.gated_norm);
        let (d_o, d_z) = kernels::gated_rms_norm_backward(&o, &z, rstd, &weight, &d_u, d_weight)?;
        Ok((d_o.reshape(&shape)?, d_z.reshape(&shape)?))
    }
}

/// Bytes that backward needs of a token.
pub(super) fn saved_bytes(config: &DecoderConfig, spec: &LinearAttentionSpec, element: f64) -> f64 {
    let heads = spec.num_value_heads;
    // `x`, the input of the convolution, `z`, `o`, `a`, `b`
    let wide = config.hidden_size + spec.qkv_width() + 2 * spec.value_width() + 2 * heads;
    element * wide as f64 + 4.0 * (1 + heads) as f64 // and `rstd` of the rows and of the heads
}

impl Stage for LinearAttentionBlock {
    type Context = DecoderContext;

    fn params(&self) -> Vec<&Param> {
        let alone = [&self.conv, &self.a_log, &self.dt_bias, &self.gated_norm];
        let linears = [&self.qkv, &self.z, &self.b, &self.a, &self.out];
        let linears = linears.into_iter().flat_map(Linear::params);
        self.norm.params().chain(alone).chain(linears).collect()
    }

    /// Backward computes the convolution again, which is cheap. `T` is the number of own tokens, and
    /// `C'` the number of channels of own heads.
    fn forward(
        &self,
        x: &Tensor, // [T, D]
        context: &DecoderContext,
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let samples = context.segments.cu_seqlens();
        let (normed, rstd) = self.norm.normed(x, pass)?; // [T, D]
        let qkv = self.qkv.forward(&normed, pass)?; // [T, C]
        let z = self.z.forward(&normed, pass)?; // [T, Hv * dv]
        let (b, a) = (self.b.forward(&normed, pass)?, self.a.forward(&normed, pass)?); // [T, Hv]
        let own = self.own_heads(x.dim(0)?, samples, pass)?;
        let qkv = own.qkv(&qkv)?; // [all tokens, C']
        let mixed = kernels::causal_conv1d(&qkv, &own.taps(&self.taps(pass)?)?, samples)?;
        let [a_log, dt_bias] = self.decays(pass)?;
        let (g, beta) = kernels::delta_gates(&a, &b, &a_log, &dt_bias)?;
        let [g, beta] = own.of_own([&g, &beta])?;
        let inputs = DeltaInputs { qkv: &mixed, g: &g, beta: &beta };
        let o = kernels::gated_delta_rule(inputs, own.heads, samples, None)?;
        let o = own.of_tokens(&o)?; // [T, Hv * dv]
        let (y, o_rstd) = self.output(x, &o, &z, pass)?; // [T, D], [T * Hv]
        Ok((y, Saved::new([x.clone(), rstd, qkv, z, a, b, o, o_rstd])))
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
        let [x, rstd, qkv, z, a, b, o, o_rstd] = saved.tensors()?;
        let samples = context.segments.cu_seqlens();
        let (d_o, d_z) = self.output_backward((&o, &o_rstd), &z, &dy, pass)?; // [T, Hv * dv]
        drop((o, o_rstd, z));
        let own = self.own_heads(dy.dim(0)?, samples, pass)?;
        let taps = own.taps(&self.taps(pass)?)?;
        let [a_log, dt_bias] = self.decays(pass)?;
        let gates = [&a, &b, &a_log, &dt_bias];
        let d_inputs = {
            let mixed = kernels::causal_conv1d(&qkv, &taps, samples)?;
            let (g, beta) = kernels::delta_gates(&a, &b, &a_log, &dt_bias)?;
            let [g, beta, d_o] = own.of_own([&g, &beta, &d_o])?;
            let inputs = DeltaInputs { qkv: &mixed, g: &g, beta: &beta };
            kernels::gated_delta_rule_backward(inputs, own.heads, samples, &d_o)?
        };
        drop(d_o);
        let DeltaGrad { dqkv, dg, dbeta } = d_inputs;
        let (dg, dbeta) = (own.of_tokens(&dg)?, own.of_tokens(&dbeta)?);
        let (d_log, d_bias) = (pass.grad(&self.a_log), pass.grad(&self.dt_bias));
        let DeltaGatesGrad { da, db } =
            kernels::delta_gates_backward(gates, &dg, &dbeta, d_log, d_bias)?;
        let d_taps = pass.grad(&self.conv).map(|buffer| buffer.flatten_from(1)).transpose()?;
        let d_qkv = own.with_taps(d_taps.as_ref(), |d_taps| {
            kernels::causal_conv1d_backward(&qkv, &taps, &dqkv, samples, d_taps)
        })?;
        drop((qkv, dqkv));
        let d_qkv = own.qkv_of_tokens(d_qkv)?; // [T, C]
        let normed = self.norm.apply(&x, &rstd, pass)?; // [T, D]
        let parts = [(&self.qkv, &d_qkv), (&self.z, &d_z), (&self.b, &db), (&self.a, &da)];
        if input_grad == InputGrad::Skip && !self.norm.is_trained(pass) {
            for (linear, d) in parts {
                linear.backward_params(&normed, d, &linear.output_grad(d, pass)?, pass)?;
            }
            return Ok(None);
        }
        let [(first, d_first), rest @ ..] = parts;
        let mut d_normed = first.backward(&normed, d_first, pass)?; // [T, D]
        for (linear, d) in rest {
            d_normed = linear.backward_add(&normed, d, d_normed, pass)?;
        }
        self.norm.backward_add(&x, &rstd, &d_normed, Some(&dy), pass).map(Some)
    }
}

impl Mixer for LinearAttentionBlock {
    fn decode(
        &self,
        layer: usize,
        x: &Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let (normed, _) = self.norm.normed(x, pass)?;
        let qkv = self.qkv.forward(&normed, pass)?; // [N, C]
        let (b, a) = (self.b.forward(&normed, pass)?, self.a.forward(&normed, pass)?);
        let [a_log, dt_bias] = self.decays(pass)?;
        let (g, beta) = kernels::delta_gates(&a, &b, &a_log, &dt_bias)?;
        let o = for_each_sample(caches, context.segments.cu_seqlens(), |cache, tokens| {
            let own = |x: &Tensor| x.narrow(0, tokens.start, tokens.len()); // n of the N rows
            self.next_tokens(&own(&qkv)?, [&own(&g)?, &own(&beta)?], cache.state(layer), pass)
        })?; // [N, Hv * dv]
        Ok(self.output(x, &o, &self.z.forward(&normed, pass)?, pass)?.0)
    }
}

fn one(num_tokens: usize) -> Result<CuSeqlens> {
    CuSeqlens::from_lengths(&[num_tokens as u32]).map_err(Error::wrap)
}
