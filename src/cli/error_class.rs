//! The exit code and the hint of each error of the library.

use super::failure::{ErrorClass, Exit, Failure};
use super::gpu_error;
use super::stdout::is_stdout_error;
use crate::batch::UnpadError;
use crate::checkpoint::CheckpointError;
use crate::config::{ConfigError, ValueError};
use crate::convert::ConvertError;
use crate::data::{
    CacheError, CollateError, CorpusError, DataConfigError, EncoderError, ImageConfigError,
    LoaderError, OrderError, RowTrouble, SampleError, SourceError, TokenizerError, Trouble,
};
use crate::dist::{DistError, LaunchError};
use crate::metrics::JsonlError;
use crate::models::ModelConfigError;
use crate::net::hub::HubError;
use crate::nn::WeightError;
use crate::optim::{GroupError, OptimError};
use crate::run::verify::VerifyError;
use crate::run::{AdapterError, DeviceError, ReplayError, RunError, SetupError};
use crate::train::{EvalError, StepError, TrainError};
use std::error::Error;

/// The class of `error` itself, not of its causes; `None` if it is not an error of this crate.
pub(super) fn classify(error: &(dyn Error + 'static)) -> Option<ErrorClass> {
    if let Some(error) = error.downcast_ref::<Failure>() {
        let inner = || classify(error.wrapped.as_deref()?)?.hint;
        return Some(ErrorClass::new(error.exit, error.hint.clone().or_else(inner)));
    }
    if is_stdout_error(error) {
        let hint =
            "free space on the disk that stdout is redirected to, or redirect it to another disk";
        return Some(ErrorClass::new(Exit::CannotWrite, hint.to_owned()));
    }
    if let Some(error) = error.downcast_ref() {
        return run(error);
    }
    if let Some(error) = error.downcast_ref::<DistError>() {
        let exit = if error.is_usage() { Exit::Usage } else { Exit::Ranks };
        return Some(ErrorClass::new(exit, error.hint().to_owned()));
    }
    if let Some(error) = error.downcast_ref::<LaunchError>() {
        return Some(ErrorClass::new(Exit::Usage, error.hint()));
    }
    if let Some(error) = error.downcast_ref::<candle_core::Error>() {
        return gpu_error::class(&error.to_string());
    }
    match inner(error) {
        Some(inner) => classify(inner),
        None => config(error).or_else(|| data(error)).or_else(|| model(error)),
    }
}

/// Returns the error inside a variant that only wraps another error.
fn inner<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e (dyn Error + 'static)> {
    if let Some(error) = error.downcast_ref::<ReplayError>() {
        return match error {
            ReplayError::Run(error) => Some(error.as_ref()),
            ReplayError::Train(error) => Some(error.as_ref()),
            ReplayError::NoStep { .. } => None,
        };
    }
    Some(if let Some(error) = error.downcast_ref::<TrainError>() {
        match error {
            TrainError::Data(error) => error,
            TrainError::Step(error) => error,
            TrainError::Eval(error) => error,
            TrainError::Checkpoint(error) => error,
            TrainError::Sink(error) => error,
            TrainError::Ranks(error) => error,
            TrainError::Candle(error) => error,
        }
    } else if let Some(error) = error.downcast_ref::<VerifyError>() {
        match error {
            VerifyError::NoRows { .. }
            | VerifyError::NoTargets { .. }
            | VerifyError::Folder { .. } => return None,
            VerifyError::Row(error) => error,
            VerifyError::Run(error) => error.as_ref(),
            VerifyError::Train(error) => error.as_ref(),
            VerifyError::Step(error) => error,
            VerifyError::Loader(error) => error,
            VerifyError::Collate(error) => error,
            VerifyError::Unpad(error) => error,
            VerifyError::Candle(error) => error,
        }
    } else if let Some(error) = error.downcast_ref::<SetupError>() {
        match error {
            SetupError::MissingTensors { .. }
            | SetupError::Contradiction { .. }
            | SetupError::Shape { .. }
            | SetupError::MaskedOnGpu
            | SetupError::AuxLossOnGpu
            | SetupError::Fp8OnGpu { .. }
            | SetupError::NoExperts { .. }
            | SetupError::QuantizedBase { .. } => return None,
            SetupError::Config { source, .. } => source,
            SetupError::Files { source, .. } => source.as_ref(),
            SetupError::Groups(error) => error,
            SetupError::Adapter(error) => error,
            SetupError::Weights(error) => error,
            SetupError::Candle(error) => error,
        }
    } else {
        match error.downcast_ref::<EvalError>()? {
            EvalError::Row(error) => error,
            EvalError::Collate(error) => error,
            EvalError::Unpad(error) => error,
            EvalError::Ranks(error) => error,
            EvalError::Candle(error) => error,
        }
    })
}

/// The exit code of an error of the hub.
pub(super) fn hub_exit(error: &HubError) -> Exit {
    match error {
        HubError::Write { .. } => Exit::CannotWrite,
        error if error.is_temporary() => Exit::Ranks, // temporary, as a lost rank is
        _ => Exit::Usage,
    }
}

fn run(error: &RunError) -> Option<ErrorClass> {
    let exit = match error {
        RunError::CreateOutputDir { .. } | RunError::OutputFile { .. } => Exit::CannotWrite,
        RunError::Value(_)
        | RunError::DataConfig(_)
        | RunError::Busy { .. }
        | RunError::ModelInOutputDir { .. }
        | RunError::OtherConfig { .. }
        | RunError::ImageSetting { .. }
        | RunError::VideoSetting { .. }
        | RunError::DataSet { .. }
        | RunError::Urls(_)
        | RunError::NoWeights { .. }
        | RunError::AlgorithmsFile { .. }
        | RunError::Algorithms { .. }
        | RunError::World { .. }
        | RunError::SequenceWorld { .. }
        | RunError::SequenceHeads { .. }
        | RunError::Groups { .. } => Exit::Usage,
        RunError::Hub { problem, .. } => hub_exit(problem),
        RunError::UnusableRows { .. }
        | RunError::NoOptimizer { .. }
        | RunError::State { .. }
        | RunError::StateVersion { .. }
        | RunError::InputsChanged { .. }
        | RunError::MediaChanged { .. }
        | RunError::DataChanged { .. } => Exit::Data,
        RunError::Device(error) => return classify(error),
        RunError::Encoder(error) => return classify(error),
        RunError::Data(error) => return classify(error),
        RunError::Order(error) => return classify(error),
        RunError::Setup(error) => return classify(error),
        RunError::Cache(error) => return classify(error),
        RunError::Plan(error) => return classify(error),
        RunError::Checkpoint(error) => return classify(error),
        RunError::Sink(error) => return classify(error),
        RunError::Config(error) => return classify(error),
        RunError::Ranks(error) => return classify(error),
        RunError::Candle(error) => return classify(error),
    };
    Some(ErrorClass::new(exit, error.hint()))
}

fn config(error: &(dyn Error + 'static)) -> Option<ErrorClass> {
    let hint = if let Some(error) = error.downcast_ref::<ConfigError>() {
        error.hint()
    } else if let Some(ReplayError::NoStep { .. }) = error.downcast_ref() {
        "metrics.jsonl of the run has its steps".to_owned()
    } else if let Some(error) = error.downcast_ref::<ValueError>() {
        error.hint()
    } else if let Some(error) = error.downcast_ref::<DataConfigError>() {
        error.hint().to_owned()
    } else if let Some(error) = error.downcast_ref::<ConvertError>() {
        error.hint()
    } else if let Some(error) = error.downcast_ref::<OrderError>() {
        error.hint().to_owned()
    } else if let Some(error) = error.downcast_ref::<DeviceError>() {
        error.hint()
    } else if let Some(error) = error.downcast_ref::<AdapterError>() {
        match error {
            AdapterError::Files { source, .. } => return classify(source.as_ref()),
            error => error.hint().unwrap_or_default(),
        }
    } else {
        error.downcast_ref::<GroupError>()?.hint()
    };
    Some(ErrorClass::new(Exit::Usage, hint))
}

fn trouble_exit(trouble: Trouble) -> Exit {
    match trouble {
        Trouble::Resources => Exit::Resources,
        Trouble::Disk => Exit::Ranks,
    }
}

fn data(error: &(dyn Error + 'static)) -> Option<ErrorClass> {
    let class = if let Some(RowTrouble { trouble, .. }) = error.downcast_ref() {
        ErrorClass::new(trouble_exit(*trouble), trouble.hint().to_owned())
    } else if let Some(error) = error.downcast_ref::<SampleError>() {
        ErrorClass::new(Exit::Data, error.hint())
    } else if let Some(error) = error.downcast_ref::<SourceError>() {
        let exit = match error {
            SourceError::Corpus(CorpusError::Write { .. }) => Exit::CannotWrite,
            SourceError::File(error) if error.is_write() => Exit::CannotWrite,
            _ => Exit::Data,
        };
        ErrorClass::new(exit, error.hint())
    } else if let Some(error) = error.downcast_ref::<CacheError>() {
        let exit = error.trouble().map_or(Exit::CannotWrite, trouble_exit);
        ErrorClass::new(exit, error.hint().to_owned())
    } else if let Some(LoaderError::Ranks(error)) = error.downcast_ref() {
        return classify(error);
    } else if let Some(error) = error.downcast_ref::<LoaderError>() {
        let exit = match error {
            LoaderError::Trouble(error) => return classify(error),
            LoaderError::Spawn { .. } => Exit::Resources,
            _ => Exit::Data,
        };
        ErrorClass::new(exit, error.hint().to_owned())
    } else if error.is::<CollateError>() || error.is::<UnpadError>() {
        let hint = "this is a bug in trainer: please report it with the row";
        ErrorClass::new(Exit::Data, hint.to_owned())
    } else if let Some(error) = error.downcast_ref::<StepError>() {
        match error {
            StepError::Candle(error) => return classify(error),
            StepError::Ranks(error) => return classify(error),
            StepError::NonFiniteLoss { .. } | StepError::NonFiniteGradient { .. } => {
                ErrorClass::new(Exit::Data, error.hint().map(str::to_owned))
            }
        }
    } else if let Some(error) = error.downcast_ref::<VerifyError>() {
        let is_folder = matches!(error, VerifyError::Folder { .. });
        let exit = if is_folder { Exit::CannotWrite } else { Exit::Data };
        ErrorClass::new(exit, error.hint().map(str::to_owned))
    } else if let Some(OptimError::NonFinite { .. }) = error.downcast_ref() {
        ErrorClass::new(Exit::Data, None)
    } else {
        let error = error.downcast_ref::<JsonlError>()?;
        ErrorClass::new(Exit::CannotWrite, error.hint().to_owned())
    };
    Some(class)
}

/// The class of an error of the model folder or of a checkpoint.
fn model(error: &(dyn Error + 'static)) -> Option<ErrorClass> {
    let of_config = |error: &SetupError| {
        matches!(
            error,
            SetupError::MaskedOnGpu
                | SetupError::QuantizedBase { .. }
                | SetupError::AuxLossOnGpu
                | SetupError::Fp8OnGpu { .. }
                | SetupError::NoExperts { .. }
        )
    };
    let of_config = error.downcast_ref().filter(|error| of_config(error));
    let hint = if let Some(error) = of_config {
        return Some(ErrorClass::new(Exit::Usage, error.hint()));
    } else if let Some(error) = error.downcast_ref::<SetupError>() {
        error.hint()
    } else if let Some(error) = error.downcast_ref::<CheckpointError>() {
        if let CheckpointError::Tensor { source, .. } = error
            && let Some(class) = classify(source)
        {
            return Some(class);
        }
        let is_write = error.is_write() || matches!(error, CheckpointError::Moved { .. });
        let exit = if is_write { Exit::CannotWrite } else { Exit::Data };
        return Some(ErrorClass::new(exit, error.hint()));
    } else if let Some(error) = error.downcast_ref::<ModelConfigError>() {
        Some(error.hint().to_owned())
    } else if let Some(error) = error.downcast_ref::<EncoderError>() {
        error.hint()
    } else if let Some(error) = error.downcast_ref::<ImageConfigError>() {
        Some(error.hint().to_owned())
    } else if error.is::<WeightError>() {
        Some("the weights belong to another model than `config.json`".to_owned())
    } else {
        match error.downcast_ref::<TokenizerError>()? {
            TokenizerError::Load { .. } => {
                Some("copy tokenizer.json from the published model again".to_owned())
            }
            _ => None,
        }
    };
    Some(ErrorClass::new(Exit::Data, hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::SampleId;
    use crate::data::Rejection;
    use rustix::io::Errno;

    #[test]
    fn an_error_inside_a_transparent_one_is_classified() {
        let step = StepError::NonFiniteLoss { step: 3, loss: f64::NAN };
        let class = classify(&TrainError::Step(step)).unwrap();
        assert_eq!(class.exit, Exit::Data);
        assert!(class.hint.unwrap().contains("optim.lr"));
    }

    #[test]
    fn an_error_of_the_config_is_a_usage_error_wherever_it_is_found() {
        let error = SetupError::Groups(GroupError::AllFrozen);
        assert_eq!(classify(&error).unwrap().exit, Exit::Usage);
        let error = OrderError::Weight { dataset: 0, weight: -1.0 };
        assert_eq!(classify(&RunError::Order(error)).unwrap().exit, Exit::Usage);
    }

    #[test]
    fn a_gpu_without_memory_has_an_exit_code_of_its_own() {
        let error = || candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)".to_owned());
        let in_step = StepError::Candle(error());
        for error in [TrainError::Candle(error()), TrainError::Step(in_step)] {
            assert_eq!(classify(&error).unwrap().exit, Exit::Resources);
        }
    }

    #[test]
    fn a_gpu_that_is_lost_while_a_checkpoint_is_copied_is_no_error_of_the_checkpoint() {
        let error = |code: &str| CheckpointError::Tensor {
            tensor: "lm_head.weight".to_owned(),
            source: candle_core::Error::Msg(format!("DriverError({code})")),
        };
        let exit = |code| classify(&error(code)).unwrap().exit;
        assert_eq!(exit("CUDA_ERROR_ECC_UNCORRECTABLE"), Exit::Ranks);
        assert_eq!(exit("CUDA_ERROR_OUT_OF_MEMORY"), Exit::Resources);
        assert_eq!(exit("another error"), Exit::Data);
    }

    #[test]
    fn trouble_of_the_process_or_of_a_disk_is_no_error_of_the_data() {
        for (code, exit) in [(Errno::MFILE, Exit::Resources), (Errno::IO, Exit::Ranks)] {
            let id = SampleId { file: std::path::Path::new("a.jsonl").into(), line: 3 };
            let error = SampleError::Read { id, cause: code.into() };
            let rejection = Rejection::of(&error);
            let trouble = Trouble::of(&error).unwrap();
            let stopped = LoaderError::Trouble(RowTrouble { rejection, trouble });
            assert!(stopped.to_string().contains("a.jsonl:3: cannot read the row"), "{stopped}");
            assert_eq!(classify(&stopped).unwrap().exit, exit);
            let LoaderError::Trouble(row) = stopped else { panic!("{stopped}") };
            let in_eval = TrainError::Eval(EvalError::Row(row.clone()));
            assert_eq!(classify(&in_eval).unwrap().exit, exit);
            assert_eq!(classify(&VerifyError::Row(row)).unwrap().exit, exit);
            let cache = CacheError::Exhausted { source: Box::new(error) };
            assert_eq!(classify(&cache).unwrap().exit, exit);
        }
    }

    #[test]
    fn a_loader_thread_that_cannot_be_started_is_no_error_of_the_data() {
        let error = LoaderError::Spawn { message: "os error 11".to_owned() };
        assert_eq!(classify(&error).unwrap().exit, Exit::Resources);
    }

    #[test]
    fn errors_of_other_crates_have_no_class() {
        assert_eq!(classify(&std::io::Error::other("surprise")), None);
        let error = candle_core::Error::Msg("surprise".to_owned());
        assert_eq!(classify(&TrainError::Candle(error)), None);
    }
}
