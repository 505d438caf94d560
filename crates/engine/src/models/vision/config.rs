use crate::models::config::{ModelConfigError, Section};
use crate::nn::DecoderConfig;
use kernels::Gelu;

/// Base of the rotary frequencies of the vision encoder.
pub(super) const ROPE_BASE: f64 = 10_000.0;
/// Patches on a side of the squares of an early merger.
pub(super) const EARLY_MERGE: usize = batch::SliceSizes::INNER as usize;

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
    pub parts: VisionParts,
}

/// What a vision encoder consists of.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionParts {
    pub names: VisionNames,
    /// The norms of the blocks.
    pub norm: VisionNorm,
    /// Added to the variance or the mean square in the norms of the blocks.
    pub eps: f64,
    pub attention: VisionAttention,
    pub mlp: VisionMlp,
    /// Whether the kernel of the patches has a temporal axis: `[Dv, C, tp, p, p]`.
    pub has_temporal_kernel: bool,
    pub has_patch_bias: bool,
    /// Rows of the table of learned positions: a square number, plus one with a class token. `None`:
    /// rotary positions only.
    pub num_position_embeddings: Option<usize>,
    pub table_reading: TableReading,
    /// Windows of some blocks; `None`: all blocks attend inside each frame.
    pub windows: Option<VisionWindows>,
    /// A block that merges patches, so that the blocks after it have fewer rows.
    pub early_merger: Option<EarlyMerger>,
    /// Blocks after which a deepstack merger reads the features.
    pub deepstack: Vec<usize>,
    /// The norm between the last block and the merger.
    pub post_norm: Option<&'static str>,
    pub merger: MergerParts,
}

/// Names of parameters and modules of a vision encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionNames {
    /// The linear map of a patch.
    pub patch_embed: &'static str,
    /// The table of learned positions.
    pub positions: &'static str,
    /// A learned row before the patches of each frame, which no merger reads. The first row of the
    /// table of positions is its position. `None`: the rows are the patches.
    pub class_token: Option<&'static str>,
    /// The list of blocks. The other names are inside of a block.
    pub blocks: &'static str,
    /// Norms before attention and MLP.
    pub norms: [&'static str; 2],
    /// The prefix of the layers of attention.
    pub attention: &'static str,
    /// The output layer of attention.
    pub attention_output: &'static str,
    /// Factors of the outputs of attention and MLP, one per column, if there are any.
    pub layer_scales: Option<[&'static str; 2]>,
}

/// The layers before the scores of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VisionAttention {
    /// One layer `qkv`, then rotary positions.
    Rotary,
    /// Layers `q_proj`, `k_proj` and `v_proj`. No rotary positions.
    Separate {
        has_bias: bool,
        /// RMS norms `q_norm` and `k_norm` of all heads of a patch together.
        has_norms: bool,
    },
}

/// Norm and MLP that make a token of merged patches.
#[derive(Debug, Clone, PartialEq)]
pub struct MergerParts {
    /// The main merger.
    pub name: &'static str,
    /// The norm and the two linear layers.
    pub layers: [&'static str; 3],
    pub norm: VisionNorm,
    /// Added to the variance or the mean square in the norm.
    pub eps: f64,
    pub place: NormPlace,
    pub hidden: MergerHidden,
}

/// How the patches of a grid read a table of positions that has another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableReading {
    /// Bilinear interpolation of four rows of the table, corners aligned.
    Bilinear,
    /// One row: the place of the patch as a share of the grid, rounded down.
    Nearest,
}

/// Attention inside squares of four patches, then a merger of each square to one row, with the mean of
/// the square as the residual.
#[derive(Debug, Clone, PartialEq)]
pub struct EarlyMerger {
    /// The block after which it runs.
    pub after_block: usize,
    /// The norm before attention, inside of the merger. The layers of attention have the names of
    /// those of a block.
    pub norm: &'static str,
    /// The norm is after the merge. The activation is a GELU by tanh, whatever that of the blocks is.
    pub merger: MergerParts,
}

/// Where a merger has its norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlace {
    /// `[P, Dv]`.
    BeforeMerge,
    /// `[M, 4 * Dv]`.
    AfterMerge,
}

/// Width of the hidden rows of a merger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergerHidden {
    /// That of the merged patches, `4 * Dv`.
    Input,
    /// That of the tokens, `D`.
    Output,
    /// That of the MLPs of four patches, `4 * F`.
    Mlp,
}

/// The norms of blocks and mergers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VisionNorm {
    Layer,
    Rms,
}

/// The MLP of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VisionMlp {
    /// Two linear layers with the activation `act` in between.
    Gelu {
        act: Gelu,
        /// Names of the two layers.
        layers: [&'static str; 2],
    },
    /// Not in encoders with layer scale.
    SwiGlu,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionWindows {
    /// Merged tokens on a side of a window.
    pub side: usize,
    /// Blocks with attention inside each frame. The others attend inside windows.
    pub full_attention_blocks: Vec<usize>,
}

impl VisionParts {
    /// The parts that the encoders of all Qwen models have; the others are those of Qwen2-VL.
    pub const QWEN: Self = Self {
        names: VisionNames {
            patch_embed: "model.visual.patch_embed.proj",
            positions: "model.visual.pos_embed.weight",
            class_token: None,
            blocks: "model.visual.blocks",
            norms: ["norm1", "norm2"],
            attention: "attn",
            attention_output: "attn.proj",
            layer_scales: None,
        },
        norm: VisionNorm::Layer,
        eps: 1e-6,
        attention: VisionAttention::Rotary,
        mlp: VisionMlp::Gelu { act: Gelu::Quick, layers: ["fc1", "fc2"] },
        has_temporal_kernel: true,
        has_patch_bias: false,
        num_position_embeddings: None,
        table_reading: TableReading::Bilinear,
        windows: None,
        early_merger: None,
        deepstack: Vec::new(),
        post_norm: None,
        merger: MergerParts {
            name: "model.visual.merger",
            layers: ["ln_q", "mlp.0", "mlp.2"],
            norm: VisionNorm::Layer,
            eps: 1e-6,
            place: NormPlace::BeforeMerge,
            hidden: MergerHidden::Input,
        },
    };

    /// The parts of Qwen3-VL and Qwen3.5: a table of positions, layer norms, MLPs with a GELU.
    pub(in crate::models) fn with_table(
        section: &Section<'_>,
        deepstack: Vec<usize>,
    ) -> Result<Self, ModelConfigError> {
        section.expect_no_dropout("attention_dropout")?;
        let (act, qwen) = (gelu(section, Gelu::Tanh)?, Self::QWEN);
        let layers = ["norm", "linear_fc1", "linear_fc2"];
        Ok(Self {
            mlp: VisionMlp::Gelu { act, layers: ["linear_fc1", "linear_fc2"] },
            has_patch_bias: true,
            num_position_embeddings: Some(section.size("num_position_embeddings")?),
            deepstack,
            merger: MergerParts { layers, ..qwen.merger },
            ..qwen
        })
    }

    /// Rows of a frame that are no patches.
    pub(super) fn extra_rows(&self) -> u32 {
        u32::from(self.names.class_token.is_some())
    }
}

/// The activation `hidden_act` of a section, or `default` if the file does not have it.
pub(in crate::models) fn gelu(
    section: &Section<'_>,
    default: Gelu,
) -> Result<Gelu, ModelConfigError> {
    let found = &section.value["hidden_act"];
    match found.as_str() {
        None if found.is_null() => Ok(default),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Gelu::Tanh),
        Some("gelu") => Ok(Gelu::Erf),
        Some("quick_gelu") => Ok(Gelu::Quick),
        name => Err(ModelConfigError::Unsupported {
            key: "vision_config.hidden_act",
            found: name.map_or_else(|| found.to_string(), str::to_owned),
            known: "`gelu_pytorch_tanh`, `gelu` or `quick_gelu`",
        }),
    }
}

impl VisionConfig {
    /// Reads the sizes in the section `vision_config` of the file `top`.
    pub(in crate::models) fn read(
        top: &Section<'_>,
        section: &Section<'_>,
        parts: VisionParts,
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
            parts,
        })
    }

    /// Fails if the sizes contradict each other or those of the decoder.
    pub(in crate::models) fn check(&self, text: &DecoderConfig) -> Result<(), ModelConfigError> {
        let fail = |what: String| Err(ModelConfigError::Shape { what });
        if !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            return fail(format!(
                "vision `hidden_size` is {}, expected a multiple of 4 * {} heads",
                self.hidden_size, self.num_heads
            ));
        }
        let parts = &self.parts;
        let has_other_rows = parts.extra_rows() > 0 || parts.early_merger.is_some();
        let reads_blocks = !parts.deepstack.is_empty() || parts.windows.is_some();
        if parts.names.layer_scales.is_some() && parts.mlp == VisionMlp::SwiGlu
            || has_other_rows && reads_blocks
            || parts.extra_rows() > 0 && parts.early_merger.is_some()
        {
            return fail("vision encoders with these parts are not implemented".to_owned());
        }
        if self.out_hidden_size != text.hidden_size {
            return fail(format!(
                "vision `out_hidden_size` is {}, expected the text `hidden_size` {}",
                self.out_hidden_size, text.hidden_size
            ));
        }
        if let Some(rows) = self.parts.num_position_embeddings {
            let rows = rows - self.parts.extra_rows() as usize;
            if rows.isqrt().pow(2) != rows {
                return fail(format!("`num_position_embeddings` {rows} is not a square"));
            }
        }
        let taps = &self.parts.deepstack;
        if taps.windows(2).any(|pair| pair[0] >= pair[1])
            || taps.iter().any(|block| *block >= self.depth)
            || taps.len() > text.layers.len()
        {
            return fail(format!(
                "`deepstack_visual_indexes` {taps:?}: expected ascending numbers below `depth` {}, at \
                 most `num_hidden_layers` {} of them",
                self.depth,
                text.layers.len()
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

    /// Number of rows of the last block that become one token.
    pub(super) fn rows_per_token(&self) -> usize {
        let merged = if self.parts.early_merger.is_some() { EARLY_MERGE.pow(2) } else { 1 };
        self.patches_per_token() / merged
    }

    /// Patches on a side of the squares that a token consists of: the patches of a square follow each
    /// other, and so do the squares of a token.
    pub(super) fn square(&self) -> usize {
        if self.parts.early_merger.is_some() { EARLY_MERGE } else { self.spatial_merge_size }
    }

    /// Whether the patches of `block` attend inside a window only.
    pub fn has_windows(&self, block: usize) -> bool {
        let windows = self.parts.windows.as_ref();
        windows.is_some_and(|windows| !windows.full_attention_blocks.contains(&block))
    }

    /// Number of patches of a window; 0 without windows.
    pub(super) fn window_patches(&self) -> usize {
        let windows = self.parts.windows.as_ref();
        windows.map_or(0, |windows| (windows.side * self.spatial_merge_size).pow(2))
    }

    /// Width of the hidden rows of a merger.
    pub(super) fn hidden_of(&self, merger: &MergerParts) -> usize {
        match merger.hidden {
            MergerHidden::Input => self.hidden_size * self.rows_per_token(),
            MergerHidden::Output => self.out_hidden_size,
            MergerHidden::Mlp => self.intermediate_size * EARLY_MERGE.pow(2),
        }
    }

    /// Values in one flattened patch: `channels * temporal_patch_size * patch_size^2`.
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }
}

/// Fails if the rotary positions of the patches are not those of all published models. Files of
/// transformers 5 have their settings.
pub(in crate::models) fn expect_rope(section: &Section<'_>) -> Result<(), ModelConfigError> {
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
