//! The order in which an epoch visits the rows: a function of seed, epoch and data alone.

use std::fmt::Debug;
use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sha2::{Digest, Sha256};

use crate::data::dataset::corpus::Windows;
use crate::data::dataset::mixture::{Mixture, Shares, StoppingStrategy};
use crate::data::row::Row;

/// Whether the rows of an epoch are shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// Data sets in the order of the config, rows in that of the file.
    File,
    /// A permutation of all of them, another one each epoch.
    Shuffled,
}

/// How much of a data set an epoch sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatasetShare {
    /// Rows of the data set.
    pub rows: u64,
    /// Passes an epoch: the whole part of it all rows, the fraction a seeded subset.
    pub weight: f64,
}

/// Data sets from which no order can be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OrderError {
    /// A weight that is no positive number.
    #[error("data set {dataset}: weight is `{weight}`, expected a finite number above 0")]
    Weight {
        /// Index of the data set.
        dataset: usize,
        /// Its weight.
        weight: f64,
    },
    /// More rows than an index holds.
    #[error(
        "data set {dataset}: an epoch would see {rows} rows up to it, at most {} fit",
        u32::MAX
    )]
    TooManyRows {
        /// Index of the data set that passes the limit.
        dataset: usize,
        /// Rows an epoch of the data sets up to this one.
        rows: f64,
    },
}

impl OrderError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Weight { .. } => "to leave a data set out, remove its entry",
            Self::TooManyRows { .. } => "lower its weight, or split the data over several runs",
        }
    }
}

/// The visiting order of every epoch. Positions in an epoch count from 0 to [`Order::epoch_len`].
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
    /// Of a corpus, whose rows are first tokens of windows.
    windows: Option<Windows>,
}

#[derive(Debug, Clone)]
enum Mix {
    Repeat,
    Share {
        shares: Shares,
        epoch_rows: u64,
        /// Rows of each data set in an epoch.
        counts: Vec<u64>,
    },
}

/// Passes of the data sets in an epoch: whole ones, and rows of another, drawn anew each epoch.
fn passes(weight: f64, rows: u32) -> (u32, u32) {
    // A data set that is listed is seen, however small its share.
    let fewest = if weight < 1.0 && rows > 0 { 1.0 } else { 0.0 };
    let extra_rows = (weight.fract() * f64::from(rows)).round().max(fewest);
    (if rows == 0 { 0 } else { weight.floor() as u32 }, extra_rows as u32)
}

impl Order {
    /// From the data sets' sizes and the fingerprint of their content. For a corpus of windows the size
    /// is [`Windows::fewest`]; see [`Order::with_windows`].
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

    /// The rows of `dataset` are the windows of a corpus, at another offset in each pass.
    pub fn with_windows(mut self, dataset: usize, windows: Windows) -> Result<Self, OrderError> {
        self.datasets[dataset].windows = Some(windows);
        self.check_size()?;
        Ok(self)
    }

    /// The weights are what `mixture` says. After [`Order::with_windows`].
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

    /// Rows of the first epoch; others differ by what offsets leave of a corpus.
    pub fn len(&self) -> u64 {
        self.epoch_len(0)
    }

    /// Rows of an epoch.
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

    /// [`Order::epoch_len`] as a function of its own.
    pub(in crate::data) fn epoch_sizes(&self) -> Box<dyn Fn(u64) -> u64 + Send> {
        let order = self.clone();
        Box::new(move |epoch| order.epoch_len(epoch))
    }

    /// True if an epoch has no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows of each data set, whatever its weight.
    pub fn dataset_rows(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.datasets.iter().map(|dataset| dataset.rows)
    }

    /// The rows of an epoch, in the order in which it visits them; [`Order::epoch_len`] of them.
    pub fn epoch(&self, epoch: u64) -> Vec<Row> {
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
                let all: Vec<Row> = self.pass(dataset, passes.end).collect();
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

    /// Offset of a pass over a data set, counted since the run began.
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
    fn pass(&self, dataset: u32, pass: u64) -> Box<dyn Iterator<Item = Row>> {
        let set = &self.datasets[dataset as usize];
        match set.windows {
            None => Box::new((0..set.rows).map(move |row| Row { dataset, row })),
            Some(windows) => {
                let starts = windows.starts(self.offset(dataset, pass));
                Box::new(starts.map(move |row| Row { dataset, row }))
            }
        }
    }

    /// Rows of one pass over a data set after the other, without the first `skipped`; never ends.
    fn later_rows(&self, dataset: u32, skipped: u64) -> impl Iterator<Item = Row> + '_ {
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
            let mut rows: Vec<Row> = self.pass(dataset, pass).collect();
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

    /// One independent stream of random numbers for each use.
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
    /// Numbers of the whole passes of an epoch; the one after them is that of its fraction.
    fn passes_of(&self, epoch: u64) -> Range<u64> {
        let whole = passes(self.weight, self.rows).0;
        let first = epoch * (u64::from(whole) + 1);
        first..first + u64::from(whole)
    }

    /// Rows of the shortest pass.
    fn fewest(&self) -> u64 {
        u64::from(self.windows.map_or(self.rows, |windows| windows.fewest()))
    }
}

/// Rows of an epoch beyond its whole passes, of a pass of so many.
fn passes_extra(set: &DatasetPasses, rows: u64) -> u32 {
    passes(set.weight, rows as u32).1
}

fn shuffle(rows: &mut [Row], rng: &mut ChaCha8Rng) {
    for last in (1..rows.len()).rev() {
        rows.swap(last, below(rng, last as u64 + 1) as usize);
    }
}

/// `count` of `0..rows`, ascending.
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

/// Uniform in `0..bound` up to a bias of `bound / 2^64`. Ours, because the order must outlive
/// changes of the sampling code in a dependency.
fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(shares: &[(u64, f64)], row_order: RowOrder, seed: u64) -> Order {
        let share = |(rows, weight): &(u64, f64)| DatasetShare { rows: *rows, weight: *weight };
        let datasets: Vec<_> = shares.iter().map(share).collect();
        Order::new(&datasets, row_order, seed, [7; 32]).unwrap()
    }

    fn pairs(rows: &[Row]) -> Vec<(u32, u32)> {
        rows.iter().map(|row| (row.dataset, row.row)).collect()
    }

    #[test]
    fn without_shuffle_the_order_is_that_of_config_and_file() {
        let order = order(&[(2, 1.0), (3, 1.0)], RowOrder::File, 1);
        assert_eq!(pairs(&order.epoch(0)), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
        assert_eq!(order.epoch(0), order.epoch(5));
    }

    /// The numbers may never change: a resumed run of an older build relies on them.
    #[test]
    fn the_shuffle_is_the_same_on_every_machine() {
        let order = order(&[(8, 1.0)], RowOrder::Shuffled, 42);
        let rows = |epoch| order.epoch(epoch).iter().map(|row| row.row).collect::<Vec<_>>();
        assert_eq!(rows(0), [2, 7, 6, 4, 1, 3, 5, 0]);
        assert_eq!(rows(1), [6, 0, 4, 3, 1, 2, 7, 5]);
    }

    #[test]
    fn seed_epoch_and_fingerprint_each_change_the_order() {
        let base = order(&[(50, 1.0)], RowOrder::Shuffled, 1);
        let other_seed = order(&[(50, 1.0)], RowOrder::Shuffled, 2);
        let other_data = Order { fingerprint: [8; 32], ..base.clone() };
        assert_eq!(base.epoch(0), base.clone().epoch(0));
        assert_ne!(base.epoch(0), base.epoch(1));
        assert_ne!(base.epoch(0), other_seed.epoch(0));
        assert_ne!(base.epoch(0), other_data.epoch(0));
    }

    #[test]
    fn every_place_of_a_shuffle_is_equally_likely() {
        let order = order(&[(4, 1.0)], RowOrder::Shuffled, 3);
        let mut seen = [[0u32; 4]; 4]; // [row][place]
        for epoch in 0..4000 {
            for (place, row) in order.epoch(epoch).iter().enumerate() {
                seen[row.row as usize][place] += 1;
            }
        }
        // 1000 expected with a deviation of 27
        assert!(seen.iter().flatten().all(|count| count.abs_diff(1000) < 140), "{seen:?}");
    }

    #[test]
    fn a_fraction_of_a_weight_draws_another_subset_each_epoch() {
        let order = order(&[(100, 0.25)], RowOrder::File, 3);
        assert_eq!(order.len(), 25);
        assert_ne!(order.epoch(0), order.epoch(1));
        assert!(order.epoch(0).is_sorted());
    }

    #[test]
    fn impossible_weights_and_sizes_are_refused() {
        let new = |rows, weight| {
            Order::new(&[DatasetShare { rows, weight }], RowOrder::File, 0, [0; 32]).map(drop)
        };
        for weight in [0.0, -0.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(new(1, weight), Err(OrderError::Weight { dataset: 0, .. })));
        }
        assert!(matches!(new(2, 1e300), Err(OrderError::TooManyRows { dataset: 0, .. })));
        assert!(matches!(new(1 << 33, 1e-9), Err(OrderError::TooManyRows { dataset: 0, .. })));
        assert!(new(0, 1.0).is_ok());
        assert!(order(&[(0, 1e300)], RowOrder::File, 0).epoch(0).is_empty());
    }

    proptest! {
        #[test]
        fn each_row_comes_as_often_as_its_weight_says(
            shares in prop::collection::vec((0u64..40, 1u32..350), 1..4),
            shuffle in any::<bool>(),
            seed in any::<u64>(),
            epoch in 0u64..9,
        ) {
            let shares: Vec<_> =
                shares.iter().map(|(rows, percent)| (*rows, f64::from(*percent) / 100.0)).collect();
            let row_order = if shuffle { RowOrder::Shuffled } else { RowOrder::File };
            let order = order(&shares, row_order, seed);
            let rows = order.epoch(epoch);
            prop_assert_eq!(rows.len() as u64, order.len());
            for (dataset, (num_rows, weight)) in shares.iter().enumerate() {
                let mut seen = vec![0u32; *num_rows as usize];
                for row in rows.iter().filter(|row| row.dataset as usize == dataset) {
                    seen[row.row as usize] += 1;
                }
                let whole = weight.floor() as u32;
                prop_assert!(seen.iter().all(|times| *times == whole || *times == whole + 1));
                let extra = seen.iter().filter(|times| **times > whole).count();
                let share = (weight.fract() * *num_rows as f64).round() as usize;
                let fewest = usize::from(*weight < 1.0 && *num_rows > 0); // listed is seen
                prop_assert_eq!(extra, share.max(fewest));
            }
        }
    }
}
