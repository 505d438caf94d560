//! Checks the settings of evaluations.

use super::{LeftOut, RunConfig, ValueError};

const NO_EVAL: &str = "no value without `data.eval` or `data.eval_share`";

impl RunConfig {
    /// Problems of `checkpoint.best` and `eval`.
    pub(super) fn evaluation_problems(&self, left_out: &LeftOut) -> Vec<ValueError> {
        let mut problems = Vec::new();
        let mut invalid = |key, found: &dyn std::fmt::Display, expected| {
            problems.push(ValueError::new(key, found, expected));
        };
        let has_rows = !self.data.eval_sets().is_empty() || left_out.has("data.eval");
        if let Some(best) = &self.checkpoint.best {
            if !has_rows {
                invalid("checkpoint.best", &best.metric, NO_EVAL);
            } else if !self.is_metric(&best.metric) {
                let expected = "`eval.loss`, `eval.accuracy`, `eval.NAME.loss` with the name of a \
                                data set, or `eval.` and one of `eval.generate.metrics`";
                invalid("checkpoint.best.metric", &best.metric, expected);
            }
        }
        let sections = [
            ("eval.generate", self.eval.generate.is_some()),
            ("eval.early_stopping", self.eval.early_stopping.is_some()),
        ];
        for (key, _) in sections.into_iter().filter(|(_, is_set)| *is_set && !has_rows) {
            invalid(key, &"set", NO_EVAL);
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
