//! Arrow IPC files and streams, memory-mapped. Rows of uncompressed batches are read from the map
//! without a copy of the batch.
#![expect(unsafe_code, reason = "memory maps")]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{Block, Message, MessageHeader, MetadataVersion, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, Schema};
use bytes::Bytes;
use memmap2::Mmap;

use super::columns;
use super::columns::{FileChunks, MAX_ROWS, guarded};
use crate::source::raw_row::RawRow;
use crate::source::source_error::SourceError;

const FORMAT: &str = "an Arrow IPC file";
/// Upper estimate of the memory of a batch whose data stay in the map.
const MAPPED_BYTES: usize = 16 << 10;
/// Maximum number of bytes of a batch after unpacking.
const MAX_UNPACKED_BYTES: u64 = 1 << 32;
/// Maximum number of bytes after unpacking per compressed byte: a block of Zstandard takes at least 4
/// bytes, and has at most 128 KiB after unpacking.
const MAX_EXPANSION: u64 = 1 << 15;
/// Marks a message with a length of 4 bytes after it.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Length of the magic number at the end of a file, with the length of the footer before it.
const TRAILER: usize = 10;

/// An open file or stream.
#[derive(Debug)]
pub(super) struct ArrowRows {
    map: Buffer,
    decoder: FileDecoder,
    batches: Vec<ArrowBatch>,
    num_rows: usize,
    decoded: FileChunks,
}

#[derive(Debug)]
struct ArrowBatch {
    /// The first row.
    first: usize,
    block: Block,
    is_compressed: bool,
}

/// How the batches of a file are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// By a footer.
    File,
    /// By reading the header of each message.
    Stream,
}

impl ArrowRows {
    pub(super) fn open(path: &Path, file: &File, layout: Layout) -> Result<Self, SourceError> {
        // SAFETY: the map is read-only. Other programs must not change the file in place while it
        // is open, as docs/data-format.md states for memory-mapped files.
        let map = unsafe { Mmap::map(file) }
            .map_err(|cause| SourceError::Read { path: path.to_owned(), cause })?;
        let map = Buffer::from(Bytes::from_owner(map));
        let opened = guarded(str::to_owned, || match layout {
            Layout::File => Self::open_file(&map),
            Layout::Stream => Self::open_stream(&map),
        });
        let rows = opened.map_err(|problem| SourceError::broken(path, FORMAT, &problem))?;
        columns::check(path, &rows.0)?;
        Ok(rows.1)
    }

    fn open_file(map: &Buffer) -> Result<(Arc<Schema>, Self), String> {
        let truncated = "it does not end with a footer: the file is truncated";
        let (rest, trailer) = map.as_slice().split_last_chunk::<TRAILER>().ok_or(truncated)?;
        let length = read_footer_length(*trailer).map_err(|_| truncated)?;
        let footer = rest.len().checked_sub(length).map(|start| &rest[start..]).ok_or(truncated)?;
        let footer = root_as_footer(footer).map_err(|error| format!("its footer: {error}"))?;
        let schema = footer.schema().ok_or("its footer has no schema")?;
        let schema = Arc::new(try_fb_to_schema(schema).map_err(text)?);
        let mut this = Self::new(map.clone(), schema.clone(), footer.version());
        for block in footer.dictionaries().iter().flatten() {
            this.add_dictionary(block)?;
        }
        for block in footer.recordBatches().iter().flatten() {
            let part = slice(map, block)?;
            this.add(&message(&part)?, *block)?;
        }
        Ok((schema, this))
    }

    fn open_stream(map: &Buffer) -> Result<(Arc<Schema>, Self), String> {
        let truncated = || "it ends inside a message: the file is truncated".to_owned();
        let mut found: Option<(Arc<Schema>, Self)> = None;
        let (mut offset, mut is_ended) = (0, false);
        while let Some(head) = map.as_slice().get(offset..offset + 8) {
            let (prefix, length) = match head.split_at(4) {
                (mark, length) if mark == CONTINUATION => (8, length),
                (length, _) => (4, length),
            };
            let length = length.try_into().map_or(0, u32::from_le_bytes) as usize;
            if length == 0 {
                is_ended = true; // the end mark
                break;
            }
            if map.len() - offset < prefix + length {
                return Err(truncated());
            }
            let part = map.slice_with_length(offset, prefix + length);
            let message = message(&part)?;
            let body = usize::try_from(message.bodyLength()).map_err(|_| truncated())?;
            let block = Block::new(offset as i64, (prefix + length) as i32, body as i64);
            slice(map, &block).map_err(|_| truncated())?;
            match (message.header_type(), &mut found) {
                (MessageHeader::Schema, None) => {
                    let schema = message.header_as_schema().ok_or("its schema cannot be read")?;
                    let schema = Arc::new(try_fb_to_schema(schema).map_err(text)?);
                    found =
                        Some((schema.clone(), Self::new(map.clone(), schema, message.version())));
                }
                (MessageHeader::DictionaryBatch, Some((_, this))) if this.batches.is_empty() => {
                    this.add_dictionary(&block)?;
                }
                (MessageHeader::RecordBatch, Some((_, this))) => this.add(&message, block)?,
                (MessageHeader::DictionaryBatch, Some(_)) => {
                    return Err("a dictionary changes after its first rows: write it as an IPC file, or without dictionaries".to_owned());
                }
                (kind, _) => return Err(format!("it has an unexpected message ({kind:?})")),
            }
            offset += prefix + length + body;
        }
        if !is_ended && offset < map.len() {
            return Err(truncated());
        }
        if !is_ended {
            tracing::warn!(
                "an Arrow stream has no end mark: if its writer was stopped, rows are missing"
            );
        }
        found.ok_or_else(|| "it has no schema".to_owned())
    }

    fn new(map: Buffer, schema: Arc<Schema>, version: MetadataVersion) -> Self {
        let decoder = FileDecoder::new(schema, version);
        Self { map, decoder, batches: Vec::new(), num_rows: 0, decoded: FileChunks::new() }
    }

    /// Adds the batch of a message.
    fn add(&mut self, message: &Message<'_>, block: Block) -> Result<(), String> {
        let batch = message.header_as_record_batch().ok_or("a block is not a record batch")?;
        let rows =
            usize::try_from(batch.length()).map_err(|_| "a record batch has a negative length")?;
        // Otherwise each row that only the header declares would be decoded, and rejected alone.
        let column = batch.nodes().and_then(|nodes| nodes.iter().next());
        if column.is_some_and(|column| column.length() != batch.length()) {
            return Err(format!(
                "a record batch declares {rows} rows, its first column has another number"
            ));
        }
        if rows > 0 {
            let is_compressed = batch.compression().is_some();
            self.batches.push(ArrowBatch { first: self.num_rows, block, is_compressed });
            self.num_rows = self.num_rows.saturating_add(rows);
        }
        if self.num_rows > MAX_ROWS {
            return Err(format!("it declares {} rows, more than {MAX_ROWS}", self.num_rows));
        }
        Ok(())
    }

    fn add_dictionary(&mut self, block: &Block) -> Result<(), String> {
        let part = slice(&self.map, block)?;
        let message = message(&part)?;
        let dictionary = message.header_as_dictionary_batch();
        check_buffers(dictionary.and_then(|dictionary| dictionary.data()), block, &part)?;
        self.decoder.read_dictionary(block, &part).map_err(text)
    }

    pub(super) fn len(&self) -> usize {
        self.num_rows
    }

    /// Reads row `row < len()`.
    pub(super) fn read(&self, row: usize) -> Result<RawRow, String> {
        let number = self.batches.partition_point(|batch| batch.first <= row) - 1;
        let ArrowBatch { first, block, is_compressed } = &self.batches[number];
        let decode = || {
            let decoded = guarded(str::to_owned, || self.decode(block));
            decoded.map_err(|problem| format!("record batch {number}: {problem}"))
        };
        let memory = |batch: &RecordBatch| {
            if *is_compressed { batch.get_array_memory_size() } else { MAPPED_BYTES }
        };
        let batch = self.decoded.get(number, decode, memory)?;
        let at = row - first;
        if at >= batch.num_rows() {
            return Err(format!("record batch {number} has fewer rows than its header"));
        }
        guarded(str::to_owned, || Ok(columns::row(&batch, at)))
    }

    fn decode(&self, block: &Block) -> Result<RecordBatch, String> {
        let part = slice(&self.map, block)?;
        check_buffers(message(&part)?.header_as_record_batch(), block, &part)?;
        let batch = self.decoder.read_record_batch(block, &part).map_err(text)?;
        batch.ok_or_else(|| "it is empty".to_owned())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn text(error: ArrowError) -> String {
    error.to_string()
}

/// The bytes of a block.
fn slice(map: &Buffer, block: &Block) -> Result<Buffer, String> {
    let part = || {
        let start = usize::try_from(block.offset()).ok()?;
        let length = usize::try_from(block.metaDataLength()).ok()?;
        let length = length.checked_add(usize::try_from(block.bodyLength()).ok()?)?;
        let fits = length >= 8 && start.checked_add(length).is_some_and(|end| end <= map.len());
        fits.then(|| map.slice_with_length(start, length))
    };
    part().ok_or_else(|| "a block is outside of the file: the file is truncated".to_owned())
}

/// Refuses a batch whose buffers are outside of its block, or would not fit in memory.
fn check_buffers(
    batch: Option<arrow_ipc::RecordBatch<'_>>,
    block: &Block,
    part: &Buffer,
) -> Result<(), String> {
    let batch = batch.ok_or("a block has no batch")?;
    let body = usize::try_from(block.metaDataLength()).ok().and_then(|at| part.get(at..));
    let body = body.ok_or("a block is shorter than its header")?;
    let mut unpacked = 0_u64;
    for buffer in batch.buffers().iter().flatten() {
        let bytes = || {
            let start = usize::try_from(buffer.offset()).ok()?;
            body.get(start..start.checked_add(usize::try_from(buffer.length()).ok()?)?)
        };
        let bytes = bytes().ok_or("a buffer is outside of its batch")?;
        // the length of the data, or -1 for data that are not compressed
        if batch.compression().is_some()
            && let Some(length) = bytes.first_chunk()
        {
            let length = match i64::from_le_bytes(*length) {
                -1 => 0,
                length => u64::try_from(length).map_err(|_| "a buffer has a negative length")?,
            };
            if length > bytes.len() as u64 * MAX_EXPANSION {
                let bytes = bytes.len();
                return Err(format!(
                    "a compressed buffer of {bytes} bytes declares {length} bytes after unpacking"
                ));
            }
            unpacked = unpacked.saturating_add(length);
        }
    }
    if unpacked > MAX_UNPACKED_BYTES {
        return Err(format!("a batch has {unpacked} bytes, more than {MAX_UNPACKED_BYTES}"));
    }
    let mut nodes = batch.nodes().into_iter().flatten();
    if nodes.any(|node| node.length() < 0 || !(0..=node.length()).contains(&node.null_count())) {
        return Err("a column has a negative length, or more nulls than values".to_owned());
    }
    Ok(())
}

/// The header of the message at the beginning of `part`, which has at least 8 bytes.
fn message(part: &Buffer) -> Result<Message<'_>, String> {
    let bytes = part.as_slice();
    let bytes = bytes.strip_prefix(&CONTINUATION).unwrap_or(bytes);
    let bytes = bytes.get(4..).unwrap_or_default();
    root_as_message(bytes).map_err(|error| format!("the header of a message: {error}"))
}
