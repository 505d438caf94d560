//! Rows whose lengths come from caches: what plans a run without reading its rows again.

use super::reader::JsonlRows;
use crate::batch::{EncodedSample, SampleId};
use crate::data::{
    CacheError, CacheWork, Length, LengthCache, LoaderOptions, Rejection, Row, RowReader,
};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of a run with the length cache of each of its files.
pub struct CachedRows {
    rows: Arc<JsonlRows>,
    caches: Vec<LengthCache>,
}

/// What becomes of the rows of one file under today's limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LengthSummary {
    /// The data file.
    pub file: PathBuf,
    /// Its rows.
    pub rows: u64,
    /// Those that train.
    pub usable: u64,
    /// Those among them that are cut to `max_length`.
    pub truncated: u64,
    /// Text tokens that cutting drops.
    pub tokens_cut: u64,
    /// Tokens of the usable rows, visual ones included.
    pub tokens: u64,
    /// Length of the longest usable row.
    pub longest: usize,
    /// Rows that do not train, by reason.
    pub rejected: BTreeMap<String, u64>,
}

impl CachedRows {
    /// Brings the caches in `folder` up to date: on all cores, and only what is not known yet. `progress` is
    /// told how many rows of all files are done.
    pub fn update(
        rows: Arc<JsonlRows>,
        folder: &Path,
        progress: &dyn Fn(u64),
    ) -> Result<(Self, CacheWork), CacheError> {
        let mut caches = Vec::new();
        let (mut before, mut work) = (0, CacheWork::default());
        for file in rows.files() {
            let progress = |done| progress(before + done);
            let (cache, more) = LengthCache::update(file, rows.encoder(), folder, &progress)?;
            caches.push(cache);
            before += file.len() as u64;
            work = CacheWork {
                measured: work.measured + more.measured,
                reused: work.reused + more.reused,
            };
        }
        Ok((Self { rows, caches }, work))
    }

    /// The cache of each file, in config order.
    pub fn caches(&self) -> &[LengthCache] {
        &self.caches
    }

    /// What becomes of the rows of each file.
    pub fn summaries(&self, options: &LoaderOptions) -> Vec<LengthSummary> {
        let files = self.rows.files().iter().enumerate();
        let summary = |(dataset, file): (usize, &crate::data::JsonlFile)| {
            let row = |row| Row { dataset: dataset as u32, row };
            let rows = (0..file.len() as u32).into_par_iter();
            let added =
                rows.fold(LengthSummary::default, |sum, at| self.add(sum, row(at), options));
            let summary = added.reduce(LengthSummary::default, LengthSummary::join);
            LengthSummary { file: file.path().to_owned(), ..summary }
        };
        files.map(summary).collect()
    }

    fn add(&self, mut sum: LengthSummary, row: Row, options: &LoaderOptions) -> LengthSummary {
        sum.rows += 1;
        let length = self.length(row).and_then(|length| {
            options.admit(length, || self.id(row))?;
            Ok(length.tokens)
        });
        match length {
            Ok(tokens) => {
                let whole = self.caches[row.dataset as usize]
                    .outline(row.row as usize, self.rows.encoder())
                    .map_or(tokens, |outline| outline.num_tokens());
                sum.usable += 1;
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
            rows: self.rows + other.rows,
            usable: self.usable + other.usable,
            truncated: self.truncated + other.truncated,
            tokens_cut: self.tokens_cut + other.tokens_cut,
            tokens: self.tokens + other.tokens,
            longest: self.longest.max(other.longest),
            rejected: self.rejected,
        }
    }
}

impl RowReader for CachedRows {
    fn read(&self, row: Row) -> Result<EncodedSample, Rejection> {
        self.rows.read(row)
    }

    fn length(&self, row: Row) -> Result<Length, Rejection> {
        let (cache, encoder) = (&self.caches[row.dataset as usize], self.rows.encoder());
        cache.length(row.row as usize, encoder, self.rows.cut_of_rows(), || self.id(row))
    }

    fn id(&self, row: Row) -> SampleId {
        self.rows.id(row)
    }
}
