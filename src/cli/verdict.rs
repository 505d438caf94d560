//! What each error of the library means to the user: an exit code, and what to do about it.

use super::report::{Exit, Failure};
use crate::batch::UnpadError;
use crate::checkpoint::CheckpointError;
use crate::config::{ConfigError, ValueError};
use crate::data::{
    CacheError, CollateError, CorpusError, DataConfigError, EncoderError, ImageConfigError,
    LoaderError, OrderError, SampleError, SourceError, TokenizerError,
};
use crate::metrics::JsonlError;
use crate::models::{ModelConfigError, WeightError};
use crate::optim::{GroupError, OptimError};
use crate::train::{EvalError, SetupError, StepError, TrainError};
use std::error::Error;

/// Exit code and hint of one kind of error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) exit: Exit,
    pub(super) hint: Option<String>,
}

impl Verdict {
    fn new(exit: Exit, hint: impl Into<String>) -> Self {
        Self { exit, hint: Some(hint.into()) }
    }

    fn data(hint: impl Into<Option<String>>) -> Self {
        Self { exit: Exit::Data, hint: hint.into() }
    }
}

/// The verdict on an error itself, without its causes; `None` for errors that are not ours.
pub(super) fn verdict(error: &(dyn Error + 'static)) -> Option<Verdict> {
    whole_run(error).or_else(|| config(error)).or_else(|| data(error)).or_else(|| model(error))
}

/// Errors that wrap those of a part: the part knows better.
fn whole_run(error: &(dyn Error + 'static)) -> Option<Verdict> {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return Some(failure.verdict());
    }
    if let Some(failure) = super::stdout::failure_of(error) {
        return Some(failure.verdict());
    }
    let part: &(dyn Error + 'static) = if let Some(error) = error.downcast_ref::<TrainError>() {
        match error {
            TrainError::Data(error) => error,
            TrainError::Step(error) => error,
            TrainError::Eval(error) => error,
            TrainError::Checkpoint(error) => error,
            TrainError::Sink(error) => error,
            TrainError::Candle(_) => return None,
        }
    } else if let Some(error) = error.downcast_ref::<SetupError>() {
        match error {
            SetupError::Config { source, .. } => source,
            SetupError::Files { source, .. } => source.as_ref(),
            SetupError::MissingTensors { .. } | SetupError::Shape { .. } => {
                return Some(Verdict::data(error.hint()));
            }
            SetupError::MaskedOnGpu => {
                return Some(Verdict { exit: Exit::Usage, hint: error.hint() });
            }
            SetupError::Groups(error) => error,
            SetupError::Weights(error) => error,
            SetupError::Candle(_) => return None,
        }
    } else if let Some(error) = error.downcast_ref::<EvalError>() {
        match error {
            EvalError::Collate(error) => error,
            EvalError::Unpad(error) => error,
            EvalError::Candle(_) => return None,
        }
    } else {
        return None;
    };
    verdict(part)
}

fn config(error: &(dyn Error + 'static)) -> Option<Verdict> {
    if let Some(error) = error.downcast_ref::<ConfigError>() {
        Some(Verdict::new(Exit::Usage, error.hint()))
    } else if let Some(error) = error.downcast_ref::<ValueError>() {
        Some(Verdict::new(Exit::Usage, error.hint()))
    } else if let Some(error) = error.downcast_ref::<DataConfigError>() {
        Some(Verdict::new(Exit::Usage, error.hint()))
    } else if let Some(error) = error.downcast_ref::<OrderError>() {
        Some(Verdict::new(Exit::Usage, error.hint()))
    } else {
        let error = error.downcast_ref::<GroupError>()?;
        Some(Verdict::new(Exit::Usage, error.hint()))
    }
}

fn data(error: &(dyn Error + 'static)) -> Option<Verdict> {
    const REPORT: &str = "this is a mistake of the trainer: please report it with the row";
    if let Some(error) = error.downcast_ref::<SampleError>() {
        Some(Verdict::data(error.hint()))
    } else if let Some(error) = error.downcast_ref::<SourceError>() {
        match error {
            SourceError::Corpus(CorpusError::Write { .. }) => {
                Some(Verdict::new(Exit::CannotWrite, error.hint().unwrap_or_default()))
            }
            _ => Some(Verdict::data(error.hint())),
        }
    } else if let Some(error) = error.downcast_ref::<CacheError>() {
        Some(Verdict::new(Exit::CannotWrite, error.hint()))
    } else if let Some(error) = error.downcast_ref::<LoaderError>() {
        Some(Verdict::new(Exit::Data, error.hint()))
    } else if error.is::<CollateError>() || error.is::<UnpadError>() {
        Some(Verdict::new(Exit::Data, REPORT))
    } else if let Some(error) = error.downcast_ref::<StepError>() {
        match error {
            StepError::Candle(_) => None,
            StepError::NonFiniteLoss { .. } | StepError::NonFiniteGradient { .. } => {
                Some(Verdict::data(error.hint().map(str::to_owned)))
            }
        }
    } else if let Some(OptimError::NonFinite { .. }) = error.downcast_ref::<OptimError>() {
        Some(Verdict::data(None))
    } else {
        let error = error.downcast_ref::<JsonlError>()?;
        Some(Verdict::new(Exit::CannotWrite, error.hint()))
    }
}

/// The model folder and checkpoints.
fn model(error: &(dyn Error + 'static)) -> Option<Verdict> {
    if let Some(error) = error.downcast_ref::<CheckpointError>() {
        let exit = if error.is_write() { Exit::CannotWrite } else { Exit::Data };
        Some(Verdict::new(exit, error.hint()))
    } else if let Some(error) = error.downcast_ref::<ModelConfigError>() {
        Some(Verdict::new(Exit::Data, error.hint()))
    } else if let Some(error) = error.downcast_ref::<EncoderError>() {
        Some(Verdict::data(error.hint()))
    } else if let Some(error) = error.downcast_ref::<ImageConfigError>() {
        Some(Verdict::new(Exit::Data, error.hint()))
    } else if error.is::<WeightError>() {
        Some(Verdict::new(Exit::Data, "the weights belong to another model than `config.json`"))
    } else if let Some(TokenizerError::Load { .. }) = error.downcast_ref::<TokenizerError>() {
        Some(Verdict::new(Exit::Data, "copy tokenizer.json from the published model again"))
    } else {
        error.is::<TokenizerError>().then(|| Verdict::data(None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_inside_of_a_transparent_one_is_found() {
        let step = StepError::NonFiniteLoss { step: 3, loss: f64::NAN };
        let verdict = verdict(&TrainError::Step(step)).unwrap();
        assert_eq!(verdict.exit, Exit::Data);
        assert!(verdict.hint.unwrap().contains("optim.lr"));
    }

    #[test]
    fn an_error_of_the_config_is_one_wherever_it_is_found() {
        let error = SetupError::Groups(GroupError::AllFrozen);
        assert_eq!(verdict(&error).unwrap().exit, Exit::Usage);
        let error = OrderError::Weight { dataset: 0, weight: -1.0 };
        assert_eq!(verdict(&error).unwrap().exit, Exit::Usage);
    }

    #[test]
    fn an_error_of_others_has_no_verdict() {
        assert_eq!(verdict(&std::io::Error::other("surprise")), None);
        let error = candle_core::Error::Msg("surprise".to_owned());
        assert_eq!(verdict(&TrainError::Candle(error)), None);
    }
}
