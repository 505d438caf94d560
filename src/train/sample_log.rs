//! The rows and losses of each step, in `samples.jsonl`.

use super::datasets::SampleLoss;
use crate::data::{RowReader, SampleCounts, SampleIndex};
use serde::{Deserialize, Serialize};

/// A line of `samples.jsonl`: the samples of a step. All lists are in the order of the token
/// streams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepSamples {
    /// Optimizer step, from 1.
    pub step: u64,
    /// `file:line` of each sample.
    pub rows: Vec<String>,
    /// Mean loss of its supervised tokens before the update; `null` without such tokens, or if it
    /// is not finite.
    pub loss: Vec<Option<f64>>,
    /// Its number of supervised tokens.
    pub num_target_tokens: Vec<u32>,
}

impl StepSamples {
    /// The samples of `step`; `sizes` and `losses` have one entry for each.
    pub(super) fn new(
        step: u64,
        reader: &dyn RowReader,
        sizes: &[SampleCounts],
        losses: &[SampleLoss],
    ) -> Self {
        let row = |size: &SampleCounts| {
            reader.id(SampleIndex { dataset: size.dataset, row: size.row }).to_string()
        };
        let loss = |loss: &SampleLoss| {
            Some(loss.nll_sum / loss.target_weight).filter(|mean| mean.is_finite())
        };
        Self {
            step,
            rows: sizes.iter().map(row).collect(),
            loss: losses.iter().map(loss).collect(),
            num_target_tokens: sizes.iter().map(|size| size.num_targets).collect(),
        }
    }

    /// Indices of the samples with the highest losses, those without a finite loss first: at most
    /// `count`. Samples without supervised tokens are left out.
    pub fn worst(&self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.retain(|index| self.num_target_tokens[*index] > 0);
        let key = |index: &usize| self.loss[*index].unwrap_or(f64::INFINITY);
        order.sort_by(|a, b| key(b).total_cmp(&key(a)));
        order.truncate(count);
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_samples_have_the_highest_losses() {
        let samples = StepSamples {
            step: 1,
            rows: ["a:1", "a:2", "a:3", "a:4"].map(str::to_owned).into(),
            loss: vec![Some(1.0), None, Some(3.0), None],
            num_target_tokens: vec![5, 2, 5, 0],
        };
        assert_eq!(samples.worst(2), [1, 2]);
    }
}
