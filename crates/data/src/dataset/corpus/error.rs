//! Errors of a corpus.

use std::io;
use std::path::PathBuf;

use crate::row::Rejection;

/// The reason why a corpus cannot be used.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum CorpusError {
    #[error("cannot read `{}`: {cause}", .path.display())]
    #[fault(
        hint = "paths in `data` must point to files, relative to the folder in which the command runs"
    )]
    Read {
        /// Path as written in the config.
        path: PathBuf,
        cause: io::Error,
    },
    #[error("{}:{line}: the line is not UTF-8", .path.display())]
    #[fault(hint = "convert the file to UTF-8")]
    Utf8 {
        /// Path as written in the config.
        path: PathBuf,
        line: u64,
    },
    #[error("cannot write the tokens of `{}` to `{}`: {cause}", .path.display(), .folder.display())]
    #[fault(exit = CannotWrite, hint = "check the free space and the permissions of the folder")]
    Write {
        /// Path as written in the config.
        path: PathBuf,
        folder: PathBuf,
        cause: io::Error,
    },
    #[error("`corpus.{key}` of `{}` is `{token}`, expected a token of `tokenizer.json`", .path.display())]
    #[fault(hint = "use a token of the model folder's tokenizer, or remove the key")]
    UnknownToken {
        /// Path as written in the config.
        path: PathBuf,
        key: &'static str,
        token: String,
    },
    #[error("`{}` has {tokens} tokens, expected at least {fewest} for `length` {length}", .path.display())]
    #[fault(hint = "lower `corpus.length`, or add text")]
    TooShort {
        /// Path as written in the config.
        path: PathBuf,
        tokens: u32,
        length: u32,
        fewest: u64,
    },
    #[error("`{}` has more than {} tokens, lines or samples", .path.display(), u32::MAX)]
    #[fault(hint = "split the file into several data sets")]
    TooLarge {
        /// Path as written in the config.
        path: PathBuf,
    },
    /// A row cannot be used, and `data.on_error` is `stop`.
    #[error("{0}")]
    #[fault(hint = "fix the row, or set `data.on_error: skip` to skip such rows")]
    Rejected(Box<Rejection>),
    #[error("`{}`: {rejected} of {rows} rows rejected, expected a share of at most {max_rejected}: {first}", .path.display())]
    #[fault(hint = "fix the rows, or raise `data.max_rejected`")]
    TooManyRejected {
        /// Path as written in the config.
        path: PathBuf,
        rejected: usize,
        rows: u64,
        max_rejected: f64,
        first: Box<Rejection>,
    },
}
