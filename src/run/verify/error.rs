//! Errors of a verification. A difference between layouts is not an error, but part of the report.

use super::super::RunError;
use crate::batch::UnpadError;
use crate::data::{CollateError, LoaderError, RowTrouble};
use crate::train::{StepError, TrainError};
use std::io;
use std::path::PathBuf;

/// The reason why rows cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Model or data cannot be loaded.
    #[error(transparent)]
    Run(Box<RunError>),
    /// The process or a disk failed while a row was read.
    #[error(transparent)]
    Row(#[from] RowTrouble),
    /// The stopped and resumed run failed.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The rows cannot be packed.
    #[error(transparent)]
    Loader(#[from] LoaderError),
    /// Samples do not form a batch.
    #[error(transparent)]
    Collate(#[from] CollateError),
    /// A batch cannot be unpadded.
    #[error(transparent)]
    Unpad(#[from] UnpadError),
    /// An op failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// No row can be used.
    #[error("none of the {rejected} rows of an epoch can be used{first}")]
    NoRows {
        /// Number of rejected rows.
        rejected: usize,
        /// The first rejection, after a colon.
        first: String,
    },
    /// No token of the rows is supervised.
    #[error("the {rows} rows have no supervised token")]
    NoTargets {
        /// Number of rows.
        rows: usize,
    },
    /// The temporary folder cannot be used.
    #[error("temporary folder `{}`: {problem}", .folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The error of the operating system.
        problem: io::Error,
    },
}

impl From<RunError> for VerifyError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<TrainError> for VerifyError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl VerifyError {
    /// Returns the fix that the error message suggests; `None` if the wrapped error has it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoRows { .. } => Some("repair the rows; the warnings above list them"),
            Self::NoTargets { .. } => Some(
                "choose more rows with `--rows`, or see which tokens are supervised with `inspect`",
            ),
            Self::Folder { .. } => Some("free space there, or set TMPDIR to another folder"),
            _ => None,
        }
    }
}
