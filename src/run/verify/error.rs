//! Errors of a verification. A difference between layouts is not an error, but part of the report.

use super::super::RunError;
use crate::batch::UnpadError;
use crate::data::{CollateError, LoaderError, RowTrouble};
use crate::train::TrainError;
use std::io;
use std::path::PathBuf;

/// The reason why rows cannot be verified.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[expect(missing_docs, reason = "the messages say it")]
#[fault(exit = Data)]
pub enum VerifyError {
    #[error(transparent)]
    #[fault(from)]
    Run(Box<RunError>),
    #[error(transparent)]
    #[fault(from)]
    Row(#[from] RowTrouble),
    #[error(transparent)]
    #[fault(from)]
    Train(Box<TrainError>),
    #[error(transparent)]
    #[fault(from)]
    Loader(#[from] LoaderError),
    #[error(transparent)]
    #[fault(from)]
    Collate(#[from] CollateError),
    #[error(transparent)]
    #[fault(from)]
    Unpad(#[from] UnpadError),
    #[error(transparent)]
    #[fault(exit = None)]
    Candle(#[from] candle_core::Error),
    #[error("none of the {rejected} rows of an epoch can be used{first}")]
    #[fault(hint = "repair the rows; the warnings above list them")]
    NoRows {
        rejected: usize,
        /// The first rejection, after a colon.
        first: String,
    },
    #[error("the {rows} rows have no supervised token")]
    #[fault(
        hint = "choose more rows with `--rows`, or see which tokens are supervised with `inspect`"
    )]
    NoTargets { rows: usize },
    #[error("temporary folder `{}`: {problem}", .folder.display())]
    #[fault(exit = CannotWrite, hint = "free space there, or set TMPDIR to another folder")]
    Folder { folder: PathBuf, problem: io::Error },
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
