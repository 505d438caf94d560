//! Operations and memory of the model, for `trainer bench`.

use super::config::{VisionKind, VisionLanguageConfig};
use super::encoder::VisionEncoder;
use crate::cost::{ActivationMemory, PartWork, RowKind};
use crate::nn::{Decoder, indexes, matrix_elements};
use crate::tape::Recompute;

impl VisionLanguageConfig {
    pub(super) fn work(&self, vision: &VisionEncoder, decoder: &Decoder) -> Vec<PartWork> {
        let (blocks, mergers) = (vision.block_params(), vision.merger_params());
        let num_windowed = (0..self.vision.depth).filter(|k| self.vision.has_windows(*k)).count();
        let num_full = self.vision.depth - num_windowed;
        // Of a patch with all patches of its window, as if no window is cut off at an edge.
        let in_windows = 2 * num_windowed * self.vision.window_patches() * self.vision.hidden_size;
        let mut work = vec![
            PartWork {
                weights: matrix_elements(&blocks, vision.positions()) + in_windows as f64,
                params: indexes(&blocks),
                // twice: full attention, where the decoder's is causal
                attention: 2.0 * (num_full * self.vision.hidden_size) as f64,
                rows: RowKind::Patches,
            },
            PartWork {
                weights: matrix_elements(&mergers, None),
                params: indexes(&mergers),
                attention: 0.0,
                rows: RowKind::VisionTokens,
            },
        ];
        work.extend(decoder.work(&self.text));
        work
    }

    /// Memory of activations; `vision` is `None` if the vision encoder is frozen.
    pub(super) fn activation_memory(
        &self,
        element: f64,
        llm: Recompute,
        vision: Option<Recompute>,
    ) -> ActivationMemory {
        let v = &self.vision;
        let (hidden, num_mergers) = (v.hidden_size as f64, v.deepstack().len() + 1);
        let num_mergers = num_mergers as f64;
        let input = element * hidden;
        // the input of a GELU and means, or both inputs of SwiGLU
        let (wide, stats) = match v.kind {
            VisionKind::Learned { .. } => (v.intermediate_size, 4),
            VisionKind::Windowed { .. } => (2 * v.intermediate_size, 2),
        };
        let saved =
            element * (6 * v.hidden_size + wide) as f64 + 4.0 * (stats + v.num_heads) as f64;
        let tape = match vision {
            None => 0.0,
            // a merger keeps its hidden rows, `Dv` values a patch; patch embed keeps the pixels
            Some(Recompute::Least | Recompute::No) => {
                v.depth as f64 * saved + (num_mergers + 1.0) * input
            }
            Some(Recompute::Yes) => (v.depth as f64 + 1.0) * input,
        };
        let text_hidden = self.text.hidden_size as f64;
        let features = num_mergers * element * text_hidden / self.patches_per_token() as f64;
        let patch_values = v.patch_values() as f64;
        ActivationMemory {
            patch_values,
            patch: element * patch_values + features + tape,
            ..self.text.memory(element, llm)
        }
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
        let patch = |vision| config.activation_memory(4.0, Recompute::No, vision).patch;
        let frozen = 4.0 * 12.0 + 4.0 * 10.0 / 4.0; // pixels; a fourth of a token's features
        assert_eq!(patch(None), frozen);
        let block = 4.0 * (6.0 * 8.0 + 16.0) + 4.0 * 6.0;
        let merger = 2.0 * 4.0 * 8.0; // its input and its hidden rows
        assert_eq!(patch(Some(Recompute::No)), frozen + 2.0 * block + merger);
        assert_eq!(patch(Some(Recompute::Yes)), frozen + 3.0 * 4.0 * 8.0);
    }
}
