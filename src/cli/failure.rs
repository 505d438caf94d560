//! Errors of commands, which have no type in the library.

pub(super) use fault::Exit;
use fault::{Fault, Hint};
use std::error::Error;
use std::fmt;

/// An error of a command, with an exit code and a hint.
///
/// Errors of the library need no wrapping: they have an exit code and a hint.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) exit: Exit,
    message: String,
    pub(super) hint: Option<String>,
    /// Replaces the message, if given.
    wrapped: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    pub(super) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None, wrapped: None }
    }

    /// Gives `error` an exit code; its message, causes and hint are kept.
    pub(super) fn of(exit: Exit, error: impl Error + Send + Sync + 'static) -> Self {
        Self { exit, message: String::new(), hint: None, wrapped: Some(Box::new(error)) }
    }

    pub(super) fn wrapped(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.wrapped.as_deref()?)
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

impl Fault for Failure {
    fn exit(&self) -> Option<Exit> {
        Some(self.exit)
    }

    fn hint(&self) -> Hint {
        self.hint.clone().map(Into::into)
    }
}
