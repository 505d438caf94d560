//! Ranks measure the rows of a data set together: each writes the rows of its part to a file of its
//! own, from which the next update completes the cache.

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::build::{num_threads, threads};
use super::file::{BATCH_ROWS, CacheError, Place, Writer};
use super::measure::{Batch, Known, Measurer, lengths};
use super::rows::Rows;
use super::stamps::Stamps;
use super::table::LengthCache;
use crate::data::encode::Encoder;
use crate::data::encode::measure::Measured;
use crate::data::source::RowFile;
use crate::dist::Rank;

impl LengthCache {
    /// Measures the rows of `rank`'s part of `file`, unless `folder` has a cache of the whole file.
    /// When all ranks are done, [`Self::update`] reuses their rows. `progress` receives the number of
    /// rows done.
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
        let threads = threads(num_threads());
        let threads =
            threads.map_err(std::io::Error::other).map_err(CacheError::write(&place.path))?;
        let known = old.into_iter().flatten().chain(place.left_behind()).collect();
        let measurer = Measurer {
            file,
            encoder,
            stamps: Stamps::new(file.image_root()),
            same_limits: false,
            known: Known::new(known),
            should_go_on: &|| true,
            left: AtomicUsize::new(usize::MAX),
            is_stopped: AtomicBool::new(false),
            exhausted: OnceLock::new(),
        };
        let own = rank.own_part(file.len());
        let lengths = |measured: &Measured| lengths(encoder, measured);
        let mut writer = Writer::of_rank(&place, rank.rank)?;
        for first in own.clone().step_by(BATCH_ROWS) {
            let rows = first..(first + BATCH_ROWS).min(own.end);
            let done = threads.install(|| measurer.look_up_rows(rows.clone()));
            if let Batch::New(entries) = done.batch {
                let format = |source| CacheError::Format { path: place.path.clone(), source };
                writer.write(&Rows::from_entries(&entries, &lengths).map_err(format)?)?;
            }
            if done.rows < rows.len() {
                break; // the error follows
            }
            progress((rows.end - own.start) as u64);
        }
        measurer.exhausted.into_inner().map_or(Ok(()), Err)
    }
}
