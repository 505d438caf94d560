//! The rows of the cache as Arrow columns, which pandas and polars can read too, and the lengths in
//! memory: 32 bytes per row and 16 per image.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{
    FixedSizeBinaryBuilder, Int64Builder, ListBuilder, StringBuilder, StructBuilder, UInt32Builder,
    UInt64Builder,
};
use arrow_array::{
    Array, ArrayRef, FixedSizeBinaryArray, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, UInt32Array, UInt64Array,
};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};

use crate::encode::Encoder;
use crate::encode::measure::Measured;
use crate::encode::truncate::{TokenCounts, TruncationRule};
use crate::media::image::ImageSize;
use crate::row::{Length, Rejection};
use crate::source::{ImageStamp, SampleFault};
use batch::{AreaLimits, SampleId};

/// Number of bytes of a row's hash.
pub(super) const HASH_BYTES: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowEntry {
    pub(super) line: u64,
    pub(super) offset: u64,
    pub(super) hash: [u8; HASH_BYTES],
    pub(super) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The row can be encoded, unless its pixels are broken.
    Measured {
        /// Its counts and image sizes.
        measured: Measured<'static>,
        /// The file of each image; `None` for a data URI.
        images: Vec<Option<ImageFile>>,
        /// The files of its videos, or of their frames.
        videos: Vec<ImageFile>,
    },
    Rejected {
        /// The key under which it is counted.
        reason: String,
        /// The message without file and line.
        message: String,
    },
}

/// The file of an image, a frame or a video.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageFile {
    /// The path in the row.
    pub(super) path: String,
    pub(super) stamp: ImageStamp,
    /// Checksum of its first and last bytes.
    pub(super) crc: u32,
}

fn image_fields() -> Fields {
    Fields::from(vec![
        Field::new("height", DataType::UInt32, false),
        Field::new("width", DataType::UInt32, false),
        Field::new("file", DataType::Utf8, true),
        Field::new("bytes", DataType::UInt64, false),
        Field::new("mtime_ns", DataType::Int64, false),
        Field::new("min_pixels", DataType::UInt32, false),
        Field::new("max_pixels", DataType::UInt32, false),
        Field::new("crc", DataType::UInt32, false),
    ])
}

pub(super) fn schema() -> Schema {
    let image = Field::new("image", DataType::Struct(image_fields()), false);
    Schema::new(vec![
        Field::new("line", DataType::UInt64, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("hash", DataType::FixedSizeBinary(HASH_BYTES as i32), false),
        Field::new("length", DataType::UInt32, true),
        Field::new("visual_tokens", DataType::UInt32, true),
        Field::new("supervised_tokens", DataType::UInt32, true),
        Field::new("text_tokens", DataType::UInt32, false),
        Field::new("mark_tokens", DataType::UInt32, false),
        Field::new("text_before_media", DataType::UInt32, false),
        Field::new("first_target", DataType::UInt32, true),
        Field::new("last_target", DataType::UInt32, true),
        Field::new("images", DataType::List(Arc::new(image)), false),
        Field::new("video_patches", DataType::UInt32, false),
        Field::new("reject_reason", DataType::Utf8, true),
        Field::new("reject_message", DataType::Utf8, true),
    ])
}

/// The columns with the positions of the rows in the data file.
pub(super) const INDEX_COLUMNS: [usize; 2] = [0, 1];

/// A batch of rows, by columns.
#[derive(Debug, Clone)]
pub(super) struct RowBatch {
    pub(super) line: UInt64Array,
    pub(super) offset: UInt64Array,
    hash: FixedSizeBinaryArray,
    length: UInt32Array,
    visual_tokens: UInt32Array,
    supervised_tokens: UInt32Array,
    text_tokens: UInt32Array,
    mark_tokens: UInt32Array,
    text_before_media: UInt32Array,
    first_target: UInt32Array,
    last_target: UInt32Array,
    images: ListArray,
    video_patches: UInt32Array,
    height: UInt32Array,
    width: UInt32Array,
    file: StringArray,
    bytes: UInt64Array,
    mtime_ns: Int64Array,
    min_pixels: UInt32Array,
    max_pixels: UInt32Array,
    crc: UInt32Array,
    reject_reason: StringArray,
    reject_message: StringArray,
}

/// The column with this name; an Arrow error if it is missing or has another type.
pub(super) fn column<A: Array + Clone + 'static>(
    batch: &RecordBatch,
    name: &str,
) -> Result<A, ArrowError> {
    let column = batch.column_by_name(name);
    typed(column, name)
}

fn typed<A: Array + Clone + 'static>(
    column: Option<&ArrayRef>,
    name: &str,
) -> Result<A, ArrowError> {
    let found = column.and_then(|column| column.as_any().downcast_ref::<A>());
    found.cloned().ok_or_else(|| ArrowError::SchemaError(format!("column `{name}`")))
}

impl RowBatch {
    pub(super) fn from_batch(batch: &RecordBatch) -> Result<Self, ArrowError> {
        let images: ListArray = column(batch, "images")?;
        let structs = images.values().as_any().downcast_ref::<StructArray>();
        let structs =
            structs.ok_or_else(|| ArrowError::SchemaError("column `images`".to_owned()))?;
        Ok(Self {
            line: column(batch, "line")?,
            offset: column(batch, "offset")?,
            hash: column(batch, "hash")?,
            length: column(batch, "length")?,
            visual_tokens: column(batch, "visual_tokens")?,
            supervised_tokens: column(batch, "supervised_tokens")?,
            text_tokens: column(batch, "text_tokens")?,
            mark_tokens: column(batch, "mark_tokens")?,
            text_before_media: column(batch, "text_before_media")?,
            first_target: column(batch, "first_target")?,
            last_target: column(batch, "last_target")?,
            video_patches: column(batch, "video_patches")?,
            height: typed(structs.column_by_name("height"), "height")?,
            width: typed(structs.column_by_name("width"), "width")?,
            file: typed(structs.column_by_name("file"), "file")?,
            bytes: typed(structs.column_by_name("bytes"), "bytes")?,
            mtime_ns: typed(structs.column_by_name("mtime_ns"), "mtime_ns")?,
            min_pixels: typed(structs.column_by_name("min_pixels"), "min_pixels")?,
            max_pixels: typed(structs.column_by_name("max_pixels"), "max_pixels")?,
            crc: typed(structs.column_by_name("crc"), "crc")?,
            images,
            reject_reason: column(batch, "reject_reason")?,
            reject_message: column(batch, "reject_message")?,
        })
    }

    /// Builds a batch from entries; `lengths` computes those of measured rows.
    pub(super) fn from_entries(
        entries: &[RowEntry],
        lengths: impl Fn(&Measured) -> [usize; 2],
    ) -> Result<Self, ArrowError> {
        let [mut line, mut offset] = [(); 2].map(|()| UInt64Builder::with_capacity(entries.len()));
        let mut video_patches = UInt32Builder::with_capacity(entries.len());
        let mut hash = FixedSizeBinaryBuilder::new(HASH_BYTES as i32);
        let [
            mut length,
            mut visual,
            mut supervised,
            mut text,
            mut marks,
            mut before,
            mut first,
            mut last,
        ] = [(); 8].map(|()| UInt32Builder::with_capacity(entries.len()));
        let [mut reason, mut message] = [(); 2].map(|()| StringBuilder::new());
        let image = Field::new("image", DataType::Struct(image_fields()), false);
        let structs = StructBuilder::from_fields(image_fields(), entries.len());
        let mut images = ListBuilder::new(structs).with_field(image);
        for entry in entries {
            line.append_value(entry.line);
            offset.append_value(entry.offset);
            hash.append_value(entry.hash)?;
            let (text_of, row_lengths) = match &entry.outcome {
                Outcome::Measured { measured, images: files, videos } => {
                    for (size, file) in measured.sizes.iter().zip(files) {
                        append_image(images.values(), *size, file.as_ref());
                    }
                    for file in videos {
                        append_image(images.values(), ImageSize::default(), Some(file));
                    }
                    video_patches.append_value(measured.video_patches);
                    reason.append_null();
                    message.append_null();
                    (measured.text, Some(lengths(measured)))
                }
                Outcome::Rejected { reason: key, message: words } => {
                    reason.append_value(key);
                    message.append_value(words);
                    video_patches.append_value(0);
                    (TokenCounts::default(), None)
                }
            };
            images.append(true);
            length.append_option(row_lengths.map(|lengths| lengths[0] as u32));
            visual.append_option(row_lengths.map(|lengths| lengths[1] as u32));
            supervised.append_option(row_lengths.map(|_| text_of.num_targets as u32));
            text.append_value(text_of.text_tokens as u32);
            marks.append_value(text_of.media_tokens as u32);
            before.append_value(text_of.text_before_media as u32);
            first.append_option(text_of.ends.map(|ends| ends.0 as u32));
            last.append_option(text_of.ends.map(|ends| ends.1 as u32));
        }
        let columns: Vec<ArrayRef> = vec![
            Arc::new(line.finish()),
            Arc::new(offset.finish()),
            Arc::new(hash.finish()),
            Arc::new(length.finish()),
            Arc::new(visual.finish()),
            Arc::new(supervised.finish()),
            Arc::new(text.finish()),
            Arc::new(marks.finish()),
            Arc::new(before.finish()),
            Arc::new(first.finish()),
            Arc::new(last.finish()),
            Arc::new(images.finish()),
            Arc::new(video_patches.finish()),
            Arc::new(reason.finish()),
            Arc::new(message.finish()),
        ];
        Self::from_batch(&RecordBatch::try_new(Arc::new(schema()), columns)?)
    }

    pub(super) fn to_batch(&self) -> Result<RecordBatch, ArrowError> {
        let columns: [&dyn Array; 15] = [
            &self.line,
            &self.offset,
            &self.hash,
            &self.length,
            &self.visual_tokens,
            &self.supervised_tokens,
            &self.text_tokens,
            &self.mark_tokens,
            &self.text_before_media,
            &self.first_target,
            &self.last_target,
            &self.images,
            &self.video_patches,
            &self.reject_reason,
            &self.reject_message,
        ];
        let columns = columns.map(|column| arrow_array::make_array(column.to_data()));
        RecordBatch::try_new(Arc::new(schema()), columns.into())
    }

    pub(super) fn with_lengths(self, lengths: impl Fn(&Measured) -> [usize; 2]) -> Self {
        let found: Vec<_> = (0..self.len())
            .map(|row| self.measured(row).ok().map(|measured| lengths(&measured)))
            .collect();
        let [length, visual_tokens] = [0, 1].map(|part| {
            found.iter().map(|lengths| lengths.map(|lengths| lengths[part] as u32)).collect()
        });
        Self { length, visual_tokens, ..self }
    }

    pub(super) fn len(&self) -> usize {
        self.line.len()
    }

    pub(super) fn hash(&self, row: usize) -> [u8; HASH_BYTES] {
        self.hash.value(row).try_into().expect("the column has this width")
    }

    /// Reason and message of a row's rejection.
    pub(super) fn rejected(&self, row: usize) -> Option<(&str, &str)> {
        let is_rejected = self.reject_reason.is_valid(row);
        is_rejected.then(|| (self.reject_reason.value(row), self.reject_message.value(row)))
    }

    /// The measurement of a row, or reason and message of its rejection.
    pub(super) fn measured(&self, row: usize) -> Result<Measured<'static>, (&str, &str)> {
        if let Some(rejected) = self.rejected(row) {
            return Err(rejected);
        }
        let count = |column: &UInt32Array| column.value(row) as usize;
        let is_known = self.first_target.is_valid(row) && self.last_target.is_valid(row);
        let text = TokenCounts {
            text_tokens: count(&self.text_tokens),
            media_tokens: count(&self.mark_tokens),
            text_before_media: count(&self.text_before_media),
            num_targets: count(&self.supervised_tokens),
            ends: is_known.then(|| (count(&self.first_target), count(&self.last_target))),
        };
        let sizes = self.images(row).map(|at| self.size(at)).filter(|size| size.pixels != [0, 0]);
        Ok(Measured { text, sizes: sizes.collect(), video_patches: self.video_patches.value(row) })
    }

    /// The files of a row's media: path, stamp and checksum.
    pub(super) fn files(&self, row: usize) -> impl Iterator<Item = (&str, ImageStamp, u32)> {
        self.images(row).filter_map(|at| self.image_file(at))
    }

    fn size(&self, at: usize) -> ImageSize {
        // 0 in the file: no limit
        let limit = |column: &UInt32Array| NonZeroU32::new(column.value(at));
        let [min_pixels, max_pixels] = [&self.min_pixels, &self.max_pixels].map(limit);
        let limits = AreaLimits { min_pixels, max_pixels };
        ImageSize { pixels: [self.height.value(at), self.width.value(at)], limits }
    }

    fn image_file(&self, at: usize) -> Option<(&str, ImageStamp, u32)> {
        let stamp = ImageStamp { bytes: self.bytes.value(at), mtime_ns: self.mtime_ns.value(at) };
        self.file.is_valid(at).then(|| (self.file.value(at), stamp, self.crc.value(at)))
    }

    pub(super) fn entry(&self, row: usize) -> RowEntry {
        let outcome = match self.measured(row) {
            Err((reason, message)) => {
                Outcome::Rejected { reason: reason.to_owned(), message: message.to_owned() }
            }
            Ok(measured) => {
                let file = |at| {
                    let (path, stamp, crc) = self.image_file(at)?;
                    Some(ImageFile { path: path.to_owned(), stamp, crc })
                };
                let first_video = self.images(row).start + measured.sizes.len();
                Outcome::Measured {
                    images: (self.images(row).start..first_video).map(file).collect(),
                    videos: (first_video..self.images(row).end).filter_map(file).collect(),
                    measured,
                }
            }
        };
        let (line, offset) = (self.line.value(row), self.offset.value(row));
        RowEntry { line, offset, hash: self.hash(row), outcome }
    }

    fn images(&self, row: usize) -> std::ops::Range<usize> {
        let offsets = self.images.value_offsets();
        offsets[row] as usize..offsets[row + 1] as usize
    }
}

fn append_image(images: &mut StructBuilder, size: ImageSize, file: Option<&ImageFile>) {
    const FIELDS: &str = "the builder has the fields of `image_fields`";
    let stamp = file.map_or(ImageStamp { bytes: 0, mtime_ns: 0 }, |file| file.stamp);
    let ImageSize { pixels: [height, width], limits: AreaLimits { min_pixels, max_pixels } } = size;
    let [min_pixels, max_pixels] = [min_pixels, max_pixels].map(|at| at.map_or(0, NonZeroU32::get));
    let crc = file.map_or(0, |file| file.crc);
    for (field, value) in [(0, height), (1, width), (5, min_pixels), (6, max_pixels), (7, crc)] {
        images.field_builder::<UInt32Builder>(field).expect(FIELDS).append_value(value);
    }
    let path = file.map(|file| file.path.as_str());
    images.field_builder::<StringBuilder>(2).expect(FIELDS).append_option(path);
    images.field_builder::<UInt64Builder>(3).expect(FIELDS).append_value(stamp.bytes);
    images.field_builder::<Int64Builder>(4).expect(FIELDS).append_value(stamp.mtime_ns);
    images.append(true);
}

/// The lengths of all rows of one data file.
#[derive(Debug)]
pub struct LengthCache {
    path: PathBuf,
    counts: Vec<Counts>,                         // [rows]
    sizes: Vec<ImageSize>,                       // of all images, in the order of the rows
    rejected: BTreeMap<usize, (String, String)>, // reason and message without file and line
}

/// The [`TokenCounts`] of a row in 32 bits each.
#[derive(Debug, Clone, Copy)]
struct Counts {
    text_tokens: u32,
    mark_tokens: u32,
    text_before_media: u32,
    num_targets: u32,
    video_patches: u32,
    ends: [u32; 2], // `NONE` without a target
    sizes_end: u32,
}

const NONE: u32 = u32::MAX;

impl LengthCache {
    /// An empty table with capacity for `rows` rows.
    pub(super) fn with_capacity(path: PathBuf, rows: usize) -> Self {
        let (sizes, rejected) = (Vec::new(), BTreeMap::new());
        Self { path, counts: Vec::with_capacity(rows), sizes, rejected }
    }

    pub(super) fn push(&mut self, rows: &RowBatch) {
        for row in 0..rows.len() {
            let Measured { text, sizes, video_patches } = match rows.measured(row) {
                Ok(measured) => measured,
                Err((reason, message)) => {
                    let rejected = (reason.to_owned(), message.to_owned());
                    self.rejected.insert(self.counts.len(), rejected);
                    Measured::default()
                }
            };
            self.sizes.extend(sizes.iter());
            self.counts.push(Counts {
                text_tokens: text.text_tokens as u32,
                mark_tokens: text.media_tokens as u32,
                text_before_media: text.text_before_media as u32,
                num_targets: text.num_targets as u32,
                video_patches,
                ends: text.ends.map_or([NONE; 2], |(first, last)| [first as u32, last as u32]),
                sizes_end: self.sizes.len() as u32,
            });
        }
    }

    /// Path of the cache file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// The size of row `row < len()` under the limits of `encoder` and `cut`, or its rejection.
    /// `id` returns its file and line.
    pub fn length(
        &self,
        row: usize,
        encoder: &Encoder,
        cut: Option<TruncationRule>,
        id: impl FnOnce() -> SampleId,
    ) -> Result<Length, Rejection> {
        if let Some((reason, message)) = self.rejected.get(&row) {
            let id = id();
            return Err(Rejection::new(&id, reason, format!("{id}{message}")));
        }
        let length = encoder.length_under(&self.measured(row), cut);
        length.map_err(|cause| SampleFault::from(cause).at(&id()).into())
    }

    /// The counts of row `row < len()` before truncation; `None` if it is rejected.
    pub fn token_counts(&self, row: usize, encoder: &Encoder) -> Option<TokenCounts> {
        if self.rejected.contains_key(&row) {
            return None;
        }
        Some(encoder.token_counts(&self.measured(row)))
    }

    fn measured(&self, row: usize) -> Measured<'_> {
        let Counts { ends, sizes_end, video_patches, .. } = self.counts[row];
        let first = row.checked_sub(1).map_or(0, |before| self.counts[before].sizes_end as usize);
        let text = TokenCounts {
            text_tokens: self.counts[row].text_tokens as usize,
            media_tokens: self.counts[row].mark_tokens as usize,
            text_before_media: self.counts[row].text_before_media as usize,
            num_targets: self.counts[row].num_targets as usize,
            ends: (ends != [NONE; 2]).then(|| (ends[0] as usize, ends[1] as usize)),
        };
        let sizes = self.sizes[first..sizes_end as usize].into();
        Measured { text, sizes, video_patches }
    }
}
