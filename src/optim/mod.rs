//! From gradients to weights: parameter groups, learning rate schedule, clipping, AdamW.

mod adamw;
mod groups;
mod schedule;

pub use adamw::{AdamW, GradNorm, Norms, OptimError, OwnedPart, ParamState, Update};
pub use groups::{GroupError, Named, ParamGroup, ParamGroups, matches};
pub use schedule::{Schedule, ScheduleConfig, Span};

use candle_core::DType;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// AdamW and its learning rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// Learning rate at the end of warm-up; 1e-5 by default.
    pub lr: f64,
    /// Decay rates of the first and the second moment; 0.9 and 0.999 by default.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment; 1e-8 by default.
    pub eps: f64,
    /// Decoupled weight decay of tensors with two or more dimensions; 0 by default.
    pub weight_decay: f64,
    /// How the learning rate changes after warm-up; `cosine` by default.
    pub schedule: ScheduleConfig,
    /// Number of steps of linear warm-up; none by default.
    pub warmup_steps: Option<u64>,
    /// Warm-up as a fraction of all steps, rounded up. Cannot be combined with `warmup_steps`.
    pub warmup_ratio: Option<f64>,
    /// Length of the decay of `schedule: wsd` as a fraction of all steps, rounded up; null: 0.1. An
    /// error with other schedules.
    pub decay_ratio: Option<f64>,
    /// Learning rate that the schedule reaches after the last step; 0 by default.
    pub min_lr: f64,
    /// Device and dtype of the moments; `f32` on the device of the weights by default.
    pub moments: Moments,
    /// Factors of the learning rate by component (`vision`, `merger`, `llm`) or by glob over
    /// parameter names. If several match, the last one applies.
    pub lr_multipliers: IndexMap<String, f64>,
}

/// Device and dtype of the moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moments {
    /// `f32` on the device of the weights: 8 bytes per trained parameter.
    #[default]
    F32,
    /// `bf16` on the device of the weights, with stochastic rounding: 4 bytes per trained
    /// parameter.
    Bf16,
    /// `f32` in host memory, together with the master weights. The update runs on the CPU. Without
    /// a GPU this equals `f32`.
    Host,
}

impl Moments {
    /// Dtype of the moments.
    pub fn dtype(self) -> DType {
        if self == Self::Bf16 { DType::BF16 } else { DType::F32 }
    }
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
            decay_ratio: None,
            min_lr: 0.0,
            moments: Moments::F32,
            lr_multipliers: IndexMap::new(),
        }
    }
}
