//! Measures rows, and finds out which need no measurement.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::file::CacheError;
use super::media::{Stamps, Walk, checksum};
use super::rows::{HASH_BYTES, ImageFile, Outcome, RowBatch, RowEntry};
use crate::encode::Encoder;
use crate::encode::measure::Measured;
use crate::media::image::ImageError;
use crate::media::video::VideoError;
use crate::row::Rejection;
use crate::source::files::RowContent;
use crate::source::{ImageStamp, RowFile, SampleError, SampleFault, TransientFailure, retry};
use batch::{MediaRef, MediaSource, Medium, Sample, VideoRef};

/// Number of rows whose images are checked by one thread.
const ROWS_A_WALK: usize = 512;

/// Rows by the hash of their bytes.
pub(super) struct Known {
    batches: Vec<RowBatch>,
    places: HashMap<[u8; HASH_BYTES], (u32, u32)>,
}

impl Known {
    /// Of two rows with the same bytes, the later one is used.
    pub(super) fn new(batches: Vec<RowBatch>) -> Self {
        let mut places = HashMap::with_capacity(batches.iter().map(RowBatch::len).sum());
        for (batch, rows) in (0..).zip(&batches) {
            places.extend((0..rows.len()).map(|row| (rows.hash(row), (batch, row as u32))));
        }
        Self { batches, places }
    }

    fn get(&self, hash: [u8; HASH_BYTES]) -> Option<(&RowBatch, usize)> {
        let (batch, row) = *self.places.get(&hash)?;
        Some((&self.batches[batch as usize], row as usize))
    }
}

/// A batch to be written.
pub(super) enum CacheBatch {
    /// A batch of the previous cache, with lengths under the current limits.
    Kept(Box<RowBatch>),
    New(Vec<RowEntry>),
}

pub(super) struct MeasuredBatch {
    pub(super) batch: CacheBatch,
    pub(super) measured: usize,
}

/// A batch of the previous cache whose images have been checked.
pub(super) enum Checked {
    /// Unchanged; with lengths under the current limits.
    Current(RowBatch),
    /// The listed rows must be measured again.
    Stale(RowBatch, Vec<usize>),
}

pub(super) struct Measurer<'a> {
    pub(super) file: &'a RowFile,
    pub(super) encoder: &'a Encoder,
    pub(super) stamps: Stamps<'a>,
    pub(super) same_limits: bool,
    pub(super) known: Known,
    /// Set when the process lacks open files or memory: no more rows are measured.
    pub(super) exhausted: OnceLock<CacheError>,
}

/// Number of tokens under the current limits, and of these the visual tokens: for users who read the
/// cache.
pub(super) fn lengths(encoder: &Encoder, measured: &Measured) -> [usize; 2] {
    [encoder.token_counts(measured).num_tokens(), encoder.visual_tokens(measured)]
}

impl<'a> Measurer<'a> {
    /// `known` has rows that need no measurement; `same_limits`: with lengths under the current
    /// limits.
    pub(super) fn new(
        file: &'a RowFile,
        encoder: &'a Encoder,
        known: Vec<RowBatch>,
        same_limits: bool,
    ) -> Self {
        Self {
            file,
            encoder,
            stamps: Stamps::new(file.image_root()),
            same_limits,
            known: Known::new(known),
            exhausted: OnceLock::new(),
        }
    }

    /// Whether `old` has these rows of the file. A damaged cache may lack a batch.
    pub(super) fn is_of(&self, old: &RowBatch, rows: &Range<usize>) -> bool {
        let (first, last) = (rows.start, rows.end - 1);
        let is_at = |at: usize, row: usize| {
            old.offset.value(at) == self.file.offset(row)
                && old.line.value(at) == self.file.id(row).line
        };
        old.len() == rows.len() && is_at(0, first) && is_at(last - first, last)
    }

    pub(super) fn check_images(&self, old: RowBatch) -> Checked {
        let parts = (0..old.len().div_ceil(ROWS_A_WALK)).into_par_iter();
        let stale = parts.map(|part| {
            let first = part * ROWS_A_WALK;
            let rows = first..(first + ROWS_A_WALK).min(old.len());
            let mut walk = self.stamps.walk();
            let is_stale = |row: &usize| !is_current(&mut walk, &old, *row);
            rows.filter(is_stale).collect()
        });
        let stale = stale.collect::<Vec<Vec<usize>>>().concat();
        if stale.is_empty() {
            Checked::Current(self.with_current_lengths(old))
        } else {
            Checked::Stale(old, stale)
        }
    }

    fn with_current_lengths(&self, rows: RowBatch) -> RowBatch {
        if self.same_limits { rows } else { rows.with_lengths(|row| lengths(self.encoder, row)) }
    }

    /// Measures the `stale` rows of a batch, which begins at row `first` of the file. `None` if the
    /// process is exhausted.
    pub(super) fn refresh(
        &self,
        first: usize,
        old: RowBatch,
        stale: &[usize],
    ) -> Option<MeasuredBatch> {
        let look_up = |row: &usize| Some((*row, self.look_up(first + row)?));
        let anew =
            stale.par_iter().map(look_up).collect::<Option<Vec<(usize, (RowEntry, bool))>>>()?;
        let measured = anew.iter().filter(|(_, (_, measured))| *measured).count();
        let anew = anew.into_iter().map(|(row, (entry, _))| (row, entry));
        let new: Vec<(usize, RowEntry)> =
            anew.filter(|(row, entry)| old.entry(*row) != *entry).collect();
        let batch = if new.is_empty() {
            CacheBatch::Kept(Box::new(self.with_current_lengths(old)))
        } else {
            let mut entries: Vec<RowEntry> = (0..old.len()).map(|row| old.entry(row)).collect();
            for (row, entry) in new {
                entries[row] = entry;
            }
            CacheBatch::New(entries)
        };
        Some(MeasuredBatch { batch, measured })
    }

    /// Rows that the previous cache may have in other positions. `None` if the process is exhausted.
    pub(super) fn look_up_rows(&self, rows: Range<usize>) -> Option<MeasuredBatch> {
        let found = rows.into_par_iter().map(|row| self.look_up(row));
        let found = found.collect::<Option<Vec<(RowEntry, bool)>>>()?;
        let measured = found.iter().filter(|(_, measured)| *measured).count();
        let batch = CacheBatch::New(found.into_iter().map(|(entry, _)| entry).collect());
        Some(MeasuredBatch { batch, measured })
    }

    /// The entry of a row, and whether it was measured. `None` if the process is exhausted.
    fn look_up(&self, row: usize) -> Option<(RowEntry, bool)> {
        if self.exhausted.get().is_some() {
            return None;
        }
        let content = retry(TransientFailure::of, || self.file.content(row));
        let hash = content.as_ref().map_or([0; HASH_BYTES], hash);
        let (line, offset) = (self.file.id(row).line, self.file.offset(row));
        if let Some((rows, found)) = self.known.get(hash).filter(|_| content.is_ok())
            && is_current(&mut self.stamps.walk(), rows, found)
        {
            return Some((RowEntry { line, offset, ..rows.entry(found) }, false));
        }
        Some((RowEntry { line, offset, hash, outcome: self.outcome(row, content)? }, true))
    }

    /// Sets the checksum of the first and last bytes of a file. It fails only if the process or a
    /// disk failed. Any other file that cannot be read has the checksum 0, such as a missing later
    /// frame of a list: the row is rejected when the frame is decoded.
    fn sum(
        &self,
        file: &mut ImageFile,
        error: impl FnOnce(ImageError) -> SampleError,
    ) -> Result<(), SampleError> {
        let crc = checksum(self.file.image_root(), file.path.as_ref()).map_err(error);
        file.crc = match crc {
            Err(error) if TransientFailure::of(&error).is_some() => return Err(error),
            crc => crc.unwrap_or_default(),
        };
        Ok(())
    }

    /// `None` if the process lacks open files or memory, or a disk failed.
    fn outcome(&self, row: usize, content: Result<RowContent, SampleError>) -> Option<Outcome> {
        let measure = |content: RowContent| {
            let sample = self.file.parse(row, content)?;
            retry(TransientFailure::of, || {
                let (mut images, mut videos) = files(&sample);
                let measured = self.encoder.measure(&sample)?;
                for (index, file) in (1..).zip(&mut images) {
                    let error = |cause| SampleFault::Image { index, cause }.at(&sample.id);
                    file.as_mut().map_or(Ok(()), |file| self.sum(file, error))?;
                }
                for (place, file) in &mut videos {
                    self.sum(file, |cause| place.error(cause).at(&sample.id))?;
                }
                let videos = videos.into_iter().map(|(_, file)| file).collect();
                Ok(Outcome::Measured { measured, images, videos })
            })
        };
        let measured = catch_unwind(AssertUnwindSafe(|| content.and_then(measure)));
        let measured = measured.unwrap_or_else(|panic| {
            tracing::error!(row = %self.file.id(row), "measuring the row panicked");
            resume_unwind(panic)
        });
        match measured {
            Ok(outcome) => Some(outcome),
            Err(error) if TransientFailure::of(&error).is_some() => {
                let _ = self.exhausted.set(CacheError::Exhausted { source: Box::new(error) });
                None
            }
            Err(error) => Some(rejected(error)),
        }
    }
}

/// The start of each reason that may depend on files other than the data file. Such a row may be
/// valid now although its text is unchanged.
const REASONS_OF_FILES: [&str; 6] =
    ["image_", "video_", "media_too_large", "too_many_tokens", "box_range", "unreadable"];

/// Whether measuring again would give the same result.
fn is_current(walk: &mut Walk<'_>, rows: &RowBatch, row: usize) -> bool {
    if let Some((reason, _)) = rows.rejected(row) {
        return !REASONS_OF_FILES.iter().any(|of| reason.starts_with(of));
    }
    let now = |walk: &mut Walk<'_>, path| walk.stamp(path).unwrap_or(ImageStamp::GONE);
    rows.files(row).all(|(path, stamp, _)| now(walk, path) == stamp)
}

fn rejected(error: SampleError) -> Outcome {
    let id = error.id.to_string();
    let Rejection { reason, message, .. } = error.into();
    let message = message.strip_prefix(&id).map_or(message.clone(), str::to_owned);
    Outcome::Rejected { reason, message }
}

/// A video of a row, or a frame of it, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VideoPlace {
    video: usize,
    frame: Option<usize>, // `None`: a video file
}

impl VideoPlace {
    /// The error of a row whose file at this place cannot be read.
    fn error(self, cause: ImageError) -> SampleFault {
        let cause = match (self.frame, cause) {
            (
                None,
                ImageError::Read { path, source: cause }
                | ImageError::Root { root: path, source: cause },
            ) => VideoError::Read { path, cause },
            (frame, cause) => VideoError::Frame { frame: frame.unwrap_or(1), cause },
        };
        SampleFault::Video { index: self.video, cause }
    }
}

/// The files of images, and those of videos with their places, without checksums. Call this before
/// the headers are read, so that the next pass finds a change in between.
fn files(sample: &Sample) -> (Vec<Option<ImageFile>>, Vec<(VideoPlace, ImageFile)>) {
    let file = |root: &Path, path: &Path| {
        let stamp = ImageStamp::of(&root.join(path)).unwrap_or(ImageStamp::GONE);
        ImageFile { path: path.display().to_string(), stamp, crc: 0 }
    };
    let image = |media: &MediaRef| match &media.source {
        MediaSource::DataUri(_) | MediaSource::Url(_) | MediaSource::Bytes(_) => None,
        MediaSource::File { root, path } => Some(file(root, path)),
    };
    let (mut images, mut videos, mut video) = (Vec::new(), Vec::new(), 0);
    for medium in &sample.media {
        match medium {
            Medium::Image(media) => images.push(image(media)),
            Medium::Video(VideoRef::Frames { frames, .. }) => {
                video += 1;
                let place = |frame| VideoPlace { video, frame: Some(frame) };
                let frames = (1..).zip(frames);
                videos.extend(frames.filter_map(|(at, frame)| Some((place(at), image(frame)?))));
            }
            Medium::Video(VideoRef::File { root, path, .. }) => {
                video += 1;
                videos.push((VideoPlace { video, frame: None }, file(root, path)));
            }
        }
    }
    (images, videos)
}

fn hash(content: &RowContent) -> [u8; HASH_BYTES] {
    let digest = content.hash();
    std::array::from_fn(|at| digest[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{self, Write};

    /// A disk fails in the middle of a row: the message names the medium as the loader does.
    #[test]
    fn images_and_videos_are_counted_each_from_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let row = r#"{"messages": [{"role": "user", "content": "<image><video><image><video>"},
            {"role": "assistant", "content": "a"}],
            "images": ["data:image/png;base64,AA==", "b.png"], "videos": [["c.png", "d.png"], "e.mp4"]}"#;
        File::create(&path).unwrap().write_all(row.replace('\n', "").as_bytes()).unwrap();
        let file = RowFile::open(&path, None).unwrap();
        let sample = file.parse(0, file.content(0).unwrap()).unwrap();
        let (images, videos) = files(&sample);
        assert!(images[0].is_none() && images[1].as_ref().unwrap().path == "b.png");
        let stale = |path: &str| ImageError::Read {
            path: path.into(),
            source: io::Error::from(rustix::io::Errno::STALE),
        };
        let mut texts = Vec::new();
        for (place, ImageFile { path, stamp, .. }) in videos {
            assert_eq!(stamp, ImageStamp::GONE);
            let error = place.error(stale(&path)).at(&sample.id);
            assert!(TransientFailure::of(&error).is_some());
            texts.push(error.to_string());
        }
        for (text, [of, place]) in texts.iter().zip([
            ["frame 1: cannot read image `c.png`", "(video 1 of the row)"],
            ["frame 2: cannot read image `d.png`", "(video 1 of the row)"],
            ["cannot read video `e.mp4`", "(video 2 of the row)"],
        ]) {
            assert!(text.contains(of) && text.contains(place), "{text}");
        }
        assert_eq!(texts.len(), 3);
    }
}
