//! Why a corpus cannot be used.

use std::io;
use std::path::PathBuf;

use crate::data::row::Rejection;

/// Why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The system refused it.
    #[error("cannot read `{}`: {cause}", .path.display())]
    Read {
        /// As the config names it.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// Bytes that are no text.
    #[error("{}:{line}: the line is not UTF-8", .path.display())]
    Utf8 {
        /// As the config names it.
        path: PathBuf,
        /// From 1.
        line: u64,
    },
    /// The tokenised corpus could not be written.
    #[error("cannot write the tokens of `{}` to `{}`: {cause}", .path.display(), .folder.display())]
    Write {
        /// As the config names it.
        path: PathBuf,
        /// Where to.
        folder: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// A separator that is no token.
    #[error("`corpus.{key}` of `{}` is `{token}`, which `tokenizer.json` does not have", .path.display())]
    UnknownToken {
        /// As the config names it.
        path: PathBuf,
        /// `eos_token` or `bos_token`.
        key: &'static str,
        /// Its value.
        token: String,
    },
    /// A corpus that gives no window.
    #[error("`{}` has {tokens} tokens, windows of `length` {length} need at least {fewest}", .path.display())]
    TooShort {
        /// As the config names it.
        path: PathBuf,
        /// Its tokens.
        tokens: u32,
        /// Inputs of a window.
        length: u32,
        /// Tokens that would do.
        fewest: u64,
    },
    /// More tokens, lines or pieces than an index counts.
    #[error("`{}` has more tokens or lines than fit, at most {}", .path.display(), u32::MAX)]
    TooLarge {
        /// As the config names it.
        path: PathBuf,
    },
    /// A row that cannot be used, and the config says that this stops the run.
    #[error("{0}")]
    Rejected(Box<Rejection>),
    /// More rows cannot be used than the config allows.
    #[error("`{}`: {rejected} of {rows} rows rejected, at most a share of {max_rejected} may be: {first}", .path.display())]
    TooManyRejected {
        /// As the config names it.
        path: PathBuf,
        /// How many.
        rejected: usize,
        /// Of how many.
        rows: u64,
        /// The share that is allowed.
        max_rejected: f64,
        /// One of them.
        first: Box<Rejection>,
    },
}

impl CorpusError {
    /// What to do about it, where that is not plain from the message.
    pub fn hint(&self) -> String {
        match self {
            Self::Read { .. } => {
                "paths in `data` lead to files, from the folder in which the command runs"
            }
            Self::Utf8 { .. } => "convert the file to UTF-8",
            Self::Write { .. } => "check free space and permissions of the folder",
            Self::UnknownToken { .. } => {
                "name a token of the model folder's tokenizer, or leave the key out"
            }
            Self::TooShort { .. } => "lower `corpus.length`, or add text",
            Self::TooLarge { .. } => "split the file into several data sets",
            Self::Rejected(_) => "repair the row, or skip such rows with `data.on_error: skip`",
            Self::TooManyRejected { .. } => {
                "repair the rows, or allow more with `data.max_rejected`"
            }
        }
        .to_owned()
    }
}
