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
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: 200, keep: NonZeroUsize::MIN.saturating_add(2), background: true }
    }
}
