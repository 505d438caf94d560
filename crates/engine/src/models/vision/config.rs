use crate::models::config::{ModelConfigError, Section};
use crate::nn::DecoderConfig;
use kernels::Gelu;

/// Base of the rotary frequencies of the vision encoder.
pub(super) const ROPE_BASE: f64 = 10_000.0;

#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    pub depth: usize,
    /// Hidden size of the blocks, `Dv`.
    pub hidden_size: usize,
    /// Width of a block's MLP.
    pub intermediate_size: usize,
    pub num_heads: usize,
    /// Number of colour channels.
    pub in_channels: usize,
    /// Pixels on a side of a patch.
    pub patch_size: usize,
    /// Frames in a patch.
    pub temporal_patch_size: usize,
    /// Patches on a side of the square that becomes one token.
    pub spatial_merge_size: usize,
    /// Width of the mergers' output: the language model's hidden size.
    pub out_hidden_size: usize,
    /// Id of the token whose embedding the features of an image replace.
    pub image_token_id: u32,
    /// The parts in which families differ.
    pub kind: VisionKind,
}

/// Positions, norms, MLPs and attention of a vision encoder.
#[derive(Debug, Clone, PartialEq)]
pub enum VisionKind {
    /// Qwen3-VL and Qwen3.5: a learned table of positions, layer norms, MLPs with a GELU, attention
    /// inside each frame.
    Learned {
        /// Rows of the position table; a square number.
        num_position_embeddings: usize,
        /// Blocks after which a deepstack merger reads the features.
        deepstack_visual_indexes: Vec<usize>,
        /// Activation of the blocks' MLP.
        hidden_act: Gelu,
    },
    /// Qwen2.5-VL: rotary positions only, RMS norms, SwiGLU, attention inside windows of a frame.
    Windowed {
        /// Merged tokens on a side of a window.
        window: usize,
        /// Blocks with attention inside each frame.
        full_attention_blocks: Vec<usize>,
    },
}

impl VisionConfig {
    /// Reads the section `vision_config` of the file `top`, of an encoder with learned positions.
    pub(in crate::models) fn read(
        (top, section): (&Section<'_>, &Section<'_>),
        deepstack_visual_indexes: Vec<usize>,
    ) -> Result<Self, ModelConfigError> {
        section.expect_no_dropout("attention_dropout")?;
        let act = section.value["hidden_act"].as_str().unwrap_or("gelu_pytorch_tanh");
        let kind = VisionKind::Learned {
            num_position_embeddings: section.size("num_position_embeddings")?,
            deepstack_visual_indexes,
            hidden_act: match act {
                "gelu_pytorch_tanh" | "gelu_new" => Gelu::Tanh,
                "gelu" => Gelu::Erf,
                found => {
                    return Err(ModelConfigError::Unsupported {
                        key: "vision_config.hidden_act",
                        found: found.to_owned(),
                        known: "`gelu_pytorch_tanh` and `gelu`",
                    });
                }
            },
        };
        Self::with_kind((top, section), kind)
    }

    /// Reads the sizes that all families have.
    pub(in crate::models) fn with_kind(
        (top, section): (&Section<'_>, &Section<'_>),
        kind: VisionKind,
    ) -> Result<Self, ModelConfigError> {
        expect_rope(section)?;
        Ok(Self {
            depth: section.size("depth")?,
            hidden_size: section.size("hidden_size")?,
            intermediate_size: section.size("intermediate_size")?,
            num_heads: section.size("num_heads")?,
            in_channels: section.size_or("in_channels", 3)?,
            patch_size: section.size("patch_size")?,
            temporal_patch_size: section.size("temporal_patch_size")?,
            spatial_merge_size: section.size("spatial_merge_size")?,
            out_hidden_size: section.size("out_hidden_size")?,
            image_token_id: top.size("image_token_id")? as u32,
            kind,
        })
    }

    /// Fails if the sizes contradict each other or those of the decoder.
    pub(in crate::models) fn check(&self, text: &DecoderConfig) -> Result<(), ModelConfigError> {
        let fail = |what: String| Err(ModelConfigError::Shape { what });
        if self.hidden_size % (4 * self.num_heads) != 0 {
            return fail(format!(
                "vision `hidden_size` is {}, expected a multiple of 4 * `num_heads` {}",
                self.hidden_size, self.num_heads
            ));
        }
        if self.out_hidden_size != text.hidden_size {
            return fail(format!(
                "vision `out_hidden_size` is {}, expected the text `hidden_size` {}",
                self.out_hidden_size, text.hidden_size
            ));
        }
        if let VisionKind::Learned { num_position_embeddings: rows, .. } = self.kind
            && rows.isqrt().pow(2) != rows
        {
            return fail(format!("`num_position_embeddings` {rows} is not a square"));
        }
        let taps = self.deepstack();
        if taps.windows(2).any(|pair| pair[0] >= pair[1])
            || taps.iter().any(|block| *block >= self.depth)
            || taps.len() > text.num_hidden_layers
        {
            return fail(format!(
                "`deepstack_visual_indexes` {taps:?}: expected ascending numbers below `depth` {}, at \
                 most `num_hidden_layers` {} of them",
                self.depth, text.num_hidden_layers
            ));
        }
        if self.image_token_id as usize >= text.vocab_size {
            return fail(format!(
                "`image_token_id` {} is not below `vocab_size` {}",
                self.image_token_id, text.vocab_size
            ));
        }
        Ok(())
    }

    /// Number of patches that become one token.
    pub(super) fn patches_per_token(&self) -> usize {
        self.spatial_merge_size.pow(2)
    }

    /// Blocks after which a deepstack merger reads the features.
    pub fn deepstack(&self) -> &[usize] {
        match &self.kind {
            VisionKind::Learned { deepstack_visual_indexes, .. } => deepstack_visual_indexes,
            VisionKind::Windowed { .. } => &[],
        }
    }

    /// Whether the patches of `block` attend inside a window only.
    pub fn has_windows(&self, block: usize) -> bool {
        match &self.kind {
            VisionKind::Learned { .. } => false,
            VisionKind::Windowed { full_attention_blocks, .. } => {
                !full_attention_blocks.contains(&block)
            }
        }
    }

    /// Number of patches of a window; 0 without windows.
    pub(super) fn window_patches(&self) -> usize {
        match self.kind {
            VisionKind::Learned { .. } => 0,
            VisionKind::Windowed { window, .. } => (window * self.spatial_merge_size).pow(2),
        }
    }

    /// Values in one flattened patch: `channels * temporal_patch_size * patch_size^2`.
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }
}

/// Fails if the rotary positions of the patches are not those of all published models. Files of
/// transformers 5 have their settings.
fn expect_rope(section: &Section<'_>) -> Result<(), ModelConfigError> {
    let rope = &section.value["rope_parameters"];
    let kind = &rope["rope_type"];
    // `axial` was named `default` before transformers 5.23
    if !(kind.is_null() || kind == "axial" || kind == "default") {
        return Err(ModelConfigError::Unsupported {
            key: "vision_config.rope_parameters.rope_type",
            found: kind.as_str().map_or_else(|| kind.to_string(), str::to_owned),
            known: "`axial` or `default`",
        });
    }
    let base = &rope["rope_theta"];
    if !(base.is_null() || base.as_f64() == Some(ROPE_BASE)) {
        return Err(ModelConfigError::Range {
            key: "vision_config.rope_parameters.rope_theta".to_owned(),
            found: base.to_string(),
            expected: format!("{ROPE_BASE}"),
        });
    }
    Ok(())
}
