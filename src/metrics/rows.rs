//! The rows of `metrics.jsonl`.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// One optimizer step; the fields are the keys of `metrics.jsonl`, in this order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Optimizer steps done, this one included.
    pub step: u64,
    /// Epochs consumed as of the end of this step, fractional.
    pub epoch: f64,
    /// Mean nll over all supervised targets of the step; `null` in the file if it is not finite.
    pub loss: f64,
    /// L2 norm over all trainable parameters, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step, without multipliers.
    pub lr: f64,
    /// Real tokens, vision tokens included.
    pub num_tokens: u64,
    /// Supervised targets: the divisor of the loss.
    pub num_target_tokens: u64,
    /// Samples.
    pub num_samples: u64,
    /// Real tokens / (packs * packing_length), or / padded tokens without packing.
    pub fill: f64,
    /// Wall clock of the step, waiting for data included.
    pub step_time_s: f64,
    /// Part of it spent waiting for the loader.
    pub data_wait_s: f64,
    /// `num_tokens / step_time_s`.
    pub tokens_per_s: f64,
    /// Highest resident memory of the process so far.
    pub peak_memory_bytes: u64,
    /// Most memory that tensors took on the GPU so far; absent on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_device_memory_bytes: Option<u64>,
    /// Most that was held for them, with what lies idle between them: what the GPU must have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_device_reserved_bytes: Option<u64>,
    /// Rows rejected so far, and texts of corpora that could not be used.
    pub rejected: u64,
    /// The same by reason; absent while there are none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rejected_by_reason: BTreeMap<String, u64>,
    /// The same by data file and reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rejected_by_file: BTreeMap<String, BTreeMap<String, u64>>,
    /// `loss/NAME` and counts of each data set, where there are several.
    #[serde(flatten)]
    pub datasets: BTreeMap<String, Value>,
}

impl StepMetrics {
    /// One log line with the numbers that a reader follows.
    pub fn log(&self) {
        tracing::info!(
            step = self.step,
            epoch = %format_args!("{:.3}", self.epoch),
            loss = %format_args!("{:.4}", self.loss),
            grad_norm = %format_args!("{:.3}", self.grad_norm),
            lr = %format_args!("{:.3e}", self.lr),
            fill = %format_args!("{:.3}", self.fill),
            tokens_per_s = %format_args!("{:.0}", self.tokens_per_s),
            step_time_s = %format_args!("{:.3}", self.step_time_s),
            data_wait_s = %format_args!("{:.3}", self.data_wait_s),
            rejected = self.rejected,
            "train"
        );
    }
}

/// One pass over the evaluation data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Always true: tells these rows from those of steps.
    eval: bool,
    /// Optimizer steps done.
    pub step: u64,
    /// Mean nll over all supervised targets.
    pub loss: f64,
    /// Supervised targets.
    pub num_target_tokens: u64,
    /// Samples.
    pub num_samples: u64,
    /// Share of the samples whose every supervised token is the most likely one, where it was computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Wall clock of the pass.
    pub time_s: f64,
    /// `loss/NAME` and counts of each data set, where there are several.
    #[serde(flatten)]
    pub datasets: BTreeMap<String, Value>,
}

impl EvalMetrics {
    /// A row without accuracy.
    pub fn new(
        step: u64,
        loss: f64,
        num_target_tokens: u64,
        num_samples: u64,
        time_s: f64,
    ) -> Self {
        Self {
            eval: true,
            step,
            loss,
            num_target_tokens,
            num_samples,
            accuracy: None,
            time_s,
            datasets: BTreeMap::new(),
        }
    }

    /// The same row with the share of exact samples, where there is one.
    #[must_use]
    pub fn with_accuracy(self, accuracy: Option<f64>) -> Self {
        Self { accuracy, ..self }
    }

    /// The same row with the keys of each data set.
    #[must_use]
    pub fn with_datasets(self, datasets: BTreeMap<String, Value>) -> Self {
        Self { datasets, ..self }
    }

    /// One log line.
    pub fn log(&self) {
        tracing::info!(
            step = self.step,
            loss = %format_args!("{:.4}", self.loss),
            accuracy = self.accuracy,
            num_target_tokens = self.num_target_tokens,
            num_samples = self.num_samples,
            time_s = %format_args!("{:.3}", self.time_s),
            "eval"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_row_has_the_keys_of_the_contract_in_their_order() {
        let row = StepMetrics {
            step: 3,
            epoch: 0.5,
            loss: f64::NAN,
            grad_norm: 1.0,
            lr: 1e-5,
            num_tokens: 10,
            num_target_tokens: 4,
            num_samples: 2,
            fill: 0.9,
            step_time_s: 1.5,
            data_wait_s: 0.1,
            tokens_per_s: 6.7,
            peak_memory_bytes: 1 << 30,
            peak_device_memory_bytes: None,
            peak_device_reserved_bytes: None,
            rejected: 0,
            rejected_by_reason: BTreeMap::new(),
            rejected_by_file: BTreeMap::new(),
            datasets: BTreeMap::new(),
        };
        let row = serde_json::to_value(&row).unwrap();
        let keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let contract = "step epoch loss grad_norm lr num_tokens num_target_tokens num_samples fill \
                        step_time_s data_wait_s tokens_per_s peak_memory_bytes rejected";
        assert_eq!(keys.join(" "), contract);
        assert!(row["loss"].is_null());
    }

    #[test]
    fn an_eval_row_says_so() {
        let row = EvalMetrics::new(7, 1.25, 100, 5, 0.5);
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.starts_with(r#"{"eval":true,"step":7,"loss":1.25,"#), "{text}");
        assert!(!text.contains("accuracy"));
        let text = serde_json::to_string(&row.with_accuracy(Some(0.75))).unwrap();
        assert!(text.contains(r#""accuracy":0.75"#), "{text}");
    }
}
