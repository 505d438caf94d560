//! Making the cache, and making it again where rows or pictures have changed.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};

use super::file::{BATCH_ROWS, Batches, CacheError, Footer, Place, Writer};
use super::rows::{Entry, HASH_BYTES, ImageFile, Lengths, Outcome, Rows};
use super::stamps::{Stamps, Walk};
use super::table::LengthCache;
use crate::batch::{MediaRef, MediaSource, Medium, Sample, VideoRef};
use crate::data::encode::{Encoder, Measured};
use crate::data::row::Rejection;
use crate::data::source::{ImageStamp, JsonlFile, SampleError};

/// Batches that may wait to be written.
const WAITING: usize = 2;
/// Most of the time of a picture that was not read lately is waiting for the disk.
const THREADS_A_CORE: usize = 8;
/// Batches of an older cache whose pictures are looked at together: no core waits for the last of each.
const TOGETHER: usize = 8;
/// Rows whose pictures are looked at one after another.
const ROWS_A_WALK: usize = 512;

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
    /// One of the cache before, with the lengths of today.
    Kept(Box<Rows>),
    /// One with new entries.
    New(Vec<Entry>),
}

impl LengthCache {
    /// Whether `folder` has a cache of `file`, up to date or not.
    pub fn exists(file: &JsonlFile, encoder: &Encoder, folder: &Path) -> bool {
        Place::of(file, encoder, folder).path.is_file()
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
        let place = Place::of(file, encoder, folder);
        let _lock = place.lock()?;
        let num_threads = THREADS_A_CORE * rayon::current_num_threads();
        Self::bring_up_to_date(&place, file, encoder, num_threads, &|| true, progress)
    }

    /// The same on one thread beside other work, for as long as `should_go_on` says. `None` if it ended
    /// before all rows were done; the next time goes on from there.
    ///
    /// It leaves the cache to any other process that writes it or waits for it.
    pub fn update_beside(
        file: &JsonlFile,
        encoder: &Encoder,
        folder: &Path,
        should_go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<CacheWork>, CacheError> {
        let place = Place::of(file, encoder, folder);
        let Some(_lock) = place.try_lock()? else { return Ok(None) };
        place.forget_wanted();
        let is_wanted = AtomicBool::new(false);
        let should_go_on = || should_go_on() && !is_wanted.load(Relaxed);
        let progress = |_| is_wanted.store(place.is_wanted(), Relaxed);
        let (cache, work) =
            Self::bring_up_to_date(&place, file, encoder, 1, &should_go_on, &progress)?;
        Ok((cache.len() == file.len()).then_some(work))
    }

    /// Under the lock of `place`. The cache has fewer rows than `file` if it was told to stop.
    fn bring_up_to_date(
        place: &Place,
        file: &JsonlFile,
        encoder: &Encoder,
        num_threads: usize,
        should_go_on: &(dyn Fn() -> bool + Sync),
        progress: &dyn Fn(u64),
    ) -> Result<(Self, CacheWork), CacheError> {
        let threads = ThreadPoolBuilder::new().num_threads(num_threads);
        let threads = threads.thread_name(|thread| format!("cache-{thread}")).build();
        let threads = threads.map_err(io::Error::other).map_err(CacheError::write(&place.path))?;
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
            place,
            lengths: &|measured| lengths(encoder, measured),
            // a file that is all the same need not be written again
            always: old_footer.as_ref() != Some(&footer),
        };
        let stamps = Stamps::new(file.image_root());
        let measurer = Measurer { file, encoder, stamps, same_limits, threads, should_go_on };
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
                Batch::Kept(rows) => (*rows, self.always),
                Batch::New(entries) => {
                    (Rows::from_entries(&entries, self.lengths).map_err(format)?, true)
                }
            };
            if writer.is_none() && is_new {
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

/// Measures rows of a file.
struct Measurer<'a> {
    file: &'a JsonlFile,
    encoder: &'a Encoder,
    stamps: Stamps<'a>,
    same_limits: bool,
    threads: ThreadPool,
    should_go_on: &'a (dyn Fn() -> bool + Sync),
}

/// A batch of the cache before, its pictures looked at.
enum LookedAt {
    /// Nothing has changed; the lengths are those of today's limits.
    Current(Rows),
    /// These rows are to be measured again.
    Stale(Rows, Vec<usize>),
}

impl Measurer<'_> {
    fn run(
        &self,
        source: Source,
        output: &Output<'_>,
        footer: &Footer,
        progress: &dyn Fn(u64),
    ) -> Result<(LengthCache, CacheWork), CacheError> {
        let num_rows = self.file.len();
        let (known, old_batches) = match source {
            Source::SameRows { batches } => (Known::new(Vec::new()), Some(batches)),
            Source::Other { known } => (known, None),
        };
        let start = |name: &str| thread::Builder::new().name(format!("cache-{name}"));
        let (sender, receiver) = sync_channel(WAITING);
        let (old_sender, old_receiver) = sync_channel(TOGETHER);
        thread::scope(|scope| {
            let failed = || CacheError::write(&output.place.path);
            let writer =
                start("writer").spawn_scoped(scope, || output.write(receiver, footer, num_rows));
            let writer = writer.map_err(failed())?;
            let read = move || {
                for old in old_batches.into_iter().flatten() {
                    if old_sender.send(old).is_err() {
                        break;
                    }
                }
            };
            start("reader").spawn_scoped(scope, read).map_err(failed())?;
            let mut work = CacheWork::default();
            let firsts: Vec<usize> = (0..num_rows).step_by(BATCH_ROWS).collect();
            'all: for firsts in firsts.chunks(TOGETHER) {
                let with_old = |first: &usize| {
                    let rows = *first..(first + BATCH_ROWS).min(num_rows);
                    // none behind the place where the cache is damaged, which has been warned of
                    let old = old_receiver.recv().ok().filter(|old: &Rows| old.len() == rows.len());
                    (rows, old)
                };
                let parts: Vec<_> = firsts.iter().map(with_old).collect();
                let look_at =
                    |(rows, old): (_, Option<Rows>)| (rows, old.map(|old| self.look_at(old)));
                let parts: Vec<(Range<usize>, _)> =
                    self.threads.install(|| parts.into_par_iter().map(look_at).collect());
                for (rows, looked_at) in parts {
                    let done = self.threads.install(|| match looked_at {
                        Some(LookedAt::Current(rows)) => Some((Batch::Kept(Box::new(rows)), 0)),
                        Some(LookedAt::Stale(old, stale)) => self.refresh(rows.start, old, &stale),
                        None => self.look_up_all(rows.clone(), &known),
                    });
                    let Some((batch, measured)) = done else { break 'all }; // told to stop
                    work.measured += measured as u64;
                    work.reused += (rows.len() - measured) as u64;
                    if sender.send(batch).is_err() {
                        break 'all; // the writer has failed, and says why below
                    }
                    progress(rows.end as u64);
                }
            }
            drop((sender, old_receiver));
            let table = writer.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            Ok((table, work))
        })
    }

    fn look_at(&self, old: Rows) -> LookedAt {
        let parts = (0..old.len().div_ceil(ROWS_A_WALK)).into_par_iter();
        let stale = parts.flat_map_iter(|part| {
            let first = part * ROWS_A_WALK;
            let (old, mut walk) = (&old, self.stamps.walk());
            (first..(first + ROWS_A_WALK).min(old.len()))
                .filter(move |row| !is_current(&mut walk, old, *row))
        });
        let stale: Vec<usize> = stale.collect();
        if stale.is_empty() {
            LookedAt::Current(self.today(old))
        } else {
            LookedAt::Stale(old, stale)
        }
    }

    /// Known rows with the lengths of today.
    fn today(&self, rows: Rows) -> Rows {
        if self.same_limits { rows } else { rows.with_lengths(|row| lengths(self.encoder, row)) }
    }

    /// A batch of the same rows as before with the `stale` ones measured again, and how many; `None` if
    /// told to stop.
    fn refresh(&self, first: usize, old: Rows, stale: &[usize]) -> Option<(Batch, usize)> {
        let anew = stale.par_iter().map(|row| {
            let row = first + row;
            (self.should_go_on)().then(|| self.outcome(row, self.file.bytes(row)))
        });
        let anew: Vec<Outcome> = anew.collect::<Option<_>>()?;
        let is_new = |(row, outcome): (&usize, &Outcome)| old.entry(*row).outcome != *outcome;
        if !stale.iter().zip(&anew).any(is_new) {
            return Some((Batch::Kept(Box::new(self.today(old))), stale.len()));
        }
        let mut entries: Vec<Entry> = (0..old.len()).map(|row| old.entry(row)).collect();
        for (row, outcome) in stale.iter().zip(anew) {
            entries[*row].outcome = outcome;
        }
        Some((Batch::New(entries), stale.len()))
    }

    /// Rows that may be known, and how many of them had to be measured; `None` if told to stop.
    fn look_up_all(&self, rows: Range<usize>, known: &Known) -> Option<(Batch, usize)> {
        let row = |row| (self.should_go_on)().then(|| self.look_up(row, known));
        let found: Vec<(Entry, bool)> = rows.into_par_iter().map(row).collect::<Option<_>>()?;
        let measured = found.iter().filter(|(_, measured)| *measured).count();
        Some((Batch::New(found.into_iter().map(|(entry, _)| entry).collect()), measured))
    }

    /// A row that may be known, and whether it had to be measured.
    fn look_up(&self, row: usize, known: &Known) -> (Entry, bool) {
        let bytes = self.file.bytes(row);
        let hash = bytes.as_ref().map_or([0; HASH_BYTES], |bytes| hash(bytes));
        let (line, offset) = (self.file.id(row).line, self.file.offset(row));
        if let Some((rows, found)) = known.get(hash).filter(|_| bytes.is_ok())
            && is_current(&mut self.stamps.walk(), rows, found)
        {
            return (Entry { line, offset, ..rows.entry(found) }, false);
        }
        (Entry { line, offset, hash, outcome: self.outcome(row, bytes) }, true)
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

/// Whether measuring would find the same. A row that was rejected for its pictures may have been
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
