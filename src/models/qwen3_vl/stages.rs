//! The list of stages, forward and backward: where the vision tower meets the decoder.
//!
//! ```text
//! pixels -> patch embed -> block 0 .. block n -> merger -> rows of the embedding
//!                             | (at the deepstack indexes)
//!                             deepstack merger k -> added to the rows after decoder layer k
//! ids -> embedding -> layer 0 .. layer m -> norm -> hidden [T, D]
//! ```

use super::config::ModelConfig;
use super::input::{ModelInput, VisionInput};
use super::merger::{Merger, NormPlace};
use super::params::{EMBED_TOKENS, LM_HEAD, ParamMap, WeightError};
use super::text::{DecoderLayer, RmsNorm};
use super::vision::{PatchEmbed, VisionBlock, vision_blocks};
use crate::ops::{self, AttentionBackend};
use crate::tape::{GradSink, InputGrad, Kept, Param, Recompute, Stage};
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// What is run again in the backward pass instead of being kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecomputePolicy {
    /// Blocks and mergers of the tower.
    pub vision: Recompute,
    /// Decoder layers.
    pub llm: Recompute,
}

impl RecomputePolicy {
    /// Everything is kept.
    pub const NONE: Self = Self { vision: Recompute::No, llm: Recompute::No };
}

/// The vision tower.
struct Vision {
    patch_embed: PatchEmbed,
    blocks: Vec<VisionBlock>,
    merger: Merger,
    deepstack: Vec<(usize, Merger)>, // block after which it reads
}

/// The decoder.
struct Text {
    embed_tokens: Param, // [V, D]
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

/// A Qwen3-VL dense model over a list of parameters.
pub struct Model {
    config: ModelConfig,
    vision: Vision,
    text: Text,
    lm_head: Param, // [V, D]; the embedding itself when tied
}

/// What forward kept of the vision tower.
struct VisionTape {
    patch_embed: Kept<PatchEmbed>,
    blocks: Vec<Kept<VisionBlock>>,
    deepstack: Vec<Kept<Merger>>,
    merger: Kept<Merger>,
}

/// What forward kept; backward consumes it. Where nothing is trained, nothing is kept.
pub struct Tape {
    vision: Option<VisionTape>,
    layers: Vec<Kept<DecoderLayer>>, // from the first that backward visits
    norm: Kept<RmsNorm>,
}

/// Features of a micro-batch's images: `[M, D]` each.
pub(super) struct Features {
    main: Tensor,
    deepstack: Vec<Tensor>,
}

impl Model {
    /// Puts the model together from parameters with their published names.
    pub fn new(
        config: &ModelConfig,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let map = ParamMap::new(params);
        let join = config.vision.spatial_merge_size * config.vision.spatial_merge_size;
        let deepstack = config.vision.deepstack_visual_indexes.iter().enumerate().map(|(k, at)| {
            let name = format!("model.visual.deepstack_merger_list.{k}");
            Ok((*at, Merger::new(&map, &name, NormPlace::AfterJoin, join)?))
        });
        let vision = Vision {
            patch_embed: PatchEmbed::new(&map)?,
            blocks: vision_blocks(&map, config, attention)?,
            merger: Merger::new(&map, "model.visual.merger", NormPlace::BeforeJoin, join)?,
            deepstack: deepstack.collect::<std::result::Result<_, _>>()?,
        };
        let layers = (0..config.text.num_hidden_layers)
            .map(|layer| DecoderLayer::new(&map, &config.text, layer, attention.clone()));
        let eps = config.text.rms_norm_eps;
        let text = Text {
            embed_tokens: map.get(EMBED_TOKENS)?,
            layers: layers.collect::<std::result::Result<_, _>>()?,
            norm: RmsNorm::new(&map, "model.language_model.norm", eps)?,
        };
        let lm_head = map.get(if config.tie_word_embeddings { EMBED_TOKENS } else { LM_HEAD })?;
        Ok(Self { config: config.clone(), vision, text, lm_head })
    }

    /// Sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Weight of the head, `[V, D]`.
    pub fn lm_head(&self) -> &Param {
        &self.lm_head
    }

    /// Hidden states after the last norm, `[T, D]`, and what backward into `grads` needs.
    pub fn forward(
        &self,
        input: &ModelInput,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> Result<(Tensor, Tape)> {
        let trained_vision = any_trained(self.vision.params(), grads);
        let (features, vision) = match &input.vision {
            Some(vision) if trained_vision => {
                let (features, tape) = self.vision.forward(vision, recompute.vision)?;
                (Some(features), Some(tape))
            }
            _ => (self.features(input)?, None),
        };
        let mut h = self.embed(input, features.as_ref())?; // [T, D]
        let mut visited = vision.is_some() || grads.buffer(&self.text.embed_tokens).is_some();
        let mut layers = Vec::with_capacity(self.text.layers.len());
        for (k, layer) in self.text.layers.iter().enumerate() {
            visited = visited || any_trained(layer.params(), grads);
            h = if visited {
                let (y, kept) = Kept::forward(layer, h, &input.text, recompute.llm)?;
                layers.push(kept);
                y
            } else {
                layer.forward(&h, &input.text)?.0
            };
            Self::inject(&h, input, features.as_ref(), k)?;
        }
        let (hidden, norm) = Kept::forward(&self.text.norm, h, &input.text, Recompute::No)?;
        Ok((hidden, Tape { vision, layers, norm }))
    }

    /// Hidden states after the last norm, `[T, D]`, keeping nothing.
    pub fn hidden(&self, input: &ModelInput) -> Result<Tensor> {
        let features = self.features(input)?;
        let mut h = self.embed(input, features.as_ref())?;
        for (k, layer) in self.text.layers.iter().enumerate() {
            h = layer.forward(&h, &input.text)?.0;
            Self::inject(&h, input, features.as_ref(), k)?;
        }
        Ok(self.text.norm.forward(&h, &input.text)?.0)
    }

    /// Adds the gradient of every trained parameter to `grads`, given `d_hidden: [T, D]`.
    pub fn backward(
        &self,
        tape: Tape,
        d_hidden: Tensor,
        input: &ModelInput,
        grads: &dyn GradSink,
    ) -> Result<()> {
        let vision_input =
            input.vision.as_ref().filter(|_| any_trained(self.vision.params(), grads));
        let embeds = grads.buffer(&self.text.embed_tokens);
        let needed = |layers: &[DecoderLayer]| {
            let below = vision_input.is_some()
                || embeds.is_some()
                || layers.iter().any(|layer| any_trained(layer.params(), grads));
            if below { InputGrad::Needed } else { InputGrad::Skip }
        };
        let layers = &self.text.layers;
        let (context, num_deepstack) = (&input.text, self.vision.deepstack.len());
        let dh = tape.norm.backward(&self.text.norm, d_hidden, context, grads, needed(layers))?;
        let Some(mut dh) = dh.filter(|_| needed(layers) == InputGrad::Needed) else {
            return Ok(());
        };
        let mut d_deepstack = Vec::with_capacity(num_deepstack); // last first
        let first = layers.len() - tape.layers.len();
        for (i, kept) in tape.layers.into_iter().enumerate().rev() {
            let k = first + i;
            if let Some(vision) = vision_input.filter(|_| k < num_deepstack) {
                d_deepstack.push(ops::gather_rows(&dh, &vision.rows)?); // [M, D]
            }
            match kept.backward(&layers[k], dh, context, grads, needed(&layers[..k]))? {
                Some(dx) => dh = dx,
                None => return Ok(()),
            }
        }
        let d_main = match vision_input {
            Some(vision) => Some((vision, ops::gather_rows(&dh, &vision.rows)?)), // [M, D]
            None => None,
        };
        if let Some(d_table) = embeds {
            if let Some(vision) = &input.vision {
                ops::zero_rows(&dh, &vision.rows)?; // features replaced these rows of the embedding
            }
            ops::embedding_backward(&input.input_ids, &dh, d_table)?;
        }
        drop(dh);
        match (d_main, tape.vision) {
            (Some((vision, d_main)), Some(kept)) => {
                self.vision.backward(kept, d_main, d_deepstack, vision, grads)
            }
            _ => Ok(()),
        }
    }

    /// Features of the images, keeping nothing; `None` without images.
    pub(super) fn features(&self, input: &ModelInput) -> Result<Option<Features>> {
        input.vision.as_ref().map(|vision| self.vision.features(vision)).transpose()
    }

    /// Adds deepstack feature `k` to the rows of the images, after decoder layer `k`.
    pub(super) fn inject(
        h: &Tensor,
        input: &ModelInput,
        features: Option<&Features>,
        k: usize,
    ) -> Result<()> {
        match (&input.vision, features.and_then(|features| features.deepstack.get(k))) {
            (Some(vision), Some(feature)) => ops::index_add(h, &vision.rows, feature),
            _ => Ok(()),
        }
    }

    pub(super) fn layers(&self) -> &[DecoderLayer] {
        &self.text.layers
    }

    pub(super) fn norm(&self) -> &RmsNorm {
        &self.text.norm
    }

    /// Token embeddings with the main features in their rows, `[T, D]`.
    pub(super) fn embed(&self, input: &ModelInput, features: Option<&Features>) -> Result<Tensor> {
        let h = ops::embedding(&input.input_ids, self.text.embed_tokens.tensor())?;
        if let (Some(vision), Some(features)) = (&input.vision, features) {
            ops::index_copy(&h, &vision.rows, &features.main)?;
        }
        Ok(h)
    }
}

fn any_trained<'a>(params: impl IntoIterator<Item = &'a Param>, grads: &dyn GradSink) -> bool {
    params.into_iter().any(|param| grads.buffer(param).is_some())
}

impl Vision {
    fn params(&self) -> impl Iterator<Item = &Param> {
        let blocks = self.blocks.iter().flat_map(VisionBlock::params);
        let deepstack = self.deepstack.iter().flat_map(|(_, merger)| merger.params());
        self.patch_embed.params().chain(blocks).chain(self.merger.params()).chain(deepstack)
    }

    /// The deepstack merger that reads after `block`.
    fn tap(&self, block: usize) -> Option<&Merger> {
        self.deepstack.iter().find(|(at, _)| *at == block).map(|(_, merger)| merger)
    }

    fn forward(&self, input: &VisionInput, recompute: Recompute) -> Result<(Features, VisionTape)> {
        let (context, pixels) = (&input.context, input.pixel_values.clone());
        let (mut h, patch_embed) =
            Kept::forward(&self.patch_embed, pixels, context, Recompute::No)?;
        let mut tape = (Vec::with_capacity(self.blocks.len()), Vec::new());
        let mut features = Vec::with_capacity(self.deepstack.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let (y, kept) = Kept::forward(block, h, context, recompute)?; // [P, Dv]
            tape.0.push(kept);
            h = y;
            if let Some(merger) = self.tap(i) {
                let (feature, kept) = Kept::forward(merger, h.clone(), &(), recompute)?; // [M, D]
                features.push(feature);
                tape.1.push(kept);
            }
        }
        let (main, merger) = Kept::forward(&self.merger, h, &(), recompute)?; // [M, D]
        let (blocks, deepstack) = tape;
        let tape = VisionTape { patch_embed, blocks, deepstack, merger };
        Ok((Features { main, deepstack: features }, tape))
    }

    /// Features alone, keeping nothing.
    fn features(&self, input: &VisionInput) -> Result<Features> {
        let mut h = self.patch_embed.forward(&input.pixel_values, &input.context)?.0;
        let mut deepstack = Vec::with_capacity(self.deepstack.len());
        for (i, block) in self.blocks.iter().enumerate() {
            h = block.forward(&h, &input.context)?.0;
            if let Some(merger) = self.tap(i) {
                deepstack.push(merger.forward(&h, &())?.0);
            }
        }
        Ok(Features { main: self.merger.forward(&h, &())?.0, deepstack })
    }

    /// `d_deepstack` comes last feature first, as the decoder's backward finds them.
    fn backward(
        &self,
        tape: VisionTape,
        d_main: Tensor,
        d_deepstack: Vec<Tensor>,
        input: &VisionInput,
        grads: &dyn GradSink,
    ) -> Result<()> {
        // Whether the tower needs a gradient below its first `blocks` blocks.
        let embed_trained = any_trained(self.patch_embed.params(), grads);
        let below = |blocks: usize| {
            let mut tower = self.blocks[..blocks].iter();
            if embed_trained || tower.any(|block| any_trained(block.params(), grads)) {
                InputGrad::Needed
            } else {
                InputGrad::Skip
            }
        };
        let last = self.blocks.len();
        let mut dh = tape.merger.backward(&self.merger, d_main, &(), grads, below(last))?;
        let mut taps = tape.deepstack.into_iter().rev().zip(d_deepstack);
        for (i, kept) in tape.blocks.into_iter().enumerate().rev() {
            if let Some(merger) = self.tap(i) {
                let Some((kept, d_feature)) = taps.next() else {
                    candle_core::bail!("a deepstack feature has no gradient");
                };
                let d_tap = kept.backward(merger, d_feature, &(), grads, below(i + 1))?;
                if let (Some(dh), Some(d_tap)) = (&dh, &d_tap) {
                    ops::add_in_place(dh, d_tap)?;
                }
            }
            // Frozen blocks below the last trained one are not run; their mergers still are.
            dh = match (dh, below(i + 1)) {
                (Some(dy), InputGrad::Needed) => {
                    kept.backward(&self.blocks[i], dy, &input.context, grads, below(i))?
                }
                _ => None,
            };
        }
        if let Some(dy) = dh.filter(|_| embed_trained) {
            let context = &input.context;
            tape.patch_embed.backward(&self.patch_embed, dy, context, grads, InputGrad::Skip)?;
        }
        Ok(())
    }
}
