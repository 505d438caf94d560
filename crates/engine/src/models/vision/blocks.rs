//! Stages of the vision encoder: patch embedding, and pre-norm blocks with full attention inside
//! each frame or window.

use super::config::{VisionConfig, VisionMlp, VisionNorm, VisionParts};
use super::gelu_mlp::GeluMlp;
use super::input::{TablePositions, VisionContext};
use crate::nn::{Linear, MlpBlock, Norm, ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor, bail};
use kernels::{AttentionBackend, Masking, Qkv, Scores, Segments};
use std::sync::Arc;

/// Added to the variance or the mean square of every norm.
const EPS: f64 = 1e-6;

impl VisionNorm {
    /// The norm with the parameters `<name>.weight` and `<name>.bias`.
    pub(super) fn build(
        self,
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Norm, WeightError> {
        match self {
            Self::Layer => Norm::layer(params, name, EPS),
            Self::Rms => Norm::rms(params, name, EPS),
        }
    }
}

/// Pixels to features: a linear map of each patch, plus its interpolated position embedding if
/// there is a table of them.
pub(super) struct PatchEmbed {
    proj: Linear,
    pub(super) positions: Option<Param>, // [N, Dv]
}

impl PatchEmbed {
    pub(super) fn new(
        params: &ParamMap<'_>,
        parts: &VisionParts,
    ) -> std::result::Result<Self, WeightError> {
        let proj = "model.visual.patch_embed.proj";
        let table = parts.num_position_embeddings;
        Ok(Self {
            proj: if parts.has_patch_bias {
                Linear::with_bias(params, proj)?
            } else {
                Linear::without_bias(params, proj)?
            },
            positions: table.map(|_| params.get("model.visual.pos_embed.weight")).transpose()?,
        })
    }
}

impl Stage for PatchEmbed {
    type Context = VisionContext;

    fn params(&self) -> Vec<&Param> {
        self.proj.params().chain(&self.positions).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [P, C*tp*p*p], the pixels
        context: &VisionContext,
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let features = self.proj.forward(x, pass)?; // [P, Dv]
        let saved = Saved::new([x.clone()]);
        let (Some(table), Some(TablePositions { index, weight })) =
            (&self.positions, &context.positions)
        else {
            return Ok((features, saved));
        };
        let table = pass.weight(table)?;
        Ok((kernels::interpolate_rows_add(&table, index, weight, &features)?, saved))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [P, Dv]
        context: &VisionContext,
        _input_grad: InputGrad, // pixels need no gradient
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [pixels] = saved.tensors()?;
        self.proj.backward_params(&pixels, &dy, &self.proj.output_grad(&dy, pass)?, pass)?;
        let d_table = self.positions.as_ref().and_then(|table| pass.grad(table));
        if let (Some(d_table), Some(TablePositions { index, weight })) =
            (d_table, &context.positions)
        {
            kernels::interpolate_rows_backward(index, weight, &dy, d_table)?;
        }
        Ok(None)
    }
}

pub(super) struct VisionBlock {
    norm1: Norm,
    qkv: Linear,
    proj: Linear,
    mlp: Box<dyn Stage<Context = ()>>,
    has_windows: bool,
    num_heads: usize,
    scores: Scores,
    attention: Arc<dyn AttentionBackend>,
}

impl VisionBlock {
    pub(super) fn new(
        params: &ParamMap<'_>,
        config: &VisionConfig,
        block: usize,
        attention: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let name = |part: &str| format!("model.visual.blocks.{block}.{part}");
        let linear = |part: &str| Linear::with_bias(params, &name(&format!("mlp.{part}")));
        let norm = |part: &str| config.parts.norm.build(params, &name(part));
        let mlp: Box<dyn Stage<Context = ()>> = match config.parts.mlp {
            VisionMlp::Gelu { act, layers: [fc1, fc2] } => Box::new(GeluMlp {
                norm: norm("norm2")?,
                fc1: linear(fc1)?,
                fc2: linear(fc2)?,
                act,
            }),
            VisionMlp::SwiGlu => Box::new(MlpBlock::new(norm("norm2")?, linear)?),
        };
        Ok(Self {
            norm1: norm("norm1")?,
            qkv: Linear::with_bias(params, &name("attn.qkv"))?,
            proj: Linear::with_bias(params, &name("attn.proj"))?,
            mlp,
            has_windows: config.has_windows(block),
            num_heads: config.num_heads,
            scores: Scores::new(Masking::Full, config.hidden_size / config.num_heads),
            attention,
        })
    }

    fn segments<'a>(&self, context: &'a VisionContext) -> &'a Segments {
        let windows = context.windows.as_ref().filter(|_| self.has_windows);
        windows.map_or(&context.frames, |windows| &windows.segments)
    }
}

impl Stage for VisionBlock {
    type Context = VisionContext;

    fn params(&self) -> Vec<&Param> {
        let linears = self.qkv.params().chain(self.proj.params());
        self.norm1.params().chain(linears).chain(self.mlp.params()).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [P, Dv]
        context: &VisionContext,
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, stats) = self.norm1.normed(x, pass)?; // [P, Dv]
        let qkv = self.qkv.forward(&normed, pass)?; // [P, 3 * Dv]
        let (q, k, v) = kernels::vision_rope_split(&qkv, self.num_heads, &context.rope)?; // [P, H, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let (o, lse) = self.attention.forward(heads, self.segments(context), self.scores)?; // [P, H, Dh], [H, P]
        let x1 = self.proj.forward_add(&o.reshape(x.shape())?, x, pass)?; // [P, Dv]
        // patches are many: what is cheap is always computed again
        let (y, mlp) = self.mlp.forward(&x1, &(), Recompute::Cheap, pass)?; // [P, Dv]
        Ok((y, Saved::new([x.clone(), stats, q, k, v, o, lse]).with_parts([mlp])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [P, Dv]
        context: &VisionContext,
        _input_grad: InputGrad, // one of eight matmuls: not worth a second path
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, stats, q, k, v, o, lse] = saved.tensors()?;
        let [mlp] = saved.parts()?;
        let Some(dx1) = self.mlp.backward(mlp, dy, &(), InputGrad::Needed, pass)? else {
            bail!("the MLP of a block returned no gradient of its input");
        }; // [P, Dv], after attention
        let d_o = self.proj.backward(&o.reshape(x.shape())?, &dx1, pass)?.reshape(o.shape())?;
        let heads = Qkv { q: &q, k: &k, v: &v };
        let segments = self.segments(context);
        let d_heads = self.attention.backward(heads, &o, &lse, &d_o, segments, self.scores)?;
        let d_qkv = kernels::vision_rope_merge_backward(
            &d_heads.dq,
            &d_heads.dk,
            &d_heads.dv,
            &context.rope,
        )?; // [P, 3 * Dv]
        let normed = self.norm1.apply(&x, &stats, pass)?;
        let d_normed = self.qkv.backward(&normed, &d_qkv, pass)?; // [P, Dv]
        self.norm1.backward_add(&x, &stats, &d_normed, Some(&dx1), pass).map(Some)
    }
}
