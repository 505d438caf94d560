//! From gradients to weights: groups by pattern, schedule, clipping, AdamW.

mod adamw;
mod groups;
mod schedule;

pub use adamw::{AdamW, OptimError, ParamState, StepNorm, Update};
pub use groups::{GroupError, Groups, Named, Setting};
pub use schedule::{Schedule, ScheduleConfig, Warmup};

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// AdamW and its learning rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of tensors with two or more dimensions.
    pub weight_decay: f64,
    /// Shape of the learning rate after warm-up.
    pub schedule: ScheduleConfig,
    /// Steps of linear warm-up.
    pub warmup_steps: Option<u64>,
    /// Warm-up as a share of all steps, rounded up; not together with `warmup_steps`.
    pub warmup_ratio: Option<f64>,
    /// Learning rate at the end of the schedule.
    pub min_lr: f64,
    /// Where the moments are kept, and in which dtype.
    pub moments: Moments,
    /// Factors by part (`vision`, `merger`, `llm`) or by glob over parameter names; where several
    /// match, the last one listed holds.
    pub lr_multipliers: IndexMap<String, f64>,
}

/// Where the moments are kept, and in which dtype.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moments {
    /// In `f32`, beside the weights: 8 bytes a trained parameter.
    #[default]
    F32,
    /// In `bf16`, beside the weights, rounded at random: 4 bytes a trained parameter.
    Bf16,
    /// In `f32` in the memory of the host, with the masters: nothing on the GPU, and the update runs on the host's
    /// cores. On the CPU the same as `f32`.
    Host,
}

impl Default for OptimConfig {
    fn default() -> Self {
        Self {
            lr: 1e-5,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            schedule: ScheduleConfig::Cosine,
            warmup_steps: None,
            warmup_ratio: None,
            min_lr: 0.0,
            moments: Moments::F32,
            lr_multipliers: IndexMap::new(),
        }
    }
}
