//! The best evaluation of a run, and whether evaluations still improve.

use super::config::EarlyStopping;
use crate::checkpoint::{BestConfig, BestMode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How `checkpoint.best` and `eval.early_stopping` compare evaluations.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalRule {
    /// As in the config.
    metric: String,
    /// Its key in `eval.jsonl`.
    key: String,
    mode: BestMode,
    keeps_best: bool,
    early_stopping: Option<EarlyStopping>,
}

const LOSS: &str = "eval.loss";

impl EvalRule {
    /// `None` if neither is configured.
    pub fn new(best: Option<&BestConfig>, early_stopping: Option<EarlyStopping>) -> Option<Self> {
        if best.is_none() && early_stopping.is_none() {
            return None;
        }
        let metric = best.map_or(LOSS, |best| &best.metric);
        let key = metric.strip_prefix("eval.").unwrap_or(metric);
        // `NAME.loss` of a data set
        let key = key.strip_suffix(".loss").map_or(key.to_owned(), |name| format!("loss/{name}"));
        let is_loss = key == "loss" || key.starts_with("loss/");
        let default = if is_loss { BestMode::Min } else { BestMode::Max };
        Some(Self {
            metric: metric.to_owned(),
            key,
            mode: best.and_then(|best| best.mode).unwrap_or(default),
            keeps_best: best.is_some(),
            early_stopping,
        })
    }

    pub fn metric(&self) -> &str {
        &self.metric
    }

    /// Its key in `eval.jsonl`.
    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn keeps_best(&self) -> bool {
        self.keeps_best
    }

    /// Whether `value` is better than `other` by more than `delta`.
    fn is_better(&self, value: f64, other: f64, delta: f64) -> bool {
        match self.mode {
            BestMode::Min => value < other - delta,
            BestMode::Max => value > other + delta,
        }
    }

    fn identity(&self) -> String {
        format!("{} {:?}", self.metric, self.mode)
    }
}

/// What later evaluations are compared with, in `trainer_state.json`. Checkpoints of runs without
/// `checkpoint.best` and `eval.early_stopping` have none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalHistory {
    /// Metric and mode. With others, the history starts again.
    compared: String,
    step: u64,
    best: Option<BestEval>,
    /// The bits of the last value that was an improvement by more than `min_delta`.
    improved: Option<u64>,
    /// Number of evaluations since then.
    since: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct BestEval {
    step: u64,
    /// For readers of the file.
    value: f64,
    /// The value as it is compared: readers of the file may round `value`.
    bits: u64,
}

impl EvalHistory {
    /// Adds the evaluation of a step; `row` is its row in `eval.jsonl`. Returns whether it is the
    /// best one so far. An evaluation that is repeated counts once.
    pub fn add(&mut self, rule: &EvalRule, step: u64, row: &Value) -> bool {
        let compared = rule.identity();
        if self.compared != compared {
            *self = Self { compared, ..Self::default() };
        }
        if step > self.step {
            self.step = step;
            self.compare(rule, step, row[&rule.key].as_f64());
        }
        self.best.is_some_and(|best| best.step == step)
    }

    fn compare(&mut self, rule: &EvalRule, step: u64, value: Option<f64>) {
        let best = self.best.map(|best| f64::from_bits(best.bits));
        let improved = self.improved.map(f64::from_bits);
        let is_better = |value: &f64, other: Option<f64>, delta| {
            other.is_none_or(|other| rule.is_better(*value, other, delta))
        };
        if let Some(value) = value.filter(|value| is_better(value, best, 0.0)) {
            self.best = Some(BestEval { step, value, bits: value.to_bits() });
        }
        let delta = rule.early_stopping.map_or(0.0, |early| early.min_delta);
        match value.filter(|value| is_better(value, improved, delta)) {
            Some(value) => (self.improved, self.since) = (Some(value.to_bits()), 0),
            None => self.since += 1,
        }
    }

    /// The history in `trainer_state.json`, if it has one.
    pub fn of_state(state: &Value) -> Option<Self> {
        Self::deserialize(&state["evals"]).ok()
    }

    pub fn best_step(&self, rule: &EvalRule) -> Option<u64> {
        self.best.filter(|_| self.compared == rule.identity()).map(|best| best.step)
    }

    /// Resets the best evaluation, whose model is lost. The next one becomes the best.
    pub fn forget_best(&mut self) {
        self.best = None;
    }

    /// Restores the best evaluation of an earlier history: the model of this one could not be kept.
    /// That of another metric cannot be compared.
    pub fn restore_best(&mut self, before: &Self) {
        self.best = before.best.filter(|_| before.compared == self.compared);
    }

    /// Whether the evaluation of a step was added.
    pub fn has(&self, rule: &EvalRule, step: u64) -> bool {
        self.compared == rule.identity() && self.step >= step
    }

    /// The reason why the run ends; `None` if it continues.
    pub fn ends(&self, rule: &EvalRule) -> Option<String> {
        let early = rule.early_stopping?;
        let ends = self.compared == rule.identity() && self.since >= early.patience.get();
        ends.then(|| {
            let best = self.best.map_or(String::new(), |best| {
                format!("; its best value is {} at step {}", best.value as f32, best.step)
            });
            format!(
                "early stopping at step {}: `{}` has not improved in {} evaluations{best}",
                self.step, rule.metric, self.since
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::num::NonZeroU64;

    fn rule(metric: &str, patience: u64, min_delta: f64) -> EvalRule {
        let best = BestConfig { metric: metric.to_owned(), mode: None };
        let patience = NonZeroU64::new(patience).unwrap();
        EvalRule::new(Some(&best), Some(EarlyStopping { patience, min_delta })).unwrap()
    }

    /// The steps that were the best so far, and the step at which the run ends.
    fn follow(rule: &EvalRule, values: &[Value]) -> (Vec<u64>, Option<u64>) {
        let (mut history, mut best, mut end) = (EvalHistory::default(), Vec::new(), None);
        for (step, value) in (1..).zip(values) {
            let is_best = history.add(rule, step, &json!({rule.key(): value}));
            // a checkpoint keeps all of it
            let text = serde_json::to_string(&history).unwrap();
            assert_eq!(
                serde_json::from_str::<EvalHistory>(&text).unwrap().ends(rule),
                history.ends(rule)
            );
            assert_eq!(history.clone().add(rule, step, &Value::Null), is_best, "it counts once");
            best.extend(is_best.then_some(step));
            end = end.or(history.ends(rule).map(|_| step));
        }
        (best, end)
    }

    #[test]
    fn the_best_evaluation_is_the_first_of_the_best_value() {
        let values = [json!(2.0), json!(1.5), json!(1.5), json!(null), json!(1.75), json!(1.0)];
        assert_eq!(follow(&rule("eval.loss", 9, 0.0), &values), (vec![1, 2, 6], None));
        assert_eq!(follow(&rule("eval.digits.loss", 9, 0.0), &values), (vec![1, 2, 6], None));
        assert_eq!(follow(&rule("eval.accuracy", 9, 0.0), &values), (vec![1], None));
        assert_eq!(rule("eval.a.b.loss", 1, 0.0).key(), "loss/a.b");
    }

    #[test]
    fn a_run_ends_after_evaluations_without_an_improvement() {
        let values = [json!(2.0), json!(1.5), json!(1.5), json!(null), json!(1.75), json!(1.0)];
        assert_eq!(follow(&rule("eval.loss", 3, 0.0), &values).1, Some(5));
        assert_eq!(follow(&rule("eval.loss", 4, 0.0), &values).1, None);
        // small steps add up to an improvement
        let slow = [json!(2.0), json!(1.875), json!(1.75), json!(1.625), json!(1.5)];
        assert_eq!(follow(&rule("eval.loss", 3, 0.25), &slow), (vec![1, 2, 3, 4, 5], None));
        assert_eq!(follow(&rule("eval.loss", 2, 0.25), &slow).1, Some(3));
    }

    #[test]
    fn another_metric_starts_again() {
        let (loss, accuracy) = (rule("eval.loss", 1, 0.0), rule("eval.accuracy", 1, 0.0));
        let mut history = EvalHistory::default();
        let row = json!({"loss": 1.0, "accuracy": 0.5});
        assert!(history.add(&loss, 1, &row) && !history.add(&loss, 2, &row));
        assert!(history.ends(&loss).is_some() && history.ends(&accuracy).is_none());
        let before = history.clone();
        assert!(!history.has(&accuracy, 2) && history.add(&accuracy, 2, &row));
        // the model could not be kept: the loss is no accuracy
        history.restore_best(&before);
        assert_eq!(history.best_step(&accuracy), None);
        assert!(history.add(&accuracy, 3, &row));
    }
}
