//! The training loop: the only module that uses data, model, loss and optimizer together.

mod adapter;
mod audit;
mod best;
mod config;
mod datasets;
mod device;
mod division;
mod error;
mod eval;
mod experts;
mod generate;
mod gradients;
mod health;
mod predict;
mod ranks;
mod rejects;
mod sample_log;
mod saved_tensors;
mod scores;
mod sequence;
mod state;
mod step;
mod step_result;
mod trainer;
mod weights;

pub use adapter::{AdapterConfig, AdapterInit, AdapterKind, Quantize, Targets};
pub use best::{EvalHistory, EvalRule};
pub use config::{
    AttentionChoice, EarlyStopping, EvalConfig, GenerateConfig, LogConfig, MatmulChoice,
    ModelSection, NewTokenRows, Offload, OnNonFinite, Precision, RecomputeChoice, Tracker,
    TrainConfig, Weights,
};
pub use datasets::{DatasetCounts, DatasetLoss, Rejected, log_datasets, metric_keys};
pub use device::DeviceChoice;
pub use division::division;
pub use error::TrainError;
pub use eval::{EvalReport, Evaluator, SampleScore};
pub use experts::StepChoices;
pub use generate::{Answer, GenerateOptions, Generator, generate};
pub use gradients::{GradientSums, SharedSums, buffers_of_tree};
pub use health::{Divergence, Health, Spike};
pub use predict::{Prediction, Predictor};
pub use ranks::Ranks;
pub use rejects::write_rejects;
pub use sample_log::StepSamples;
pub use saved_tensors::{JoinedConstants, SavedAs};
pub use scores::Score;
pub use state::{BaseContents, BaseModel, Planned, TrainState};
pub use step::{LaunchedStep, Losses, MicroBatches, PreparedStep, StepCounts, StepRunner};
pub use step_result::{SampleResult, StepResult};
pub use trainer::{
    Checkpoints, Evaluation, Logs, Observer, StepRules, TrainData, TrainOutcome, Trainer,
    TrainerParts,
};
pub use weights::{
    RankWeights, ShardTensors, ShardedWeights, StoredMemory, StoredWeight, StoredWeights,
    WeightDivision, WeightStorage, stored_memory,
};
