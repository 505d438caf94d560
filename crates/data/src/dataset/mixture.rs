//! Mixes data sets by share. The data set of the next row is chosen without randomness.
//!
//! In every prefix of an epoch, the number of rows of each data set differs from its share by less
//! than one row. All computations use integers: a share is a number of units of the sum.

use serde::{Deserialize, Serialize};
use settings::Choice;

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first(weights: &[f64], rows: usize) -> Vec<usize> {
        Shares::new(weights).interleave().take(rows).collect()
    }

    #[test]
    fn a_mixture_written_out() {
        assert_eq!(first(&[0.5, 0.5], 6), [0, 1, 0, 1, 0, 1]);
        assert_eq!(first(&[3.0, 1.0], 8), [0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(first(&[1.0, 3.0], 8), [1, 1, 0, 1, 1, 1, 0, 1]);
        assert_eq!(first(&[2.0, 1.0, 1.0], 8), [0, 1, 0, 2, 0, 1, 0, 2]);
        assert_eq!(first(&[7.0], 3), [0, 0, 0]);
    }

    #[test]
    fn an_epoch_ends_with_the_last_data_set_or_before_the_first_is_repeated() {
        let shares = Shares::new(&[3.0, 1.0]);
        let rows = |stopping| shares.epoch_rows(&[30, 100], stopping);
        assert_eq!(rows(StoppingStrategy::AllExhausted), 400); // 100 rows are a quarter
        assert_eq!(rows(StoppingStrategy::FirstExhausted), 40); // 30 rows are three quarters
        let huge = Shares::new(&[f64::MAX, f64::MAX, 1e-300]);
        assert!(
            huge.epoch_rows(&[1, 1, u64::from(u32::MAX)], StoppingStrategy::AllExhausted) > 1 << 60
        );
    }

    proptest! {
        #[test]
        fn each_data_set_has_its_due_within_a_row_in_every_prefix(
            weights in prop::collection::vec(prop_oneof![1e-4f64..1.0, 1.0f64..2.0, Just(1.0)], 1..9),
            rows in 1usize..2000,
        ) {
            let shares = Shares::new(&weights);
            let total = i128::from(shares.total);
            let mut seen = vec![0i128; weights.len()];
            for (slot, dataset) in (1i128..).zip(shares.interleave().take(rows)) {
                seen[dataset] += 1;
                for (seen, units) in seen.iter().zip(&shares.units) {
                    let off = seen * total - slot * i128::from(*units);
                    prop_assert!(off.abs() < total, "slot {slot}: off by {off} / {total}");
                }
            }
            prop_assert_eq!(seen.iter().sum::<i128>(), rows as i128);
        }

        #[test]
        fn an_epoch_exhausts_what_it_should(
            sets in prop::collection::vec((1u64..60, 1u32..30), 1..6), all in any::<bool>(),
        ) {
            let weights: Vec<f64> = sets.iter().map(|set| f64::from(set.1)).collect();
            let rows: Vec<u64> = sets.iter().map(|set| set.0).collect();
            let stopping =
                [StoppingStrategy::FirstExhausted, StoppingStrategy::AllExhausted][usize::from(all)];
            let shares = Shares::new(&weights);
            let length = shares.epoch_rows(&rows, stopping) as usize;
            let mut seen = vec![0; rows.len()];
            for dataset in shares.interleave().take(length) {
                seen[dataset] += 1;
            }
            let pairs = || seen.iter().zip(&rows);
            if all {
                prop_assert!(pairs().all(|(seen, rows)| seen >= rows), "{seen:?} of {rows:?}");
            } else if length > 1 {
                prop_assert!(pairs().all(|(seen, rows)| seen <= rows), "{seen:?} of {rows:?}");
            }
        }
    }
}
