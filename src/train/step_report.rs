//! The results of a step that ranks exchange.

use super::datasets::SampleLoss;
use super::ranks::{Bits, Ranks};
use crate::dist::DistError;
use crate::metrics::RankMetrics;
use serde::{Deserialize, Serialize};

/// The results of a step on one rank.
pub(super) struct StepReport {
    /// Losses of the samples of this rank.
    pub(super) samples: Vec<SampleLoss>,
    /// Seconds that this rank waited for data.
    pub(super) data_wait_s: f64,
    /// Tokens per second of this rank.
    pub(super) tokens_per_s: f64,
    /// Peak memory of this process, in bytes.
    pub(super) peak_memory_bytes: u64,
}

/// The results of a step on all ranks.
pub(super) struct StepReports {
    /// Losses of all samples, in order.
    pub(super) samples: Vec<SampleLoss>,
    /// Speed and memory of the ranks; `None` for a run in one process.
    pub(super) ranks: Option<RankMetrics>,
}

#[derive(Serialize, Deserialize)]
struct Message {
    samples: Vec<[Bits; 2]>,
    data_wait_s: Bits,
    tokens_per_s: Bits,
    peak_memory_bytes: u64,
}

impl StepReport {
    /// Exchanges the reports of all ranks. `owners` has the sequence group of each sample, whose ranks
    /// have the losses of their own tokens.
    pub(super) fn gather(self, owners: &[usize], ranks: &Ranks) -> Result<StepReports, DistError> {
        let Self { samples, data_wait_s, tokens_per_s, peak_memory_bytes } = self;
        let all = ranks.gather(Message {
            samples: samples.iter().map(|s| [s.nll_sum, s.target_weight].map(Bits::from)).collect(),
            data_wait_s: data_wait_s.into(),
            tokens_per_s: tokens_per_s.into(),
            peak_memory_bytes,
        })?;
        let of = |value: fn(&Message) -> f64| -> Vec<f64> { all.iter().map(value).collect() };
        let metrics = RankMetrics::new(
            &of(|message| message.data_wait_s.into()),
            &of(|message| message.tokens_per_s.into()),
            &of(|message| message.peak_memory_bytes as f64),
        );
        let group_losses = |group: &[Message]| {
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
