//! Reasons why a path of the config cannot be read as rows.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why a data file cannot be read as rows.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum FileError {
    #[error("`{}` is {found}, expected {expected}", .path.display())]
    #[fault(hint = *hint)]
    Format { path: PathBuf, found: String, expected: &'static str, hint: &'static str },
    #[error("`{}`: {format}, but {problem}", .path.display())]
    #[fault(hint = "copy or download the file again, or write it again")]
    Broken {
        path: PathBuf,
        format: &'static str,
        /// What is wrong, with the row if it is known.
        problem: String,
    },
    #[error("`{}`: column `{column}` has the type `{found}`, which has no JSON value", .path.display())]
    #[fault(hint = "remove the column, or convert it to text or numbers")]
    Column { path: PathBuf, column: String, found: String },
    #[error("`{}`:1: {problem}", .path.display())]
    #[fault(
        hint = "the first line of a CSV or TSV file must name each column once, for example `instruction,output`"
    )]
    Header { path: PathBuf, problem: String },
    #[error("`{}` is a Git LFS pointer to a file of {bytes} bytes", .path.display())]
    #[fault(hint = "run `git lfs pull` in its repository")]
    LfsPointer { path: PathBuf, bytes: String },
    #[error("`{}` is an encrypted Parquet file", .path.display())]
    #[fault(hint = "decrypt the file, or write it again without encryption")]
    Encrypted { path: PathBuf },
    #[error("`{}` has no data files: {searched}", .path.display())]
    #[fault(
        hint = "write the path of a file, of a folder with data files, or a pattern such as `data/**/*.parquet`"
    )]
    NoFiles { path: PathBuf, searched: String },
    #[error("the folder `{}` has data files of several formats: {found}", .path.display())]
    #[fault(hint = "write a pattern such as `FOLDER/*.jsonl` as `path`")]
    Mixed { path: PathBuf, found: String },
    #[error("`{}` has the splits {splits}", .path.display())]
    #[fault(
        hint = "write the folder of one split as `path`, or a pattern such as `FOLDER/train-*`"
    )]
    Splits { path: PathBuf, splits: String },
    #[error("cannot unpack `{}` into `{}`: {cause}", .path.display(), .folder.display())]
    #[fault(
        exit = CannotWrite,
        hint = "check free space and permissions, or set `data.cache_dir` to another folder"
    )]
    Unpack { path: PathBuf, folder: PathBuf, cause: io::Error },
}

impl FileError {
    /// The path in the config that selects no usable files, if this is the cause.
    pub fn config_path(&self) -> Option<&Path> {
        match self {
            Self::NoFiles { path, .. } | Self::Mixed { path, .. } | Self::Splits { path, .. } => {
                Some(path)
            }
            _ => None,
        }
    }

    pub(in crate::source) fn broken(
        path: &Path,
        format: &'static str,
        problem: &(impl ToString + ?Sized),
    ) -> Self {
        Self::Broken { path: path.to_owned(), format, problem: problem.to_string() }
    }
}
