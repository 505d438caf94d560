//! Ranks measure the rows of a data set together: each writes the rows of its part to a file of its
//! own, from which the next update completes the cache.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::build::{num_threads, threads};
use super::file::{BATCH_ROWS, CacheError, LEFT_BEHIND, Lock, Place};
use super::measure::{Batch, Measurer, lengths};
use super::rows::Rows;
use super::table::LengthCache;
use super::writer::{SUMS, Writer, read_stream, sums_of};
use crate::encode::Encoder;
use crate::encode::measure::Measured;
use crate::source::RowFile;
use ranks::Rank;

/// Suffix of the files of ranks, before their number.
const OF_RANK: &str = ".rank-";

impl Place {
    /// The complete batches of killed processes, the newer ones last.
    pub(super) fn read_partial(&self, lock: &Lock) -> Vec<Rows> {
        let [partial, temporary] = LEFT_BEHIND.map(|ending| self.sibling(ending));
        let [mut found, newer] = [&partial, &temporary].map(|path| read_stream(path));
        let num_rows = |batches: &[Rows]| batches.iter().map(Rows::len).sum::<usize>();
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
    pub(super) fn left_behind(&self) -> Vec<Rows> {
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
    pub(super) fn of_ranks(&self) -> Vec<PathBuf> {
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

impl Writer {
    /// Writes the rows that rank `rank` has measured to a file of its own, which needs no lock.
    pub(super) fn of_rank(place: &Place, rank: usize) -> Result<Self, CacheError> {
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
        let place = Place::of(file, encoder, folder);
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
        let place = Place::of(file, encoder, folder);
        let (footer, old) = place.read().unzip();
        if footer.is_some_and(|footer| footer.fits(file)) {
            return Ok(());
        }
        let threads = threads(num_threads(), &place)?;
        let known = old.into_iter().flatten().chain(place.left_behind()).collect();
        let measurer = Measurer::new(file, encoder, known, false, &|| true, usize::MAX);
        let own = rank.own_part(file.len());
        let lengths = |measured: &Measured| lengths(encoder, measured);
        let mut writer = Writer::of_rank(&place, rank.rank)?;
        for first in own.clone().step_by(BATCH_ROWS) {
            let rows = first..(first + BATCH_ROWS).min(own.end);
            let done = threads.install(|| measurer.look_up_rows(rows.clone()));
            if let Batch::New(entries) = done.batch {
                let format = |source| CacheError::Format { path: place.path.clone(), source };
                writer.write(&Rows::from_entries(&entries, lengths).map_err(format)?)?;
            }
            if done.rows < rows.len() {
                break; // the error follows
            }
            progress((rows.end - own.start) as u64);
        }
        measurer.exhausted.into_inner().map_or(Ok(()), Err)
    }
}
