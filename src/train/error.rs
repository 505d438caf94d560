use crate::batch::BatchError;
use crate::checkpoint::CheckpointError;
use crate::data::{LoaderError, SampleError, TransientRowError};
use crate::dist::{DistError, rank_error};
use crate::metrics::JsonlError;
use crate::optim::OptimError;

pub(super) type Result<T> = std::result::Result<T, TrainError>;

/// The reason why a step, an evaluation or a run failed.
#[derive(Debug, thiserror::Error, fault::Fault)]
pub enum TrainError {
    #[error("step {step}: the loss is {loss}; no weight was changed")]
    #[fault(exit = Data, hint = loss_hint(*step))]
    NonFiniteLoss {
        /// Optimizer step, from 1.
        step: u64,
        loss: f64,
    },
    #[error("step {step}: {source}; no weight was changed")]
    #[fault(exit = Data, hint = FINITE)]
    NonFiniteGradient {
        /// Optimizer step, from 1.
        step: u64,
        source: OptimError,
    },
    #[error("the evaluation failed")]
    #[fault(from)]
    Eval(#[source] Box<Self>),
    #[error(transparent)]
    Data(#[from] LoaderError),
    #[error(transparent)]
    Row(#[from] TransientRowError),
    #[error(transparent)]
    Sample(Box<SampleError>),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Sink(#[from] JsonlError),
    #[error(transparent)]
    Ranks(#[from] DistError),
    #[error(transparent)]
    #[fault(exit = None, hint = None)]
    Candle(candle_core::Error),
}

impl From<candle_core::Error> for TrainError {
    fn from(error: candle_core::Error) -> Self {
        match rank_error(&error) {
            Some(lost) => Self::Ranks(lost.clone()),
            None => Self::Candle(error),
        }
    }
}

const FINITE: &str = "lower `optim.lr` or raise `optim.warmup_steps`; metrics.jsonl has the earlier steps, \
                      and checkpoints never contain values that are not finite";

fn loss_hint(step: u64) -> &'static str {
    if step > 1 {
        return FINITE;
    }
    "no step was trained yet: the weights of the model folder are finite, but too large; \
     copy them from the published model again"
}

impl TrainError {
    pub(super) fn in_evaluation(error: Self) -> Self {
        Self::Eval(Box::new(error))
    }

    /// The error of the connections between ranks that caused this one.
    pub(crate) fn lost(&self) -> Option<&DistError> {
        match self {
            Self::Ranks(error) | Self::Data(LoaderError::Ranks(error)) => Some(error),
            Self::Eval(error) => error.lost(),
            _ => None,
        }
    }
}
