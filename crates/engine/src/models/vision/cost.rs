//! Operations and memory of the vision encoder.

use super::config::{EARLY_MERGE, VisionAttention, VisionConfig, VisionMlp, VisionNorm};
use super::encoder::VisionEncoder;
use crate::cost::{ActivationMemory, PartWork, RowKind};
use crate::nn::{indexes, matrix_elements};
use crate::tape::Recompute;

impl VisionConfig {
    pub(in crate::models) fn work(&self, encoder: &VisionEncoder) -> Vec<PartWork> {
        let (blocks, mergers) = (encoder.block_params(), encoder.merger_params());
        let num_windowed = (0..self.depth).filter(|k| self.has_windows(*k)).count();
        let num_full = self.depth - num_windowed;
        // Of a patch with all patches of its window, as if no window is cut off at an edge.
        let mut in_windows = 2 * num_windowed * self.window_patches() * self.hidden_size;
        let mut full = num_full as f64;
        if let Some(of) = &self.parts.early_merger {
            let square = EARLY_MERGE.pow(2);
            in_windows += 2 * square * self.hidden_size;
            // a quarter of the rows, each of which attends to a quarter
            let merged = (self.depth - of.after_block - 1) as f64;
            full -= merged * (1.0 - 1.0 / square.pow(2) as f64);
        }
        let merged = matrix_elements(&encoder.merged_params(), &[]) * (1.0 - self.merged_share());
        vec![
            PartWork {
                weights: matrix_elements(&blocks, &encoder.tables()) - merged + in_windows as f64,
                params: indexes(&blocks),
                // twice: full attention, where the decoder's is causal
                attention: 2.0 * full * self.hidden_size as f64,
                windows: Vec::new(),
                rows: RowKind::Patches,
            },
            PartWork {
                weights: matrix_elements(&mergers, &[]),
                params: indexes(&mergers),
                attention: 0.0,
                windows: Vec::new(),
                rows: RowKind::VisionTokens,
            },
        ]
    }

    /// Rows after an early merger, of one row before it.
    fn merged_share(&self) -> f64 {
        self.rows_per_token() as f64 / self.patches_per_token() as f64
    }

    /// Adds the memory of patches to that of the decoder's activations; `recompute` is `None` if
    /// the encoder is frozen.
    pub(in crate::models) fn add_memory(
        &self,
        memory: &mut ActivationMemory,
        element: f64,
        recompute: Option<Recompute>,
    ) {
        let num_mergers = (self.parts.deepstack.len() + 1) as f64;
        let input = element * self.hidden_size as f64;
        // the input of a GELU, or both inputs of SwiGLU
        let wide = match self.parts.mlp {
            VisionMlp::Gelu { .. } => self.intermediate_size,
            VisionMlp::SwiGlu => 2 * self.intermediate_size,
        };
        // `f32` values that two norms keep
        let stats = match self.parts.norm {
            VisionNorm::Layer => 4,
            VisionNorm::Rms => 2,
        };
        // the outputs that layer scales multiply, and the inputs of the norms of queries and keys
        let scales = if self.parts.names.layer_scales.is_some() { 2 } else { 0 };
        let (norms, norm_stats) = match self.parts.attention {
            VisionAttention::Separate { has_norms: true, .. } => (2, 2),
            _ => (0, 0),
        };
        let rows = 6 + scales + norms;
        let saved = element * (rows * self.hidden_size + wide) as f64
            + 4.0 * (stats + norm_stats + self.num_heads) as f64;
        let share = self.merged_share();
        // Blocks that keep this for each patch, those after an early merger for a part of them. The
        // merger itself keeps as much as a block.
        let (blocks, merged_blocks) = match &self.parts.early_merger {
            Some(of) => (of.after_block + 2, (self.depth - of.after_block - 1) as f64 * share),
            None => (self.depth, 0.0),
        };
        let blocks = blocks as f64 + merged_blocks;
        let norm = if self.parts.post_norm.is_some() { share * input } else { 0.0 };
        // the gradients of a block's output and of the MLP's hidden rows
        let buffers = element * (self.hidden_size + self.intermediate_size) as f64;
        let (tape, buffers_of_block, recomputed) = match recompute {
            // Forward of a block holds what it would save, the input and the output of the MLP, and
            // the hidden rows after their activation.
            None => {
                (0.0, saved + element * (2 * self.hidden_size + self.intermediate_size) as f64, 0.0)
            }
            // Backward of the first blocks has freed the merged ones.
            // a merger keeps its hidden rows; patch embed keeps the pixels
            Some(Recompute::Nothing | Recompute::Cheap) => {
                let hidden = self.hidden_of(&self.parts.merger) as f64;
                let hidden = hidden / self.patches_per_token() as f64;
                let tape = blocks * saved + num_mergers * element * hidden + norm + share * input;
                (tape, buffers - merged_blocks * saved, 0.0)
            }
            Some(Recompute::Stage) => {
                let tape = (blocks + share) * input + norm;
                (tape, buffers - merged_blocks * input, saved - input)
            }
        };
        let of_token = num_mergers * element * self.out_hidden_size as f64;
        let features = of_token / self.patches_per_token() as f64;
        memory.patch_values = self.patch_values() as f64;
        memory.patch = element * memory.patch_values + features + tape;
        memory.patch_buffers = buffers_of_block.max(share * buffers); // the latter of the last block
        memory.patch_recomputed = recomputed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::qwen3_vl::read;
    use serde_json::json;

    #[test]
    fn a_frozen_vision_encoder_keeps_its_features_only() {
        let config = read(&json!({
            "image_token_id": 1,
            "text_config": {
                "vocab_size": 100, "hidden_size": 10, "intermediate_size": 30,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000,
                "rope_scaling": {"mrope_section": [2, 0, 0]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2,
                "in_channels": 3, "patch_size": 2, "temporal_patch_size": 1,
                "spatial_merge_size": 2, "num_position_embeddings": 4, "out_hidden_size": 10,
                "deepstack_visual_indexes": [],
            },
        }));
        let config = config.unwrap();
        let patch = |recompute| {
            let mut memory = config.text.memory(4.0, Recompute::Cheap);
            config.vision.as_ref().unwrap().add_memory(&mut memory, 4.0, recompute);
            memory.patch
        };
        let frozen = 4.0 * 12.0 + 4.0 * 10.0 / 4.0; // pixels; a fourth of a token's features
        assert_eq!(patch(None), frozen);
        let block = 4.0 * (6.0 * 8.0 + 16.0) + 4.0 * 6.0;
        let merger = 2.0 * 4.0 * 8.0; // its input and its hidden rows
        assert_eq!(patch(Some(Recompute::Cheap)), frozen + 2.0 * block + merger);
        assert_eq!(patch(Some(Recompute::Stage)), frozen + 3.0 * 4.0 * 8.0);
    }
}
