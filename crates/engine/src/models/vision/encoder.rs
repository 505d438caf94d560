//! The vision encoder: its stages, forward and backward.
//!
//! ```text
//! pixels -> patch embed -> block 0 .. block n -> norm, in some -> merger -> main features [M, D]
//!                             | (at the deepstack indexes)
//!                             deepstack merger k -> deepstack features k [M, D]
//! ```

use super::blocks::{PatchEmbed, VisionBlock};
use super::config::{MergerParts, NormPlace, VisionConfig};
use super::input::VisionInput;
use super::merger::Merger;
use crate::nn::{Norm, ParamMap, WeightError};
use crate::tape::{InputGrad, Param, Pass, Recompute, SavedStage, Stage};
use candle_core::{Result, Tensor};
use kernels::{AttentionBackend, Gelu};
use std::sync::Arc;

/// Name of deepstack merger `k`.
pub(super) fn deepstack_merger(k: usize) -> String {
    format!("model.visual.deepstack_merger_list.{k}")
}

pub(in crate::models) struct VisionEncoder {
    patch_embed: PatchEmbed,
    blocks: Vec<VisionBlock>, // an early merger is one of them
    post_norm: Option<Norm>,
    merger: Merger,
    deepstack: Vec<(usize, Merger)>, // the block whose output it reads
}

/// The tensors that the forward pass of the vision encoder saves for backward.
pub(in crate::models) struct VisionTape {
    patch_embed: SavedStage,
    blocks: Vec<SavedStage>,
    deepstack: Vec<SavedStage>,
    post_norm: Option<SavedStage>,
    merger: SavedStage,
}

/// Features of a micro-batch's images, `[M, D]` each.
pub(in crate::models) struct Features {
    pub(in crate::models) main: Tensor,
    pub(in crate::models) deepstack: Vec<Tensor>,
}

impl VisionEncoder {
    pub(in crate::models) fn new(
        map: &ParamMap<'_>,
        vision: &VisionConfig,
        attention: &Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let (parts, n) = (&vision.parts, vision.rows_per_token());
        let merger = |name: &str, parts: &MergerParts| Merger::new(map, name, parts, Gelu::Erf, n);
        let mut blocks = Vec::with_capacity(vision.depth + 1);
        for block in 0..vision.depth {
            blocks.push(VisionBlock::new(map, vision, block, attention.clone())?);
            if let Some(of) = parts.early_merger.as_ref().filter(|of| of.after_block == block) {
                blocks.push(VisionBlock::early_merger(map, vision, of, attention.clone())?);
            }
        }
        let deepstack = parts.deepstack.iter().enumerate().map(|(k, at)| {
            let place = NormPlace::AfterMerge;
            let parts = MergerParts { place, ..parts.merger.clone() };
            Ok((*at, merger(&deepstack_merger(k), &parts)?))
        });
        let post_norm = parts.post_norm.map(|name| parts.norm.build(map, name, parts.eps));
        Ok(Self {
            patch_embed: PatchEmbed::new(map, parts)?,
            blocks,
            post_norm: post_norm.transpose()?,
            merger: merger(parts.merger.name, &parts.merger)?,
            deepstack: deepstack.collect::<std::result::Result<_, _>>()?,
        })
    }

    pub(in crate::models) fn num_deepstack(&self) -> usize {
        self.deepstack.len()
    }

    /// Parameters of patch embedding and blocks, and of the norm after them.
    pub(in crate::models) fn block_params(&self) -> Vec<&Param> {
        let blocks = self.blocks.iter().flat_map(Stage::params);
        let norm = self.post_norm.iter().flat_map(Norm::params);
        self.patch_embed.params().into_iter().chain(blocks).chain(norm).collect()
    }

    /// Those of [`Self::block_params`] that multiply the rows that an early merger has made.
    pub(super) fn merged_params(&self) -> Vec<&Param> {
        let mut blocks = self.blocks.iter();
        let merger = blocks.find_map(VisionBlock::merger);
        let blocks = blocks.flat_map(Stage::params); // those after it
        merger.into_iter().flat_map(Stage::params).chain(blocks).collect()
    }

    /// The learned rows, which nothing multiplies.
    pub(in crate::models) fn tables(&self) -> Vec<&Param> {
        self.patch_embed.tables().collect()
    }

    pub(in crate::models) fn merger_params(&self) -> Vec<&Param> {
        let deepstack = self.deepstack.iter().flat_map(|(_, merger)| merger.params());
        self.merger.params().into_iter().chain(deepstack).collect()
    }

    /// Parameters of each stage, in the order of backward.
    pub(in crate::models) fn stages(&self) -> Vec<Vec<&Param>> {
        let mut stages = vec![self.merger.params()];
        stages.extend(self.post_norm.as_ref().map(Stage::params));
        for (i, block) in self.blocks.iter().enumerate().rev() {
            stages.extend(self.deepstack_merger(i).map(Stage::params));
            stages.push(block.params());
        }
        stages.push(self.patch_embed.params());
        stages
    }

    /// Whether `pass` has a gradient buffer for a parameter of the encoder.
    pub(in crate::models) fn is_trained(&self, pass: &Pass<'_>) -> bool {
        self.patch_embed.is_trained(pass)
            || self.blocks.iter().any(|block| block.is_trained(pass))
            || self.post_norm.iter().any(|norm| norm.is_trained(pass))
            || self.merger.is_trained(pass)
            || self.deepstack.iter().any(|(_, merger)| merger.is_trained(pass))
    }

    fn deepstack_merger(&self, block: usize) -> Option<&Merger> {
        self.deepstack.iter().find(|(at, _)| *at == block).map(|(_, merger)| merger)
    }

    pub(in crate::models) fn forward(
        &self,
        input: &VisionInput,
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Features, VisionTape)> {
        let (context, pixels) = (&input.context, input.pixel_values.clone());
        let (mut h, patch_embed) =
            SavedStage::forward(&self.patch_embed, pixels, context, Recompute::Cheap, pass)?;
        let (mut blocks, mut mergers) = (Vec::with_capacity(self.blocks.len()), Vec::new());
        let mut features = Vec::with_capacity(self.deepstack.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let (y, saved) = SavedStage::forward(block, h, context, recompute, pass)?; // [R, Dv]
            blocks.push(saved);
            h = y;
            if let Some(merger) = self.deepstack_merger(i) {
                let (feature, saved) =
                    SavedStage::forward(merger, h.clone(), &(), recompute, pass)?; // [M, D]
                features.push(feature);
                mergers.push(saved);
            }
        }
        let mut post_norm = None;
        if let Some(norm) = &self.post_norm {
            let (y, saved) = SavedStage::forward(norm, h, &(), recompute, pass)?; // [R, Dv]
            (h, post_norm) = (y, Some(saved));
        }
        let h = input.of_patches(h)?; // [P, Dv]
        let (main, merger) = SavedStage::forward(&self.merger, h, &(), recompute, pass)?; // [M, D]
        let tape = VisionTape { patch_embed, blocks, deepstack: mergers, post_norm, merger };
        Ok((Features { main: input.ordered(main)?, deepstack: features }, tape))
    }

    /// Computes the features without saving activations.
    pub(in crate::models) fn features(
        &self,
        input: &VisionInput,
        pass: &Pass<'_>,
    ) -> Result<Features> {
        let recompute = Recompute::Cheap;
        let context = &input.context;
        let mut h = self.patch_embed.forward(&input.pixel_values, context, recompute, pass)?.0;
        let mut deepstack = Vec::with_capacity(self.deepstack.len());
        for (i, block) in self.blocks.iter().enumerate() {
            h = block.forward(&h, context, recompute, pass)?.0;
            if let Some(merger) = self.deepstack_merger(i) {
                deepstack.push(merger.forward(&h, &(), recompute, pass)?.0);
            }
        }
        if let Some(norm) = &self.post_norm {
            h = norm.forward(&h, &(), recompute, pass)?.0;
        }
        let h = input.of_patches(h)?; // [P, Dv]
        let main = input.ordered(self.merger.forward(&h, &(), recompute, pass)?.0)?;
        Ok(Features { main, deepstack })
    }

    /// Runs backward of all stages and reports them as finished. `d_deepstack` lists the gradient
    /// of the last deepstack feature first.
    pub(in crate::models) fn backward(
        &self,
        tape: VisionTape,
        d_main: Tensor,
        d_deepstack: Vec<Tensor>,
        input: &VisionInput,
        pass: &Pass<'_>,
    ) -> Result<()> {
        // Whether the output of the patch embedding, of each block, and of the norm needs a gradient.
        let mut trained = self.patch_embed.is_trained(pass);
        let mut below = vec![InputGrad::needed_if(trained)];
        for block in &self.blocks {
            trained = trained || block.is_trained(pass);
            below.push(InputGrad::needed_if(trained));
        }
        let last = below[self.blocks.len()];
        trained = trained || self.post_norm.iter().any(|norm| norm.is_trained(pass));
        let d_main = input.windowed(d_main)?;
        let needed = InputGrad::needed_if(trained);
        let dh = tape.merger.backward(&self.merger, d_main, &(), needed, pass)?;
        let mut dh = dh.map(|dh| input.of_rows(dh)).transpose()?; // [R, Dv]
        if let (Some(norm), Some(saved)) = (&self.post_norm, tape.post_norm) {
            dh = match dh {
                Some(dy) => saved.backward(norm, dy, &(), last, pass)?,
                None => pass.grads.finished(&Stage::params(norm)).map(|()| None)?,
            };
        }
        let mut mergers = tape.deepstack.into_iter().rev().zip(d_deepstack);
        for (i, saved) in tape.blocks.into_iter().enumerate().rev() {
            if let Some(merger) = self.deepstack_merger(i) {
                let Some((saved, d_feature)) = mergers.next() else {
                    candle_core::bail!("a deepstack feature has no gradient");
                };
                let d_block = saved.backward(merger, d_feature, &(), below[i + 1], pass)?;
                if let (Some(dh), Some(d_block)) = (&dh, &d_block) {
                    kernels::add_in_place(dh, d_block)?;
                }
            }
            // A block with no trained parameter in it or before it is skipped; its merger is not.
            dh = if let (Some(dy), InputGrad::Needed) = (dh, below[i + 1]) {
                saved.backward(&self.blocks[i], dy, &input.context, below[i], pass)?
            } else {
                pass.grads.finished(&self.blocks[i].params())?;
                None
            };
        }
        match dh.filter(|_| below[0] == InputGrad::Needed) {
            Some(dy) => {
                let (stage, context) = (&self.patch_embed, &input.context);
                tape.patch_embed.backward(stage, dy, context, InputGrad::Skip, pass)?;
                Ok(())
            }
            None => pass.grads.finished(&self.patch_embed.params()),
        }
    }
}
