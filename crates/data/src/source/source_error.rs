//! Reasons why a data set cannot be opened.

use std::io;
use std::path::{Path, PathBuf};

use super::dataset_info::DatasetInfoError;
use super::error::SampleError;
use super::file_error::FileError;
use super::rows::RowForm;
use crate::dataset::corpus::error::CorpusError;

/// The reason why a data file cannot be used.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum SourceError {
    #[error("cannot read `{}`: {cause}", .path.display())]
    #[fault(hint = path_hint(path))]
    Read {
        /// Path as written in the config.
        path: PathBuf,
        cause: io::Error,
    },
    #[error("`{}` has no rows", .path.display())]
    #[fault(hint = "add rows to the file, or remove it from `data`")]
    NoRows {
        /// Path as written in the config.
        path: PathBuf,
    },
    #[error("`{}`: none of the first {checked} rows has a known form: {first}", .path.display())]
    #[fault(from = first)]
    UnknownForm {
        /// Path as written in the config.
        path: PathBuf,
        checked: usize,
        first: Box<SampleError>,
    },
    #[error("`{}` is plain text, but its data set has no `corpus` section", .path.display())]
    #[fault(
        hint = "add a `corpus` section to the data set, for example `corpus: {{sampling: random, length: 512}}`"
    )]
    PlainText {
        /// Path as written in the config.
        path: PathBuf,
    },
    #[error(
        "`{}` has rows of the form `{form}`, but its data set has a `corpus` section", .path.display()
    )]
    #[fault(hint = "remove `corpus`, or write each row as `{{\"text\": ..}}`")]
    NoText {
        /// Path as written in the config.
        path: PathBuf,
        form: RowForm,
    },
    #[error("{problem}")]
    #[fault(hint = "docs/data-format.md lists the keys of an entry that are supported")]
    DatasetInfo {
        /// `FILE#NAME` in the config.
        entry: String,
        problem: Box<DatasetInfoError>,
    },
    #[error(transparent)]
    #[fault(from)]
    File(Box<FileError>),
    #[error(transparent)]
    #[fault(from)]
    Corpus(#[from] CorpusError),
}

impl From<FileError> for SourceError {
    fn from(error: FileError) -> Self {
        Self::File(Box::new(error))
    }
}

fn path_hint(path: &Path) -> &'static str {
    if path.to_string_lossy().contains(":/") {
        "data sets are read from files: download it, or write `hf://datasets/OWNER/NAME/FILE` for a data set of the Hugging Face Hub"
    } else {
        "paths in `data` must point to files or folders, relative to the folder in which the command runs"
    }
}
