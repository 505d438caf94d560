//! Prints an error to stderr and picks the exit code of the process.
//!
//! ```text
//! error: cannot write `runs/demo/checkpoints/.tmp-step-00000200/model.safetensors`
//! caused by: no space left on device (os error 28)
//! hint: free space on this disk, lower `checkpoint.keep`, or set `output_dir` to another disk
//! ```

use super::error_class::classify;
use super::escaped::escaped_part;
use super::failure::Exit;
use super::stdout::is_closed_pipe;
use super::terminal::{Terminal, coloured_error};
use crate::ops::failed_gpu_allocation;
use rustix::io::Errno;
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
    let hint = if lacks_resources(error) {
        Some("raise the limit of open files (`ulimit -n`), or free memory".to_owned())
    } else {
        let hint = error.chain().find_map(|error| classify(error)?.hint);
        hint.or_else(|| match exit(error) {
            Exit::Software => Some(BUG.to_owned()),
            Exit::Resources => Some("check the limits and permissions of the process".to_owned()),
            _ => None,
        })
    };
    if let Some(hint) = hint {
        text.extend(["hint: ", &escaped_part(&hint), "\n"]);
    }
    text
}

/// Whether the driver of a GPU had no memory.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.to_string().to_ascii_uppercase().contains("OUT_OF_MEMORY"))
}

/// The exit code of the outermost error in the chain that has a class. If the process lacks memory
/// or open files, this is the cause of all others.
pub(super) fn exit(error: &anyhow::Error) -> Exit {
    if lacks_resources(error) {
        return Exit::Resources;
    }
    match error.chain().find_map(classify) {
        Some(class) => class.exit,
        None if is_of_system(error) => Exit::Resources,
        None => Exit::Software,
    }
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
    use crate::checkpoint::write_atomically;
    use crate::cli::failure::Failure;
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
}
