//! Writes to stdout. Its errors can be distinguished from errors of other files.

use std::error::Error;
use std::io::{self, Write};

/// A failed write to stdout.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[error("cannot write to stdout")]
#[fault(
    exit = CannotWrite,
    hint = "free space on the disk that stdout is redirected to, or redirect it to another disk"
)]
pub(super) struct StdoutError(#[source] io::Error);

/// Locked stdout; [`is_stdout_error`] recognises its errors.
#[derive(Debug)]
pub(super) struct Stdout(io::StdoutLock<'static>);

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

/// Marks an error as an error of stdout.
pub(super) fn wrap(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), StdoutError(error))
}

impl StdoutError {
    /// The error of stdout that `error` is.
    pub(super) fn find_in<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e Self> {
        error.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()
    }
}

/// Whether the reader of stdout closed the pipe (`trainer inspect .. | head`), which is not an
/// error.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut errors = error.chain().filter_map(StdoutError::find_in);
    errors.any(|StdoutError(cause)| cause.kind() == io::ErrorKind::BrokenPipe)
}

pub(super) fn is_stdout_error(error: &(dyn Error + 'static)) -> bool {
    StdoutError::find_in(error).is_some()
}
