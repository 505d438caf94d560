use super::scores::Score;
use crate::models::RecomputePolicy;
use crate::ops::{AttentionBackend, Flash, Masked, Matmul};
use crate::tape::Recompute;
use candle_core::DType;
use serde::{Deserialize, Serialize};
use settings::{Choice, section};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;

/// The model, its precision and its kernels.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSection {
    /// Model folder in the transformers layout, or a [hub id](hub.md)
    pub path: PathBuf,
    /// Source of the weights
    #[key(default)]
    pub weights: Weights,
    /// `true`: remove padding before the model, which computes one stream of tokens. `false`:
    /// compute on padded rows `[B, L]`
    #[key(default = true, neutral)]
    pub use_rmpad: bool,
    /// Attention implementation
    #[key(default, neutral)]
    pub attention: AttentionChoice,
    /// Dtype of weights and activations
    #[key(default)]
    pub precision: Precision,
    /// Components or parameters that are not trained
    #[key(default)]
    pub freeze: Vec<String>,
    /// Activations that the backward pass computes again instead of keeping them
    #[key(default, neutral)]
    pub recompute: RecomputeChoice,
    /// Weights that stay in host memory and are copied to a GPU when they are used
    #[key(default, neutral)]
    pub offload: Offload,
    /// Factor of the auxiliary loss of the routers of a model with experts
    #[key(default)]
    #[valid(range = 0.0.., expected = "a finite number of 0 or more")]
    pub aux_loss: f64,
    /// Operands of the linear layers of the decoder
    #[key(default)]
    pub matmul: MatmulChoice,
    /// Tokens that the vocabulary [receives](model-folders.md#add-tokens)
    #[key(default)]
    pub add_tokens: Vec<String>,
    /// Special tokens that the vocabulary receives, after those of `add_tokens`; decoding leaves them
    /// out
    #[key(default)]
    pub add_special_tokens: Vec<String>,
    /// First values of the rows of new tokens in the embedding and in the head
    #[key(default)]
    pub new_token_rows: NewTokenRows,
}

impl ModelSection {
    /// The model in a folder, with the weights of its files and the defaults of the other keys.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let config = serde_json::json!({ "path": path.into() });
        serde_json::from_value(config).expect("all other keys have defaults")
    }
}

/// First values of the rows of new tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum NewTokenRows {
    /// The mean of the rows of the tokens that encode the text of the new token without it.
    #[default]
    Pieces,
    /// The mean of the rows of all tokens before it.
    Mean,
}

/// Source of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// The safetensors files of the model folder.
    #[default]
    Pretrained,
    /// Random weights drawn from `seed`; the folder needs only its configs and tokenizer.
    Random,
}

/// Attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum MatmulChoice {
    /// That of `precision`.
    #[default]
    Native,
    /// FP8 (e4m3) with a scale for each row, in forward and for the gradients of inputs.
    Fp8,
    /// As `fp8`, and also for the gradients of weights.
    Fp8All,
    /// As `fp8`, and a GPU adds the products of forward faster and with fewer bits.
    Fp8Fast,
}

impl MatmulChoice {
    /// The format for the ops.
    pub fn format(self) -> Matmul {
        match self {
            Self::Native => Matmul::Native,
            Self::Fp8 => Matmul::Fp8,
            Self::Fp8All => Matmul::Fp8All,
            Self::Fp8Fast => Matmul::Fp8Fast,
        }
    }
}

/// Components whose activations are recomputed in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
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

    /// The stages of the model that this choice recomputes.
    pub fn policy(self) -> RecomputePolicy {
        let (vision, llm) = match self {
            Self::Least => (Recompute::Cheap, Recompute::Nothing),
            // a run sets another choice after the prediction
            Self::Auto | Self::None => (Recompute::Cheap, Recompute::Cheap),
            Self::Full => (Recompute::Stage, Recompute::Stage),
            Self::Vision => (Recompute::Stage, Recompute::Cheap),
            Self::Llm => (Recompute::Cheap, Recompute::Stage),
        };
        RecomputePolicy { vision, llm }
    }
}

/// Weights that are kept in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// None.
    #[default]
    None,
    /// The frozen matrices of decoder layers, of blocks of the vision encoder and of mergers.
    Frozen,
}

/// Size of a step, number of steps, and gradient clipping.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Number of packs in a micro-batch; without packing, number of samples
    #[key(default = NonZeroUsize::MIN)]
    pub batch_size: NonZeroUsize,
    /// Micro-batches per optimizer step
    #[key(default = NonZeroUsize::MIN)]
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Number of epochs; 1 if neither this nor `max_steps` is set. With both, the run ends at
    /// whichever comes first
    #[key(neutral)]
    pub epochs: Option<NonZeroU64>,
    /// Maximum optimizer steps; without `epochs`, the data is repeated until then
    #[key(neutral)]
    pub max_steps: Option<NonZeroU64>,
    /// Maximum L2 norm of the gradients of all trained parameters
    #[key(default = 1.0)]
    #[valid(range = 0.0.., expected = "a finite number of 0 or more (0: no clipping)")]
    pub max_grad_norm: f64,
    /// What happens if the loss or a gradient of a step is not finite
    #[key(default, neutral)]
    pub on_non_finite: OnNonFinite,
    /// Maximum number of steps in a row that `on_non_finite: skip` skips
    #[key(default = 10, neutral)]
    pub max_skipped: u64,
    /// Seconds without progress after which the run of a single process ends with exit code 74; 0:
    /// never. Several ranks use `distributed.timeout_s`
    #[key(default = 3600, neutral)]
    pub timeout_s: u64,
}

/// What to do if the loss or a gradient of a step is not finite. No weight changes in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum OnNonFinite {
    /// End the run with an error.
    #[default]
    Stop,
    /// Skip the step with a warning.
    Skip,
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
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct EvalConfig {
    /// Optimizer steps between evaluations of `data.eval`; 0: only one at the end
    #[key(default = 200)]
    pub every_steps: u64,
    /// Number of answers generated and printed after the last evaluation; 0: none
    #[key(default = 6)]
    pub show: usize,
    /// Answers eval rows in each evaluation; `{}` is the section with its defaults
    pub generate: Option<GenerateConfig>,
    /// Ends the run if evaluations no longer improve: `{patience: 3}`
    pub early_stopping: Option<EarlyStopping>,
}

/// The greedy answers of an evaluation, and how they are compared with the expected ones.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerateConfig {
    /// Maximum number of tokens of an answer
    #[key(default = NonZeroUsize::MIN.saturating_add(127))]
    pub max_new_tokens: NonZeroUsize,
    /// The scores
    #[key(default = vec![Score::Exact])]
    pub metrics: Vec<Score>,
    /// Number of chats that are answered, the first ones of `data.eval`; `null`: all
    pub rows: Option<NonZeroUsize>,
    /// Number of answers that a rank generates at the same time
    // Kernels never divide so few rows, so an answer does not depend on its place in the batch.
    #[key(default = NonZeroUsize::MIN)]
    #[valid(range = 1.0..=64.0, expected = "a number from 1 to 64")]
    pub batch: NonZeroUsize,
}

impl GenerateConfig {
    /// Maximum of `batch`: kernels never divide so few rows, so that an answer cannot depend on its
    /// place in the batch.
    pub const MAX_BATCH: usize = 64;
}

/// When a run ends before its last step. Evaluations are compared by the metric of
/// `checkpoint.best`, or by `eval.loss` without it.
#[section]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EarlyStopping {
    /// Number of evaluations in a row without an improvement after which the run ends
    pub patience: NonZeroU64,
    /// An evaluation improves if it is better by more than this
    #[key(default)]
    #[valid(range = 0.0.., expected = "a finite number of 0 or more")]
    pub min_delta: f64,
}

/// How often metrics are logged.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct LogConfig {
    /// Optimizer steps between log lines; `metrics.jsonl` has every step
    #[key(default = NonZeroU64::MIN)]
    pub every_steps: NonZeroU64,
    /// Whether `samples.jsonl` lists the rows of each step with their losses
    #[key(default = true)]
    pub samples: bool,
    /// Programs that show the metrics while the run trains ([trackers](report.md#trackers))
    #[key(default)]
    pub trackers: Vec<Tracker>,
    /// Project of the run in the trackers, which MLflow calls experiment; `null`: that of the
    /// variable `WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME` or `SWANLAB_PROJ_NAME`, or else `trainer`
    pub project: Option<String>,
    /// Name of the run in the trackers; `null`: the last part of `output_dir`
    pub run_name: Option<String>,
}

/// A program that shows the metrics of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Tracker {
    /// TensorBoard.
    Tensorboard,
    /// Weights & Biases.
    Wandb,
    /// `MLflow`.
    Mlflow,
    /// `SwanLab`.
    Swanlab,
}

impl Tracker {
    pub const ALL: [Self; 4] = [Self::Tensorboard, Self::Wandb, Self::Mlflow, Self::Swanlab];

    /// The Python package of its client, and what the client must have; `None` if it needs none.
    pub fn package(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Tensorboard => None,
            Self::Wandb => Some(("wandb", "init")),
            Self::Mlflow => Some(("mlflow", "MlflowClient")),
            Self::Swanlab => Some(("swanlab", "init")),
        }
    }
}
