//! The results of a step that ranks exchange.

use super::datasets::SampleLoss;
use super::ranks::{Bits, Ranks};
use crate::dist::DistError;
use crate::metrics::{RankMetrics, RankValues};
use serde::{Deserialize, Serialize};

pub(super) struct StepReport {
    /// Losses of the samples of this rank.
    pub(super) samples: Vec<SampleLoss>,
    /// Speed and memory of this rank.
    pub(super) values: RankValues,
}

pub(super) struct StepReports {
    /// Losses of all samples, in order.
    pub(super) samples: Vec<SampleLoss>,
    /// Speed and memory of the ranks; `None` for a run in one process.
    pub(super) ranks: Option<RankMetrics>,
}

#[derive(Serialize, Deserialize)]
struct StepMessage {
    samples: Vec<[Bits; 2]>,
    data_wait_s: Bits,
    tokens_per_s: Bits,
    peak_memory_bytes: u64,
    peak_device_bytes: Option<[u64; 2]>,
}

impl StepMessage {
    fn values(&self) -> RankValues {
        RankValues {
            data_wait_s: self.data_wait_s.into(),
            tokens_per_s: self.tokens_per_s.into(),
            peak_memory_bytes: self.peak_memory_bytes,
            peak_device_bytes: self.peak_device_bytes,
        }
    }
}

impl StepReport {
    /// Exchanges the reports of all ranks. `owners` has the sequence group of each sample, whose
    /// ranks have the losses of their own tokens.
    pub(super) fn gather(self, owners: &[usize], ranks: &Ranks) -> Result<StepReports, DistError> {
        let Self { samples, values } = self;
        let all = ranks.gather(StepMessage {
            samples: samples.iter().map(|s| [s.nll_sum, s.target_weight].map(Bits::from)).collect(),
            data_wait_s: values.data_wait_s.into(),
            tokens_per_s: values.tokens_per_s.into(),
            peak_memory_bytes: values.peak_memory_bytes,
            peak_device_bytes: values.peak_device_bytes,
        })?;
        let metrics = RankMetrics::new(&all.iter().map(StepMessage::values).collect::<Vec<_>>());
        let group_losses = |group: &[StepMessage]| {
            let mut sums = vec![SampleLoss::default(); group[0].samples.len()];
            for message in group {
                for (sum, [nll_sum, target_weight]) in sums.iter_mut().zip(&message.samples) {
                    sum.nll_sum += f64::from(*nll_sum);
                    sum.target_weight += f64::from(*target_weight);
                }
            }
            sums.into_iter()
        };
        let mut groups: Vec<_> = all.chunks(ranks.sequence().size).map(group_losses).collect();
        let samples = owners.iter().filter_map(|owner| groups[*owner].next());
        let metrics = (ranks.rank().world > 1).then_some(metrics);
        Ok(StepReports { samples: samples.collect(), ranks: metrics })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::{Group, threads};
    use std::thread;

    #[test]
    fn rank_0_has_the_memory_of_the_gpus_of_all_ranks() {
        let gathered = |group: Group| {
            let own = group.rank.rank as u64;
            let Group { rank, step, shard_group, sums, monitor, .. } = group;
            let ranks = Ranks::new(rank, step, shard_group, sums, monitor);
            let values = RankValues {
                data_wait_s: 0.0,
                tokens_per_s: 1.0,
                peak_memory_bytes: 10 + own,
                peak_device_bytes: Some([20 + own, 40 + 2 * own]),
            };
            let report = StepReport { samples: Vec::new(), values };
            report.gather(&[], &ranks).unwrap().ranks.unwrap()
        };
        let all: Vec<RankMetrics> = thread::scope(|scope| {
            let groups = threads(3).unwrap().into_iter();
            let ranks: Vec<_> = groups.map(|group| scope.spawn(move || gathered(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(all[0].peak_memory_bytes, [10.0, 11.0, 12.0]);
        assert_eq!(all[0].peak_device_memory_bytes, Some([20.0, 21.0, 22.0]));
        assert_eq!(all[0].peak_device_reserved_bytes, Some([40.0, 42.0, 44.0]));
        assert_eq!([all[1], all[2]], [all[0]; 2]);
    }
}
