//! Checks the settings of evaluations.

use super::{RunConfig, ValueError};
use crate::dist::{Distributed, Shard};
use crate::train::GenerateConfig;

const NO_EVAL: &str = "no value without `data.eval`";

impl RunConfig {
    /// Checks `checkpoint.best` and `eval`.
    pub(super) fn check_evaluations(&self) -> Result<(), ValueError> {
        let invalid = |key, found: &dyn ToString, expected| {
            Err(ValueError { key, found: found.to_string(), expected })
        };
        let has_rows = !self.data.eval.is_empty();
        if let Some(best) = &self.checkpoint.best {
            if !has_rows {
                return invalid("checkpoint.best", &best.metric, NO_EVAL);
            }
            if !self.is_metric(&best.metric) {
                let expected = "`eval.loss`, `eval.accuracy`, `eval.NAME.loss` with the name of a \
                                data set, or `eval.` and one of `eval.generate.metrics`";
                return invalid("checkpoint.best.metric", &best.metric, expected);
            }
        }
        if let Some(generate) = &self.eval.generate {
            if !has_rows {
                return invalid("eval.generate", &"set", NO_EVAL);
            }
            let Distributed { shard, sequence, .. } = &self.distributed;
            if *shard == Shard::Full || sequence.get() > 1 {
                let expected = "no value with `distributed.shard: full` or `distributed.sequence`, \
                                with which no rank has all weights and tokens";
                return invalid("eval.generate", &"set", expected);
            }
            let batch = generate.batch.get();
            if batch > GenerateConfig::MAX_BATCH {
                return invalid("eval.generate.batch", &batch, "a number from 1 to 64");
            }
        }
        if let Some(early) = self.eval.early_stopping {
            if !has_rows {
                return invalid("eval.early_stopping", &"set", NO_EVAL);
            }
            if !(early.min_delta.is_finite() && early.min_delta >= 0.0) {
                let expected = "a finite number of 0 or more";
                return invalid("eval.early_stopping.min_delta", &early.min_delta, expected);
            }
        }
        Ok(())
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
