//! The file formats of rows. A [`DataFile`] is one file, in which any row is read by its number.

mod arrow;
mod columns;
mod csv;
mod json;
pub(crate) mod listing;
mod parquet;
mod sniff;
mod tar;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use arrow::{ArrowRows, Layout};
use csv::CsvHeader;
use json::Hashing;
pub(crate) use json::RowIndex;
use parquet::ParquetRows;
pub(crate) use sniff::{BOM, without_compression};
use sniff::{Format, HEAD_BYTES, Packed};

use super::raw_row::{MAX_ROW_BYTES, RawRow};
use super::sample_error::SampleFault;
use super::source_error::SourceError;
use super::stamp::Stamp;

/// Maximum number of bytes that are read at once for rows that follow each other.
const BLOCK_BYTES: usize = 64 << 10;

/// The content of a row, before it is parsed.
#[derive(Debug)]
pub(crate) enum RowContent {
    /// The text of a JSON object.
    Json(Vec<u8>),
    /// The cells of a table, or the files of a tar archive.
    Row(RawRow),
    /// Its number of bytes, above [`MAX_ROW_BYTES`]. It was not read.
    TooLarge(u64),
}

impl RowContent {
    /// SHA-256 of the content.
    pub(crate) fn hash(&self) -> [u8; 32] {
        match self {
            Self::Json(bytes) => Sha256::digest(bytes).into(),
            Self::TooLarge(bytes) => Sha256::digest(bytes.to_le_bytes()).into(), // it is rejected
            Self::Row(RawRow { object, blobs }) => {
                let mut hasher = Sha256::new();
                hasher.update(serde_json::to_vec(object).unwrap_or_default());
                for blob in blobs {
                    hasher.update((blob.len() as u64).to_le_bytes());
                    hasher.update(blob);
                }
                hasher.finalize().into()
            }
        }
    }

    /// Size of the text of a JSON row, or of the binary values of another row.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::Json(bytes) => bytes.len(),
            Self::TooLarge(bytes) => *bytes as usize,
            Self::Row(row) => row.blobs.iter().map(|blob| blob.len()).sum(),
        }
    }

    /// The keys and values of the row.
    pub(crate) fn into_raw(self) -> Result<RawRow, SampleFault> {
        match self {
            Self::Json(bytes) => RawRow::from_json(&bytes),
            Self::TooLarge(bytes) => Err(SampleFault::TooLarge {
                what: "bytes",
                found: bytes as usize,
                most: MAX_ROW_BYTES,
            }),
            Self::Row(row) => Ok(row),
        }
    }
}

/// The index of a file from an earlier scan, and the metadata of the file then.
#[derive(Debug)]
pub(crate) struct KnownIndex {
    /// Path of the file, as in [`SampleId::file`].
    pub(crate) path: PathBuf,
    /// Metadata that proves that the file is unchanged.
    pub(crate) stamp: Stamp,
    pub(crate) index: RowIndex,
}

/// An open data file. Rows can be read in any order and from several threads.
#[derive(Debug)]
pub(crate) struct DataFile {
    path: Arc<Path>,
    file: Arc<File>,
    stamp: Option<Stamp>,
    opened: Option<Stamp>, // metadata when the file was indexed, settled or not
    index: RowIndex,       // without rows if the format has an index of its own
    rows: FileRows,
}

#[derive(Debug)]
enum FileRows {
    /// Between the offsets of the index, from this file.
    Indexed(Arc<File>, Syntax),
    Parquet(ParquetRows),
    Arrow(ArrowRows),
}

/// The bytes of an indexed row.
#[derive(Debug)]
enum Syntax {
    Line,
    Element,
    Record(CsvHeader),
    Members,
}

impl DataFile {
    /// Opens the file at `path`, and scans it unless the index in `known` is of the unchanged file.
    /// A compressed file is unpacked into the folder `cache`, or into a temporary file.
    pub(crate) fn open(
        path: &Path,
        known: Option<&KnownIndex>,
        cache: Option<&Path>,
    ) -> Result<Self, SourceError> {
        let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
        let file = Arc::new(files::open(path).map_err(unreadable)?);
        let (read_at, before) = (SystemTime::now(), Stamp::of(&file).map_err(unreadable)?);
        let is_settled = before.is_settled(read_at);
        let mut head = head(&file).map_err(unreadable)?;
        let mut content = file.clone();
        let mut name = Cow::from(path);
        let packed = Packed { path, stamp: &before, is_settled, cache };
        if let Some(compression) = sniff::compression(&head) {
            content = Arc::new(packed.unpack(&file, compression)?);
            head = self::head(&content).map_err(unreadable)?;
            name = without_compression(path);
        }
        let format = sniff::format(path, &name, &head)?;
        let known = known.filter(|known| known.stamp == before);
        let (index, rows) = open_rows(packed, content, format, &head, known)?;
        let unchanged = Stamp::of(&file).map_err(unreadable)? == before;
        let stamp = Some(before.clone()).filter(|_| unchanged && is_settled);
        let (path, opened) = (path.into(), Some(before));
        Ok(Self { path, file, stamp, opened, index, rows })
    }

    pub(crate) fn len(&self) -> usize {
        match &self.rows {
            FileRows::Indexed(..) => self.index.len(),
            FileRows::Parquet(rows) => rows.len(),
            FileRows::Arrow(rows) => rows.len(),
        }
    }

    /// Path as passed to [`Self::open`].
    pub(crate) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// The line of a row, or its number if the file has no lines; from 1.
    pub(crate) fn line(&self, row: usize) -> u64 {
        match self.rows {
            FileRows::Indexed(..) => self.index.line(row),
            FileRows::Parquet(_) | FileRows::Arrow(_) => row as u64 + 1,
        }
    }

    /// Byte offset of a row in the unpacked file, or its number if the format has an index.
    pub(crate) fn offset(&self, row: usize) -> u64 {
        match self.rows {
            FileRows::Indexed(..) => self.index.start(row),
            FileRows::Parquet(_) | FileRows::Arrow(_) => row as u64,
        }
    }

    /// Number of bytes of the unpacked file.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.index.num_bytes()
    }

    /// Number of bytes before a row; an estimate if the format has an index of its own.
    pub(crate) fn bytes_before(&self, row: usize) -> u64 {
        match self.rows {
            FileRows::Indexed(..) => self.index.start(row),
            _ => (self.num_bytes() as u128 * row as u128 / self.len().max(1) as u128) as u64,
        }
    }

    /// SHA-256 of the unpacked file.
    pub(crate) fn sha256(&self) -> [u8; 32] {
        self.index.sha256()
    }

    /// Metadata of the file when it was scanned; `None` if it cannot prove that the file is
    /// unchanged.
    pub(crate) fn stamp(&self) -> Option<&Stamp> {
        self.stamp.as_ref()
    }

    /// Returns whether the open file was written to since it was opened. A new file at the same
    /// path does not count.
    pub(crate) fn has_changed(&self) -> bool {
        let now = Stamp::of(&self.file).ok();
        !now.zip(self.opened.as_ref())
            .is_some_and(|(now, opened)| now.has_same_size_and_mtime(opened))
    }

    pub(crate) fn content(&self, row: usize) -> io::Result<RowContent> {
        let (file, syntax) = match &self.rows {
            FileRows::Indexed(file, syntax) => (file, syntax),
            FileRows::Parquet(rows) => return content(rows.read(row)),
            FileRows::Arrow(rows) => return content(rows.read(row)),
        };
        let (start, end) = (self.index.start(row), self.index.end(row));
        if end - start > MAX_ROW_BYTES as u64 {
            return Ok(RowContent::TooLarge(end - start));
        }
        let mut bytes = vec![0; (end - start) as usize];
        file.read_exact_at(&mut bytes, start)?;
        syntax.content(bytes)
    }

    /// [`Self::content`] of rows that follow each other. Short rows are read with one call of the
    /// operating system, others when the iterator comes to them.
    pub(crate) fn contents(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = io::Result<RowContent>> {
        let block = self.block(&rows);
        let alone = block.is_none().then(|| rows.map(move |row| self.content(row)));
        block.into_iter().flatten().chain(alone.into_iter().flatten())
    }

    /// The contents of rows that are between the offsets of the index and together short. `None` for
    /// others, and if they cannot be read: read alone, each row has its own error.
    fn block(&self, rows: &Range<usize>) -> Option<Vec<io::Result<RowContent>>> {
        let FileRows::Indexed(file, syntax) = &self.rows else { return None };
        let (first, last) =
            (rows.start, rows.end.checked_sub(1).filter(|last| rows.contains(last))?);
        let start = self.index.start(first);
        let num_bytes = usize::try_from(self.index.end(last) - start).ok()?;
        let mut bytes = vec![0; Some(num_bytes).filter(|bytes| *bytes <= BLOCK_BYTES)?];
        file.read_exact_at(&mut bytes, start).ok()?;
        let row_bytes = |row| {
            let (from, to) = (self.index.start(row) - start, self.index.end(row) - start);
            bytes[from as usize..to as usize].to_vec()
        };
        Some(rows.clone().map(|row| syntax.content(row_bytes(row))).collect())
    }
}

impl Syntax {
    /// The content of a row, of the bytes between its offsets.
    fn content(&self, mut bytes: Vec<u8>) -> io::Result<RowContent> {
        match self {
            Self::Line => bytes.truncate(bytes.trim_ascii_end().len()),
            Self::Element => bytes.truncate(json::element(&bytes).len()),
            Self::Record(header) => return content(header.row(&bytes)),
            Self::Members => return content(tar::row(&bytes)),
        }
        Ok(RowContent::Json(bytes))
    }
}

fn content(row: Result<RawRow, String>) -> io::Result<RowContent> {
    row.map(RowContent::Row).map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem))
}

/// The first bytes of a file.
fn head(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; HEAD_BYTES];
    let mut length = 0;
    while length < head.len() {
        match file.read_at(&mut head[length..], length as u64)? {
            0 => break,
            num_read => length += num_read,
        }
    }
    head.truncate(length);
    Ok(head)
}

/// Opens the rows of the unpacked `file`. Without an index, the file is read once to its end.
fn open_rows(
    packed: Packed<'_>,
    file: Arc<File>,
    format: Format,
    head: &[u8],
    known: Option<&KnownIndex>,
) -> Result<(RowIndex, FileRows), SourceError> {
    let path = packed.path;
    let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
    (&*file).rewind().map_err(unreadable)?; // it may have been unpacked through this handle
    let known = known.map(|known| known.index.clone());
    let hash_all = || {
        let (num_bytes, sha256) = Hashing::new(&*file).finish()?;
        Ok(RowIndex::default().finish(num_bytes, sha256))
    };
    let without_rows =
        |known: RowIndex| Ok(RowIndex::default().finish(known.num_bytes(), known.sha256()));
    let buffered = || BufReader::with_capacity(1 << 20, &*file);
    let (index, syntax) = match format {
        Format::Lines => (lines(known, buffered()).map_err(unreadable)?, Syntax::Line),
        Format::Array => array(path, head, known, &file)?,
        Format::Csv(delimiter) => {
            let header = CsvHeader::read(path, delimiter, head_or_all(head, &file))?;
            (&*file).rewind().map_err(unreadable)?;
            let index = known.map_or_else(|| header.scan(&*file), Ok).map_err(unreadable)?;
            (index, Syntax::Record(header))
        }
        Format::Tar => (known.map_or_else(|| tar::scan(path, buffered()), Ok)?, Syntax::Members),
        Format::Parquet => {
            let index = known.map_or_else(hash_all, without_rows).map_err(unreadable)?;
            let rows = ParquetRows::open(path, file)?;
            if !rows.is_slow() || packed.cache.is_none() {
                return Ok((index, FileRows::Parquet(rows)));
            }
            let why = "writing a Parquet file with large row groups and no page index as Arrow";
            let file =
                packed.store(why, ".arrow", |file, failed| rows.write_arrow(file, failed))?;
            return Ok((index, FileRows::Arrow(ArrowRows::open(path, &file, Layout::File)?)));
        }
        Format::ArrowFile | Format::ArrowStream => {
            let layout = if format == Format::ArrowFile { Layout::File } else { Layout::Stream };
            let rows = ArrowRows::open(path, &file, layout)?;
            let index = known.map_or_else(hash_all, without_rows).map_err(unreadable)?;
            return Ok((index, FileRows::Arrow(rows)));
        }
    };
    Ok((index, FileRows::Indexed(file, syntax)))
}

fn lines(known: Option<RowIndex>, reader: impl io::BufRead) -> io::Result<RowIndex> {
    known.map_or_else(|| json::scan_lines(reader), Ok)
}

/// The head if it has the whole first line, otherwise the whole file.
fn head_or_all<'a>(head: &'a [u8], file: &'a File) -> Box<dyn Read + 'a> {
    let has_line = head.contains(&b'\n') && !head.contains(&b'"');
    if has_line { Box::new(head) } else { Box::new(file) }
}

/// The index of a file that begins with `[`: an array, or lines of which the first is an array.
fn array(
    path: &Path,
    head: &[u8],
    known: Option<RowIndex>,
    mut file: &File,
) -> Result<(RowIndex, Syntax), SourceError> {
    let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
    if let Some(index) = known {
        // the rows of an array begin after its bracket
        let bracket = head.iter().position(|byte| *byte == b'[').unwrap_or(0) as u64;
        let is_array = index.len() == 0 || index.start(0) > bracket;
        return Ok((index, if is_array { Syntax::Element } else { Syntax::Line }));
    }
    match json::scan_array(path, BufReader::with_capacity(1 << 20, file))? {
        json::Array::Rows(index) => Ok((index, Syntax::Element)),
        json::Array::Lines => {
            file.rewind().map_err(unreadable)?;
            let index = json::scan_lines(BufReader::with_capacity(1 << 20, file));
            Ok((index.map_err(unreadable)?, Syntax::Line))
        }
    }
}
