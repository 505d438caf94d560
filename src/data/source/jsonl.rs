//! One JSONL file: a scan finds where lines begin, rows are read from there one at a time.
//!
//! Memory: 8 bytes a row, however large the file is. Blank lines are no rows, but they count for
//! line numbers; CRLF, a UTF-8 byte order mark and a missing last newline are accepted.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::SampleError;
use super::formats::{RowForm, parse_row, parse_text};
use super::stamp::Stamp;
use crate::batch::{Sample, SampleId};
use crate::data::dataset::corpus::CorpusError;

/// Rows looked at to find the form of a file.
const DETECTION_ROWS: usize = 100;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// A data file, open for reading rows in any order and from many threads.
#[derive(Debug)]
pub struct JsonlFile {
    file: File,
    path: Arc<Path>,
    image_root: Arc<Path>,
    index: LineIndex,
    stamp: Option<Stamp>,
    opened: Option<Box<Stamp>>, // as it was when its rows were known, settled or not
    form: RowForm,
}

/// Why a data file cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The system refused it.
    #[error("cannot read `{}`: {cause}", .path.display())]
    Read {
        /// As the config names it.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// No rows.
    #[error("`{}` has no rows", .path.display())]
    NoRows {
        /// As the config names it.
        path: PathBuf,
    },
    /// No row at the beginning could be recognised.
    #[error("`{}`: none of the first {looked_at} rows has a known form: {first}", .path.display())]
    UnknownForm {
        /// As the config names it.
        path: PathBuf,
        /// How many rows were tried.
        looked_at: usize,
        /// What is wrong with the first of them.
        first: Box<SampleError>,
    },
    /// Plain text in a data set without `corpus`.
    #[error("`{}` is plain text, and its data set has no `corpus`", .path.display())]
    PlainText {
        /// As the config names it.
        path: PathBuf,
    },
    /// Chats in a data set with `corpus`.
    #[error("`{}` has rows of the form `{form}`, and its data set has `corpus`", .path.display())]
    NoText {
        /// As the config names it.
        path: PathBuf,
        /// What they are.
        form: RowForm,
    },
    /// A corpus that cannot be used.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
}

impl SourceError {
    /// What to do about it, where that is not plain from the message.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some(
                "paths in `data` lead to JSONL files, from the folder in which the command runs"
                    .to_owned(),
            ),
            Self::NoRows { .. } => Some("write rows to it, or take it out of `data`".to_owned()),
            Self::UnknownForm { first, .. } => first.hint(),
            Self::PlainText { .. } => Some(
                "say how samples are taken from it, for example `corpus: {sampling: random, length: 512}`"
                    .to_owned(),
            ),
            Self::NoText { .. } => {
                Some("remove `corpus`, or write each document as `{\"text\": ..}`".to_owned())
            }
            Self::Corpus(error) => Some(error.hint()),
        }
    }
}

impl JsonlFile {
    /// Scans `path` once: line starts, fingerprint, row form. Relative image paths in the rows are
    /// resolved against `image_root`, by default the folder of the file.
    pub fn open(path: &Path, image_root: Option<&Path>) -> Result<Self, SourceError> {
        let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
        let file = File::open(path).map_err(unreadable)?;
        let (read_at, before) = (SystemTime::now(), Stamp::of(&file).map_err(unreadable)?);
        let index =
            LineIndex::scan(BufReader::with_capacity(1 << 20, &file)).map_err(unreadable)?;
        let unchanged = Stamp::of(&file).map_err(unreadable)? == before;
        let stamp = Some(before).filter(|stamp| unchanged && stamp.is_settled(read_at));
        Self::with_index(file, path, image_root, index, stamp)
    }

    /// An open file whose index is known already. With a `stamp` the file is as it was when it was indexed
    /// for as long as it bears that.
    pub(in crate::data) fn with_index(
        file: File,
        path: &Path,
        image_root: Option<&Path>,
        index: LineIndex,
        stamp: Option<Stamp>,
    ) -> Result<Self, SourceError> {
        if index.starts.is_empty() {
            return Err(SourceError::NoRows { path: path.to_owned() });
        }
        let image_root = Self::image_root_of(path, image_root);
        let mut this = Self {
            opened: stamp.clone().or_else(|| Stamp::of(&file).ok()).map(Box::new),
            file,
            path: path.into(),
            image_root: image_root.into(),
            index,
            stamp,
            form: RowForm::Messages,
        };
        this.form = this.detect()?;
        Ok(this)
    }

    /// Folder that relative image paths start from: the given one, or that of the file.
    pub(in crate::data) fn image_root_of<'a>(path: &'a Path, given: Option<&'a Path>) -> &'a Path {
        let root = given.or_else(|| path.parent()).unwrap_or(Path::new(""));
        if root == Path::new("") { Path::new(".") } else { root }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.index.starts.len()
    }

    /// Never true: a file without rows is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// File and line of row `row < len()`.
    pub fn id(&self, row: usize) -> SampleId {
        SampleId { file: self.path.clone(), line: self.index.line(row) }
    }

    /// Reads and parses row `row < len()`.
    pub fn read(&self, row: usize) -> Result<Sample, SampleError> {
        self.parse(row, &self.bytes(row)?)
    }

    /// Parses `bytes` as row `row < len()`.
    pub(in crate::data) fn parse(&self, row: usize, bytes: &[u8]) -> Result<Sample, SampleError> {
        parse_row(&self.id(row), bytes, &self.image_root)
    }

    /// Where row `row < len()` begins, in bytes.
    pub(in crate::data) fn offset(&self, row: usize) -> u64 {
        self.index.starts[row]
    }

    /// Length of the file in bytes, as of the scan.
    pub(in crate::data) fn num_bytes(&self) -> u64 {
        self.index.num_bytes
    }

    /// Folder that relative image paths start from.
    pub(in crate::data) fn image_root(&self) -> &Path {
        &self.image_root
    }

    /// What tells that the file has not changed since the scan; `None` if nothing does.
    pub(in crate::data) fn stamp(&self) -> Option<&Stamp> {
        self.stamp.as_ref()
    }

    /// Whether the open file was written to since it was opened; another one by its name is another file.
    pub(in crate::data) fn has_changed(&self) -> bool {
        let now = Stamp::of(&self.file).ok();
        !now.zip(self.opened.as_deref()).is_some_and(|(now, opened)| now.has_the_bytes_of(opened))
    }

    /// The document in row `row < len()` of a corpus.
    pub fn read_text(&self, row: usize) -> Result<String, SampleError> {
        parse_text(&self.id(row), &self.bytes(row)?)
    }

    /// SHA-256 over the bytes of the file, as of the scan.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.index.sha256
    }

    /// The layout of the first row that has a known one.
    pub fn form(&self) -> RowForm {
        self.form
    }

    /// Row `row < len()` without the line's end.
    pub(in crate::data) fn bytes(&self, row: usize) -> Result<Vec<u8>, SampleError> {
        let start = self.index.starts[row];
        let end = self.index.starts.get(row + 1).copied().unwrap_or(self.index.num_bytes);
        let mut bytes = vec![0; (end - start) as usize];
        self.file
            .read_exact_at(&mut bytes, start)
            .map_err(|cause| SampleError::Read { id: self.id(row), cause })?;
        bytes.truncate(bytes.trim_ascii_end().len());
        Ok(bytes)
    }

    fn detect(&self) -> Result<RowForm, SourceError> {
        let looked_at = self.len().min(DETECTION_ROWS);
        let mut first = None;
        for row in 0..looked_at {
            let form = self.bytes(row).and_then(|bytes| RowForm::of_row(&self.id(row), &bytes));
            match form {
                Ok(form) => return Ok(form),
                Err(error) => first = first.or(Some(error)),
            }
        }
        let first = Box::new(first.expect("a file with rows has a first one"));
        Err(SourceError::UnknownForm { path: self.path.to_path_buf(), looked_at, first })
    }
}

/// Where the rows of a file begin.
#[derive(Debug)]
pub(in crate::data) struct LineIndex {
    starts: Vec<u64>,        // [rows], byte offsets
    gaps: Vec<(usize, u64)>, // (row, blank lines before it), ascending; only where it changes
    num_bytes: u64,
    sha256: [u8; 32],
}

impl LineIndex {
    /// From the first byte and the line of each row, in order.
    pub(in crate::data) fn of_rows(
        rows: impl Iterator<Item = (u64, u64)>,
        num_bytes: u64,
        sha256: [u8; 32],
    ) -> Self {
        let mut index = Self { starts: Vec::new(), gaps: Vec::new(), num_bytes, sha256 };
        for (start, line) in rows {
            let row = index.starts.len();
            if index.line(row) != line {
                index.gaps.push((row, line.saturating_sub(row as u64 + 1)));
            }
            index.starts.push(start);
        }
        index
    }

    fn scan(mut reader: impl BufRead) -> io::Result<Self> {
        let mut hasher = Sha256::new();
        let mut starts = Vec::new();
        let mut gaps: Vec<(usize, u64)> = Vec::new();
        let mut offset = 0; // of the next byte
        let mut line_start = 0;
        let mut has_text = false;
        let mut num_blank = 0;
        loop {
            let chunk = reader.fill_buf()?;
            if chunk.is_empty() {
                break;
            }
            hasher.update(chunk);
            let length = chunk.len();
            for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
                let mut text = piece.trim_ascii_start();
                if offset == 0 && text.starts_with(BOM) {
                    line_start = BOM.len() as u64;
                    text = text[BOM.len()..].trim_ascii_start();
                }
                if !text.is_empty() && !has_text {
                    has_text = true;
                    if gaps.last().map_or(0, |gap| gap.1) != num_blank {
                        gaps.push((starts.len(), num_blank));
                    }
                    starts.push(line_start);
                }
                offset += piece.len() as u64;
                if piece.ends_with(b"\n") {
                    num_blank += u64::from(!has_text);
                    has_text = false;
                    line_start = offset;
                }
            }
            reader.consume(length);
        }
        Ok(Self { starts, gaps, num_bytes: offset, sha256: hasher.finalize().into() })
    }

    /// Line of a row, starting at 1.
    fn line(&self, row: usize) -> u64 {
        let after = self.gaps.partition_point(|gap| gap.0 <= row);
        let num_blank = if after == 0 { 0 } else { self.gaps[after - 1].1 };
        row as u64 + num_blank + 1
    }
}
