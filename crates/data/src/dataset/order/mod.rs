//! The order of the rows of an epoch, and the mixture of data sets by share. Both depend on seed,
//! epoch and data only; the data set of the next row is chosen without randomness.
//!
//! In every prefix of an epoch, the number of rows of each data set differs from its share by less
//! than one row. All computations use integers: a share is a number of units of the sum.

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use settings::Choice;
use sha2::{Digest, Sha256};

use crate::dataset::corpus::windows::Windows;
use crate::row::SampleIndex;

/// Whether the rows of an epoch are shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// Data sets in the order of the config, rows in the order of the file.
    File,
    /// A random permutation of all rows, a new one each epoch.
    Shuffled,
}

/// The size and the weight of a data set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatasetShare {
    /// Number of rows of the data set.
    pub rows: u64,
    /// Passes per epoch. The fractional part is a random subset of the rows.
    pub weight: f64,
}

/// The reason why the order of the rows cannot be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum OrderError {
    #[error("data set {dataset}: weight is `{weight}`, expected a finite number above 0")]
    #[fault(hint = "to leave a data set out, remove its entry")]
    Weight { dataset: usize, weight: f64 },
    #[error("an epoch has {rows} rows up to data set {dataset}, expected at most {}", u32::MAX)]
    #[fault(hint = "lower its weight, or split the data over several runs")]
    TooManyRows { dataset: usize, rows: f64 },
}

/// The order of every epoch. Positions in an epoch go from 0 to [`Order::epoch_len`].
#[derive(Debug, Clone)]
pub struct Order {
    datasets: Vec<DatasetPasses>,
    mixture: Mix,
    sequence: RowOrder,
    seed: u64,
    fingerprint: [u8; 32],
}

#[derive(Debug, Clone, Copy)]
struct DatasetPasses {
    rows: u32,
    weight: f64,
    /// Set for a corpus, whose rows are the first tokens of windows.
    windows: Option<Windows>,
}

#[derive(Debug, Clone)]
enum Mix {
    Repeat,
    Share {
        shares: Shares,
        epoch_rows: u64,
        /// Number of rows of each data set in an epoch.
        counts: Vec<u64>,
    },
}

/// How often an epoch uses all rows of a data set, and the number of further rows, drawn each
/// epoch.
fn passes(weight: f64, rows: u32) -> (u32, u32) {
    // An epoch has at least one row of each data set.
    let fewest = if weight < 1.0 && rows > 0 { 1.0 } else { 0.0 };
    let extra_rows = (weight.fract() * f64::from(rows)).round().max(fewest);
    (if rows == 0 { 0 } else { weight.floor() as u32 }, extra_rows as u32)
}

impl Order {
    /// Creates an order from the sizes of the data sets and the fingerprint of their content. The
    /// size of a corpus of windows is [`Windows::fewest`]; see [`Order::with_windows`].
    pub fn new(
        datasets: &[DatasetShare],
        row_order: RowOrder,
        seed: u64,
        fingerprint: [u8; 32],
    ) -> Result<Self, OrderError> {
        let mut sets = Vec::with_capacity(datasets.len());
        for (dataset, DatasetShare { rows, weight }) in datasets.iter().copied().enumerate() {
            if !(weight.is_finite() && weight > 0.0) {
                return Err(OrderError::Weight { dataset, weight });
            }
            let Ok(rows) = u32::try_from(rows) else {
                return Err(OrderError::TooManyRows { dataset, rows: rows as f64 });
            };
            sets.push(DatasetPasses { rows, weight, windows: None });
        }
        let order =
            Self { datasets: sets, mixture: Mix::Repeat, sequence: row_order, seed, fingerprint };
        order.check_size()?;
        Ok(order)
    }

    /// Sets the rows of `dataset` to windows of a corpus, which have another offset in each pass.
    pub fn with_windows(mut self, dataset: usize, windows: Windows) -> Result<Self, OrderError> {
        self.datasets[dataset].windows = Some(windows);
        self.check_size()?;
        Ok(self)
    }

    /// Sets the meaning of the weights. Call it after [`Order::with_windows`].
    pub fn mixed(
        mut self,
        mixture: Mixture,
        stopping: StoppingStrategy,
    ) -> Result<Self, OrderError> {
        let fewest: Vec<u64> = self.datasets.iter().map(DatasetPasses::fewest).collect();
        if mixture == Mixture::Repeat || fewest.contains(&0) {
            return Ok(self);
        }
        let weights: Vec<f64> = self.datasets.iter().map(|set| set.weight).collect();
        let shares = Shares::new(&weights);
        let epoch_rows = shares.epoch_rows(&fewest, stopping);
        if epoch_rows > u128::from(u32::MAX) {
            let least = (0..weights.len()).min_by(|a, b| weights[*a].total_cmp(&weights[*b]));
            let dataset = least.unwrap_or(0);
            return Err(OrderError::TooManyRows { dataset, rows: epoch_rows as f64 });
        }
        let mut counts = vec![0; weights.len()];
        for dataset in shares.interleave().take(epoch_rows as usize) {
            counts[dataset] += 1;
        }
        self.mixture = Mix::Share { shares, epoch_rows: epoch_rows as u64, counts };
        Ok(self)
    }

    fn check_size(&self) -> Result<(), OrderError> {
        let mut total = 0.0;
        for (dataset, set) in self.datasets.iter().enumerate() {
            let rows = set.windows.map_or(set.rows, |windows| windows.count(0));
            let fewest = if set.weight < 1.0 && rows > 0 { 1.0 } else { 0.0 };
            let extra = (set.weight.fract() * f64::from(rows)).round().max(fewest);
            total += set.weight.floor() * f64::from(rows) + extra;
            if total > f64::from(u32::MAX) {
                return Err(OrderError::TooManyRows { dataset, rows: total });
            }
        }
        Ok(())
    }

    /// Number of rows of the first epoch. Other epochs differ if offsets change the windows of a
    /// corpus.
    pub fn len(&self) -> u64 {
        self.epoch_len(0)
    }

    /// Number of rows of an epoch.
    pub fn epoch_len(&self, epoch: u64) -> u64 {
        match &self.mixture {
            Mix::Share { epoch_rows, .. } => *epoch_rows,
            Mix::Repeat => (0u32..)
                .zip(&self.datasets)
                .map(|(dataset, set)| {
                    let passes = set.passes_of(epoch);
                    let rows = passes.clone().map(|pass| self.pass_len(dataset, pass));
                    let extra = passes.end;
                    let fraction = passes_extra(set, self.pass_len(dataset, extra));
                    rows.sum::<u64>() + u64::from(fraction)
                })
                .sum(),
        }
    }

    /// [`Order::epoch_len`] as an owned function.
    pub(crate) fn epoch_sizes(&self) -> Box<dyn Fn(u64) -> u64 + Send> {
        let order = self.clone();
        Box::new(move |epoch| order.epoch_len(epoch))
    }

    /// True if an epoch has no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of rows of each data set, regardless of its weight.
    pub fn dataset_rows(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.datasets.iter().map(|dataset| dataset.rows)
    }

    /// The rows of an epoch in order.
    pub fn epoch(&self, epoch: u64) -> Vec<SampleIndex> {
        let mut order = Vec::with_capacity(self.epoch_len(epoch) as usize);
        if let Mix::Share { shares, epoch_rows, counts } = &self.mixture {
            let rows = (0u32..).zip(counts).map(|(set, count)| self.later_rows(set, epoch * count));
            let mut rows: Vec<_> = rows.collect();
            let sets = shares.interleave().take(*epoch_rows as usize);
            order.extend(sets.map(|set| rows[set].next().expect("passes have no end")));
            return order;
        }
        for (dataset, set) in (0u32..).zip(&self.datasets) {
            let passes = set.passes_of(epoch);
            for pass in passes.clone() {
                order.extend(self.pass(dataset, pass));
            }
            let rows = self.pass_len(dataset, passes.end) as u32;
            let extra_rows = passes_extra(set, u64::from(rows));
            if extra_rows > 0 {
                let mut rng = self.rng(epoch, u64::from(dataset));
                let all: Vec<SampleIndex> = self.pass(dataset, passes.end).collect();
                let subset = subset(rows, extra_rows, &mut rng);
                order.extend(subset.into_iter().map(|index| all[index as usize]));
            }
        }
        let is_ordered = |set: &DatasetPasses| set.windows.is_some_and(|w| w.are_ordered());
        if self.sequence == RowOrder::Shuffled && !self.datasets.iter().any(is_ordered) {
            shuffle(&mut order, &mut self.rng(epoch, u64::MAX)); // no data set has this index
        }
        order
    }

    /// Offset of the windows in pass `pass` of a run over a data set.
    fn offset(&self, dataset: u32, pass: u64) -> u32 {
        let offsets = self.datasets[dataset as usize].windows.map_or(1, |w| w.num_offsets());
        match offsets {
            1 => 0,
            _ => below(&mut self.pass_rng(dataset, pass, 0), u64::from(offsets)) as u32,
        }
    }

    fn pass_len(&self, dataset: u32, pass: u64) -> u64 {
        let set = &self.datasets[dataset as usize];
        u64::from(set.windows.map_or(set.rows, |w| w.count(self.offset(dataset, pass))))
    }

    /// Rows of a pass over a data set, in the order of the file.
    fn pass(&self, dataset: u32, pass: u64) -> Box<dyn Iterator<Item = SampleIndex>> {
        let set = &self.datasets[dataset as usize];
        match set.windows {
            None => Box::new((0..set.rows).map(move |row| SampleIndex { dataset, row })),
            Some(windows) => {
                let starts = windows.starts(self.offset(dataset, pass));
                Box::new(starts.map(move |row| SampleIndex { dataset, row }))
            }
        }
    }

    /// Returns an endless iterator over the rows of a data set, pass after pass, without the first
    /// `skipped` rows.
    fn later_rows(&self, dataset: u32, skipped: u64) -> impl Iterator<Item = SampleIndex> + '_ {
        let (mut first, mut left) = (0, skipped);
        if self.datasets[dataset as usize].windows.is_none() {
            let rows = self.pass_len(dataset, 0);
            (first, left) = (skipped / rows, skipped % rows);
        }
        while left >= self.pass_len(dataset, first) {
            left -= self.pass_len(dataset, first);
            first += 1;
        }
        let is_ordered = self.datasets[dataset as usize].windows.is_some_and(|w| w.are_ordered());
        let passes = (first..).flat_map(move |pass| {
            let mut rows: Vec<SampleIndex> = self.pass(dataset, pass).collect();
            if self.sequence == RowOrder::Shuffled && !is_ordered {
                shuffle(&mut rows, &mut self.pass_rng(dataset, pass, 1));
            }
            rows
        });
        passes.skip(left as usize)
    }

    fn pass_rng(&self, dataset: u32, pass: u64, purpose: u64) -> ChaCha8Rng {
        self.rng_of(&[self.seed, pass, u64::from(dataset), purpose])
    }

    /// Returns a random number generator for `epoch` that is independent for each `purpose`.
    fn rng(&self, epoch: u64, purpose: u64) -> ChaCha8Rng {
        self.rng_of(&[self.seed, epoch, purpose])
    }

    fn rng_of(&self, numbers: &[u64]) -> ChaCha8Rng {
        let mut hash = Sha256::new();
        for number in numbers {
            hash.update(number.to_le_bytes());
        }
        hash.update(self.fingerprint);
        ChaCha8Rng::from_seed(hash.finalize().into())
    }
}

impl DatasetPasses {
    /// Indices of the whole passes of an epoch. The next index is the partial pass.
    fn passes_of(&self, epoch: u64) -> Range<u64> {
        let whole = passes(self.weight, self.rows).0;
        let first = epoch * (u64::from(whole) + 1);
        first..first + u64::from(whole)
    }

    /// Number of rows of the shortest pass.
    fn fewest(&self) -> u64 {
        u64::from(self.windows.map_or(self.rows, |windows| windows.fewest()))
    }
}

/// Number of rows of the partial pass, if a whole pass has `rows` rows.
fn passes_extra(set: &DatasetPasses, rows: u64) -> u32 {
    passes(set.weight, rows as u32).1
}

fn shuffle(rows: &mut [SampleIndex], rng: &mut ChaCha8Rng) {
    for last in (1..rows.len()).rev() {
        rows.swap(last, below(rng, last as u64 + 1) as usize);
    }
}

/// A random subset of `0..rows` with `count` elements, ascending.
fn subset(rows: u32, count: u32, rng: &mut ChaCha8Rng) -> Vec<u32> {
    let mut all: Vec<u32> = (0..rows).collect();
    for chosen in 0..count as usize {
        let rest = all.len() - chosen;
        all.swap(chosen, chosen + below(rng, rest as u64) as usize);
    }
    all.truncate(count as usize);
    all.sort_unstable();
    all
}

/// Uniform in `0..bound` up to a bias of `bound / 2^64`. It is not taken from a crate, because the
/// order must not change with the version of a dependency.
fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(bound)) >> 64) as u64
}

/// The meaning of the weights of data sets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Mixture {
    /// A weight is how often an epoch uses each row of the data set.
    #[default]
    Repeat,
    /// A weight is the data set's share of the rows of an epoch.
    Share,
}

/// When an epoch of a mixture by share ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum StoppingStrategy {
    /// When each row has been used at least once. Smaller data sets are repeated until then.
    #[default]
    AllExhausted,
    /// Before any data set is repeated.
    FirstExhausted,
}

/// Approximate sum of the units of all shares. It is so large that rounding to units does not
/// change an epoch.
const TOTAL: f64 = (1u64 << 32) as f64;

/// Shares in integer units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shares {
    units: Vec<u64>, // at least 1 each
    total: u64,
}

impl Shares {
    /// Computes the shares from weights, which must be finite and positive.
    pub(crate) fn new(weights: &[f64]) -> Self {
        let largest = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        // Division by the largest weight first, because the sum may be infinite.
        let sum: f64 = weights.iter().map(|weight| weight / largest).sum();
        let units = |weight: &f64| ((weight / largest / sum * TOTAL).round() as u64).max(1);
        let units: Vec<u64> = weights.iter().map(units).collect();
        Self { total: units.iter().sum(), units }
    }

    /// Number of rows of an epoch over data sets with these numbers of rows, each at least 1.
    pub(crate) fn epoch_rows(&self, rows: &[u64], stopping: StoppingStrategy) -> u128 {
        let total = u128::from(self.total);
        let pairs = rows.iter().zip(&self.units);
        let pairs = pairs.map(|(rows, units)| (u128::from(*rows) * total, u128::from(*units)));
        let rows = match stopping {
            StoppingStrategy::AllExhausted => pairs.map(|(rows, units)| rows.div_ceil(units)).max(),
            StoppingStrategy::FirstExhausted => pairs.map(|(rows, units)| rows / units).min(),
        };
        rows.unwrap_or(0).max(1)
    }

    /// Returns an endless iterator over the data set of each row.
    pub(crate) fn interleave(&self) -> Interleave {
        let jobs = self.units.iter().map(|units| Job::new(*units, self.total)).collect();
        Interleave { jobs, total: self.total, slot: 0 }
    }
}

/// The next row of a data set. If it comes before `release`, the data set is a row ahead of its
/// share; if it comes after `deadline`, the data set is a row behind.
#[derive(Debug, Clone)]
struct Job {
    units: u64,
    taken: u64,
    release: u128,
    deadline: u128,
}

impl Job {
    fn new(units: u64, total: u64) -> Self {
        let mut job = Self { units, taken: 0, release: 0, deadline: 0 };
        job.set(total);
        job
    }

    fn set(&mut self, total: u64) {
        let (units, total) = (u128::from(self.units), u128::from(total));
        self.release = u128::from(self.taken) * total / units;
        self.deadline = (u128::from(self.taken + 1) * total).div_ceil(units);
    }
}

/// Iterator over the data set of each slot: the released row with the earliest deadline is next.
///
/// All data sets together have one row per slot, so a fractional schedule exists. Earliest deadline
/// first is optimal for unit jobs, so it meets every deadline.
#[derive(Debug, Clone)]
pub(crate) struct Interleave {
    jobs: Vec<Job>,
    total: u64,
    slot: u128,
}

impl Iterator for Interleave {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let ready = self.jobs.iter().enumerate().filter(|(_, job)| job.release <= self.slot);
        let next = ready.min_by_key(|(_, job)| job.deadline)?.0;
        self.jobs[next].taken += 1;
        self.jobs[next].set(self.total);
        self.slot += 1;
        Some(next)
    }
}
