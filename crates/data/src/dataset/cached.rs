//! Rows whose lengths come from length caches.

use super::{DataSet, DatasetRows};
use crate::{
    CacheError, CacheWork, Length, LengthCache, LoaderOptions, MediaLook, MediaStamps, Rejection,
    RowReader, SampleIndex, TokenCounts,
};
use batch::{EncodedSample, SampleId};
use ranks::Rank;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of a run, with the length cache of each file of chats.
pub struct CachedRows {
    rows: Arc<DatasetRows>,
    caches: Vec<Option<LengthCache>>, // `None` for a corpus: its lengths follow from its tokens
}

/// Counts of the rows of one file under the limits of the config.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LengthSummary {
    /// The data file.
    pub file: PathBuf,
    /// Its cache file.
    pub cache: PathBuf,
    /// Number of rows.
    pub rows: u64,
    /// Number of usable rows.
    pub usable: u64,
    /// Number of usable rows that are truncated to `max_length`.
    pub truncated: u64,
    /// Number of text tokens that truncation removes.
    pub tokens_cut: u64,
    /// Number of truncated rows that lose supervised tokens. Rows whose media tokens are supervised
    /// are not counted.
    pub answers_cut: u64,
    /// Number of tokens of the usable rows, visual ones included.
    pub tokens: u64,
    /// Length of the longest usable row.
    pub longest: usize,
    /// Number of rejected rows, by reason.
    pub rejected: BTreeMap<String, u64>,
}

impl CachedRows {
    /// Updates the caches in `folder` on all cores. Rows that a cache already has are not measured
    /// again. `progress` receives the number of finished rows of all files.
    pub fn update(
        rows: Arc<DatasetRows>,
        folder: &Path,
        progress: &dyn Fn(u64),
    ) -> Result<(Self, CacheWork), CacheError> {
        let mut caches = Vec::new();
        let (mut before, mut work) = (0, CacheWork::default());
        for set in rows.sets() {
            let DataSet::Chats(chats) = set else {
                caches.push(None);
                continue;
            };
            let file = chats.file();
            let progress = |done| progress(before + done);
            let (cache, more) = LengthCache::update(file, rows.encoder(), folder, &progress)?;
            caches.push(Some(cache));
            before += file.len() as u64;
            work.measured += more.measured;
            work.reused += more.reused;
        }
        Ok((Self { rows, caches }, work))
    }

    /// The rows with the lengths of the caches in `folder`, without a check of images; `None` if a
    /// file has no complete cache under the current limits.
    pub fn complete(rows: Arc<DatasetRows>, folder: &Path) -> Option<Self> {
        let of_set = |set: &DataSet| match set {
            DataSet::Chats(chats) => {
                LengthCache::complete(chats.file(), rows.encoder(), folder).map(Some)
            }
            DataSet::Corpus(_) => Some(None),
        };
        let caches = rows.sets().iter().map(of_set).collect::<Option<_>>()?;
        Some(Self { rows, caches })
    }

    /// The media files of all rows; `None` if a file of chats has no complete cache in `folder`.
    /// Those that `look` selects are read, and the others taken from the caches. Fails if the
    /// process or a disk failed.
    pub fn media(
        rows: &DatasetRows,
        folder: &Path,
        look: MediaLook,
    ) -> Result<Option<MediaStamps>, CacheError> {
        let mut media = MediaStamps::default();
        for set in rows.sets() {
            let DataSet::Chats(chats) = set else { continue };
            let (file, encoder) = (chats.file(), rows.encoder());
            if LengthCache::add_media(file, encoder, folder, look, &mut media)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(media))
    }

    /// Measures the rows of one rank's part of each file, so that [`CachedRows::update`] finds the
    /// rows of all ranks. `progress` receives the number of finished rows of this rank.
    pub fn measure_part(
        rows: &DatasetRows,
        folder: &Path,
        rank: Rank,
        progress: &dyn Fn(u64),
    ) -> Result<(), CacheError> {
        let mut before = 0;
        for set in rows.sets() {
            let DataSet::Chats(chats) = set else { continue };
            let file = chats.file();
            let progress = |done| progress(before + done);
            LengthCache::measure_part(file, rows.encoder(), folder, rank, &progress)?;
            before += rank.own_part(file.len()).len() as u64;
        }
        Ok(())
    }

    /// The summary of each file of chats, in config order.
    pub fn summaries(&self, options: &LoaderOptions) -> Vec<LengthSummary> {
        let sets = (0u32..).zip(self.rows.sets().iter().zip(&self.caches));
        let summary = |(dataset, (set, cache)): (u32, (&DataSet, &Option<LengthCache>))| {
            let cache = cache.as_ref()?;
            let rows = (0..set.len() as u32).into_par_iter();
            let add = |sum, row| self.add(sum, SampleIndex { dataset, row }, cache, options);
            let summary = rows.fold(LengthSummary::default, add);
            let summary = summary.reduce(LengthSummary::default, LengthSummary::join);
            let (file, cache) = (set.path().to_owned(), cache.path().to_owned());
            Some(LengthSummary { file, cache, ..summary })
        };
        sets.filter_map(summary).collect()
    }

    fn add(
        &self,
        mut sum: LengthSummary,
        row: SampleIndex,
        cache: &LengthCache,
        options: &LoaderOptions,
    ) -> LengthSummary {
        sum.rows += 1;
        let length = self.length(row).and_then(|length| {
            options.check_length(length, || self.id(row))?;
            Ok(length.tokens)
        });
        match length {
            Ok(tokens) => {
                let counts = cache.token_counts(self.rows.file_row(row), self.rows.encoder());
                let whole = counts.as_ref().map_or(tokens, TokenCounts::num_tokens);
                let cut = self.rows.truncation_rule();
                sum.usable += 1;
                sum.answers_cut +=
                    u64::from(counts.is_some_and(|counts| counts.loses_targets(cut)));
                sum.truncated += u64::from(whole > tokens);
                sum.tokens_cut += (whole - tokens) as u64;
                sum.tokens += tokens as u64;
                sum.longest = sum.longest.max(tokens);
            }
            Err(rejection) => *sum.rejected.entry(rejection.reason).or_default() += 1,
        }
        sum
    }
}

impl LengthSummary {
    fn join(mut self, other: Self) -> Self {
        for (reason, count) in other.rejected {
            *self.rejected.entry(reason).or_default() += count;
        }
        Self {
            file: self.file,
            cache: self.cache,
            rows: self.rows + other.rows,
            usable: self.usable + other.usable,
            truncated: self.truncated + other.truncated,
            tokens_cut: self.tokens_cut + other.tokens_cut,
            answers_cut: self.answers_cut + other.answers_cut,
            tokens: self.tokens + other.tokens,
            longest: self.longest.max(other.longest),
            rejected: self.rejected,
        }
    }
}

impl RowReader for CachedRows {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        self.rows.read(row)
    }

    fn read_of_length(&self, row: SampleIndex, length: Length) -> Result<EncodedSample, Rejection> {
        self.rows.read_of_length(row, length)
    }

    /// Does not read a row that has a cached length.
    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        match &self.caches[row.dataset as usize] {
            Some(cache) => {
                let (encoder, cut) = (self.rows.encoder(), self.rows.truncation_rule());
                cache.length(self.rows.file_row(row), encoder, cut, || self.id(row))
            }
            None => self.rows.length(row),
        }
    }

    fn uniform_length(&self, dataset: u32) -> Option<Length> {
        self.rows.uniform_length(dataset)
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        self.rows.id(row)
    }
}
