//! Exit codes, and errors that carry one.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Exit {
    /// Wrong arguments or config.
    Usage = 64,
    /// Bad data, a damaged file, or a loss or gradient that is not finite.
    Data = 65,
    /// A bug of this program: a panic, or an error without any other class.
    Software = 70,
    /// Memory or another resource of the process is used up.
    Resources = 71,
    /// A file cannot be written.
    CannotWrite = 73,
    /// A rank was lost or hung, a GPU was lost, a disk failed while data was read, or the Hub
    /// cannot be reached.
    Ranks = 74,
    /// Stopped by a signal after a checkpoint was saved: the same command continues the run.
    Stopped = 75,
    /// Stopped at once by a second Ctrl-C.
    Interrupted = 130,
    /// The reader of stdout closed the pipe (`.. | head`): the code of a process that SIGPIPE
    /// ended.
    ClosedPipe = 141,
}

impl Exit {
    /// The exit code of another process; `None` if it is not a code of this program.
    pub(super) fn from_code(code: i32) -> Option<Self> {
        use Exit::{
            CannotWrite, ClosedPipe, Data, Interrupted, Ranks, Resources, Software, Stopped, Usage,
        };
        let all = [
            Usage,
            Data,
            Software,
            Resources,
            CannotWrite,
            Ranks,
            Stopped,
            Interrupted,
            ClosedPipe,
        ];
        all.into_iter().find(|exit| *exit as i32 == code)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Exit code and hint of one kind of error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ErrorClass {
    pub(super) exit: Exit,
    pub(super) hint: Option<String>,
}

impl ErrorClass {
    pub(super) fn new(exit: Exit, hint: impl Into<Option<String>>) -> Self {
        Self { exit, hint: hint.into() }
    }
}

/// An error of a command, with an exit code and a hint.
///
/// Errors of the library need no wrapping: [`classify`](super::error_class::classify) finds their
/// exit code and hint.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) exit: Exit,
    message: String,
    pub(super) hint: Option<String>,
    /// Replaces the message, if given.
    pub(super) wrapped: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    pub(super) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None, wrapped: None }
    }

    /// Gives `error` an exit code; its message, causes and hint are kept.
    pub(super) fn of(exit: Exit, error: impl Error + Send + Sync + 'static) -> Self {
        Self { exit, message: String::new(), hint: None, wrapped: Some(Box::new(error)) }
    }

    /// Adds the fix that the error message suggests.
    #[must_use]
    pub(super) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.wrapped {
            Some(error) => write!(f, "{error}"),
            None => f.write_str(&self.message),
        }
    }
}

impl Error for Failure {
    /// Skips the wrapped error, whose message is already the message of this error.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.wrapped.as_deref().and_then(Error::source)
    }
}
