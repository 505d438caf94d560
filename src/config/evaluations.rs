//! Checks the settings of evaluations.

use super::{LeftOut, RunConfig, ValueError};
use crate::train::GenerateConfig;

const NO_EVAL: &str = "no value without `data.eval`";

impl RunConfig {
    /// Problems of `checkpoint.best` and `eval`.
    pub(super) fn evaluation_problems(&self, left_out: &LeftOut) -> Vec<ValueError> {
        let mut problems = Vec::new();
        let mut invalid = |key, found: &dyn ToString, expected| {
            problems.push(ValueError { key, found: found.to_string(), expected });
        };
        let has_rows = !self.data.eval.is_empty() || left_out.has("data.eval");
        if let Some(best) = &self.checkpoint.best {
            if !has_rows {
                invalid("checkpoint.best", &best.metric, NO_EVAL);
            } else if !self.is_metric(&best.metric) {
                let expected = "`eval.loss`, `eval.accuracy`, `eval.NAME.loss` with the name of a \
                                data set, or `eval.` and one of `eval.generate.metrics`";
                invalid("checkpoint.best.metric", &best.metric, expected);
            }
        }
        if let Some(generate) = &self.eval.generate {
            if !has_rows {
                invalid("eval.generate", &"set", NO_EVAL);
            }
            let batch = generate.batch.get();
            if batch > GenerateConfig::MAX_BATCH {
                invalid("eval.generate.batch", &batch, "a number from 1 to 64");
            }
        }
        if let Some(early) = self.eval.early_stopping {
            if !has_rows {
                invalid("eval.early_stopping", &"set", NO_EVAL);
            }
            if !(early.min_delta.is_finite() && early.min_delta >= 0.0) {
                let expected = "a finite number of 0 or more";
                invalid("eval.early_stopping.min_delta", &early.min_delta, expected);
            }
        }
        problems
    }

    /// Whether evaluations have this metric, if `data.eval` has the data set that it names.
    fn is_metric(&self, metric: &str) -> bool {
        let Some(key) = metric.strip_prefix("eval.") else { return false };
        let scores = self.eval.generate.iter().flat_map(|generate| &generate.metrics);
        ["loss", "accuracy"].contains(&key)
            || scores.into_iter().any(|score| score.name() == key)
            || key.strip_suffix(".loss").is_some_and(|name| !name.is_empty())
    }
}
