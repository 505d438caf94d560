//! Reads a JSONL file: one scan finds where the lines start, then rows are read one at a time.
//!
//! The index takes 8 bytes of memory per row. Blank lines are not rows, but they count in line
//! numbers. CRLF, a UTF-8 byte order mark and a missing last newline are accepted.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::error::SampleError;
use super::raw_row::RawRow;
use super::rows::{RowForm, RowParser, RowRules};
use super::stamp::Stamp;
use crate::batch::{Sample, SampleId};
use crate::data::dataset::corpus::error::CorpusError;

/// Maximum number of rows that are parsed to detect the form of a file.
const DETECTION_ROWS: usize = 100;
/// Maximum number of rows, and of their bytes, that are parsed to find keys that are not read.
const SURVEY_ROWS: usize = 1000;
const SURVEY_BYTES: usize = 16 << 20;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// An open JSONL file. Rows can be read in any order and from several threads.
#[derive(Debug)]
pub struct JsonlFile {
    file: File,
    path: Arc<Path>,
    parser: RowParser,
    index: LineIndex,
    stamp: Option<Stamp>,
    opened: Option<Box<Stamp>>, // metadata when the file was indexed, settled or not
    form: RowForm,
}

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
    /// The corpus cannot be used.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
}

impl SourceError {
    /// Returns the fix that the error message suggests; `None` if the message alone is enough.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some(
                "paths in `data` must point to files, relative to the folder in which the command runs"
                    .to_owned(),
            ),
            Self::NoRows { .. } => {
                Some("add rows to the file, or remove it from `data`".to_owned())
            }
            Self::UnknownForm { first, .. } => first.hint(),
            Self::PlainText { .. } => Some(
                "add a `corpus` section to the data set, for example `corpus: {sampling: random, length: 512}`"
                    .to_owned(),
            ),
            Self::NoText { .. } => {
                Some("remove `corpus`, or write each row as `{\"text\": ..}`".to_owned())
            }
            Self::Corpus(error) => Some(error.hint()),
        }
    }
}

impl JsonlFile {
    /// Opens the file at `path` and scans it once for line starts, fingerprint and row form.
    ///
    /// Relative image paths in the rows are resolved against `image_root`, or against the folder of
    /// the file if it is `None`.
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

    /// Wraps an open file whose index is known. `stamp` is the file's metadata when it was indexed;
    /// the index is valid as long as the file has this stamp. `None` if the metadata cannot prove
    /// that the file is unchanged.
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
            parser: RowParser::new(image_root, RowRules::default()),
            index,
            stamp,
            form: RowForm::Messages,
        };
        this.form = this.detect()?;
        Ok(this)
    }

    /// Sets the rules for the rows, and logs which keys of the first rows are not read.
    #[must_use]
    pub fn with_rules(mut self, rules: RowRules) -> Self {
        self.parser = RowParser::new(&self.parser.image_root, rules);
        let mut left = SURVEY_BYTES;
        let rows = (0..self.len().min(SURVEY_ROWS)).map_while(|row| {
            let (id, bytes) = (self.id(row), self.bytes(row).ok()?);
            left = left.checked_sub(bytes.len())?;
            Some((RawRow::from_json(&id, &bytes), id))
        });
        self.parser.survey(&self.path, rows.filter_map(|(row, id)| Some((id, row.ok()?))));
        self
    }

    /// The rules for the rows.
    pub fn rules(&self) -> RowRules {
        self.parser.rules
    }

    /// Returns the folder for relative image paths: the given one, or the folder of the file.
    pub(in crate::data) fn image_root_of<'a>(path: &'a Path, given: Option<&'a Path>) -> &'a Path {
        let root = given.or_else(|| path.parent()).unwrap_or(Path::new(""));
        if root == Path::new("") { Path::new(".") } else { root }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.index.starts.len()
    }

    /// Always `false`, because a file without rows cannot be opened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Path as passed to [`Self::open`].
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
        let id = self.id(row);
        self.parser.parse(&id, RawRow::from_json(&id, bytes)?)
    }

    /// Byte offset of row `row < len()`.
    pub(in crate::data) fn offset(&self, row: usize) -> u64 {
        self.index.starts[row]
    }

    /// Size of the file in bytes when it was scanned.
    pub(in crate::data) fn num_bytes(&self) -> u64 {
        self.index.num_bytes
    }

    /// Folder that relative image paths are resolved against.
    pub(in crate::data) fn image_root(&self) -> &Path {
        &self.parser.image_root
    }

    /// Metadata of the file when it was scanned; `None` if it cannot prove that the file is
    /// unchanged.
    pub(in crate::data) fn stamp(&self) -> Option<&Stamp> {
        self.stamp.as_ref()
    }

    /// Returns whether the open file was written to since it was opened. A new file at the same
    /// path does not count.
    pub(in crate::data) fn has_changed(&self) -> bool {
        let now = Stamp::of(&self.file).ok();
        !now.zip(self.opened.as_deref())
            .is_some_and(|(now, opened)| now.has_same_size_and_mtime(opened))
    }

    /// Reads the document in row `row < len()` of a corpus.
    pub fn read_text(&self, row: usize) -> Result<String, SampleError> {
        let id = self.id(row);
        RowParser::parse_text(&id, RawRow::from_json(&id, &self.bytes(row)?)?)
    }

    /// SHA-256 of the bytes of the file when it was scanned.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.index.sha256
    }

    /// Form of the first row whose form is known.
    pub fn form(&self) -> RowForm {
        self.form
    }

    /// Reads the bytes of row `row < len()` without the line end.
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
        let checked = self.len().min(DETECTION_ROWS);
        let mut first = None;
        for row in 0..checked {
            let id = self.id(row);
            let raw = self.bytes(row).and_then(|bytes| RawRow::from_json(&id, &bytes));
            match raw.and_then(|raw| RowForm::of(&id, &raw.object)) {
                Ok(form) => return Ok(form),
                Err(error) => first = first.or(Some(error)),
            }
        }
        let first = Box::new(first.expect("the file has at least one row"));
        Err(SourceError::UnknownForm { path: self.path.to_path_buf(), checked, first })
    }
}

/// Byte offsets and line numbers of the rows of a file.
#[derive(Debug)]
pub(in crate::data) struct LineIndex {
    starts: Vec<u64>,        // [rows], byte offsets
    gaps: Vec<(usize, u64)>, // (row, blank lines before it), ascending; only where they change
    num_bytes: u64,
    sha256: [u8; 32],
}

impl LineIndex {
    /// Builds the index from the byte offset and the line number of each row, in order.
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

    /// Returns the line number of a row, starting at 1.
    fn line(&self, row: usize) -> u64 {
        let after = self.gaps.partition_point(|gap| gap.0 <= row);
        let num_blank = if after == 0 { 0 } else { self.gaps[after - 1].1 };
        row as u64 + num_blank + 1
    }
}
