//! The `checkpoint` section of the config.

use serde::{Deserialize, Serialize};
use std::num::NonZeroUsize;

/// When checkpoints are written, and how many are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Optimizer steps between two checkpoints; 0 writes only one, at the end of the run.
    pub every_steps: u64,
    /// Number of newest checkpoints to keep on disk; at least 1.
    pub keep: NonZeroUsize,
    /// Whether training continues while a thread writes a copy of the training state, if memory
    /// suffices for the copy.
    pub background: bool,
    /// Keeps the model of the best evaluation in the folder `best`; off by default.
    pub best: Option<BestConfig>,
}

/// Which evaluation is the best one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestConfig {
    /// `eval.loss`, `eval.accuracy`, `eval.NAME.loss` of a data set, or a score of `eval.generate`
    /// such as `eval.exact`.
    pub metric: String,
    /// Whether a smaller or a larger value is better; by default `min` for losses, otherwise `max`.
    #[serde(default)]
    pub mode: Option<BestMode>,
}

/// Which of two values is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BestMode {
    /// The smaller one.
    Min,
    /// The larger one.
    Max,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every_steps: 200,
            keep: NonZeroUsize::MIN.saturating_add(2),
            background: true,
            best: None,
        }
    }
}
