//! Errors of a corpus.

use std::io;
use std::path::PathBuf;

use crate::row::Rejection;

/// The reason why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The file cannot be read.
    #[error("cannot read `{}`: {cause}", .path.display())]
    Read {
        /// Path as written in the config.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// The file is not UTF-8.
    #[error("{}:{line}: the line is not UTF-8", .path.display())]
    Utf8 {
        /// Path as written in the config.
        path: PathBuf,
        /// Line number, starting at 1.
        line: u64,
    },
    /// The tokenised corpus cannot be written.
    #[error("cannot write the tokens of `{}` to `{}`: {cause}", .path.display(), .folder.display())]
    Write {
        /// Path as written in the config.
        path: PathBuf,
        /// Folder of the tokens.
        folder: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A separator is not a token.
    #[error("`corpus.{key}` of `{}` is `{token}`, expected a token of `tokenizer.json`", .path.display())]
    UnknownToken {
        /// Path as written in the config.
        path: PathBuf,
        /// `eos_token` or `bos_token`.
        key: &'static str,
        /// Value of the key.
        token: String,
    },
    /// The corpus is too short for a window.
    #[error("`{}` has {tokens} tokens, expected at least {fewest} for `length` {length}", .path.display())]
    TooShort {
        /// Path as written in the config.
        path: PathBuf,
        /// Number of tokens of the corpus.
        tokens: u32,
        /// Number of input tokens of a window.
        length: u32,
        /// Minimum number of tokens.
        fewest: u64,
    },
    /// The corpus has more tokens, lines or pieces than the index can count.
    #[error("`{}` has more than {} tokens, lines or samples", .path.display(), u32::MAX)]
    TooLarge {
        /// Path as written in the config.
        path: PathBuf,
    },
    /// A row cannot be used, and `data.on_error` is `stop`.
    #[error("{0}")]
    Rejected(Box<Rejection>),
    /// More rows were rejected than the config allows.
    #[error("`{}`: {rejected} of {rows} rows rejected, expected a share of at most {max_rejected}: {first}", .path.display())]
    TooManyRejected {
        /// Path as written in the config.
        path: PathBuf,
        /// Number of rejected rows.
        rejected: usize,
        /// Number of all rows.
        rows: u64,
        /// Maximum share of rejected rows, from 0 to 1.
        max_rejected: f64,
        /// The first rejection.
        first: Box<Rejection>,
    },
}

impl CorpusError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
        match self {
            Self::Read { .. } => {
                "paths in `data` must point to files, relative to the folder in which the command runs"
            }
            Self::Utf8 { .. } => "convert the file to UTF-8",
            Self::Write { .. } => "check the free space and the permissions of the folder",
            Self::UnknownToken { .. } => {
                "use a token of the model folder's tokenizer, or remove the key"
            }
            Self::TooShort { .. } => "lower `corpus.length`, or add text",
            Self::TooLarge { .. } => "split the file into several data sets",
            Self::Rejected(_) => "fix the row, or set `data.on_error: skip` to skip such rows",
            Self::TooManyRejected { .. } => "fix the rows, or raise `data.max_rejected`",
        }
        .to_owned()
    }
}
