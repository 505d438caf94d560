//! Stages of the vision encoder: patch embedding with interpolated positions, and pre-norm blocks
//! with full attention inside each frame.

use super::config::VisionConfig;
use super::input::VisionContext;
use crate::nn::{LayerNorm, Linear, ParamMap, WeightError};
use crate::ops::{self, AttentionBackend, Gelu, Masking, Qkv};
use crate::tape::{GradSink, InputGrad, Param, Stage};
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// The epsilon of every layer norm of the vision encoder.
pub(super) const LAYER_NORM_EPS: f64 = 1e-6;

/// Pixels to features: a linear map of each patch, plus its interpolated position embedding.
pub(super) struct PatchEmbed {
    proj: Linear,
    pub(super) positions: Param, // [N, Dv]
}

impl PatchEmbed {
    pub(super) fn new(params: &ParamMap<'_>) -> std::result::Result<Self, WeightError> {
        Ok(Self {
            proj: Linear::with_bias(params, "model.visual.patch_embed.proj")?,
            positions: params.get("model.visual.pos_embed.weight")?,
        })
    }
}

impl Stage for PatchEmbed {
    type Context = VisionContext;
    type Saved = Tensor; // the pixels

    fn params(&self) -> Vec<&Param> {
        self.proj.params().chain(std::iter::once(&self.positions)).collect()
    }

    fn forward(&self, x: &Tensor, context: &VisionContext) -> Result<(Tensor, Tensor)> {
        let features = self.proj.forward(x)?; // [P, Dv]
        let (index, weight) = (&context.position_index, &context.position_weight);
        let y = ops::interpolate_rows_add(&self.positions.tensor(), index, weight, &features)?;
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
        if let Some(d_table) = grads.buffer(&self.positions) {
            let (index, weight) = (&context.position_index, &context.position_weight);
            ops::interpolate_rows_backward(index, weight, &dy, d_table)?;
        }
        Ok(None)
    }
}

/// One block.
pub(super) struct VisionBlock {
    norm1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    act: Gelu,
    num_heads: usize,
    attention: Arc<dyn AttentionBackend>,
}

/// The tensors that the backward of a block needs.
pub(super) struct SavedVisionBlock {
    x: Tensor,      // [P, Dv]
    stats1: Tensor, // [P, 2]
    q: Tensor,      // [P, H, Dh]
    k: Tensor,      // [P, H, Dh]
    v: Tensor,      // [P, H, Dh]
    o: Tensor,      // [P, H, Dh]
    lse: Tensor,    // [H, P]
    x1: Tensor,     // [P, Dv], after attention
    stats2: Tensor, // [P, 2]
    hidden: Tensor, // [P, F], before the GELU
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
            norm1: LayerNorm::new(params, &name("norm1"), LAYER_NORM_EPS)?,
            qkv: Linear::with_bias(params, &name("attn.qkv"))?,
            proj: Linear::with_bias(params, &name("attn.proj"))?,
            norm2: LayerNorm::new(params, &name("norm2"), LAYER_NORM_EPS)?,
            fc1: Linear::with_bias(params, &name("mlp.linear_fc1"))?,
            fc2: Linear::with_bias(params, &name("mlp.linear_fc2"))?,
            act: config.hidden_act,
            num_heads: config.num_heads,
            attention,
        })
    }
}

impl Stage for VisionBlock {
    type Context = VisionContext;
    type Saved = SavedVisionBlock;

    fn params(&self) -> Vec<&Param> {
        let norms = self.norm1.params().into_iter().chain(self.norm2.params());
        let linears = [&self.qkv, &self.proj, &self.fc1, &self.fc2];
        norms.chain(linears.into_iter().flat_map(Linear::params)).collect()
    }

    fn forward(&self, x: &Tensor, context: &VisionContext) -> Result<(Tensor, SavedVisionBlock)> {
        let (normed, stats1) = self.norm1.forward(x)?; // [P, Dv]
        let qkv = self.qkv.forward(&normed)?; // [P, 3 * Dv]
        let (q, k, v) = ops::vision_rope_split(&qkv, self.num_heads, &context.rope)?; // [P, H, Dh]
        let heads = Qkv { q: &q, k: &k, v: &v };
        let (o, lse) = self.attention.forward(heads, &context.segments, Masking::Full)?;
        let x1 = self.proj.forward_add(&o.reshape(x.shape())?, x)?; // [P, Dv]
        let (normed, stats2) = self.norm2.forward(&x1)?;
        let hidden = self.fc1.forward(&normed)?; // [P, F]
        let y = self.fc2.forward_add(&ops::gelu(&hidden, self.act)?, &x1)?; // [P, Dv]
        let saved = SavedVisionBlock { x: x.clone(), stats1, q, k, v, o, lse, x1, stats2, hidden };
        Ok((y, saved))
    }

    fn backward(
        &self,
        saved: SavedVisionBlock,
        dy: Tensor,
        context: &VisionContext,
        grads: &dyn GradSink,
        _input_grad: InputGrad, // one of eight matmuls: not worth a second path
    ) -> Result<Option<Tensor>> {
        let SavedVisionBlock { x, stats1, q, k, v, o, lse, x1, stats2, hidden } = saved;
        let d_fc2 = self.fc2.output_grad(&dy)?;
        let d_activated = self.fc2.backward_input(&d_fc2)?; // [P, F]
        let recompute = self.fc2.recompute_input(grads);
        let (d_hidden, activated) = ops::gelu_backward(hidden, d_activated, self.act, recompute)?;
        if let Some(activated) = activated {
            self.fc2.backward_params(&activated, &dy, &d_fc2, grads)?;
        }
        let normed = self.norm2.apply(&x1, &stats2)?;
        let d_normed = self.fc1.backward(&normed, &d_hidden, grads)?; // [P, Dv]
        let dx1 = self.norm2.backward(&x1, &stats2, &d_normed, Some(&dy), grads)?;
        let d_o = self.proj.backward(&o.reshape(x.shape())?, &dx1, grads)?.reshape(o.shape())?;
        let heads = Qkv { q: &q, k: &k, v: &v };
        let d_heads =
            self.attention.backward(heads, &o, &lse, &d_o, &context.segments, Masking::Full)?;
        let d_qkv =
            ops::vision_rope_merge_backward(&d_heads.dq, &d_heads.dk, &d_heads.dv, &context.rope)?; // [P, 3 * Dv]
        let normed = self.norm1.apply(&x, &stats1)?;
        let d_normed = self.qkv.backward(&normed, &d_qkv, grads)?; // [P, Dv]
        self.norm1.backward(&x, &stats1, &d_normed, Some(&dx1), grads).map(Some)
    }
}
