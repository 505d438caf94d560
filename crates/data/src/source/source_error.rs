//! Errors of the files of a data set.

use std::io;
use std::path::{Path, PathBuf};

use super::dataset_info::DatasetInfoError;
use super::rows::RowForm;
use super::sample_error::SampleError;
use crate::row::{Rejection, TransientRowError};

/// The reason why the files of a data set cannot be used. Paths are those of the config.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum SourceError {
    #[error("cannot read `{}`: {cause}", .path.display())]
    #[fault(hint = path_hint(path))]
    Read { path: PathBuf, cause: io::Error },
    #[error("`{}` has no rows", .path.display())]
    #[fault(hint = "add rows to the file, or remove it from `data`")]
    NoRows { path: PathBuf },
    #[error("`{}`: none of the first {checked} rows has a known form: {first}", .path.display())]
    #[fault(from = first)]
    UnknownForm { path: PathBuf, checked: usize, first: Box<SampleError> },
    #[error("`{}` is plain text, but its data set has no `corpus` section", .path.display())]
    #[fault(
        hint = "add a `corpus` section to the data set, for example `corpus: {{sampling: random, length: 512}}`"
    )]
    PlainText { path: PathBuf },
    #[error(
        "`{}` has rows of the form `{form}`, but its data set has a `corpus` section", .path.display()
    )]
    #[fault(hint = "remove `corpus`, or write each row as `{{\"text\": ..}}`")]
    NoText { path: PathBuf, form: RowForm },
    #[error("{problem}")]
    #[fault(hint = "docs/data-format.md lists the keys of an entry that are supported")]
    DatasetInfo {
        /// `FILE#NAME` in the config.
        entry: String,
        problem: Box<DatasetInfoError>,
    },
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
    #[error("{}:{line}: the line is not UTF-8", .path.display())]
    #[fault(hint = "convert the file to UTF-8")]
    NotUtf8 { path: PathBuf, line: u64 },
    #[error("cannot write the tokens of `{}` to `{}`: {cause}", .path.display(), .folder.display())]
    #[fault(exit = CannotWrite, hint = "check the free space and the permissions of the folder")]
    WriteTokens { path: PathBuf, folder: PathBuf, cause: io::Error },
    #[error("`corpus.{key}` of `{}` is `{token}`, expected a token of `tokenizer.json`", .path.display())]
    #[fault(hint = "use a token of the model folder's tokenizer, or remove the key")]
    UnknownToken { path: PathBuf, key: &'static str, token: String },
    #[error("`{}` has {tokens} tokens, expected at least {fewest} for `length` {length}", .path.display())]
    #[fault(hint = "lower `corpus.length`, or add text")]
    FewTokens { path: PathBuf, tokens: u32, length: u32, fewest: u64 },
    #[error("`{}` has more than {} tokens, lines or samples", .path.display(), u32::MAX)]
    #[fault(hint = "split the file into several data sets")]
    ManyTokens { path: PathBuf },
    #[error("cannot hold out {held_out} of the {rows} rows of `{}` for evaluation: {why}", .path.display())]
    #[fault(
        hint = "raise `data.eval_share` or `data.eval_rows`, add rows to the file, or list a file to evaluate on under `data.eval` instead"
    )]
    NotSplit { path: PathBuf, rows: usize, held_out: usize, why: &'static str },
    #[error("`data.eval_group` is `{group}`, but no row has {lacking}")]
    #[fault(hint = "remove `data.eval_group`, or add this to the rows")]
    NoGroups { group: &'static str, lacking: &'static str },
    /// The process or a disk failed while rows were read to be held out.
    #[error("{0}")]
    #[fault(from)]
    Transient(Box<TransientRowError>),
    /// A row cannot be used, and `data.on_error` is `stop`.
    #[error("{0}")]
    #[fault(hint = "fix the row, or set `data.on_error: skip` to skip such rows")]
    Rejected(Box<Rejection>),
    #[error("`{}`: {rejected} of {rows} rows rejected, expected a share of at most {max_rejected}: {first}", .path.display())]
    #[fault(hint = "fix the rows, or raise `data.max_rejected`")]
    TooManyRejected {
        path: PathBuf,
        rejected: usize,
        rows: u64,
        max_rejected: f64,
        first: Box<Rejection>,
    },
}

impl SourceError {
    pub(in crate::source) fn broken(
        path: &Path,
        format: &'static str,
        problem: &(impl ToString + ?Sized),
    ) -> Self {
        Self::Broken { path: path.to_owned(), format, problem: problem.to_string() }
    }
}

fn path_hint(path: &Path) -> &'static str {
    if path.to_string_lossy().contains(":/") {
        "data sets are read from files: download it, or write `hf://datasets/OWNER/NAME/FILE` for a data set of the Hugging Face Hub"
    } else {
        "paths in `data` must point to files or folders, relative to the folder in which the command runs"
    }
}
