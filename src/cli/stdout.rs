//! Results on stdout, with an error that says that it was stdout.

use super::report::{Exit, Failure};
use std::error::Error;
use std::io::{self, Write};

/// Stdout refused a write.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct StdoutError(#[source] io::Error);

/// Stdout, whose errors [`failure_of`] knows.
#[derive(Debug)]
pub(super) struct Stdout(io::StdoutLock<'static>);

/// Stdout, for this command alone.
pub(super) fn stdout() -> Stdout {
    Stdout(io::stdout().lock())
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(wrap)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(wrap)
    }
}

/// An error of stdout, as [`Stdout`] gives it.
pub(super) fn wrap(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), StdoutError(error))
}

/// Why stdout refused, if it is stdout that did.
fn cause<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e io::Error> {
    let inner = error.downcast_ref::<io::Error>()?.get_ref()?;
    Some(&inner.downcast_ref::<StdoutError>()?.0)
}

/// Whether the reader of a pipe has seen enough (`trainer inspect .. | head`), which is nothing to complain about.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().filter_map(cause).any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Exit code and hint of an error of stdout.
pub(super) fn failure_of(error: &(dyn Error + 'static)) -> Option<Failure> {
    cause(error)?;
    Some(
        Failure::new(Exit::CannotWrite, "")
            .hint("free space where the output goes, or send it elsewhere"),
    )
}
