//! Reasons why a data set cannot be opened.

use std::io;
use std::path::PathBuf;

use super::dataset_info::DatasetInfoError;
use super::error::SampleError;
use super::file_error::FileError;
use super::rows::RowForm;
use crate::dataset::corpus::error::CorpusError;

/// The reason why a data file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file cannot be read.
    #[error("cannot read `{}`: {cause}", .path.display())]
    Read {
        /// Path as written in the config.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// The file has no rows.
    #[error("`{}` has no rows", .path.display())]
    NoRows {
        /// Path as written in the config.
        path: PathBuf,
    },
    /// None of the first rows has a known form.
    #[error("`{}`: none of the first {checked} rows has a known form: {first}", .path.display())]
    UnknownForm {
        /// Path as written in the config.
        path: PathBuf,
        /// Number of rows that were parsed.
        checked: usize,
        /// Error of the first row.
        first: Box<SampleError>,
    },
    /// The file is plain text, but its data set has no `corpus` section.
    #[error("`{}` is plain text, but its data set has no `corpus` section", .path.display())]
    PlainText {
        /// Path as written in the config.
        path: PathBuf,
    },
    /// The file has chats, but its data set has a `corpus` section.
    #[error(
        "`{}` has rows of the form `{form}`, but its data set has a `corpus` section", .path.display()
    )]
    NoText {
        /// Path as written in the config.
        path: PathBuf,
        /// Form of the rows.
        form: RowForm,
    },
    /// The entry of `dataset_info.json` cannot be used.
    #[error("{problem}")]
    DatasetInfo {
        /// `FILE#NAME` in the config.
        entry: String,
        /// What is wrong with it.
        problem: Box<DatasetInfoError>,
    },
    /// A file cannot be read as rows.
    #[error(transparent)]
    File(Box<FileError>),
    /// The corpus cannot be used.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
}

impl From<FileError> for SourceError {
    fn from(error: FileError) -> Self {
        Self::File(Box::new(error))
    }
}

impl SourceError {
    /// Returns the fix that the error message suggests; `None` if the message alone is enough.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { path, .. } if path.to_string_lossy().contains(":/") => Some(
                "data sets are read from files: download it, or write `hf://datasets/OWNER/NAME/FILE` for a data set of the Hugging Face Hub"
                    .to_owned(),
            ),
            Self::Read { .. } => Some(
                "paths in `data` must point to files or folders, relative to the folder in which the command runs"
                    .to_owned(),
            ),
            Self::NoRows { .. } => {
                Some("add rows to the file, or remove it from `data`".to_owned())
            }
            Self::UnknownForm { first, .. } => first.hint(),
            Self::DatasetInfo { .. } => Some(
                "docs/data-format.md lists the keys of an entry that are supported".to_owned(),
            ),
            Self::PlainText { .. } => Some(
                "add a `corpus` section to the data set, for example `corpus: {sampling: random, length: 512}`"
                    .to_owned(),
            ),
            Self::NoText { .. } => {
                Some("remove `corpus`, or write each row as `{\"text\": ..}`".to_owned())
            }
            Self::File(error) => Some(error.hint().to_owned()),
            Self::Corpus(error) => Some(error.hint()),
        }
    }
}
