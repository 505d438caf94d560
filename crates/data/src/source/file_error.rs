//! Reasons why a path of the config cannot be read as rows.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why a data file cannot be read as rows.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The content of the file is not rows.
    #[error("`{}` is {found}, expected {expected}", .path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// What the file contains.
        found: String,
        /// The format that is possible here.
        expected: &'static str,
        /// The fix.
        hint: &'static str,
    },
    /// The file is damaged or incomplete.
    #[error("`{}`: {format}, but {problem}", .path.display())]
    Broken {
        /// Path of the file.
        path: PathBuf,
        /// What the file contains.
        format: &'static str,
        /// What is wrong, with the row if it is known.
        problem: String,
    },
    /// A column has a type that rows cannot have.
    #[error("`{}`: column `{column}` has the type `{found}`, which has no JSON value", .path.display())]
    Column {
        /// Path of the file.
        path: PathBuf,
        /// Name of the column.
        column: String,
        /// Its type.
        found: String,
    },
    /// The header line of a CSV file cannot be used.
    #[error("`{}`:1: {problem}", .path.display())]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Git LFS has not downloaded the file.
    #[error("`{}` is a Git LFS pointer to a file of {bytes} bytes", .path.display())]
    LfsPointer {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file that it points to.
        bytes: String,
    },
    /// The columns of a Parquet file are encrypted.
    #[error("`{}` is an encrypted Parquet file", .path.display())]
    Encrypted {
        /// Path of the file.
        path: PathBuf,
    },
    /// A folder or pattern has no data files.
    #[error("`{}` has no data files: {searched}", .path.display())]
    NoFiles {
        /// Path in the config.
        path: PathBuf,
        /// What was searched.
        searched: String,
    },
    /// A folder has files of several formats.
    #[error("the folder `{}` has data files of several formats: {found}", .path.display())]
    Mixed {
        /// Path in the config.
        path: PathBuf,
        /// The formats.
        found: String,
    },
    /// A folder has the files of several splits.
    #[error("`{}` has the splits {splits}", .path.display())]
    Splits {
        /// Path in the config.
        path: PathBuf,
        /// Names of the splits.
        splits: String,
    },
    /// A compressed file cannot be unpacked.
    #[error("cannot unpack `{}` into `{}`: {cause}", .path.display(), .folder.display())]
    Unpack {
        /// Path of the file.
        path: PathBuf,
        /// Folder of the unpacked file.
        folder: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
}

impl FileError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Format { hint, .. } => hint,
            Self::Broken { .. } => "copy or download the file again, or write it again",
            Self::Column { .. } => "remove the column, or convert it to text or numbers",
            Self::Header { .. } => {
                "the first line of a CSV or TSV file must name each column once, for example `instruction,output`"
            }
            Self::LfsPointer { .. } => "run `git lfs pull` in its repository",
            Self::Encrypted { .. } => "decrypt the file, or write it again without encryption",
            Self::NoFiles { .. } => {
                "write the path of a file, of a folder with data files, or a pattern such as `data/**/*.parquet`"
            }
            Self::Mixed { .. } => "write a pattern such as `FOLDER/*.jsonl` as `path`",
            Self::Splits { .. } => {
                "write the folder of one split as `path`, or a pattern such as `FOLDER/train-*`"
            }
            Self::Unpack { .. } => {
                "check free space and permissions, or set `data.cache_dir` to another folder"
            }
        }
    }

    /// The path in the config that selects no usable files, if this is the cause.
    pub fn config_path(&self) -> Option<&Path> {
        match self {
            Self::NoFiles { path, .. } | Self::Mixed { path, .. } | Self::Splits { path, .. } => {
                Some(path)
            }
            _ => None,
        }
    }

    /// Whether the cause is a folder that cannot be written, and not the data.
    pub fn is_write(&self) -> bool {
        matches!(self, Self::Unpack { .. })
    }

    pub(in crate::source) fn broken(
        path: &Path,
        format: &'static str,
        problem: &(impl ToString + ?Sized),
    ) -> Self {
        Self::Broken { path: path.to_owned(), format, problem: problem.to_string() }
    }
}
