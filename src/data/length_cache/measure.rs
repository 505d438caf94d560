//! Measuring rows, and telling which need none.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::iter;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use rayon::prelude::*;
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::file::CacheError;
use super::rows::{Entry, HASH_BYTES, ImageFile, Lengths, Outcome, Rows};
use super::stamps::{Stamps, Walk};
use crate::batch::{MediaRef, MediaSource, Medium, Sample, VideoRef};
use crate::data::encode::{Encoder, Measured};
use crate::data::media::video::VideoError;
use crate::data::row::Rejection;
use crate::data::source::{ImageStamp, JsonlFile, SampleError};

/// Rows whose images are looked at one after another.
const ROWS_A_WALK: usize = 512;

/// Rows by the hash of their bytes.
pub(super) struct Known {
    batches: Vec<Rows>,
    places: HashMap<[u8; HASH_BYTES], (u32, u32)>,
}

impl Known {
    /// Of two rows with the same bytes the later one counts.
    pub(super) fn new(batches: Vec<Rows>) -> Self {
        let mut places = HashMap::with_capacity(batches.iter().map(Rows::len).sum());
        for (batch, rows) in (0..).zip(&batches) {
            places.extend((0..rows.len()).map(|row| (rows.hash(row), (batch, row as u32))));
        }
        Self { batches, places }
    }

    fn get(&self, hash: [u8; HASH_BYTES]) -> Option<(&Rows, usize)> {
        let (batch, row) = *self.places.get(&hash)?;
        Some((&self.batches[batch as usize], row as usize))
    }
}

/// A batch on its way into the cache.
pub(super) enum Batch {
    /// One of the cache before, with the lengths of today.
    Kept(Box<Rows>),
    /// One with new entries.
    New(Vec<Entry>),
}

/// What became of a batch.
pub(super) struct Done {
    pub(super) batch: Batch,
    /// Rows that had to be measured.
    pub(super) measured: usize,
    /// Rows that are done, fewer than the batch has if told to stop; it is then of what is new, wherever.
    pub(super) rows: usize,
}

/// A batch of the cache before, its images looked at.
pub(super) enum LookedAt {
    /// Nothing has changed; the lengths are those of today's limits.
    Current(Rows),
    /// These rows are to be measured again.
    Stale(Rows, Vec<usize>),
}

/// Measures rows of a file.
pub(super) struct Measurer<'a> {
    pub(super) file: &'a JsonlFile,
    pub(super) encoder: &'a Encoder,
    pub(super) stamps: Stamps<'a>,
    pub(super) same_limits: bool,
    pub(super) known: Known,
    pub(super) should_go_on: &'a (dyn Fn() -> bool + Sync),
    /// Rows that may still be measured.
    pub(super) left: AtomicUsize,
    /// Whether it was told to stop, or has to.
    pub(super) is_stopped: AtomicBool,
    /// Why nothing more can be read.
    pub(super) exhausted: OnceLock<CacheError>,
}

pub(super) fn lengths(encoder: &Encoder, measured: &Measured) -> Lengths {
    let outline = encoder.outline(measured.text, &measured.sizes);
    let images = outline.media_tokens - measured.text.media_tokens;
    let merge = encoder.merge_size().get().pow(2);
    let visual_tokens = images + (measured.video_patches / merge) as usize;
    Lengths { tokens: outline.num_tokens(), visual_tokens }
}

impl Measurer<'_> {
    /// Once it does not, it never does again.
    fn goes_on(&self) -> bool {
        let goes_on = !self.is_stopped.load(Relaxed) && (self.should_go_on)();
        if !goes_on {
            self.is_stopped.store(true, Relaxed);
        }
        goes_on
    }

    /// Whether `old` is of these rows of the file: a damaged cache may lack a batch.
    pub(super) fn is_of(&self, old: &Rows, rows: &Range<usize>) -> bool {
        let (first, last) = (rows.start, rows.end - 1);
        let is_at = |at: usize, row: usize| {
            old.offset.value(at) == self.file.offset(row)
                && old.line.value(at) == self.file.id(row).line
        };
        old.len() == rows.len() && is_at(0, first) && is_at(last - first, last)
    }

    /// `None` if told to stop.
    pub(super) fn look_at(&self, old: Rows) -> Option<LookedAt> {
        let parts = (0..old.len().div_ceil(ROWS_A_WALK)).into_par_iter();
        let stale = parts.map(|part| {
            let first = part * ROWS_A_WALK;
            let rows = first..(first + ROWS_A_WALK).min(old.len());
            let mut walk = self.stamps.walk();
            let is_stale = |row: &usize| !is_current(&mut walk, &old, *row);
            self.goes_on().then(|| rows.filter(is_stale).collect())
        });
        let stale = stale.collect::<Option<Vec<Vec<usize>>>>()?.concat();
        Some(if stale.is_empty() {
            LookedAt::Current(self.today(old))
        } else {
            LookedAt::Stale(old, stale)
        })
    }

    /// Known rows with the lengths of today.
    fn today(&self, rows: Rows) -> Rows {
        if self.same_limits { rows } else { rows.with_lengths(|row| lengths(self.encoder, row)) }
    }

    /// A batch of the same rows as before, from row `first` of the file, with the `stale` ones anew.
    pub(super) fn refresh(&self, first: usize, old: Rows, stale: &[usize]) -> Done {
        let look_up = |row: &usize| Some((*row, self.look_up(first + row)?));
        let anew: Vec<Option<(usize, (Entry, bool))>> = stale.par_iter().map(look_up).collect();
        let is_stopped = anew.iter().any(Option::is_none);
        let anew: Vec<_> = anew.into_iter().flatten().collect();
        let measured = anew.iter().filter(|(_, (_, measured))| *measured).count();
        let anew = anew.into_iter().map(|(row, (entry, _))| (row, entry));
        let new: Vec<(usize, Entry)> =
            anew.filter(|(row, entry)| old.entry(*row) != *entry).collect();
        if is_stopped {
            let new: Vec<Entry> = new.into_iter().map(|(_, entry)| entry).collect();
            return Done { rows: measured, batch: Batch::New(new), measured };
        }
        let rows = old.len();
        let batch = if new.is_empty() {
            Batch::Kept(Box::new(self.today(old)))
        } else {
            let mut entries: Vec<Entry> = (0..rows).map(|row| old.entry(row)).collect();
            for (row, entry) in new {
                entries[row] = entry;
            }
            Batch::New(entries)
        };
        Done { batch, measured, rows }
    }

    /// Rows that may be known, from wherever.
    pub(super) fn look_up_all(&self, rows: Range<usize>) -> Done {
        let found: Vec<_> = rows.into_par_iter().map(|row| self.look_up(row)).collect();
        let found: Vec<(Entry, bool)> = found.into_iter().flatten().collect();
        let measured = found.iter().filter(|(_, measured)| *measured).count();
        let rows = found.len();
        let batch = Batch::New(found.into_iter().map(|(entry, _)| entry).collect());
        Done { batch, measured, rows }
    }

    /// A row that may be known, and whether it had to be measured; `None` if told to stop.
    fn look_up(&self, row: usize) -> Option<(Entry, bool)> {
        if !self.goes_on() {
            return None;
        }
        let bytes = self.file.bytes(row);
        let hash = bytes.as_ref().map_or([0; HASH_BYTES], |bytes| hash(bytes));
        let (line, offset) = (self.file.id(row).line, self.file.offset(row));
        if let Some((rows, found)) = self.known.get(hash).filter(|_| bytes.is_ok())
            && is_current(&mut self.stamps.walk(), rows, found)
        {
            return Some((Entry { line, offset, ..rows.entry(found) }, false));
        }
        if self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
            self.is_stopped.store(true, Relaxed);
            return None;
        }
        Some((Entry { line, offset, hash, outcome: self.outcome(row, bytes)? }, true))
    }

    /// `None` if the fault is not the row's.
    fn outcome(&self, row: usize, bytes: Result<Vec<u8>, SampleError>) -> Option<Outcome> {
        let measure = |bytes: Vec<u8>| {
            let sample = self.file.parse(row, &bytes)?;
            let (images, videos) = files(&sample);
            let measured = self.encoder.measure(&sample)?;
            Ok(Outcome::Measured { measured, images, videos })
        };
        let measured = catch_unwind(AssertUnwindSafe(|| bytes.and_then(measure)));
        let measured = measured.unwrap_or_else(|panic| {
            tracing::error!(row = %self.file.id(row), "measuring the row panicked");
            resume_unwind(panic)
        });
        match measured {
            Ok(outcome) => Some(outcome),
            Err(error) if is_exhausted(&error) => {
                self.is_stopped.store(true, Relaxed);
                let _ = self.exhausted.set(CacheError::Exhausted { source: Box::new(error) });
                None
            }
            Err(error) => Some(rejected(error)),
        }
    }
}

/// Whether the process had too many open files or too little memory: the row may be in order.
fn is_exhausted(error: &SampleError) -> bool {
    let cause: &(dyn Error + 'static) = match error {
        SampleError::Read { cause, .. } => cause,
        SampleError::Image { cause, .. }
        | SampleError::Video { cause: VideoError::Frame { cause, .. }, .. } => cause,
        _ => return false,
    };
    let is_exhausted = |code| [Errno::MFILE, Errno::NFILE, Errno::NOMEM].contains(&code);
    iter::successors(Some(cause), |error| (**error).source())
        .filter_map(|error| Errno::from_io_error(error.downcast_ref::<io::Error>()?))
        .any(is_exhausted)
}

/// Whether measuring would find the same. A row that was rejected for its images may have been
/// repaired without a change of its text.
fn is_current(walk: &mut Walk<'_>, rows: &Rows, row: usize) -> bool {
    if let Some((reason, _)) = rows.rejected(row) {
        return !["image_", "video_", "unreadable"].iter().any(|of| reason.starts_with(of));
    }
    rows.files(row).all(|(path, stamp)| walk.stamp(path) == Some(stamp))
}

fn rejected(error: SampleError) -> Outcome {
    let id = error.id().to_string();
    let Rejection { reason, message, .. } = error.into();
    let message = message.strip_prefix(&id).map_or(message.clone(), str::to_owned);
    Outcome::Rejected { reason, message }
}

/// The files of images, and those of videos, before their headers are read: a change in between shows
/// the next time.
fn files(sample: &Sample) -> (Vec<Option<ImageFile>>, Vec<ImageFile>) {
    let file = |root: &Path, path: &Path| {
        let gone = |_: io::Error| ImageStamp { bytes: 0, mtime_ns: 0 };
        let stamp = ImageStamp::of(&root.join(path)).unwrap_or_else(gone);
        ImageFile { path: path.display().to_string(), stamp }
    };
    let image = |media: &MediaRef| match &media.source {
        MediaSource::DataUri(_) => None,
        MediaSource::File { root, path } => Some(file(root, path)),
    };
    let (mut images, mut videos) = (Vec::new(), Vec::new());
    for medium in &sample.media {
        match medium {
            Medium::Image(media) => images.push(image(media)),
            Medium::Video(VideoRef::Frames { frames, .. }) => {
                videos.extend(frames.iter().filter_map(image));
            }
            Medium::Video(VideoRef::File { root, path, .. }) => videos.push(file(root, path)),
        }
    }
    (images, videos)
}

fn hash(bytes: &[u8]) -> [u8; HASH_BYTES] {
    let digest = Sha256::digest(bytes);
    std::array::from_fn(|at| digest[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::SampleId;
    use crate::data::media::image::ImageError;

    #[test]
    fn what_the_process_lacks_is_not_the_fault_of_a_row() {
        let id = || SampleId { file: Path::new("rows.jsonl").into(), line: 3 };
        let image = |code: Errno| ImageError::Read { path: "a.png".into(), source: code.into() };
        for (code, expected) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOMEM, true),
            (Errno::NOENT, false),
            (Errno::ACCESS, false),
            (Errno::IO, false),
        ] {
            let frame = VideoError::Frame { frame: 1, cause: image(code) };
            for error in [
                SampleError::Read { id: id(), cause: code.into() },
                SampleError::Image { id: id(), index: 1, cause: image(code) },
                SampleError::Video { id: id(), index: 1, cause: frame },
            ] {
                assert_eq!(is_exhausted(&error), expected, "{error}");
            }
        }
    }
}
