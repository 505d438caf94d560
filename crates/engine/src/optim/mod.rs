//! From gradients to weights: parameter groups, learning rate schedule, clipping, optimizers.

mod groups;
mod optimizer;
mod schedule;
mod state;

pub use groups::{GroupError, Named, ParamGroup, ParamGroups, matches};
pub use optimizer::{GradNorm, Norms, OptimError, Optimizer, Update};
pub use schedule::{Schedule, ScheduleConfig, Span};
pub use state::MASTER;
pub use state::{OwnedPart, ParamState, StateKind, state_bytes_per_weight};

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// The optimizer and its learning rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// The optimizer; `adamw` by default.
    pub kind: Kind,
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
    /// Whether `bf16` weights have master copies in `f32`; `f32` by default.
    pub master: Master,
    /// Settings of `kind: adafactor`.
    pub adafactor: AdafactorConfig,
    /// Factors of the learning rate by component (`vision`, `merger`, `llm`) or by glob over
    /// parameter names. If several match, the last one applies.
    pub lr_multipliers: IndexMap<String, f64>,
}

/// The optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// `AdamW`.
    #[default]
    #[serde(rename = "adamw")]
    Adamw,
    /// `AdamW` with moments in 8 bits: 2.03 bytes per trained parameter.
    #[serde(rename = "adamw_8bit")]
    Adamw8bit,
    /// `Muon` for the matrices between hidden states, `AdamW` for the other parameters.
    #[serde(rename = "muon")]
    Muon,
    /// `Adafactor`: second moments of rows and columns only.
    #[serde(rename = "adafactor")]
    Adafactor,
}

impl Kind {
    /// Whether the state of a parameter can be divided among ranks.
    pub fn divides_state(self) -> bool {
        matches!(self, Self::Adamw | Self::Adamw8bit)
    }
}

/// Settings of `Adafactor`, with the names and defaults of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdafactorConfig {
    /// The second moments of step `t` keep `1 - t^beta2_decay` of their value; -0.8 by default.
    pub beta2_decay: f64,
    /// Minimum root of the second moment, 2^-23 by default, and minimum root mean square of a
    /// weight that its step is in proportion to, 1e-3 by default.
    pub eps: [f64; 2],
    /// Maximum root mean square of a direction before it is multiplied by the step; 1 by default.
    pub d: f64,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self { beta2_decay: -0.8, eps: [f64::from(f32::EPSILON), 1e-3], d: 1.0 }
    }
}

/// Master copies of `bf16` weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Master {
    /// A copy in `f32`: 4 bytes per trained parameter. The weight is the rounded copy.
    #[default]
    F32,
    /// No copy: the `bf16` weight is updated with stochastic rounding. With `precision: f32` there
    /// are no copies anyway.
    None,
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

impl Default for OptimConfig {
    fn default() -> Self {
        Self {
            kind: Kind::Adamw,
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
            master: Master::F32,
            adafactor: AdafactorConfig::default(),
            lr_multipliers: IndexMap::new(),
        }
    }
}
