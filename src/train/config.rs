//! The sections `model`, `train`, `eval` and `log` of a config.

use crate::models::RecomputePolicy;
use crate::ops::{AttentionBackend, Flash, Masked};
use crate::tape::Recompute;
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;

/// Which model, and how it computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSection {
    /// Folder in the transformers layout (or a hub id, in a build with the feature `hub`).
    pub path: PathBuf,
    /// Where the weights come from.
    #[serde(default)]
    pub weights: Weights,
    /// True: padding is removed and the model eats one token stream. False: padded `[B, L]`.
    #[serde(default = "yes")]
    pub use_rmpad: bool,
    /// Attention kernel.
    #[serde(default)]
    pub attention: AttentionChoice,
    /// Dtype of weights and activations in the forward and backward pass.
    #[serde(default)]
    pub precision: Precision,
    /// Parts (`vision`, `merger`, `llm`) or globs over parameter names that stay as loaded.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// What is computed again in the backward pass instead of being kept.
    #[serde(default)]
    pub recompute: RecomputeChoice,
}

fn yes() -> bool {
    true
}

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// From the model folder's safetensors.
    #[default]
    Pretrained,
    /// Drawn anew from `seed`; the folder needs only its configs and tokenizer.
    Random,
}

/// Attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionChoice {
    /// The fastest exact one for the device; the log says which.
    #[default]
    Auto,
    /// Tiled, variable length, no score matrix in memory.
    Flash,
    /// candle-flash-attn's forward pass with our backward; bf16 on a GPU.
    #[cfg(feature = "flash-attn")]
    FlashAttn,
    /// The reference: dense scores under a block-diagonal causal mask.
    Masked,
}

impl AttentionChoice {
    /// The kernels behind the choice.
    pub fn backend(self) -> Arc<dyn AttentionBackend> {
        match self {
            Self::Auto | Self::Flash => Arc::new(Flash),
            #[cfg(feature = "flash-attn")]
            Self::FlashAttn => Arc::new(crate::ops::FlashAttn),
            Self::Masked => Arc::new(Masked),
        }
    }
}

/// Dtype of the computation; master weights and moments are `f32` in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Single precision throughout.
    #[default]
    F32,
    /// bf16 weights and activations; norms, softmax, rotary and loss in `f32`.
    Bf16,
}

impl Precision {
    /// As candle names it.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// As transformers names it in `config.json`.
    pub fn hf_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// Activation recomputation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeChoice {
    /// Keep everything.
    #[default]
    None,
    /// Every block and layer.
    Full,
    /// The vision tower and its mergers.
    Vision,
    /// The decoder layers.
    Llm,
}

impl RecomputeChoice {
    /// For the model.
    pub fn policy(self) -> RecomputePolicy {
        let (vision, llm) = match self {
            Self::None => (Recompute::No, Recompute::No),
            Self::Full => (Recompute::Yes, Recompute::Yes),
            Self::Vision => (Recompute::Yes, Recompute::No),
            Self::Llm => (Recompute::No, Recompute::Yes),
        };
        RecomputePolicy { vision, llm }
    }
}

/// How much goes into a step, and how many steps there are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Rows of a micro-batch: packs when packing, samples when not.
    pub batch_size: NonZeroUsize,
    /// Micro-batches of an optimizer step.
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Passes over the data; 1 when neither this nor `max_steps` is given. With both, the run ends
    /// at whichever comes first.
    pub epochs: Option<NonZeroU64>,
    /// Optimizer steps; the data is repeated as often as needed when `epochs` is not given.
    pub max_steps: Option<NonZeroU64>,
    /// L2 norm that gradients are clipped to; 0 switches clipping off.
    pub max_grad_norm: f64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            batch_size: NonZeroUsize::MIN,
            gradient_accumulation_steps: NonZeroUsize::MIN,
            epochs: None,
            max_steps: None,
            max_grad_norm: 1.0,
        }
    }
}

impl TrainConfig {
    /// Epochs after which the data ends; `None`: it does not.
    pub fn epoch_limit(&self) -> Option<u64> {
        match (self.epochs, self.max_steps) {
            (Some(epochs), _) => Some(epochs.get()),
            (None, Some(_)) => None,
            (None, None) => Some(1),
        }
    }
}

/// When the eval data is scored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Optimizer steps between evaluations; there is always one at the end. 0: only that one.
    pub every_steps: u64,
    /// Answers that are generated and shown after the last evaluation.
    pub show: usize,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_steps: 200, show: 6 }
    }
}

/// How often a step is reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Optimizer steps between log lines; `metrics.jsonl` has every step.
    pub every_steps: NonZeroU64,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { every_steps: NonZeroU64::MIN }
    }
}
