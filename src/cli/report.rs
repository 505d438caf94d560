//! An error as text on stderr, and as the exit code of the process.
//!
//! ```text
//! error: cannot write `runs/demo/checkpoints/.tmp-step-00000200/model.safetensors`
//! caused by: no space left on device (os error 28)
//! hint: free space on this disk, lower `checkpoint.keep`, or set `output_dir` to another disk
//! ```

use super::stdout::is_closed_pipe;
use super::verdict::{Verdict, verdict};
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// What the exit code tells a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// An error that nobody foresaw.
    Unknown = 1,
    /// Wrong arguments or config.
    Usage = 64,
    /// Bad data, a damaged file, or a run that is no longer finite.
    Data = 65,
    /// Not enough memory.
    Memory = 71,
    /// A file cannot be written.
    CannotWrite = 73,
    /// A hang or a failed collective.
    Hang = 74,
    /// Stopped by a signal after saving: the same command continues.
    Stopped = 75,
    /// Stopped at once by a second Ctrl-C.
    Interrupted = 130,
    /// The reader of stdout has gone (`.. | head`): what a shell says of a tool that SIGPIPE ended.
    ClosedPipe = 141,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error that knows its exit code, and what the user can do about it.
///
/// Commands return it through `anyhow`. The error types of the library need no wrapping: [`report`]
/// finds their hint and code by itself.
#[derive(Debug)]
pub(super) struct Failure {
    exit: Exit,
    message: String,
    hint: Option<String>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// A failure that is its own cause.
    pub(super) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None, source: None }
    }

    /// Gives `error` a code; its message and causes are kept.
    pub(super) fn of(exit: Exit, error: impl Error + Send + Sync + 'static) -> Self {
        Self { exit, message: String::new(), hint: None, source: Some(Box::new(error)) }
    }

    /// Its own hint, else that of the error in it.
    pub(super) fn verdict(&self) -> Verdict {
        let wrapped = || verdict(self.source.as_deref()?)?.hint;
        Verdict { exit: self.exit, hint: self.hint.clone().or_else(wrapped) }
    }

    /// What to do about it.
    #[must_use]
    pub(super) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) if self.message.is_empty() => write!(f, "{source}"),
            _ => f.write_str(&self.message),
        }
    }
}

impl Error for Failure {
    /// A wrapped error's message is ours already, so its cause comes next.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().and_then(Error::source)
    }
}

/// Writes the error to stderr and returns the code to exit with.
pub(super) fn report(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return Exit::ClosedPipe.into();
    }
    // Nothing is left to do where even stderr is gone.
    let _ = io::stderr().lock().write_all(text(error).as_bytes());
    exit(error).into()
}

/// The error, one line `caused by:` for each cause, and the first hint of the chain.
pub(super) fn text(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}\n");
    for cause in error.chain().skip(1) {
        text.extend(["caused by: ", &cause.to_string(), "\n"]);
    }
    if let Some(hint) = error.chain().find_map(|error| verdict(error)?.hint) {
        text.extend(["hint: ", &hint, "\n"]);
    }
    text
}

/// The code of the outermost error in the chain that has one.
pub(super) fn exit(error: &anyhow::Error) -> Exit {
    let verdict = error.chain().find_map(verdict);
    verdict.map_or(Exit::Unknown, |verdict| verdict.exit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::write_atomically;
    use anyhow::Context;
    use std::path::Path;

    #[test]
    fn an_error_is_told_with_its_causes_and_a_hint() {
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
    fn a_wrapped_error_is_told_once() {
        let cause = io::Error::other("the disk is on fire");
        let failure = Failure::of(Exit::Data, cause).hint("call the fire brigade");
        let error = anyhow::Error::new(failure);
        assert_eq!(text(&error), "error: the disk is on fire\nhint: call the fire brigade\n");
        assert_eq!(exit(&error), Exit::Data);
    }

    #[test]
    fn a_wrapped_error_keeps_its_hint_and_its_causes() {
        let cause = write_atomically(Path::new("/no/such/folder/a"), b"").unwrap_err();
        let error = anyhow::Error::new(Failure::of(Exit::Hang, cause));
        let text = text(&error);
        assert!(
            text.contains("\ncaused by: No such file") && text.contains("\nhint: check"),
            "{text}"
        );
        assert_eq!(exit(&error), Exit::Hang);
    }

    #[test]
    fn each_kind_of_error_has_its_code() {
        let config = crate::config::load::<u8>(Path::new("/no/such.yaml"), &[]).unwrap_err();
        assert_eq!(exit(&config.into()), Exit::Usage);
        let weights = crate::checkpoint::WeightFiles::open(Path::new("/no/such")).unwrap_err();
        assert_eq!(exit(&weights.into()), Exit::Data);
        let sink = crate::metrics::JsonlSink::open(Path::new("/no/such/rows.jsonl")).unwrap_err();
        assert_eq!(exit(&sink.into()), Exit::CannotWrite);
        assert_eq!(exit(&anyhow::anyhow!("surprise")), Exit::Unknown);
        let stopped: anyhow::Result<()> =
            Err(Failure::new(Exit::Stopped, "stopped at step 3").into());
        assert_eq!(exit(&stopped.context("sft").unwrap_err()), Exit::Stopped);
        let codes = [Exit::Memory, Exit::Stopped, Exit::Interrupted].map(|exit| exit as u8);
        assert_eq!(codes, [71, 75, 130]);
    }
}
