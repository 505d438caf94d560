//! The rows of `metrics.jsonl` and `eval.jsonl`. All rows of a file have the same keys.

use super::memory::memory_text;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Speed and memory of a rank in a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankValues {
    /// Seconds of the step that it waited for its data loader.
    pub data_wait_s: f64,
    pub tokens_per_s: f64,
    /// Peak resident memory of its process so far, in bytes.
    pub peak_memory_bytes: u64,
    /// Its peak GPU memory so far, in bytes: in use by tensors, and reserved; `None` on the CPU.
    pub peak_device_bytes: Option<[u64; 2]>,
}

/// Speed and memory of the ranks of a run: smallest, mean and largest value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankMetrics {
    pub world: usize,
    /// Smallest, mean and largest time, in seconds, that a rank waited for data.
    pub data_wait_s: [f64; 3],
    pub tokens_per_s: [f64; 3],
    /// Peak resident memory of a rank's process so far, in bytes.
    pub peak_memory_bytes: [f64; 3],
    /// Peak GPU memory in use by the tensors of a rank so far, in bytes; `None` if a rank is on the
    /// CPU.
    pub peak_device_memory_bytes: Option<[f64; 3]>,
    /// Peak GPU memory reserved by a rank so far, in bytes; `None` if a rank is on the CPU.
    pub peak_device_reserved_bytes: Option<[f64; 3]>,
}

impl RankMetrics {
    /// From the values of each rank; there is at least one rank.
    pub fn new(ranks: &[RankValues]) -> Self {
        let spread = |value: &dyn Fn(&RankValues) -> f64| {
            let values = || ranks.iter().map(value);
            let smallest = values().fold(f64::INFINITY, f64::min);
            let largest = values().fold(0.0, f64::max);
            [smallest, values().sum::<f64>() / ranks.len() as f64, largest]
        };
        let of_device = |which: usize| {
            let known = ranks.iter().all(|rank| rank.peak_device_bytes.is_some());
            let value =
                |rank: &RankValues| rank.peak_device_bytes.map_or(0.0, |of| of[which] as f64);
            known.then(|| spread(&value))
        };
        Self {
            world: ranks.len(),
            data_wait_s: spread(&|rank| rank.data_wait_s),
            tokens_per_s: spread(&|rank| rank.tokens_per_s),
            peak_memory_bytes: spread(&|rank| rank.peak_memory_bytes as f64),
            peak_device_memory_bytes: of_device(0),
            peak_device_reserved_bytes: of_device(1),
        }
    }
}

/// Metrics of one optimizer step. The fields are the keys of `metrics.jsonl`, in this order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Number of optimizer steps so far, including this one.
    pub step: u64,
    /// Fractional number of epochs consumed at the end of this step.
    pub epoch: f64,
    /// Mean negative log-likelihood over all supervised targets of the step; `null` in the file if
    /// it is not finite.
    pub loss: f64,
    /// L2 norm of the gradient over all trained parameters, before clipping.
    pub grad_norm: f64,
    /// Whether the step changed no weight because its loss or a gradient is not finite.
    pub skipped: bool,
    /// Learning rate of this step, before the multipliers of parameter groups.
    pub lr: f64,
    /// Number of real tokens, including vision tokens.
    pub num_tokens: u64,
    /// Number of supervised targets. The divisor of the loss, unless rows have weights.
    pub num_target_tokens: u64,
    /// Sum of the weights of the targets, the divisor of the loss. It equals `num_target_tokens`
    /// unless rows have weights.
    pub target_weight: f64,
    pub num_samples: u64,
    /// Packing efficiency: real tokens / (packs * `packing_length`), or real tokens / padded tokens
    /// without packing.
    pub fill: f64,
    /// Wall-clock seconds of the step, including waiting for data.
    pub step_time_s: f64,
    /// Seconds of the step spent waiting for the data loader.
    pub data_wait_s: f64,
    /// Seconds between the step before and this one in which training waited for a checkpoint;
    /// `None` if none was due.
    pub save_hold_s: Option<f64>,
    /// Seconds that it took to write a checkpoint; `None` if none was completed since the step
    /// before.
    pub save_s: Option<f64>,
    /// `num_tokens / step_time_s`.
    pub tokens_per_s: f64,
    /// Peak resident memory of the process so far, in bytes.
    pub peak_memory_bytes: u64,
    /// Peak GPU memory in use by tensors so far, in bytes; `None` on the CPU.
    pub peak_device_memory_bytes: Option<u64>,
    /// Peak GPU memory reserved so far, in bytes, including free blocks kept for reuse; `None`
    /// on the CPU. This is the memory that the GPU must have.
    pub peak_device_reserved_bytes: Option<u64>,
    /// Predicted peak: of the tensors on a GPU, otherwise of the process; `None` if it is not
    /// known.
    pub predicted_memory_bytes: Option<u64>,
    /// Number of rows and corpus texts rejected so far.
    pub rejected: u64,
    /// `rejected` by reason.
    pub rejected_by_reason: BTreeMap<String, u64>,
    /// `rejected` by data file and reason.
    pub rejected_by_file: BTreeMap<String, BTreeMap<String, u64>>,
    /// Speed and memory of the ranks; `None` in a run of one process.
    pub ranks: Option<RankMetrics>,
    /// `expert_load`, `experts_idle` and `aux_loss` of a model with experts.
    #[serde(flatten)]
    pub experts: BTreeMap<String, Value>,
    /// `loss/NAME` and counts of each data set, if there are several.
    #[serde(flatten)]
    pub datasets: BTreeMap<String, Value>,
}

impl StepMetrics {
    /// The peak memory so far and the predicted one as a sentence; `None` without a prediction.
    pub fn memory(&self) -> Option<String> {
        let predicted = memory_text(self.predicted_memory_bytes? as f64);
        let peak = self.peak_device_memory_bytes.unwrap_or(self.peak_memory_bytes);
        Some(format!("memory: {} at the peak, {predicted} predicted", memory_text(peak as f64)))
    }

    /// Writes the main metrics as one log line.
    pub fn log(&self) {
        // the share of the step in which no data was ready
        let wait = 100.0 * self.data_wait_s / self.step_time_s.max(f64::MIN_POSITIVE);
        tracing::info!(
            step = self.step,
            epoch = %format_args!("{:.2}", self.epoch),
            loss = %format_args!("{:.4}", self.loss),
            grad = %format_args!("{:.2}", self.grad_norm),
            lr = %format_args!("{:.2e}", self.lr),
            "tok/s" = %format_args!("{:.0}", self.tokens_per_s),
            wait = %format_args!("{wait:.0}%"),
            rejected = Some(self.rejected).filter(|rejected| *rejected > 0),
            "train"
        );
    }
}

/// Metrics of one evaluation. The fields are the keys of `eval.jsonl`, in this order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Number of optimizer steps so far.
    pub step: u64,
    /// Mean negative log-likelihood over all supervised targets.
    pub loss: f64,
    /// Number of supervised targets.
    pub num_target_tokens: u64,
    pub num_samples: u64,
    /// Share of chats for which the model predicts every supervised token (greedy); `None` without
    /// chats.
    pub accuracy: Option<f64>,
    /// Whether `checkpoint.best` has kept the model of this evaluation.
    pub best: bool,
    /// Whether `eval.early_stopping` ends the run after this evaluation.
    pub early_stop: bool,
    /// Wall-clock seconds of the evaluation.
    pub time_s: f64,
    /// Number of answers and their mean scores, with `eval.generate`.
    #[serde(flatten)]
    pub answers: BTreeMap<String, Value>,
    /// `loss/NAME` and counts of each data set, if there are several.
    #[serde(flatten)]
    pub datasets: BTreeMap<String, Value>,
}

impl EvalMetrics {
    /// Creates a row without accuracy and without data sets.
    pub fn new(
        step: u64,
        loss: f64,
        num_target_tokens: u64,
        num_samples: u64,
        time_s: f64,
    ) -> Self {
        Self {
            step,
            loss,
            num_target_tokens,
            num_samples,
            accuracy: None,
            best: false,
            early_stop: false,
            time_s,
            answers: BTreeMap::new(),
            datasets: BTreeMap::new(),
        }
    }

    #[must_use]
    pub fn with_accuracy(self, accuracy: Option<f64>) -> Self {
        Self { accuracy, ..self }
    }

    /// Returns the row with these keys for each data set.
    #[must_use]
    pub fn with_datasets(self, datasets: BTreeMap<String, Value>) -> Self {
        Self { datasets, ..self }
    }

    /// Writes the metrics as one log line.
    pub fn log(&self) {
        let score = |(name, mean): (&String, &Value)| match mean.as_f64() {
            Some(mean) if !mean.is_nan() && name != "num_answers" => format!(" {name}={mean:.4}"),
            _ => String::new(),
        };
        let answers: String = self.answers.iter().map(score).collect();
        tracing::info!(
            step = self.step,
            loss = %format_args!("{:.4}", self.loss),
            accuracy = self.accuracy.map(|share| (share * 1e4).round() / 1e4),
            answers = (!answers.is_empty()).then(|| answers.trim_start()),
            rows = self.num_samples,
            targets = self.num_target_tokens,
            seconds = %format_args!("{:.1}", self.time_s),
            "eval"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_row() -> StepMetrics {
        StepMetrics {
            step: 3,
            epoch: 0.5,
            loss: f64::NAN,
            grad_norm: 1.0,
            skipped: false,
            lr: 1e-5,
            num_tokens: 10,
            num_target_tokens: 4,
            target_weight: 4.0,
            num_samples: 2,
            fill: 0.9,
            step_time_s: 1.5,
            data_wait_s: 0.1,
            save_hold_s: None,
            save_s: None,
            tokens_per_s: 6.7,
            peak_memory_bytes: 1 << 30,
            peak_device_memory_bytes: None,
            peak_device_reserved_bytes: None,
            predicted_memory_bytes: None,
            rejected: 0,
            rejected_by_reason: BTreeMap::new(),
            rejected_by_file: BTreeMap::new(),
            ranks: None,
            experts: BTreeMap::new(),
            datasets: BTreeMap::new(),
        }
    }

    #[test]
    fn a_step_row_has_the_documented_keys_in_order() {
        let row = serde_json::to_value(step_row()).unwrap();
        let keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let contract = "step epoch loss grad_norm skipped lr num_tokens num_target_tokens target_weight \
                        num_samples fill step_time_s data_wait_s save_hold_s save_s tokens_per_s \
                        peak_memory_bytes peak_device_memory_bytes peak_device_reserved_bytes \
                        predicted_memory_bytes rejected rejected_by_reason rejected_by_file ranks";
        assert_eq!(keys.join(" "), contract);
        assert!(row["loss"].is_null());
    }

    #[test]
    fn the_memory_of_gpus_is_known_if_all_ranks_have_one() {
        let rank = |peak_device_bytes| RankValues {
            data_wait_s: 0.5,
            tokens_per_s: 10.0,
            peak_memory_bytes: 100,
            peak_device_bytes,
        };
        let all = RankMetrics::new(&[rank(Some([7, 9])), rank(Some([1, 30])), rank(Some([4, 9]))]);
        assert_eq!(all.peak_device_memory_bytes, Some([1.0, 4.0, 7.0]));
        assert_eq!(all.peak_device_reserved_bytes, Some([9.0, 16.0, 30.0]));
        assert_eq!((all.world, all.peak_memory_bytes), (3, [100.0; 3]));
        let mixed = RankMetrics::new(&[rank(Some([7, 9])), rank(None)]);
        assert_eq!(mixed.peak_device_memory_bytes, None);
        assert_eq!(mixed.peak_device_reserved_bytes, None);
    }

    #[test]
    fn the_peak_is_compared_with_the_prediction() {
        let mut row = step_row();
        assert_eq!(row.memory(), None);
        row.predicted_memory_bytes = Some(3 << 29);
        let text = "memory: 1.00 GiB at the peak, 1.50 GiB predicted";
        assert_eq!(row.memory().as_deref(), Some(text));
        row.peak_device_memory_bytes = Some(5 << 20);
        assert!(row.memory().is_some_and(|text| text.starts_with("memory: 5 MiB")));
    }

    #[test]
    fn an_eval_row_has_the_same_keys_with_and_without_chats() {
        let row = EvalMetrics::new(7, 1.25, 100, 5, 0.5);
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.starts_with(r#"{"step":7,"loss":1.25,"#), "{text}");
        assert!(text.contains(r#""accuracy":null"#), "{text}");
        let text = serde_json::to_string(&row.with_accuracy(Some(0.75))).unwrap();
        assert!(text.contains(r#""accuracy":0.75"#), "{text}");
    }
}
