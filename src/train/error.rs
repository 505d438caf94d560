//! Errors of the training loop.

use super::eval::EvalError;
use super::step::StepError;
use crate::checkpoint::CheckpointError;
use crate::data::LoaderError;
use crate::dist::DistError;
use crate::metrics::JsonlError;

/// The reason why a run failed.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum TrainError {
    #[error(transparent)]
    #[fault(from)]
    Data(#[from] LoaderError),
    #[error(transparent)]
    #[fault(from)]
    Step(#[from] StepError),
    #[error("the evaluation failed")]
    #[fault(from)]
    Eval(#[from] EvalError),
    #[error(transparent)]
    #[fault(from)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    #[fault(from)]
    Sink(#[from] JsonlError),
    #[error(transparent)]
    #[fault(from)]
    Ranks(#[from] DistError),
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
