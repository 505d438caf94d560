//! The training loop: the only module that uses data, model, loss and optimizer together.

mod config;
mod datasets;
mod device;
mod eval;
mod generate;
mod state;
mod step;
mod trainer;

pub use config::{
    AttentionChoice, EvalConfig, LogConfig, ModelSection, Precision, RecomputeChoice, TrainConfig,
    Weights,
};
pub use datasets::{DatasetCounts, DatasetLoss, Rejected, by_dataset, log_datasets, metric_keys};
pub use device::{DeviceChoice, UnknownDevice};
pub use eval::{EvalError, EvalReport, Evaluator, SampleScore};
pub use generate::{GenerateOptions, generate};
pub use state::{Planned, TrainState};
pub use step::{
    LaunchedStep, Losses, PreparedStep, StepCounts, StepError, StepOutcome, StepRunner,
};
pub use trainer::{Observer, Outcome, TrainError, Trainer, TrainerParts, write_rejects};
