//! Builds the cache, and updates it for rows and images that have changed. Ranks measure the rows of
//! a data set together: each writes the rows of its part to a file of its own, from which the next
//! update completes the cache.

use std::ffi::OsStr;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::{fs, io, thread};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::process::{Resource, getrlimit};

use super::file::{
    BATCH_ROWS, Batches, CacheError, CachePath, CacheWriter, Footer, LEFT_BEHIND, Lock, SUMS,
    read_stream, sums_of,
};
use super::measure::{CacheBatch, Checked, MeasuredBatch, Measurer, lengths};
use super::rows::{LengthCache, RowBatch};
use crate::encode::Encoder;
use crate::encode::measure::Measured;
use crate::source::RowFile;
use ranks::Rank;

/// Maximum number of batches that wait to be written.
const WAITING: usize = 2;
/// Number of threads per core: reading an image that is not in the page cache mostly waits for the
/// disk.
const THREADS_A_CORE: usize = 8;
/// Maximum number of threads. More do not make a disk faster.
const MOST_THREADS: usize = 256;
/// Number of permitted open files per thread: a thread has an image and a folder open, and the rest
/// of the process needs files too.
const OPEN_FILES_A_THREAD: u64 = 4;
/// Number of batches whose images are checked together, so that cores do not wait at the end of
/// each batch.
const TOGETHER: usize = 8;

/// The work of a [`LengthCache::update`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheWork {
    /// Number of rows that were read and measured.
    pub measured: u64,
    /// Number of rows that were taken from the cache.
    pub reused: u64,
}

impl LengthCache {
    /// Updates the cache of `file` in `folder` on all cores and loads it. `progress` receives the
    /// number of finished rows.
    ///
    /// If the process is killed, the next update continues. Only rows that are new or changed, or
    /// that have a changed or unusable image, are measured. A complete cache in a folder without
    /// write permission is used as it is.
    pub fn update(
        file: &RowFile,
        encoder: &Encoder,
        folder: &Path,
        progress: &dyn Fn(u64),
    ) -> Result<(Self, CacheWork), CacheError> {
        let place = CachePath::of(file, encoder, folder);
        let lock = place.lock()?;
        update(&place, &lock, file, encoder, progress)
    }
}

fn num_threads() -> usize {
    most_threads(rayon::current_num_threads(), getrlimit(Resource::Nofile).current)
}

fn most_threads(cores: usize, open_files: Option<u64>) -> usize {
    let files = open_files.map_or(MOST_THREADS, |files| (files / OPEN_FILES_A_THREAD) as usize);
    (THREADS_A_CORE * cores).min(MOST_THREADS).min(files).max(1)
}

/// A pool of `num` threads, or of fewer if the system does not permit so many.
pub(super) fn threads(mut num: usize, place: &CachePath) -> Result<ThreadPool, CacheError> {
    loop {
        let threads = ThreadPoolBuilder::new().num_threads(num);
        match threads.thread_name(|thread| format!("cache-{thread}")).build() {
            Err(_) if num > 1 => num /= 2,
            built => {
                return built.map_err(io::Error::other).map_err(CacheError::write(&place.path));
            }
        }
    }
}

/// Updates a cache under its lock, and loads it.
fn update(
    place: &CachePath,
    lock: &Lock,
    file: &RowFile,
    encoder: &Encoder,
    progress: &dyn Fn(u64),
) -> Result<(LengthCache, CacheWork), CacheError> {
    let threads = threads(num_threads(), place)?;
    let limits = encoder.image_processor().limits();
    let footer = Footer::of(file, limits);
    let (old_footer, old) = place.read().unzip();
    let same_limits = old_footer.as_ref().is_some_and(|old| old.limits == footer.limits);
    // a cache of the same rows in the same positions, or of rows in other positions
    let is_same = old_footer.as_ref().is_some_and(|old| old.fits(file));
    let (same, other) = if is_same { (old, None) } else { (None, old) };
    let known = other.into_iter().flatten().chain(place.read_partial(lock)).collect();
    let output = Output {
        place,
        lock,
        file,
        lengths: &|measured| lengths(encoder, measured),
        // an unchanged cache is not written again, nor one without write permission
        always: old_footer.as_ref() != Some(&footer) && lock.may_write(place).is_ok(),
    };
    let measurer = Measurer::new(file, encoder, known, same_limits);
    let done = measure(&measurer, &threads, same, &output, &footer, progress);
    measurer.exhausted.into_inner().map_or(done, Err)
}

/// Receives the batches.
struct Output<'a> {
    place: &'a CachePath,
    lock: &'a Lock,
    file: &'a RowFile,
    lengths: &'a (dyn Fn(&Measured) -> [usize; 2] + Sync),
    always: bool,
}

impl Output<'_> {
    /// Loads the batches, and writes all of them if one is new.
    fn write(
        &self,
        batches: Receiver<CacheBatch>,
        footer: &Footer,
    ) -> Result<LengthCache, CacheError> {
        let mut writer = None;
        let mut table = LengthCache::with_capacity(self.place.path.clone(), self.file.len());
        let format = |source| CacheError::Format { path: self.place.path.clone(), source };
        for batch in batches {
            let (rows, is_new) = match batch {
                CacheBatch::Kept(rows) => (*rows, self.always),
                CacheBatch::New(entries) => {
                    (RowBatch::from_entries(&entries, self.lengths).map_err(format)?, true)
                }
            };
            if writer.is_none() && is_new {
                writer = Some(self.begin(table.len())?);
            }
            if let Some(writer) = &mut writer {
                writer.write(&rows)?;
            }
            table.push(&rows);
        }
        // with fewer rows a disk failed: the next update continues from the written batches
        if table.len() == self.file.len() {
            match writer {
                Some(_) if self.file.has_changed() => {
                    let path = self.file.path().to_owned();
                    return Err(CacheError::DataChanged { path });
                }
                Some(writer) => writer.finish(footer)?,
                None if self.lock.may_write(self.place).is_ok() => self.place.remove_left_behind(),
                None => {}
            }
        }
        Ok(table)
    }

    /// Creates a file with the first `num_kept` rows of the previous one.
    fn begin(&self, num_kept: usize) -> Result<CacheWriter, CacheError> {
        self.lock.may_write(self.place)?;
        let mut writer = CacheWriter::create(self.place)?;
        let (_, mut before) = self.place.read().unzip();
        let mut num_written = 0;
        while num_written < num_kept {
            let rows = before.as_mut().and_then(Iterator::next);
            let rows = rows.ok_or_else(|| CacheError::Lost { path: self.place.path.clone() })?;
            writer.write(&rows)?;
            num_written += rows.len();
        }
        Ok(writer)
    }
}

/// Measures the rows that are not in `same`, a cache of the same rows.
fn measure(
    measurer: &Measurer<'_>,
    threads: &ThreadPool,
    same: Option<Batches>,
    output: &Output<'_>,
    footer: &Footer,
    progress: &dyn Fn(u64),
) -> Result<(LengthCache, CacheWork), CacheError> {
    let num_rows = measurer.file.len();
    let start = |name: &str| thread::Builder::new().name(format!("cache-{name}"));
    let (sender, receiver) = sync_channel(WAITING);
    let (old_sender, old_receiver) = sync_channel(TOGETHER);
    thread::scope(|scope| {
        let failed = || CacheError::write(&output.place.path);
        let writer = start("writer").spawn_scoped(scope, || output.write(receiver, footer));
        let writer = writer.map_err(failed())?;
        let read = move || {
            for old in same.into_iter().flatten() {
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
                // `None` after the position of a damage, which has been logged
                let old = old_receiver.recv().ok().filter(|old| measurer.is_of(old, &rows));
                (rows, old)
            };
            let parts: Vec<_> = firsts.iter().map(with_old).collect();
            let check_images = |(rows, old): (_, Option<RowBatch>)| {
                (rows, old.map(|old| measurer.check_images(old)))
            };
            let parts: Vec<_> =
                threads.install(|| parts.into_par_iter().map(check_images).collect());
            for (rows, checked) in parts {
                let done = threads.install(|| match checked {
                    Some(Checked::Current(old)) => {
                        Some(MeasuredBatch { batch: CacheBatch::Kept(Box::new(old)), measured: 0 })
                    }
                    Some(Checked::Stale(old, stale)) => measurer.refresh(rows.start, old, &stale),
                    None => measurer.look_up_rows(rows.clone()),
                });
                let Some(MeasuredBatch { batch, measured }) = done else { break 'all };
                work.measured += measured as u64;
                work.reused += (rows.len() - measured) as u64;
                if sender.send(batch).is_err() {
                    break 'all; // the error of the writer is returned below
                }
                progress(rows.end as u64);
            }
        }
        drop((sender, old_receiver));
        let table = writer.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok((table, work))
    })
}

/// Suffix of the files of ranks, before their number.
const OF_RANK: &str = ".rank-";

impl CachePath {
    /// The complete batches of killed processes, the newer ones last.
    fn read_partial(&self, lock: &Lock) -> Vec<RowBatch> {
        let [partial, temporary] = LEFT_BEHIND.map(|ending| self.sibling(ending));
        let [mut found, newer] = [&partial, &temporary].map(|path| read_stream(path));
        let num_rows = |batches: &[RowBatch]| batches.iter().map(RowBatch::len).sum::<usize>();
        if num_rows(&newer) > num_rows(&found) && lock.may_write(self).is_ok() {
            // keep the longer of the two; if this fails, its rows are measured again
            let _ = fs::rename(sums_of(&temporary), sums_of(&partial));
            let _ = fs::rename(&temporary, &partial);
        }
        found.extend(newer);
        found.extend(self.of_ranks().iter().flat_map(|path| read_stream(path)));
        found
    }

    /// The complete batches of killed processes and of ranks, without the lock.
    fn left_behind(&self) -> Vec<RowBatch> {
        self.files_left_behind().iter().flat_map(|path| read_stream(path)).collect()
    }

    /// Removes the files of killed processes and of ranks. The cache has all of their rows.
    pub(super) fn remove_left_behind(&self) {
        for path in self.files_left_behind() {
            let _ = fs::remove_file(sums_of(&path));
            let _ = fs::remove_file(path);
        }
    }

    fn files_left_behind(&self) -> Vec<PathBuf> {
        let killed = LEFT_BEHIND.map(|ending| self.sibling(ending));
        killed.into_iter().chain(self.of_ranks()).collect()
    }

    /// The files with the rows that ranks have measured.
    fn of_ranks(&self) -> Vec<PathBuf> {
        let start = self.sibling(OF_RANK);
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let is_of_rank = |path: &PathBuf| {
            let [name, start] = [path, &start].map(|path| path.file_name().unwrap_or_default());
            let [name, start] = [name, start].map(OsStr::as_encoded_bytes);
            name.starts_with(start) && !name.ends_with(SUMS.as_bytes())
        };
        entries.map(|entry| entry.path()).filter(is_of_rank).collect()
    }
}

impl CacheWriter {
    /// Writes the rows that rank `rank` has measured to a file of its own, which needs no lock.
    pub(super) fn of_rank(place: &CachePath, rank: usize) -> Result<Self, CacheError> {
        let folder = place.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(CacheError::write(folder))?;
        // several runs of the same rows may measure them at the same time
        let process = std::process::id();
        Self::at(place, place.sibling(&format!("{OF_RANK}{rank}-{process}")))
    }
}

impl LengthCache {
    /// The cache of `file` in `folder` as it is; `None` if it is not complete, or if its lengths
    /// belong to other limits.
    pub fn complete(file: &RowFile, encoder: &Encoder, folder: &Path) -> Option<Self> {
        let place = CachePath::of(file, encoder, folder);
        let (footer, batches) = place.read()?;
        if !footer.fits(file) || footer.limits != encoder.image_processor().limits() {
            return None;
        }
        let mut table = Self::with_capacity(place.path.clone(), file.len());
        batches.for_each(|rows| table.push(&rows));
        (table.len() == file.len()).then_some(table)
    }

    /// Measures the rows of `rank`'s part of `file`, unless `folder` has a cache of the whole file.
    /// When all ranks are done, [`Self::update`] reuses their rows. `progress` receives the number
    /// of rows done.
    pub fn measure_part(
        file: &RowFile,
        encoder: &Encoder,
        folder: &Path,
        rank: Rank,
        progress: &dyn Fn(u64),
    ) -> Result<(), CacheError> {
        let place = CachePath::of(file, encoder, folder);
        let (footer, old) = place.read().unzip();
        if footer.is_some_and(|footer| footer.fits(file)) {
            return Ok(());
        }
        let threads = threads(num_threads(), &place)?;
        let known = old.into_iter().flatten().chain(place.left_behind()).collect();
        let measurer = Measurer::new(file, encoder, known, false);
        let own = rank.own_part(file.len());
        let lengths = |measured: &Measured| lengths(encoder, measured);
        let mut writer = CacheWriter::of_rank(&place, rank.rank)?;
        for first in own.clone().step_by(BATCH_ROWS) {
            let rows = first..(first + BATCH_ROWS).min(own.end);
            let done = threads.install(|| measurer.look_up_rows(rows.clone()));
            let Some(MeasuredBatch { batch: CacheBatch::New(entries), .. }) = done else { break };
            let format = |source| CacheError::Format { path: place.path.clone(), source };
            writer.write(&RowBatch::from_entries(&entries, lengths).map_err(format)?)?;
            progress((rows.end - own.start) as u64);
        }
        measurer.exhausted.into_inner().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use super::*;
    use crate::Encoder;
    use crate::media::image::ImageConfig;

    fn encoder() -> Encoder {
        let model =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/small-tied");
        let image = ImageConfig { min_pixels: None, max_pixels: None, max_tokens: None };
        Encoder::from_folder(&model, &image).unwrap()
    }

    fn rows(folder: &Path, count: usize) -> RowFile {
        let path = folder.join("rows.jsonl");
        let mut text = Vec::new();
        for row in 0..count {
            let chat = r#"{"role": "user", "content": "Q"}, {"role": "assistant", "content": "#;
            writeln!(text, r#"{{"messages": [{chat}"{row}"}}]}}"#).unwrap();
        }
        File::create(&path).unwrap().write_all(&text).unwrap();
        RowFile::open(&path, None).unwrap()
    }

    #[test]
    fn threads_leave_most_open_files_to_others() {
        assert_eq!(most_threads(2, Some(1024)), 16);
        assert_eq!(most_threads(128, Some(1024)), 256);
        assert_eq!(most_threads(128, Some(1 << 20)), 256);
        assert_eq!(most_threads(128, None), 256);
        assert_eq!(most_threads(128, Some(256)), 64);
        assert_eq!(most_threads(128, Some(3)), 1);
    }

    /// The kept rows would be missing in the new file.
    #[test]
    fn a_cache_whose_kept_rows_are_gone_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let (encoder, caches) = (encoder(), folder.path().join("cache"));
        let file = rows(folder.path(), BATCH_ROWS + 1);
        LengthCache::update(&file, &encoder, &caches, &|_| ()).unwrap();
        let place = CachePath::of(&file, &encoder, &caches);
        let (footer, batches) = place.read().unwrap();
        let [first, last]: [RowBatch; 2] = batches.collect::<Vec<_>>().try_into().unwrap();
        let lock = place.lock().unwrap();
        let lengths = |measured: &Measured| lengths(&encoder, measured);
        let output =
            Output { place: &place, lock: &lock, file: &file, lengths: &lengths, always: false };
        let write = || {
            let (sender, receiver) = sync_channel(2);
            sender.send(CacheBatch::Kept(Box::new(first.clone()))).unwrap();
            sender.send(CacheBatch::New(vec![last.entry(0)])).unwrap();
            drop(sender);
            output.write(receiver, &footer)
        };
        let num_rows = || place.read().unwrap().1.map(|rows| rows.len()).sum::<usize>();
        assert_eq!(write().unwrap().len(), BATCH_ROWS + 1);
        assert_eq!(num_rows(), BATCH_ROWS + 1);
        fs::remove_file(&place.path).unwrap();
        assert!(matches!(write(), Err(CacheError::Lost { .. })));
        assert!(!place.path.exists());
    }

    #[test]
    fn the_rows_of_a_damaged_cache_are_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let (encoder, caches) = (encoder(), folder.path().join("cache"));
        let file = rows(folder.path(), 10);
        LengthCache::update(&file, &encoder, &caches, &|_| ()).unwrap();
        let path = CachePath::of(&file, &encoder, &caches).path;
        let whole = fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(211).chain([whole.len() - 30, whole.len() - 8]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 16;
            File::create(&path).unwrap().write_all(&bytes).unwrap();
            assert!(LengthCache::complete(&file, &encoder, &caches).is_none(), "byte {at}");
            let (cache, work) = LengthCache::update(&file, &encoder, &caches, &|_| ()).unwrap();
            assert_eq!((cache.len(), work.measured), (10, 10), "byte {at}");
            assert!(fs::read(&path).unwrap() == whole, "byte {at}");
        }
    }

    #[test]
    fn a_cache_that_may_not_be_written_is_used_as_long_as_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let (encoder, caches) = (encoder(), folder.path().join("cache"));
        let file = rows(folder.path(), 10);
        LengthCache::update(&file, &encoder, &caches, &|_| ()).unwrap();
        let run = |file: &RowFile, image: &ImageConfig| {
            let model =
                concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/models/small-tied");
            let encoder = Encoder::from_folder(Path::new(model), image).unwrap();
            let place = CachePath::of(file, &encoder, &caches);
            let lock = Lock::ReadOnly(io::ErrorKind::ReadOnlyFilesystem);
            let (place, lock, encoder) = (&place, &lock, &encoder);
            update(place, lock, file, encoder, &|_| ())
        };
        for max_tokens in [None, std::num::NonZeroU32::new(9)] {
            let image = ImageConfig { min_pixels: None, max_pixels: None, max_tokens };
            let before = fs::metadata(caches.join(".")).unwrap().modified().unwrap();
            let (cache, work) = run(&file, &image).unwrap();
            assert_eq!((cache.len(), work), (10, CacheWork { measured: 0, reused: 10 }));
            assert_eq!(fs::metadata(caches.join(".")).unwrap().modified().unwrap(), before);
        }
        let image = ImageConfig { min_pixels: None, max_pixels: None, max_tokens: None };
        let more = run(&rows(folder.path(), 11), &image);
        assert!(matches!(more, Err(CacheError::Write { .. })), "{more:?}");
    }
}
