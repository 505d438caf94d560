//! Prints an error to stderr and picks the exit code of the process.
//!
//! ```text
//! error: cannot write `runs/demo/checkpoints/.tmp-step-00000200/model.safetensors`
//! caused by: no space left on device (os error 28)
//! hint: free space on this disk, lower `checkpoint.keep`, or set `output_dir` to another disk
//! ```

use super::args::PathError;
use super::failure::{Exit, Failure};
use super::gpu_error;
use super::terminal::{StdoutError, Terminal, coloured_error, escaped_part, is_closed_pipe};
use crate::batch::BatchError;
use crate::checkpoint::CheckpointError;
use crate::config::{ConfigError, ValueError};
use crate::convert::ConvertError;
use crate::data::{
    CacheError, LoaderError, ModelFolderError, OrderError, SampleError, SourceError,
    TokenizerError, TransientRowError,
};
use crate::dist::{DistError, LaunchError};
use crate::metrics::JsonlError;
use crate::models::ModelConfigError;
use crate::net::hub::HubError;
use crate::nn::WeightError;
use crate::ops::failed_gpu_allocation;
use crate::optim::{GroupError, OptimError};
use crate::report::ReportError;
use crate::run::{AdapterError, RunError, SetupError};
use crate::train::TrainError;
use fault::{Fault, Hint};
use rustix::io::Errno;
use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

/// Writes the error to stderr and returns the code to exit with.
pub(super) fn report(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return Exit::ClosedPipe.into();
    }
    // If stderr cannot be written either, the exit code is all that is left.
    let mut text = text(error);
    if Terminal::stderr().colours {
        text = coloured_error(&text);
    }
    let _ = io::stderr().lock().write_all(text.as_bytes());
    exit(error).into()
}

/// The error, one line `caused by:` for each of its causes, and the first hint in the chain.
pub(super) fn text(error: &anyhow::Error) -> String {
    let mut text = format!("error: {}\n", escaped_part(&error.to_string()));
    for cause in error.chain().skip(1) {
        text.extend(["caused by: ", &escaped_part(&cause.to_string()), "\n"]);
    }
    if is_out_of_memory(error)
        && let Some(sizes) = failed_gpu_allocation()
    {
        text.extend(["caused by: on the GPU: ", &sizes, "\n"]);
    }
    let (exit, hint) = outcome(error);
    let hint = hint.or_else(|| match exit {
        Exit::Software => Some(BUG.into()),
        Exit::Resources => Some("check the limits and permissions of the process".into()),
        _ => None,
    });
    if let Some(hint) = hint {
        text.extend(["hint: ", &escaped_part(&hint), "\n"]);
    }
    text
}

fn is_out_of_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.to_string().to_ascii_uppercase().contains("OUT_OF_MEMORY"))
}

pub(super) fn exit(error: &anyhow::Error) -> Exit {
    outcome(error).0
}

/// The exit code and the hint: those of the cause if the process lacks memory or open files, or if
/// a GPU failed, else those of the outermost errors in the chain that have them.
fn outcome(error: &anyhow::Error) -> (Exit, Hint) {
    if lacks_resources(error) {
        let hint = "raise the limit of open files (`ulimit -n`), or free memory";
        return (Exit::Resources, Some(hint.into()));
    }
    let of_gpu = error.chain().filter(|cause| may_be_of_gpu(*cause));
    if let Some((exit, hint)) =
        of_gpu.map(ToString::to_string).find_map(|text| gpu_error::outcome(&text))
    {
        return (exit, Some(hint));
    }
    let exit = error.chain().find_map(|cause| fault(cause)?.exit());
    let other = if is_of_system(error) { Exit::Resources } else { Exit::Software };
    (exit.unwrap_or(other), error.chain().find_map(hint))
}

/// The hint of an error, or that of the error that a [`Failure`] wraps.
fn hint(error: &(dyn Error + 'static)) -> Hint {
    let wrapped = || hint(error.downcast_ref::<Failure>()?.wrapped()?);
    fault(error)?.hint().or_else(wrapped)
}

/// Whether the text of this error may be that of the driver of a GPU: it is an error of candle, or
/// has no exit code of its own.
fn may_be_of_gpu(error: &(dyn Error + 'static)) -> bool {
    fault(error).map_or(error.is::<candle_core::Error>(), |fault| fault.exit().is_none())
}

/// The exit code and the hint of an error; `None` if its type has none.
fn fault<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e dyn Fault> {
    macro_rules! one_of {
        ($($kind:ty),*) => {
            None$(.or_else(|| {
                let boxed = || error.downcast_ref::<Box<$kind>>().map(|error| &**error);
                Some(error.downcast_ref::<$kind>().or_else(boxed)? as &dyn Fault)
            }))*
        };
    }
    let known: Option<&dyn Fault> = one_of! {
        AdapterError, BatchError, CacheError, CheckpointError, ConfigError, ConvertError,
        DistError, ModelFolderError, Failure, GroupError,
        HubError, JsonlError, LaunchError, LoaderError, ModelConfigError,
        OptimError, OrderError, PathError, ReportError, TransientRowError,
        RunError, SampleError, SetupError, SourceError, TokenizerError, TrainError,
        ValueError, WeightError
    };
    known.or_else(|| Some(StdoutError::find_in(error)? as &dyn Fault))
}

/// Whether a system call failed: starting a thread, finding this program, receiving a signal.
fn is_of_system(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.raw_os_error().is_some())
}

/// Hint of an error that is a bug of this program.
pub(super) const BUG: &str =
    "this is a bug in trainer: please report it with the command and config";

fn lacks_resources(error: &anyhow::Error) -> bool {
    let codes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    codes.filter_map(Errno::from_io_error).any(|code| RESOURCES.contains(&code))
}

/// `AGAIN`: no thread could be started.
const RESOURCES: [Errno; 4] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::SampleId;
    use crate::checkpoint::write_atomically;
    use crate::data::{Rejection, SampleFault, TransientFailure};
    use anyhow::Context;
    use std::path::Path;

    #[test]
    fn a_process_without_open_files_has_its_own_exit_code_wherever_this_is_noticed() {
        let cause: io::Error = Errno::MFILE.into();
        let error = anyhow::Error::new(cause).context("cannot read `checkpoints`");
        assert_eq!(exit(&error), Exit::Resources);
        assert!(
            text(&error)
                .ends_with("hint: raise the limit of open files (`ulimit -n`), or free memory\n")
        );
    }

    #[test]
    fn an_error_is_printed_with_its_causes_and_a_hint() {
        let cause = write_atomically(Path::new("/no/such/folder/a"), b"").unwrap_err();
        let error = anyhow::Error::new(cause).context("the run could not be saved");
        assert_eq!(
            text(&error),
            "error: the run could not be saved\n\
             caused by: cannot write `/no/such/folder/.tmp-a`\n\
             caused by: No such file or directory (os error 2)\n\
             hint: check the disk that holds `output_dir`\n"
        );
        assert_eq!(exit(&error), Exit::CannotWrite);
    }

    #[test]
    fn control_characters_of_an_error_are_shown() {
        let error = anyhow::anyhow!("the role is `\u{1b}[2J`");
        assert_eq!(text(&error), format!("error: the role is `\\u{{1b}}[2J`\nhint: {BUG}\n"));
    }

    #[test]
    fn a_wrapped_error_is_printed_once() {
        let cause = io::Error::other("the disk failed");
        let failure = Failure::of(Exit::Data, cause).hint("replace it");
        let error = anyhow::Error::new(failure);
        assert_eq!(text(&error), "error: the disk failed\nhint: replace it\n");
        assert_eq!(exit(&error), Exit::Data);
    }

    #[test]
    fn a_wrapped_error_keeps_its_hint_and_its_causes() {
        let cause = write_atomically(Path::new("/no/such/folder/a"), b"").unwrap_err();
        let error = anyhow::Error::new(Failure::of(Exit::CannotWrite, cause));
        let text = text(&error);
        assert!(
            text.contains("\ncaused by: No such file") && text.contains("\nhint: check"),
            "{text}"
        );
        assert_eq!(exit(&error), Exit::CannotWrite);
    }

    #[test]
    fn each_kind_of_error_has_its_code() {
        let config = crate::config::load::<u8>(Path::new("/no/such.yaml"), &[]).unwrap_err();
        assert_eq!(exit(&config.into()), Exit::Usage);
        let weights = crate::checkpoint::WeightFiles::open(Path::new("/no/such")).unwrap_err();
        assert_eq!(exit(&weights.into()), Exit::Data);
        let sink = crate::metrics::JsonlSink::open(Path::new("/no/such/rows.jsonl")).unwrap_err();
        assert_eq!(exit(&sink.into()), Exit::CannotWrite);
        assert_eq!(exit(&anyhow::anyhow!("surprise")), Exit::Software);
        let system =
            anyhow::Error::new(io::Error::from(Errno::PERM)).context("cannot find the program");
        assert_eq!(exit(&system), Exit::Resources);
        assert!(text(&system).contains("\nhint: check the limits"));
        let stopped: anyhow::Result<()> =
            Err(Failure::new(Exit::Stopped, "stopped at step 3").into());
        assert_eq!(exit(&stopped.context("sft").unwrap_err()), Exit::Stopped);
        let codes = [Exit::Software, Exit::Stopped, Exit::Interrupted].map(|exit| exit as u8);
        assert_eq!(codes, [70, 75, 130]);
    }

    fn exit_of(error: impl Error + Send + Sync + 'static) -> Exit {
        exit(&error.into())
    }

    #[test]
    fn an_error_inside_a_transparent_one_is_classified() {
        let step = TrainError::NonFiniteLoss { step: 3, loss: f64::NAN };
        let (exit, hint) = outcome(&RunError::from(step).into());
        assert_eq!(exit, Exit::Data);
        assert!(hint.unwrap().contains("optim.lr"));
    }

    #[test]
    fn an_error_of_the_config_is_a_usage_error_wherever_it_is_found() {
        let error = SetupError::Groups(GroupError::AllFrozen);
        assert_eq!(exit_of(error), Exit::Usage);
        let error = OrderError::Weight { dataset: 0, weight: -1.0 };
        assert_eq!(exit_of(RunError::Order(error)), Exit::Usage);
    }

    #[test]
    fn a_gpu_without_memory_has_an_exit_code_of_its_own() {
        let error = || candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)".to_owned());
        let in_eval = TrainError::Eval(Box::new(TrainError::Candle(error())));
        for error in [TrainError::Candle(error()), in_eval] {
            assert_eq!(exit_of(error), Exit::Resources);
        }
    }

    #[test]
    fn a_gpu_that_is_lost_while_a_checkpoint_is_copied_is_no_error_of_the_checkpoint() {
        let error = |code: &str| CheckpointError::Tensor {
            tensor: "lm_head.weight".to_owned(),
            source: candle_core::Error::Msg(format!("DriverError({code})")),
        };
        let exit = |code| exit_of(error(code));
        assert_eq!(exit("CUDA_ERROR_ECC_UNCORRECTABLE"), Exit::Ranks);
        assert_eq!(exit("CUDA_ERROR_OUT_OF_MEMORY"), Exit::Resources);
        assert_eq!(exit("another error"), Exit::Data);
    }

    #[test]
    fn trouble_of_the_process_or_of_a_disk_is_no_error_of_the_data() {
        for (code, exit) in [(Errno::MFILE, Exit::Resources), (Errno::IO, Exit::Ranks)] {
            let id = SampleId { file: std::path::Path::new("a.jsonl").into(), line: 3 };
            let error = SampleError { id, fault: SampleFault::Read(code.into()) };
            let rejection = Rejection::of(&error);
            let failure = TransientFailure::of(&error).unwrap();
            let stopped = LoaderError::Transient(TransientRowError { rejection, failure });
            assert!(stopped.to_string().contains("a.jsonl:3: cannot read the row"), "{stopped}");
            assert_eq!(exit_of(stopped.clone()), exit);
            let LoaderError::Transient(row) = stopped else { panic!("{stopped}") };
            let in_eval = TrainError::Eval(Box::new(TrainError::Row(row.clone())));
            assert_eq!(exit_of(in_eval), exit);
            assert_eq!(exit_of(RunError::Row(row)), exit);
            let cache = CacheError::Exhausted { source: Box::new(error) };
            assert_eq!(exit_of(cache), exit);
        }
    }

    #[test]
    fn a_loader_thread_that_cannot_be_started_is_no_error_of_the_data() {
        let error = LoaderError::Spawn { message: "os error 11".to_owned() };
        assert_eq!(exit_of(error), Exit::Resources);
    }

    #[test]
    fn errors_of_other_crates_have_no_exit_code() {
        assert_eq!(exit_of(io::Error::other("surprise")), Exit::Software);
        let error = candle_core::Error::Msg("surprise".to_owned());
        assert_eq!(exit_of(TrainError::Candle(error)), Exit::Software);
    }
}
