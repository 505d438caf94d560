//! Parquet files. A row is read with its *chunk*: neighbouring rows that are decoded together.
//!
//! A chunk has about [`CHUNK_BYTES`] of decoded data. If the file has a page index, chunks begin
//! where pages of the largest column begin, so that a page is not unpacked for two chunks.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ipc::writer::FileWriter;
use arrow_schema::ArrowError;
use bytes::Bytes;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection,
    RowSelector,
};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, Length};

use super::columns;
use super::columns::{FileChunks, MAX_DEPTH, MAX_ROWS, depth, guarded};
use crate::source::raw_row::RawRow;
use crate::source::source_error::SourceError;

/// Size of the decoded data of a chunk, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
const CHUNK_ROWS: u64 = 4096;
/// Maximum size of the decoded data of a row group without a page index, in bytes.
const SLOW_GROUP_BYTES: i64 = 32 << 20;
/// Maximum number of chunks of a row group; one of a whole file has far fewer.
const MAX_CHUNKS: u64 = 1 << 20;
const FORMAT: &str = "a Parquet file";

#[derive(Debug)]
pub(super) struct ParquetRows {
    path: PathBuf,
    input: Input,
    metadata: ArrowReaderMetadata,
    chunks: Vec<Chunk>,
    num_rows: usize,
    decoded: FileChunks,
}

/// Consecutive rows of a row group.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// The first row in the file.
    first: usize,
    group: usize,
    first_in_group: usize,
    rows: usize,
}

impl ParquetRows {
    pub(super) fn open(path: &Path, file: Arc<File>) -> Result<Self, SourceError> {
        let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
        let num_bytes = file.metadata().map_err(unreadable)?.len();
        let mut end = [0; 8];
        if num_bytes >= 8 {
            file.read_exact_at(&mut end, num_bytes - 8).map_err(unreadable)?;
        }
        if end.ends_with(b"PARE") {
            return Err(SourceError::Encrypted { path: path.to_owned() });
        }
        if num_bytes < 12 || !end.ends_with(b"PAR1") {
            let problem = "it does not end with a footer: the file is truncated";
            return Err(SourceError::broken(path, FORMAT, problem));
        }
        let broken = |problem: &str| SourceError::broken(path, FORMAT, problem);
        let length = u64::from(u32::from_le_bytes([end[0], end[1], end[2], end[3]]));
        let start = (num_bytes - 8).checked_sub(length);
        let start =
            start.ok_or_else(|| broken("its footer cannot be read: it is longer than the file"))?;
        let mut footer = vec![0; length as usize];
        file.read_exact_at(&mut footer, start).map_err(unreadable)?;
        if depth(&footer).is_some_and(|depth| depth > MAX_DEPTH) {
            let problem = format!("its schema has more than {MAX_DEPTH} levels");
            return Err(broken(&problem));
        }
        let input = Input { file, num_bytes };
        let options = ArrowReaderOptions::new()
            .with_skip_arrow_metadata(true)
            .with_offset_index_policy(PageIndexPolicy::Optional);
        let metadata = guarded(broken, || {
            ArrowReaderMetadata::load(&input, options).map_err(|error| {
                let problem = error.to_string();
                if problem.to_lowercase().contains("encrypt") {
                    return SourceError::Encrypted { path: path.to_owned() };
                }
                broken(&format!("its footer cannot be read: {problem}"))
            })
        })?;
        columns::check(path, metadata.schema())?;
        check_compression(path, metadata.metadata())?;
        let groups = metadata.metadata().row_groups();
        let rows = groups.iter().map(|group| group.num_rows().max(0) as u128).sum::<u128>();
        if rows > MAX_ROWS as u128 {
            return Err(broken(&format!("it declares {rows} rows, more than {MAX_ROWS}")));
        }
        let is_short = |group: &RowGroupMetaData| {
            group.columns().iter().any(|column| column.num_values() < group.num_rows())
        };
        if groups.iter().any(is_short) {
            return Err(broken("a row group declares more rows than a column has values"));
        }
        let chunks = guarded(broken, || Ok(chunks(metadata.metadata())))?;
        let num_rows = chunks.last().map_or(0, |last| last.first + last.rows);
        let path = path.to_owned();
        Ok(Self { path, input, metadata, chunks, num_rows, decoded: FileChunks::new() })
    }

    pub(super) fn len(&self) -> usize {
        self.num_rows
    }

    /// Reads row `row < len()`.
    pub(super) fn read(&self, row: usize) -> Result<RawRow, String> {
        let number = self.chunks.partition_point(|chunk| chunk.first <= row) - 1;
        let chunk = self.chunks[number];
        let decode = || {
            let read = || self.decode(chunk).map_err(|error| error.to_string());
            let decoded = guarded(str::to_owned, read);
            decoded.map_err(|problem| format!("row group {}: {problem}", chunk.group))
        };
        let batch = self.decoded.get(number, decode, RecordBatch::get_array_memory_size)?;
        guarded(str::to_owned, || Ok(columns::row(&batch, row - chunk.first)))
    }

    /// Whether a row needs much more time than its chunk: to find the chunk in a row group without
    /// a page index, all pages before it are read.
    pub(super) fn is_slow(&self) -> bool {
        let metadata = self.metadata.metadata();
        metadata.row_groups().iter().enumerate().any(|(number, group)| {
            let pages = metadata.page_index_for_row_group(number);
            group.total_byte_size() > SLOW_GROUP_BYTES
                && (0..group.num_columns()).any(|column| pages.page_locations(column).is_none())
        })
    }

    /// Writes all rows as an Arrow IPC file.
    pub(super) fn write_arrow(
        &self,
        file: &File,
        failed: &dyn Fn(io::Error) -> SourceError,
    ) -> Result<(), SourceError> {
        let broken = |error: ArrowError| match error {
            ArrowError::IoError(_, cause) => failed(cause),
            error => SourceError::broken(&self.path, FORMAT, &error),
        };
        let rows = self.chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(1);
        let (input, metadata) = (self.input.clone(), self.metadata.clone());
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(input, metadata);
        let damaged = |problem: &str| SourceError::broken(&self.path, FORMAT, problem);
        guarded(damaged, || {
            let reader = builder.with_batch_size(rows).build();
            let reader = reader.map_err(|error| broken(error.into()))?;
            let writer = BufWriter::with_capacity(1 << 20, file);
            let mut writer = FileWriter::try_new(writer, self.metadata.schema()).map_err(broken)?;
            for batch in reader {
                writer.write(&batch.map_err(broken)?).map_err(broken)?;
            }
            writer.finish().map_err(broken)?;
            writer.into_inner().map_err(broken)?.flush().map_err(failed)
        })
    }

    fn decode(&self, chunk: Chunk) -> Result<RecordBatch, ParquetError> {
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(
            self.input.clone(),
            self.metadata.clone(),
        );
        let selection = RowSelection::from(vec![
            RowSelector::skip(chunk.first_in_group),
            RowSelector::select(chunk.rows),
        ]);
        let mut reader = builder
            .with_row_groups(vec![chunk.group])
            .with_row_selection(selection)
            .with_batch_size(chunk.rows)
            .build()?;
        let batch = reader.next().transpose()?;
        let batch = batch.filter(|batch| batch.num_rows() == chunk.rows);
        batch.ok_or_else(|| {
            ParquetError::EOF("the row group has fewer rows than its header".to_owned())
        })
    }
}

/// Refuses compressions that need crates which this program does not have.
fn check_compression(path: &Path, metadata: &ParquetMetaData) -> Result<(), SourceError> {
    for column in metadata.row_groups().iter().flat_map(RowGroupMetaData::columns) {
        let name = match column.compression() {
            Compression::BROTLI(_) => "Brotli",
            Compression::LZO => "LZO",
            _ => continue,
        };
        return Err(SourceError::Format {
            path: path.to_owned(),
            found: format!(
                "a Parquet file whose column `{}` is compressed with {name}",
                column.column_path()
            ),
            expected: "Snappy, Zstd, Gzip, LZ4 or no compression",
            hint: "write the file again with `compression=\"zstd\"`",
        });
    }
    Ok(())
}

fn chunks(metadata: &ParquetMetaData) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut first = 0;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let rows = group.num_rows().max(0) as u64;
        let bytes_a_row = (group.total_byte_size().max(0) as u64).checked_div(rows).unwrap_or(0);
        let most = (CHUNK_BYTES / bytes_a_row.max(1)).clamp(1, CHUNK_ROWS);
        let most = most.max(rows / MAX_CHUNKS);
        let largest =
            (0..group.num_columns()).max_by_key(|at| group.column(*at).uncompressed_size());
        let pages = metadata.page_index_for_row_group(number);
        let pages = largest.and_then(|column| pages.page_locations(column));
        let pages = pages.map_or(&[][..], |pages| &pages[..]);
        let starts = pages.iter().map(|page| page.first_row_index.max(0) as u64);
        for range in split(rows, most, starts) {
            chunks.push(Chunk {
                first: first + range.start as usize,
                group: number,
                first_in_group: range.start as usize,
                rows: (range.end - range.start) as usize,
            });
        }
        first += rows as usize;
    }
    chunks
}

/// Splits the rows of a group into ranges of at most about `most` rows. A range ends at a start of
/// a page if there is one in the second half of the range.
fn split(rows: u64, most: u64, page_starts: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut page_starts = page_starts.peekable();
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < rows {
        let full = (start + most).min(rows);
        let mut end = full;
        while let Some(page) = page_starts.next_if(|page| *page <= full) {
            if page > start + most / 2 {
                end = page;
            }
        }
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Reads at offsets, so that threads do not share a position.
#[derive(Debug, Clone)]
struct Input {
    file: Arc<File>,
    num_bytes: u64,
}

struct FileReader {
    file: Arc<File>,
    offset: u64,
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num_read = self.file.read_at(buffer, self.offset)?;
        self.offset += num_read as u64;
        Ok(num_read)
    }
}

impl Length for Input {
    fn len(&self) -> u64 {
        self.num_bytes
    }
}

impl ChunkReader for Input {
    type T = BufReader<FileReader>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::new(FileReader { file: self.file.clone(), offset: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.num_bytes) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes at {start} are outside of the file"
            )));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_group_and_begin_at_pages_where_they_can() {
        let split = |rows, most, pages: &[u64]| split(rows, most, pages.iter().copied());
        assert_eq!(split(10, 4, &[]), [0..4, 4..8, 8..10]);
        assert_eq!(split(10, 4, &[0, 3, 6, 9]), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(split(10, 4, &[0, 2, 4, 6, 8]), [0..4, 4..8, 8..10]);
        assert_eq!(split(10, 4, &[0, 7]), [0..4, 4..7, 7..10]);
        assert_eq!(split(3, 1, &[0]), [0..1, 1..2, 2..3]);
        assert_eq!(split(0, 4, &[0]), []);
    }
}
