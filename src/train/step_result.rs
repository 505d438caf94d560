//! The result of a step, and of its samples.

use super::error::TrainError;
use super::experts::StepChoices;
use super::ranks::Ranks;
use super::step::StepCounts;
use crate::data::SampleCounts;
use crate::dist::DistError;
use crate::loss::TargetLosses;
use crate::metrics::{RankMetrics, RankValues};
use serde::{Deserialize, Serialize};

/// The result of a step over all ranks.
#[derive(Debug)]
pub struct StepResult {
    /// Mean over the step's supervised targets, weighted by the weights of the rows.
    pub loss: f64,
    /// L2 norm over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Number and weight of the supervised targets of the step.
    pub counts: StepCounts,
    /// The samples of this rank, with the targets that it computed; after `gather`, those of all
    /// ranks.
    pub samples: Vec<SampleResult>,
    /// Sum of the squares of the gradient of each trained parameter, before clipping.
    pub squares: Vec<f64>,
    pub choices: Option<StepChoices>,
    /// Why the weights were not updated: the loss or a gradient is not finite.
    pub problem: Option<TrainError>,
}

/// The result of a sample: sums over its targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleResult {
    /// Its data set and row, and its numbers of tokens, targets and media.
    pub size: SampleCounts,
    /// Sum of the negative log likelihoods, each multiplied by its weight.
    pub nll_sum: f64,
    /// Sum of the weights; equals the number of targets if the row has no weights.
    pub target_weight: f64,
}

impl SampleResult {
    /// Adds the targets that another rank has computed.
    pub(super) fn add(&mut self, other: &Self) {
        self.nll_sum += other.nll_sum;
        self.target_weight += other.target_weight;
    }
}

impl StepResult {
    /// Exchanges the samples of all ranks, and returns the speed and memory of the ranks: `None` for
    /// a run in one process. `owners` has the sequence group of each sample of the step, and `own`
    /// the values of this rank.
    pub(super) fn gather(
        &mut self,
        owners: &[usize],
        own: RankValues,
        ranks: &Ranks,
    ) -> Result<Option<RankMetrics>, DistError> {
        let all = ranks.gather((std::mem::take(&mut self.samples), own))?;
        let (mut samples, values): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let group = |group: &mut [Vec<SampleResult>]| {
            let (sums, others) = group.split_first_mut().expect("a group has a rank");
            for samples in others {
                sums.iter_mut().zip(samples).for_each(|(sum, sample)| sum.add(sample));
            }
            std::mem::take(sums).into_iter()
        };
        let mut groups: Vec<_> = samples.chunks_mut(ranks.sequence().size).map(group).collect();
        self.samples = owners.iter().filter_map(|owner| groups[*owner].next()).collect();
        Ok((ranks.rank().world > 1).then(|| RankMetrics::new(&values)))
    }
}

/// Splits losses by sample. `losses` has one entry per micro-batch that has targets. Concatenated,
/// the entries have the targets of `samples` in order.
pub(super) fn by_sample(samples: &[SampleCounts], losses: &[TargetLosses]) -> Vec<SampleResult> {
    let mut targets = losses.iter().flat_map(TargetLosses::pairs);
    let split = samples.iter().map(|size| {
        let mut sample = SampleResult { size: *size, ..SampleResult::default() };
        for (nll, weight) in targets.by_ref().take(size.num_targets as usize) {
            sample.nll_sum += nll * weight;
            sample.target_weight += weight;
        }
        sample
    });
    let split = split.collect();
    debug_assert!(samples.is_empty() || targets.next().is_none(), "a target of no sample");
    split
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::{Group, threads};
    use std::thread;

    /// Calls `f` on each of `world` ranks that are threads.
    fn on_ranks<T: Send>(world: usize, f: impl Fn(usize, &Ranks) -> T + Sync) -> Vec<T> {
        let f = &f;
        let call = |Group { rank, step, shard_group, sums, monitor, .. }: Group| {
            f(rank.rank, &Ranks::new(rank, step, shard_group, sums, monitor))
        };
        thread::scope(|scope| {
            let groups = threads(world).unwrap().into_iter();
            let ranks: Vec<_> = groups.map(|group| scope.spawn(move || call(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn result(samples: Vec<SampleResult>) -> StepResult {
        StepResult {
            loss: 0.0,
            grad_norm: 0.0,
            counts: StepCounts::default(),
            samples,
            squares: Vec::new(),
            choices: None,
            problem: None,
        }
    }

    fn values(own: u64) -> RankValues {
        RankValues {
            data_wait_s: 0.0,
            tokens_per_s: 1.0,
            peak_memory_bytes: 10 + own,
            peak_device_bytes: Some([20 + own, 40 + 2 * own]),
        }
    }

    #[test]
    fn rank_0_has_the_memory_of_the_gpus_of_all_ranks() {
        let all: Vec<RankMetrics> = on_ranks(3, |rank, ranks| {
            result(Vec::new()).gather(&[], values(rank as u64), ranks).unwrap().unwrap()
        });
        assert_eq!(all[0].peak_memory_bytes, [10.0, 11.0, 12.0]);
        assert_eq!(all[0].peak_device_memory_bytes, Some([20.0, 21.0, 22.0]));
        assert_eq!(all[0].peak_device_reserved_bytes, Some([40.0, 42.0, 44.0]));
        assert_eq!([all[1], all[2]], [all[0]; 2]);
    }

    #[test]
    fn all_ranks_have_the_samples_of_all_also_those_that_are_not_finite() {
        let sums = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.1];
        let owners = [0, 1, 1, 0, 1];
        let sample = |row: usize| SampleResult {
            size: SampleCounts { row: row as u32, num_targets: 7, ..SampleCounts::default() },
            nll_sum: sums[row],
            target_weight: -sums[row],
        };
        let bits = |sample: &SampleResult| {
            (sample.size, sample.nll_sum.to_bits(), sample.target_weight.to_bits())
        };
        let expected: Vec<_> = (0..5).map(|row| bits(&sample(row))).collect();
        for found in on_ranks(2, |rank, ranks| {
            let own = (0..5).filter(|row| owners[*row] == rank).map(sample).collect();
            let mut result = result(own);
            result.gather(&owners, values(0), ranks).unwrap();
            result.samples
        }) {
            assert_eq!(found.iter().map(bits).collect::<Vec<_>>(), expected);
        }
    }
}
