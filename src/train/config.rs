//! The config sections `model`, `train`, `eval` and `log`.

use super::scores::Score;
use crate::models::RecomputePolicy;
use crate::ops::{AttentionBackend, Flash, Masked, Matmul};
use crate::tape::Recompute;
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;

/// The model, its precision and its kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSection {
    /// Folder in the transformers layout, or an id of the Hugging Face Hub: `owner/name`.
    pub path: PathBuf,
    /// Source of the weights; `pretrained` by default.
    #[serde(default)]
    pub weights: Weights,
    /// Whether padding is removed, so that the model computes one stream of tokens (the default).
    /// If false, it computes padded rows `[B, L]`.
    #[serde(default = "yes")]
    pub use_rmpad: bool,
    /// Attention kernel; `auto` by default.
    #[serde(default)]
    pub attention: AttentionChoice,
    /// Dtype of weights and activations in the forward and backward pass; `f32` by default.
    #[serde(default)]
    pub precision: Precision,
    /// Components (`vision`, `merger`, `llm`) or globs over parameter names that are not trained.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Activations that the backward pass recomputes instead of storing; none by default.
    #[serde(default)]
    pub recompute: RecomputeChoice,
    /// Weights that are kept in host memory and copied to a GPU when they are used; none by
    /// default.
    #[serde(default)]
    pub offload: Offload,
    /// Factor of the auxiliary loss of the routers, which is added to the loss of a step; 0 by
    /// default.
    #[serde(default)]
    pub aux_loss: f64,
    /// Format of the operands of the products of the linear layers of the decoder; `native` by
    /// default.
    #[serde(default)]
    pub matmul: MatmulChoice,
    /// Table of the algorithms of products on a GPU, written by `trainer bench --tune`; by default
    /// cuBLASLt chooses them.
    #[serde(default)]
    pub algorithms: Option<PathBuf>,
}

impl ModelSection {
    /// The model in a folder, with the weights of its files and the defaults of the other keys.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            weights: Weights::Pretrained,
            use_rmpad: true,
            attention: AttentionChoice::Auto,
            precision: Precision::F32,
            freeze: Vec::new(),
            recompute: RecomputeChoice::None,
            offload: Offload::None,
            aux_loss: 0.0,
            matmul: MatmulChoice::Native,
            algorithms: None,
        }
    }
}

fn yes() -> bool {
    true
}

/// Source of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// The safetensors files of the model folder.
    #[default]
    Pretrained,
    /// Random weights drawn from `seed`; the folder needs only its configs and tokenizer.
    Random,
}

/// Attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionChoice {
    /// The fastest exact kernel of the device. The log shows its name.
    #[default]
    Auto,
    /// Tiled, for variable lengths, without a score matrix in memory.
    Flash,
    /// The forward pass of candle-flash-attn with the backward pass of this crate; GPU and bf16
    /// only.
    #[cfg(feature = "flash-attn")]
    FlashAttn,
    /// Reference: dense scores with a block-diagonal causal mask; CPU only.
    Masked,
}

impl AttentionChoice {
    /// Returns the kernels that this choice selects.
    pub fn backend(self) -> Arc<dyn AttentionBackend> {
        match self {
            Self::Auto | Self::Flash => Arc::new(Flash),
            #[cfg(feature = "flash-attn")]
            Self::FlashAttn => Arc::new(crate::ops::FlashAttn),
            Self::Masked => Arc::new(Masked),
        }
    }
}

/// Dtype of the computation; master weights are `f32` in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// `f32` throughout.
    #[default]
    F32,
    /// bf16 weights and activations; norms, softmax, rotary and loss in `f32`.
    Bf16,
}

impl Precision {
    /// The dtype in candle.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The name in `config.json` of transformers.
    pub fn hf_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// Format of the operands of the linear layers of the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatmulChoice {
    /// That of `precision`.
    #[default]
    Native,
    /// FP8 (e4m3) with a scale for each row, in forward and for the gradients of inputs.
    Fp8,
    /// As `fp8`, and also for the gradients of weights.
    Fp8All,
}

impl MatmulChoice {
    /// The format for the ops.
    pub fn format(self) -> Matmul {
        match self {
            Self::Native => Matmul::Native,
            Self::Fp8 => Matmul::Fp8,
            Self::Fp8All => Matmul::Fp8All,
        }
    }

    /// The value of the config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Fp8 => "fp8",
            Self::Fp8All => "fp8_all",
        }
    }
}

/// Components whose activations are recomputed in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeChoice {
    /// What needs least time and fits into the memory, by prediction.
    Auto,
    /// Least: also tensors that are cheap to compute again are stored.
    Least,
    /// None: all other activations are stored.
    #[default]
    None,
    /// All blocks of the vision encoder and all decoder layers.
    Full,
    /// The vision encoder and its mergers.
    Vision,
    /// The decoder layers.
    Llm,
}

impl RecomputeChoice {
    /// All choices except `auto`, the cheapest first.
    const ALL: [Self; 5] = [Self::Least, Self::None, Self::Vision, Self::Llm, Self::Full];

    /// The place among the choices, the cheapest first.
    pub fn place(self) -> usize {
        Self::ALL.iter().position(|choice| *choice == self).unwrap_or_default()
    }

    /// The choices that recompute more, the cheapest first.
    pub fn more(self) -> &'static [Self] {
        match self {
            Self::Auto => &Self::ALL,
            Self::Vision => &[Self::Full], // `llm` recomputes other stages
            choice => &Self::ALL[choice.place() + 1..],
        }
    }

    /// The value in a config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Least => "least",
            Self::None => "none",
            Self::Vision => "vision",
            Self::Llm => "llm",
            Self::Full => "full",
        }
    }

    /// The stages of the model that this choice recomputes.
    pub fn policy(self) -> RecomputePolicy {
        let (vision, llm) = match self {
            Self::Least => (Recompute::No, Recompute::Least),
            // a run sets another choice after the prediction
            Self::Auto | Self::None => (Recompute::No, Recompute::No),
            Self::Full => (Recompute::Yes, Recompute::Yes),
            Self::Vision => (Recompute::Yes, Recompute::No),
            Self::Llm => (Recompute::No, Recompute::Yes),
        };
        RecomputePolicy { vision, llm }
    }
}

/// Weights that are kept in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// None.
    #[default]
    None,
    /// The frozen matrices of decoder layers, of blocks of the vision encoder and of mergers.
    Frozen,
}

/// Size of a step, number of steps, and gradient clipping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Rows of a micro-batch: packs if packing is on, samples otherwise; 1 by default.
    pub batch_size: NonZeroUsize,
    /// Micro-batches per optimizer step; 1 by default.
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Number of epochs; 1 if neither this nor `max_steps` is set. With both, the run ends at
    /// whichever comes first.
    pub epochs: Option<NonZeroU64>,
    /// Number of optimizer steps; the data is repeated as needed if `epochs` is not set.
    pub max_steps: Option<NonZeroU64>,
    /// Maximum L2 norm of the gradient; larger gradients are scaled down to it. 1.0 by default; 0
    /// disables clipping.
    pub max_grad_norm: f64,
    /// What to do if the loss or a gradient of a step is not finite; `stop` by default.
    pub on_non_finite: OnNonFinite,
    /// Maximum number of steps in a row that `on_non_finite: skip` skips; 10 by default.
    pub max_skipped: u64,
    /// Seconds without progress after which the run of a single process ends with exit code 74;
    /// 3600 by default, 0 disables it. Several ranks use `distributed.timeout_s`.
    pub timeout_s: u64,
}

/// What to do if the loss or a gradient of a step is not finite. No weight changes in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnNonFinite {
    /// End the run with an error.
    #[default]
    Stop,
    /// Skip the step with a warning.
    Skip,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            batch_size: NonZeroUsize::MIN,
            gradient_accumulation_steps: NonZeroUsize::MIN,
            epochs: None,
            max_steps: None,
            max_grad_norm: 1.0,
            on_non_finite: OnNonFinite::Stop,
            max_skipped: 10,
            timeout_s: 3600,
        }
    }
}

impl TrainConfig {
    /// Number of epochs after which the data ends; `None` if it is repeated until `max_steps`.
    pub fn epoch_limit(&self) -> Option<u64> {
        match (self.epochs, self.max_steps) {
            (Some(epochs), _) => Some(epochs.get()),
            (None, Some(_)) => None,
            (None, None) => Some(1),
        }
    }
}

/// When the model is evaluated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Optimizer steps between evaluations; 200 by default. 0 evaluates only at the end of the run,
    /// as every run does.
    pub every_steps: u64,
    /// Number of answers generated and shown at the end of the run; 6 by default.
    pub show: usize,
    /// Answers eval rows in each evaluation, and compares the answers; off by default.
    pub generate: Option<GenerateConfig>,
    /// Ends the run if evaluations no longer improve; off by default.
    pub early_stopping: Option<EarlyStopping>,
}

/// The greedy answers of an evaluation, and how they are compared with the expected ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateConfig {
    /// Maximum number of tokens of an answer; 128 by default.
    pub max_new_tokens: NonZeroUsize,
    /// The scores; `[exact]` by default.
    pub metrics: Vec<Score>,
    /// Number of chats that are answered, the first ones of `data.eval`; all by default.
    pub rows: Option<NonZeroUsize>,
    /// Number of answers that are generated at the same time; 1 by default, at most
    /// [`Self::MAX_BATCH`].
    pub batch: NonZeroUsize,
}

impl GenerateConfig {
    /// Maximum of `batch`: kernels never divide so few rows, so that an answer cannot depend on its
    /// place in the batch.
    pub const MAX_BATCH: usize = 64;
}

impl Default for GenerateConfig {
    fn default() -> Self {
        let max_new_tokens = NonZeroUsize::MIN.saturating_add(127);
        let batch = NonZeroUsize::MIN;
        Self { max_new_tokens, metrics: vec![Score::Exact], rows: None, batch }
    }
}

/// When a run ends before its last step. Evaluations are compared by the metric of
/// `checkpoint.best`, or by `eval.loss` without it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStopping {
    /// Number of evaluations in a row without an improvement after which the run ends.
    pub patience: NonZeroU64,
    /// A value improves on the best one if it is better by more than this; 0 by default.
    #[serde(default)]
    pub min_delta: f64,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_steps: 200, show: 6, generate: None, early_stopping: None }
    }
}

/// How often metrics are logged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Optimizer steps between log lines; 1 by default. `metrics.jsonl` has every step.
    pub every_steps: NonZeroU64,
    /// Whether `samples.jsonl` lists the rows of each step with their losses; true by default.
    pub samples: bool,
    /// Programs that show the metrics of runs; none by default. `tensorboard` writes event files to
    /// `tensorboard/` of the run folder.
    pub trackers: Vec<Tracker>,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { every_steps: NonZeroU64::MIN, samples: true, trackers: Vec::new() }
    }
}

/// A program that shows the metrics of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tracker {
    /// TensorBoard.
    Tensorboard,
}
