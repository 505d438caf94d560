//! What a run is made of.

use super::super::best::EvalRule;
use super::super::config::{EvalConfig, OnNonFinite};
use super::super::datasets::Rejected;
use super::super::state::TrainState;
use super::super::step::StepRunner;
use crate::checkpoint::{CarriedFiles, Checkpointer, FolderLayout};
use crate::data::{DatasetRows, Loader, RowReader};
use crate::metrics::JsonlSink;
use crate::optim::Schedule;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Arguments of [`Trainer::new`](super::Trainer::new).
pub struct TrainerParts {
    pub runner: StepRunner,
    pub state: TrainState,
    /// The rows of the steps.
    pub data: TrainData,
    pub steps: StepRules,
    pub checkpoints: Checkpoints,
    pub evaluation: Evaluation,
    pub logs: Logs,
    /// Set by a signal handler: the run saves and stops after the current step.
    pub stop: Arc<AtomicBool>,
    /// Set by a signal handler: the run saves after the current step and continues.
    pub save: Arc<AtomicBool>,
}

pub struct TrainData {
    /// Steps of data, from the position in the state on.
    pub loader: Loader,
    /// Names the rows of a step.
    pub reader: Arc<dyn RowReader>,
    pub dataset_names: Vec<String>,
    pub rejected_texts: Rejected,
}

pub struct StepRules {
    pub schedule: Schedule,
    /// Maximum number of steps, even if there is more data.
    pub max_steps: u64,
    /// What to do if the loss or a gradient is not finite.
    pub on_non_finite: OnNonFinite,
    /// Maximum number of skipped steps in a row.
    pub max_skipped: u64,
    /// Predicted peak memory of this process, or of the tensors on its GPU, in bytes.
    pub predicted_memory_bytes: Option<u64>,
}

/// What checkpoints contain besides weights and state, and when they are written.
pub struct Checkpoints {
    /// Writes checkpoints and the folder `final`.
    pub checkpointer: Checkpointer,
    /// Tokenizer and processor files of the model.
    pub carried: CarriedFiles,
    /// Whether they contain a model or an adapter.
    pub layout: FolderLayout,
    /// Their `config.json`, or `adapter_config.json`.
    pub config_json: serde_json::Value,
    /// Number of steps between two of them; 0 writes one at the end only.
    pub every_steps: u64,
    /// Whether training continues while one is written, if memory suffices for a copy.
    pub in_background: bool,
}

pub struct Evaluation {
    /// Rows of `data.eval`.
    pub rows: Option<DatasetRows>,
    /// When to evaluate.
    pub config: EvalConfig,
    /// How evaluations are compared; `None` if neither `checkpoint.best` nor `eval.early_stopping`
    /// is set.
    pub rule: Option<EvalRule>,
    /// Maximum number of tokens of one forward pass.
    pub max_tokens: usize,
    /// Whether `eval.jsonl` has the evaluation of the step to resume from.
    pub is_done: bool,
}

/// The logs of a run. All are `None` if another rank writes them.
#[derive(Default)]
pub struct Logs {
    /// `metrics.jsonl`.
    pub metrics: Option<JsonlSink>,
    /// `eval.jsonl`.
    pub evals: Option<JsonlSink>,
    /// `predictions.jsonl`; `None` without `eval.generate`.
    pub predictions: Option<JsonlSink>,
    /// `rejects.jsonl`.
    pub rejects: Option<JsonlSink>,
    /// `samples.jsonl`; `None` without `log.samples`.
    pub samples: Option<JsonlSink>,
}
