//! Errors of the training loop.

use super::eval::EvalError;
use super::step::StepError;
use crate::checkpoint::CheckpointError;
use crate::data::LoaderError;
use crate::dist::DistError;
use crate::metrics::JsonlError;

/// The reason why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Data could not be loaded.
    #[error(transparent)]
    Data(#[from] LoaderError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// An evaluation failed.
    #[error("the evaluation failed")]
    Eval(#[from] EvalError),
    /// A checkpoint could not be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `metrics.jsonl` or `rejects.jsonl` could not be written.
    #[error(transparent)]
    Sink(#[from] JsonlError),
    /// The ranks can no longer work together.
    #[error(transparent)]
    Ranks(#[from] DistError),
    /// An op failed outside of a step.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl TrainError {
    /// The error of the connections between ranks that caused this one.
    pub(super) fn lost(&self) -> Option<&DistError> {
        match self {
            Self::Ranks(error)
            | Self::Step(StepError::Ranks(error))
            | Self::Data(LoaderError::Ranks(error))
            | Self::Eval(EvalError::Ranks(error)) => Some(error),
            _ => None,
        }
    }
}
