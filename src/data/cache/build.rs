//! Making the cache, and making it again where rows or pictures have changed.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::file::{BATCH_ROWS, Batches, CacheError, Footer, Place, Writer};
use super::rows::{Entry, HASH_BYTES, ImageFile, Lengths, Outcome, Rows};
use super::table::LengthCache;
use crate::batch::{MediaRef, MediaSource, Medium, Sample, VideoRef};
use crate::data::encode::{Encoder, Measured};
use crate::data::row::Rejection;
use crate::data::source::{ImageStamp, JsonlFile, SampleError};

/// Batches that may wait to be written.
const WAITING: usize = 2;

/// What [`LengthCache::update`] had to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheWork {
    /// Rows that were read and measured.
    pub measured: u64,
    /// Rows that were known.
    pub reused: u64,
}

/// A batch on its way into the cache.
enum Batch {
    /// One of the cache before, as it is.
    Kept(Box<Rows>),
    /// One with new entries.
    New(Vec<Entry>),
}

impl LengthCache {
    /// Whether `folder` has a cache of `file`, up to date or not.
    pub fn exists(file: &JsonlFile, encoder: &Encoder, folder: &Path) -> bool {
        let place = Place::new(folder, file.path(), file.image_root(), encoder.text_key());
        place.path.is_file()
    }

    /// Brings the cache of `file` in `folder` up to date, on all cores, and loads it. `progress` is told
    /// how many rows are done.
    ///
    /// Killed in between, it goes on where it was. Only rows that are new, have changed, or have a picture
    /// that has changed or could not be used are measured.
    pub fn update(
        file: &JsonlFile,
        encoder: &Encoder,
        folder: &Path,
        progress: &dyn Fn(u64),
    ) -> Result<(Self, CacheWork), CacheError> {
        let place = Place::new(folder, file.path(), file.image_root(), encoder.text_key());
        let _lock = place.lock()?;
        let limits = encoder.image_processor().limits();
        let footer = Footer::of(file, limits);
        let (old_footer, old) = place.read().unzip();
        let same_limits = old_footer.as_ref().is_some_and(|old| old.limits == footer.limits);
        let source = match (&old_footer, old) {
            (Some(footer), Some(batches)) if footer.fits(file) => Source::SameRows { batches },
            (_, old) => {
                let old = old.into_iter().flatten().chain(place.read_partial());
                Source::Other { known: Known::new(old.collect()) }
            }
        };
        let to_write = Output {
            place: &place,
            lengths: &|measured| lengths(encoder, measured),
            same_limits,
            // a file that is all the same need not be written again
            always: old_footer.as_ref() != Some(&footer),
        };
        let measurer = Measurer { file, encoder, looked_at: LookedAt::default() };
        measurer.run(source, &to_write, &footer, progress)
    }
}

fn lengths(encoder: &Encoder, measured: &Measured) -> Lengths {
    let outline = encoder.outline(measured.text, &measured.sizes);
    let pictures = outline.media_tokens - measured.text.media_tokens;
    let merge = encoder.merge_size().get().pow(2);
    let visual_tokens = pictures + (measured.video_patches / merge) as usize;
    Lengths { tokens: outline.num_tokens(), visual_tokens }
}

/// Where known rows come from.
enum Source {
    /// The cache before is of the same rows in the same places.
    SameRows { batches: Batches },
    /// Rows with the same bytes may be anywhere.
    Other { known: Known },
}

/// Rows by the hash of their bytes.
struct Known {
    batches: Vec<Rows>,
    places: HashMap<[u8; HASH_BYTES], (u32, u32)>,
}

impl Known {
    fn new(batches: Vec<Rows>) -> Self {
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

/// What becomes of the batches.
struct Output<'a> {
    place: &'a Place,
    lengths: &'a (dyn Fn(&Measured) -> Lengths + Sync),
    same_limits: bool,
    always: bool,
}

impl Output<'_> {
    /// Loads the batches and writes them: all of them, or none if nothing is new.
    fn write(
        &self,
        batches: Receiver<Batch>,
        footer: &Footer,
        num_rows: usize,
    ) -> Result<LengthCache, CacheError> {
        let mut writer = None;
        let mut num_kept = 0;
        let mut table = LengthCache::with_capacity(self.place.path.clone(), num_rows);
        let format = |source| CacheError::Format { path: self.place.path.clone(), source };
        for batch in batches {
            let (rows, is_new) = match batch {
                Batch::Kept(rows) if self.same_limits => (*rows, false),
                Batch::Kept(rows) => (rows.with_lengths(self.lengths), true),
                Batch::New(entries) => {
                    (Rows::from_entries(&entries, self.lengths).map_err(format)?, true)
                }
            };
            if writer.is_none() && (is_new || self.always) {
                let mut created = Writer::create(self.place)?;
                let (_, before) = self.place.read().unzip();
                let mut before = before.into_iter().flatten().take(num_kept);
                before.try_for_each(|rows| created.write(&rows))?;
                writer = Some(created);
            }
            match &mut writer {
                Some(writer) => writer.write(&rows)?,
                None => num_kept += 1,
            }
            table.push(&rows);
        }
        // fewer rows than there are: a panic has ended the measuring, and what is written can be gone on from
        match writer.filter(|_| table.len() == num_rows) {
            Some(writer) => writer.finish(footer).map(|()| table),
            None => Ok(table),
        }
    }
}

/// Stamps of pictures, each looked at once an update: rows that share a picture are common, and asking the
/// system is most of what an unchanged row costs.
#[derive(Default)]
struct LookedAt {
    hasher: RandomState,
    shards: [Mutex<HashMap<u64, Option<ImageStamp>>>; NUM_SHARDS],
}

/// Threads rarely meet at one of so many.
const NUM_SHARDS: usize = 32;
/// Entries of all shards together: some 50 MB.
const MOST_LOOKED_AT: usize = 1 << 20;

impl LookedAt {
    /// Of a picture as a row writes it; `None` if it cannot be looked at.
    fn stamp(&self, root: &Path, path: &str) -> Option<ImageStamp> {
        // two paths with one hash, one pair in 2^64, take one for the other
        let key = self.hasher.hash_one(path);
        let shard = || {
            let shard = &self.shards[key as usize % NUM_SHARDS];
            shard.lock().unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(found) = shard().get(&key) {
            return *found;
        }
        let found = ImageStamp::of(&root.join(path)).ok();
        let mut shard = shard();
        if shard.len() < MOST_LOOKED_AT / NUM_SHARDS {
            shard.insert(key, found);
        }
        found
    }
}

/// Measures rows of a file.
struct Measurer<'a> {
    file: &'a JsonlFile,
    encoder: &'a Encoder,
    looked_at: LookedAt,
}

impl Measurer<'_> {
    fn run(
        &self,
        mut source: Source,
        output: &Output<'_>,
        footer: &Footer,
        progress: &dyn Fn(u64),
    ) -> Result<(LengthCache, CacheWork), CacheError> {
        let num_rows = self.file.len();
        let (sender, receiver) = sync_channel(WAITING);
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("cache-writer".to_owned());
            let writer = builder.spawn_scoped(scope, || output.write(receiver, footer, num_rows));
            let writer = writer.map_err(CacheError::write(&output.place.path))?;
            let mut work = CacheWork::default();
            for first in (0..num_rows).step_by(BATCH_ROWS) {
                let rows = first..(first + BATCH_ROWS).min(num_rows);
                let old = match &mut source {
                    Source::SameRows { batches } => batches.next(),
                    Source::Other { .. } => None,
                };
                let (batch, measured) = match (&source, old.filter(|old| old.len() == rows.len())) {
                    (_, Some(old)) => self.refresh(first, old),
                    (Source::Other { known }, None) => self.look_up_all(rows.clone(), known),
                    // the cache is damaged behind its beginning, which has been warned of
                    (Source::SameRows { .. }, None) => {
                        self.look_up_all(rows.clone(), &Known::new(Vec::new()))
                    }
                };
                work.measured += measured as u64;
                work.reused += (rows.len() - measured) as u64;
                if sender.send(batch).is_err() {
                    break; // the writer has failed, and says why below
                }
                progress(rows.end as u64);
            }
            drop(sender);
            let table = writer.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            Ok((table, work))
        })
    }

    /// A batch of the same rows as before, and how many of them had to be measured again.
    fn refresh(&self, first: usize, old: Rows) -> (Batch, usize) {
        let stale: Vec<usize> =
            (0..old.len()).into_par_iter().filter(|row| !self.is_current(&old, *row)).collect();
        if stale.is_empty() {
            return (Batch::Kept(Box::new(old)), 0);
        }
        let mut entries: Vec<Entry> = (0..old.len()).map(|row| old.entry(row)).collect();
        let anew: Vec<Outcome> = stale
            .par_iter()
            .map(|row| self.outcome(first + row, self.file.bytes(first + row)))
            .collect();
        let mut changed = false;
        for (row, outcome) in stale.iter().zip(anew) {
            changed |= entries[*row].outcome != outcome;
            entries[*row].outcome = outcome;
        }
        (if changed { Batch::New(entries) } else { Batch::Kept(Box::new(old)) }, stale.len())
    }

    /// Rows that may be known, and how many of them had to be measured.
    fn look_up_all(&self, rows: Range<usize>, known: &Known) -> (Batch, usize) {
        let row = |row| self.look_up(row, known);
        let found: Vec<(Entry, bool)> = rows.into_par_iter().map(row).collect();
        let measured = found.iter().filter(|(_, measured)| *measured).count();
        (Batch::New(found.into_iter().map(|(entry, _)| entry).collect()), measured)
    }

    /// A row that may be known, and whether it had to be measured.
    fn look_up(&self, row: usize, known: &Known) -> (Entry, bool) {
        let bytes = self.file.bytes(row);
        let hash = bytes.as_ref().map_or([0; HASH_BYTES], |bytes| hash(bytes));
        let (line, offset) = (self.file.id(row).line, self.file.offset(row));
        if let Some((rows, found)) = known.get(hash).filter(|_| bytes.is_ok())
            && self.is_current(rows, found)
        {
            return (Entry { line, offset, ..rows.entry(found) }, false);
        }
        (Entry { line, offset, hash, outcome: self.outcome(row, bytes) }, true)
    }

    /// Whether measuring would find the same. A row that was rejected for its pictures may have been
    /// repaired without a change of its text.
    fn is_current(&self, rows: &Rows, row: usize) -> bool {
        if let Err((reason, _)) = rows.measured(row) {
            return !["image_", "video_", "unreadable"].iter().any(|of| reason.starts_with(of));
        }
        let root = self.file.image_root();
        rows.files(row).all(|(path, stamp)| self.looked_at.stamp(root, path) == Some(stamp))
    }

    fn outcome(&self, row: usize, bytes: Result<Vec<u8>, SampleError>) -> Outcome {
        let measure = |bytes: Vec<u8>| {
            let sample = self.file.parse(row, &bytes)?;
            let (pictures, videos) = files(&sample);
            let measured = self.encoder.measure(&sample)?;
            Ok(Outcome::Measured { measured, pictures, videos })
        };
        let measured = catch_unwind(AssertUnwindSafe(|| bytes.and_then(measure)));
        let measured = measured.unwrap_or_else(|panic| {
            tracing::error!(row = %self.file.id(row), "measuring the row panicked");
            resume_unwind(panic)
        });
        measured.unwrap_or_else(rejected)
    }
}

fn rejected(error: SampleError) -> Outcome {
    let id = error.id().to_string();
    let Rejection { reason, message, .. } = error.into();
    let message = message.strip_prefix(&id).map_or(message.clone(), str::to_owned);
    Outcome::Rejected { reason, message }
}

/// The files of pictures, and those of videos, before their headers are read: a change in between shows
/// the next time.
fn files(sample: &Sample) -> (Vec<Option<ImageFile>>, Vec<ImageFile>) {
    let file = |root: &Path, path: &Path| {
        let gone = |_: io::Error| ImageStamp { bytes: 0, mtime_ns: 0 };
        let stamp = ImageStamp::of(&root.join(path)).unwrap_or_else(gone);
        ImageFile { path: path.display().to_string(), stamp }
    };
    let picture = |media: &MediaRef| match &media.source {
        MediaSource::DataUri(_) => None,
        MediaSource::File { root, path } => Some(file(root, path)),
    };
    let (mut pictures, mut videos) = (Vec::new(), Vec::new());
    for medium in &sample.media {
        match medium {
            Medium::Image(media) => pictures.push(picture(media)),
            Medium::Video(VideoRef::Frames { frames, .. }) => {
                videos.extend(frames.iter().filter_map(picture));
            }
            Medium::Video(VideoRef::File { root, path, .. }) => videos.push(file(root, path)),
        }
    }
    (pictures, videos)
}

fn hash(bytes: &[u8]) -> [u8; HASH_BYTES] {
    let digest = Sha256::digest(bytes);
    std::array::from_fn(|at| digest[at])
}
