//! Stages of the vision encoder: patch embedding, and pre-norm blocks with full attention inside
//! each frame or window.

use super::attention::Heads;
use super::branch::BranchEnd;
use super::config::{EARLY_MERGE, EarlyMerger, VisionConfig, VisionMlp, VisionNorm, VisionParts};
use super::gelu_mlp::GeluMlp;
use super::input::{MergedContext, VisionContext};
use super::merger::Merger;
use crate::nn::{Linear, MlpBlock, Norm, ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor, bail};
use kernels::{AttentionBackend, Gelu, Masking, Qkv, Scores, Segments};
use std::sync::Arc;

impl VisionNorm {
    /// The norm with the parameters `<name>.weight` and `<name>.bias`.
    pub(super) fn build(
        self,
        params: &ParamMap<'_>,
        name: &str,
        eps: f64,
    ) -> std::result::Result<Norm, WeightError> {
        match self {
            Self::Layer => Norm::layer(params, name, eps),
            Self::Rms => Norm::rms(params, name, eps),
        }
    }
}

/// Pixels to features: a linear map of each patch, plus its position embedding if there is a table
/// of them. Some encoders have a class token in front of the patches of each frame.
pub(super) struct PatchEmbed {
    proj: Linear,
    positions: Option<Param>, // [N, Dv], with or without axes of size 1 in front
    class_token: Option<Param>, // [Dv], likewise
}

impl PatchEmbed {
    pub(super) fn new(
        params: &ParamMap<'_>,
        parts: &VisionParts,
    ) -> std::result::Result<Self, WeightError> {
        let names = &parts.names;
        let get = |name: Option<&str>| name.map(|name| params.get(name)).transpose();
        Ok(Self {
            proj: if parts.has_patch_bias {
                Linear::with_bias(params, names.patch_embed)?
            } else {
                Linear::without_bias(params, names.patch_embed)?
            },
            positions: get(parts.num_position_embeddings.map(|_| names.positions))?,
            class_token: get(names.class_token)?,
        })
    }

    /// The learned rows, which nothing multiplies.
    pub(super) fn tables(&self) -> impl Iterator<Item = &Param> {
        self.positions.iter().chain(&self.class_token)
    }
}

/// A table of rows of `width` values, whatever its other axes are.
fn table_of(param: &Tensor, width: usize) -> Result<Tensor> {
    param.reshape(((), width))
}

impl Stage for PatchEmbed {
    type Context = VisionContext;

    fn params(&self) -> Vec<&Param> {
        self.proj.params().chain(self.tables()).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [P, C*tp*p*p], the pixels
        context: &VisionContext,
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let features = self.proj.forward(x, pass)?; // [P, Dv]
        let (width, saved) = (features.dim(1)?, Saved::new([x.clone()]));
        let table = |param| table_of(&pass.weight(param)?, width);
        let mut y = features;
        if let (Some(token), Some(of)) = (&self.class_token, &context.class_tokens) {
            y = kernels::scatter_rows(&y, &of.patches, of.num_rows)?; // [R, Dv]
            kernels::index_copy(&y, &of.rows, &kernels::embedding(&of.first, &table(token)?)?)?;
        }
        if let (Some(positions), Some(of)) = (&self.positions, &context.positions) {
            y = kernels::interpolate_rows_add(&table(positions)?, &of.index, &of.weight, &y)?;
        }
        Ok((y, saved))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [R, Dv]
        context: &VisionContext,
        _input_grad: InputGrad, // pixels need no gradient
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [pixels] = saved.tensors()?;
        let width = dy.dim(1)?;
        let grad_of = |param: &Option<Param>| {
            let grad = param.as_ref().and_then(|param| pass.grad(param));
            grad.map(|grad| table_of(grad, width)).transpose()
        };
        if let (Some(d_table), Some(of)) = (grad_of(&self.positions)?, &context.positions) {
            kernels::interpolate_rows_backward(&of.index, &of.weight, &dy, &d_table)?;
        }
        if let (Some(d_token), Some(of)) = (grad_of(&self.class_token)?, &context.class_tokens) {
            kernels::embedding_backward(
                &of.first,
                &kernels::gather_rows(&dy, &of.rows)?,
                &d_token,
            )?;
        }
        let d_features = match &context.class_tokens {
            Some(of) => kernels::gather_rows(&dy, &of.patches)?,
            None => dy,
        }; // [P, Dv]
        let d = self.proj.output_grad(&d_features, pass)?;
        self.proj.backward_params(&pixels, &d_features, &d, pass)?;
        Ok(None)
    }
}

/// The rows of a block that attend to each other.
enum Scope {
    Frames,
    Windows,
    /// The squares that an early merger merges.
    Squares,
    /// Frames after an early merger.
    MergedFrames,
}

/// What follows attention.
enum SecondHalf {
    Mlp(Box<dyn Stage<Context = ()>>),
    /// Each square becomes one row.
    Merger(Box<Merger>),
}

/// Attention with a residual, then an MLP with a residual or an early merger.
pub(super) struct VisionBlock {
    norm1: Norm,
    heads: Heads,
    proj: BranchEnd,
    rest: SecondHalf,
    scope: Scope,
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
        let (parts, names) = (&config.parts, &config.parts.names);
        let block_name = format!("{}.{block}", names.blocks);
        let name = |part: &str| format!("{block_name}.{part}");
        let linear = |part: &str| Linear::with_bias(params, &name(part));
        let norm = |part: &str| parts.norm.build(params, &name(part), parts.eps);
        let [norm1, norm2] = names.norms;
        let is_merged = parts.early_merger.as_ref().is_some_and(|of| block > of.after_block);
        let scales = names.layer_scales.map(|scales| scales.map(&name));
        let [proj_scale, mlp_scale] = scales.map_or([None, None], |scales| scales.map(Some));
        let mlp_layer = |part: &str| linear(&format!("mlp.{part}"));
        let mlp: Box<dyn Stage<Context = ()>> = match parts.mlp {
            VisionMlp::Gelu { act, layers: [fc1, fc2] } => Box::new(GeluMlp {
                norm: norm(norm2)?,
                fc1: mlp_layer(fc1)?,
                fc2: BranchEnd::new(mlp_layer(fc2)?, params, mlp_scale)?,
                act,
            }),
            VisionMlp::SwiGlu => Box::new(MlpBlock::new(norm(norm2)?, mlp_layer)?),
        };
        Ok(Self {
            norm1: norm(norm1)?,
            heads: Heads::new(params, parts, &block_name)?,
            proj: BranchEnd::new(linear(names.attention_output)?, params, proj_scale)?,
            rest: SecondHalf::Mlp(mlp),
            scope: if config.has_windows(block) {
                Scope::Windows
            } else if is_merged {
                Scope::MergedFrames
            } else {
                Scope::Frames
            },
            num_heads: config.num_heads,
            scores: Scores::new(Masking::Full, config.hidden_size / config.num_heads),
            attention,
        })
    }

    /// The block that merges squares of rows.
    pub(super) fn early_merger(
        params: &ParamMap<'_>,
        config: &VisionConfig,
        of: &EarlyMerger,
        attention: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let (parts, name) = (&config.parts, of.merger.name);
        let output = format!("{name}.{}", parts.names.attention_output);
        let merger = Merger::new(params, name, &of.merger, Gelu::Tanh, EARLY_MERGE.pow(2))?;
        Ok(Self {
            norm1: parts.norm.build(params, &format!("{name}.{}", of.norm), parts.eps)?,
            heads: Heads::new(params, parts, name)?,
            proj: BranchEnd::new(Linear::with_bias(params, &output)?, params, None)?,
            rest: SecondHalf::Merger(Box::new(merger)),
            scope: Scope::Squares,
            num_heads: config.num_heads,
            scores: Scores::new(Masking::Full, config.hidden_size / config.num_heads),
            attention,
        })
    }

    /// The merger of an early merger.
    pub(super) fn merger(&self) -> Option<&Merger> {
        match &self.rest {
            SecondHalf::Merger(merger) => Some(merger),
            SecondHalf::Mlp(_) => None,
        }
    }

    fn segments<'a>(&self, context: &'a VisionContext) -> Result<&'a Segments> {
        Ok(match (&self.scope, &context.windows) {
            (Scope::Windows, Some(windows)) => &windows.segments,
            (Scope::Frames | Scope::Windows, _) => &context.frames,
            (Scope::Squares, _) => &merged(context)?.squares,
            (Scope::MergedFrames, _) => &merged(context)?.frames,
        })
    }
}

fn merged(context: &VisionContext) -> Result<&MergedContext> {
    match &context.merged {
        Some(merged) => Ok(merged),
        None => bail!("the images were uploaded for an encoder without an early merger"),
    }
}

impl Stage for VisionBlock {
    type Context = VisionContext;

    fn params(&self) -> Vec<&Param> {
        let layers = self.heads.params().into_iter().chain(self.proj.params());
        let rest = match &self.rest {
            SecondHalf::Mlp(mlp) => mlp.params(),
            SecondHalf::Merger(merger) => merger.params(),
        };
        self.norm1.params().chain(layers).chain(rest).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [R, Dv]
        context: &VisionContext,
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, stats) = self.norm1.normed(x, pass)?; // [R, Dv]
        let rope = context.rope.as_ref();
        let ([q, k, v], norms) = self.heads.forward(&normed, self.num_heads, rope, pass)?; // [R, H, Dh]
        drop(normed);
        let heads = Qkv { q: &q, k: &k, v: &v };
        let (o, lse) = self.attention.forward(heads, self.segments(context)?, self.scores)?; // [R, H, Dh], [H, R]
        let (x1, f) = self.proj.forward(&o.reshape(x.shape())?, x, pass)?; // [R, Dv]
        // patches are many: what is cheap is always computed again
        let cheap = Recompute::Cheap;
        let (y, rest) = match &self.rest {
            SecondHalf::Mlp(mlp) => mlp.forward(&x1, &(), cheap, pass)?, // [R, Dv]
            SecondHalf::Merger(merger) => {
                let (y, saved) = merger.forward(&x1, &(), cheap, pass)?; // [R / 4, Dv]
                (merged(context)?.mean.add_to(&y, &x1)?, saved)
            }
        };
        let [q_in, q_stats, k_in, k_stats] = norms;
        let saved = Saved::new([x.clone(), stats, q, k, v, o, lse]);
        Ok((y, saved.with_optional([f, q_in, q_stats, k_in, k_stats]).with_parts([rest])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [R, Dv], after an early merger [R / 4, Dv]
        context: &VisionContext,
        _input_grad: InputGrad, // one of eight matmuls: not worth a second path
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, stats, q, k, v, o, lse] = saved.tensors()?;
        let [f, norms @ ..] = saved.optional::<5>()?;
        let [rest] = saved.parts()?;
        let needed = InputGrad::Needed;
        let dx1 = match &self.rest {
            SecondHalf::Mlp(mlp) => mlp.backward(rest, dy, &(), needed, pass)?,
            SecondHalf::Merger(merger) => {
                let d_mean = merged(context)?.mean.input_grad(&dy)?;
                let dx1 = merger.backward(rest, dy, &(), needed, pass)?;
                dx1.iter().try_for_each(|dx1| kernels::add_in_place(dx1, &d_mean))?;
                dx1
            }
        };
        let Some(dx1) = dx1 else {
            bail!("the second half of a block returned no gradient of its input");
        }; // [R, Dv], after attention
        let d_f = self.proj.output_grad(f.as_ref(), &dx1, pass)?; // [R, Dv]
        let d_o = self.proj.linear.backward(&o.reshape(x.shape())?, &d_f, pass)?;
        drop((f, d_f));
        let (heads, d_o) = (Qkv { q: &q, k: &k, v: &v }, d_o.reshape(o.shape())?);
        let segments = self.segments(context)?;
        let d_heads = self.attention.backward(heads, &o, &lse, &d_o, segments, self.scores)?;
        let normed = self.norm1.apply(&x, &stats, pass)?;
        let rope = context.rope.as_ref();
        let d_normed = self.heads.backward(d_heads, norms, &normed, rope, pass)?; // [R, Dv]
        self.norm1.backward_add(&x, &stats, &d_normed, Some(&dx1), pass).map(Some)
    }
}
