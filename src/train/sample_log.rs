//! The rows and losses of each step, in `samples.jsonl`.

use super::step_result::SampleResult;
use crate::data::RowReader;
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
    pub(super) fn new(step: u64, reader: &dyn RowReader, samples: &[SampleResult]) -> Self {
        let row = |sample: &SampleResult| reader.id(sample.size.index()).to_string();
        let loss = |sample: &SampleResult| {
            Some(sample.nll_sum / sample.target_weight).filter(|mean| mean.is_finite())
        };
        Self {
            step,
            rows: samples.iter().map(row).collect(),
            loss: samples.iter().map(loss).collect(),
            num_target_tokens: samples.iter().map(|sample| sample.size.num_targets).collect(),
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
