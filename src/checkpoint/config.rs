use serde::{Deserialize, Serialize};
use settings::{Choice, section};
use std::num::NonZeroUsize;

/// When checkpoints are written, and how many are kept.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Optimizer steps between checkpoints; 0: only one at the end
    #[key(default = 200)]
    pub every_steps: u64,
    /// Number of newest checkpoints that stay on disk
    #[key(default = NonZeroUsize::MIN.saturating_add(2))]
    pub keep: NonZeroUsize,
    /// Whether training continues while a checkpoint is written
    #[key(default = true)]
    pub background: bool,
    /// Keeps the model of the best evaluation in `best/`: `{metric: eval.loss}`
    pub best: Option<BestConfig>,
}

/// Which evaluation is the best one.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BestConfig {
    /// The metric that is compared
    pub metric: String,
    /// Whether the smaller or the larger value is better; `null`: `min` for losses, otherwise `max`
    pub mode: Option<BestMode>,
}

/// Which of two values is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum BestMode {
    /// The smaller one.
    Min,
    /// The larger one.
    Max,
}
