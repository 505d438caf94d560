//! Stages of the vision encoder: patch embedding, and pre-norm blocks with full attention inside
//! each frame or window.

use super::config::{VisionConfig, VisionKind};
use super::input::{TablePositions, VisionContext};
use super::norm::Norm;
use super::vision_mlp::{SavedVisionMlp, VisionMlp};
use crate::nn::{Linear, ParamMap, WeightError};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};
use kernels::{AttentionBackend, Masking, Qkv, Segments};
use std::sync::Arc;

/// Pixels to features: a linear map of each patch, plus its interpolated position embedding if
/// there is a table of them.
pub(super) struct PatchEmbed {
    proj: Linear,
    pub(super) positions: Option<Param>, // [N, Dv]
}

impl PatchEmbed {
    pub(super) fn new(
        params: &ParamMap<'_>,
        kind: &VisionKind,
    ) -> std::result::Result<Self, WeightError> {
        let proj = "model.visual.patch_embed.proj";
        Ok(match kind {
            VisionKind::Learned { .. } => Self {
                proj: Linear::with_bias(params, proj)?,
                positions: Some(params.get("model.visual.pos_embed.weight")?),
            },
            VisionKind::Windowed { .. } => {
                Self { proj: Linear::without_bias(params, proj)?, positions: None }
            }
        })
    }
}

impl Stage for PatchEmbed {
    type Context = VisionContext;
    type Saved = Tensor; // the pixels

    fn params(&self) -> Vec<&Param> {
        self.proj.params().chain(&self.positions).collect()
    }

    fn forward(&self, x: &Tensor, context: &VisionContext) -> Result<(Tensor, Tensor)> {
        let features = self.proj.forward(x)?; // [P, Dv]
        let (Some(table), Some(TablePositions { index, weight })) =
            (&self.positions, &context.positions)
        else {
            return Ok((features, x.clone()));
        };
        let y = kernels::interpolate_rows_add(&table.tensor(), index, weight, &features)?;
        Ok((y, x.clone()))
    }

    fn backward(
        &self,
        pixels: Tensor,
        dy: Tensor,
        context: &VisionContext,
        grads: &dyn GradSink,
        _input_grad: InputGrad, // pixels need no gradient
    ) -> Result<Option<Tensor>> {
        self.proj.backward_params(&pixels, &dy, &self.proj.output_grad(&dy)?, grads)?;
        let d_table = self.positions.as_ref().and_then(|table| grads.buffer(table));
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
    mlp: VisionMlp,
    has_windows: bool,
    num_heads: usize,
    attention: Arc<dyn AttentionBackend>,
}

/// The tensors that the backward of a block needs.
pub(super) struct SavedVisionBlock {
    x: Tensor,      // [P, Dv]
    stats1: Tensor, // of the norm
    q: Tensor,      // [P, H, Dh]
    k: Tensor,      // [P, H, Dh]
    v: Tensor,      // [P, H, Dh]
    o: Tensor,      // [P, H, Dh]
    lse: Tensor,    // [H, P]
    mlp: SavedVisionMlp,
}

impl VisionBlock {
    pub(super) fn new(
        params: &ParamMap<'_>,
        config: &VisionConfig,
        block: usize,
        attention: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let name = |part: &str| format!("model.visual.blocks.{block}.{part}");
        Ok(Self {
            norm1: Norm::new(params, &name("norm1"), &config.kind)?,
            qkv: Linear::with_bias(params, &name("attn.qkv"))?,
            proj: Linear::with_bias(params, &name("attn.proj"))?,
            mlp: VisionMlp::new(params, &format!("model.visual.blocks.{block}"), &config.kind)?,
            has_windows: config.has_windows(block),
            num_heads: config.num_heads,
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
    type Saved = SavedVisionBlock;

    fn params(&self) -> Vec<&Param> {
        let linears = self.qkv.params().chain(self.proj.params());
        self.norm1.params().into_iter().chain(linears).chain(self.mlp.params()).collect()
    }

    fn forward(&self, x: &Tensor, context: &VisionContext) -> Result<(Tensor, SavedVisionBlock)> {
        let (normed, stats1) = self.norm1.forward(x)?; // [P, Dv]
        let qkv = self.qkv.forward(&normed)?; // [P, 3 * Dv]
        let (q, k, v) = kernels::vision_rope_split(&qkv, self.num_heads, &context.rope)?; // [P, H, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let (o, lse) = self.attention.forward(heads, self.segments(context), Masking::Full)?;
        let x1 = self.proj.forward_add(&o.reshape(x.shape())?, x)?; // [P, Dv]
        let (y, mlp) = self.mlp.forward(x1)?; // [P, Dv]
        Ok((y, SavedVisionBlock { x: x.clone(), stats1, q, k, v, o, lse, mlp }))
    }

    fn backward(
        &self,
        saved: SavedVisionBlock,
        dy: Tensor,
        context: &VisionContext,
        grads: &dyn GradSink,
        _input_grad: InputGrad, // one of eight matmuls: not worth a second path
    ) -> Result<Option<Tensor>> {
        let SavedVisionBlock { x, stats1, q, k, v, o, lse, mlp } = saved;
        let dx1 = self.mlp.backward(mlp, &dy, grads)?; // [P, Dv], after attention
        let d_o = self.proj.backward(&o.reshape(x.shape())?, &dx1, grads)?.reshape(o.shape())?;
        let heads = Qkv { q: &q, k: &k, v: &v };
        let segments = self.segments(context);
        let d_heads = self.attention.backward(heads, &o, &lse, &d_o, segments, Masking::Full)?;
        let d_qkv = kernels::vision_rope_merge_backward(
            &d_heads.dq,
            &d_heads.dk,
            &d_heads.dv,
            &context.rope,
        )?; // [P, 3 * Dv]
        let normed = self.norm1.apply(&x, &stats1)?;
        let d_normed = self.qkv.backward(&normed, &d_qkv, grads)?; // [P, Dv]
        self.norm1.backward(&x, &stats1, &d_normed, Some(&dx1), grads).map(Some)
    }
}
