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
use settings::{Choice, above, section};
use std::ops::Bound;

/// Maximum learning rate, weight decay and factor of a learning rate.
pub const MAX_LR: f64 = 1e6;
const USUAL_LR: &str = "a usual value is 1.0e-5";

/// The optimizer and its learning rates.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct OptimConfig {
    /// The optimizer
    #[key(default)]
    pub kind: Kind,
    /// Peak learning rate
    #[key(default = 1e-5)]
    #[valid(range = 0.0.., expected = "a finite number of 0 or more", hint = USUAL_LR)]
    #[valid(range = ..=MAX_LR, expected = "a number from 0 to 1e6", hint = USUAL_LR)]
    pub lr: f64,
    /// Decay of the two moments
    #[key(default = [0.9, 0.999])]
    #[valid(
        range = 0.0..1.0,
        expected = "a number of 0 or more and below 1",
        hint = "a usual value is [0.9, 0.999]"
    )]
    pub betas: [f64; 2],
    /// Added to the square root of the second moment
    #[key(default = 1e-8)]
    #[valid(range = above(0.0), expected = "a finite number above 0")]
    pub eps: f64,
    /// Decoupled weight decay of tensors with two or more dimensions
    #[key(default)]
    #[valid(range = 0.0.., expected = "a finite number of 0 or more")]
    #[valid(range = ..=MAX_LR, expected = "a number from 0 to 1e6")]
    pub weight_decay: f64,
    /// Learning rate after warm-up
    #[key(default)]
    pub schedule: ScheduleConfig,
    /// Steps of linear warm-up; `null`: 0
    pub warmup_steps: Option<u64>,
    /// Warm-up as a share of all steps, rounded up
    #[valid(range = 0.0..=1.0, expected = "a share from 0 to 1")]
    pub warmup_ratio: Option<f64>,
    /// Decay of `wsd` as a share of all steps, rounded up; `null`: 0.1
    #[valid(
        range = (Bound::Excluded(0.0), Bound::Included(1.0)),
        expected = "a share of all steps above 0, at most 1"
    )]
    pub decay_ratio: Option<f64>,
    /// Learning rate that the schedule reaches after the last step
    #[key(default)]
    #[valid(range = 0.0.., expected = "a number from 0 to `optim.lr`")]
    pub min_lr: f64,
    /// Dtype and place of the two moments
    #[key(default)]
    pub moments: Moments,
    /// Master copies of bf16 weights
    #[key(default)]
    pub master: Master,
    /// Settings of `kind: adafactor`, with the names and defaults of PyTorch
    #[key(default)]
    pub adafactor: AdafactorConfig,
    /// Learning rate factors by component or by glob over parameter names
    #[key(default)]
    pub lr_multipliers: IndexMap<String, f64>,
}

/// The optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
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
#[section]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorConfig {
    /// Exponent of the decay of Adafactor's second moments: those of step `t` keep
    /// `1 - t^beta2_decay` of their value
    #[key(default = -0.8)]
    #[valid(range = ..=0.0, expected = "a finite number of 0 or less")]
    pub beta2_decay: f64,
    /// Minimum root of the second moment, and minimum root mean square of a weight that its step is
    /// in proportion to
    #[key(default = [f64::from(f32::EPSILON), 1e-3])]
    pub eps: [f64; 2],
    /// Maximum root mean square of the direction of a step
    #[key(default = 1.0)]
    #[valid(range = 1.0.., expected = "a finite number of 1 or more")]
    pub d: f64,
}

/// Master copies of `bf16` weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
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
