//! The logs that a run appends to.

use super::error::RunError;
use crate::config::RunConfig;
use crate::metrics::{JsonlSink, StepRows};
use crate::train::{EvalRule, Logs, TrainState};
use std::cell::{Cell, RefCell};

const METRICS: &str = "metrics.jsonl";
const EVALS: &str = "eval.jsonl";
const PREDICTIONS: &str = "predictions.jsonl";

/// Opens the logs of rank 0, and removes the lines of steps after `state`. Also returns whether
/// `eval.jsonl` has the evaluation of the step to resume from.
pub(super) fn open_logs(config: &RunConfig, state: &TrainState) -> Result<(Logs, bool), RunError> {
    let all_done = state.step > 0 && state.step >= state.total_steps;
    if all_done {
        tracing::info!(
            step = state.step,
            "all steps of this run are done: there is nothing to train"
        );
    }
    let rule = EvalRule::new(config.checkpoint.best.as_ref(), config.eval.early_stopping);
    let is_counted = |rule: &EvalRule| {
        let evals = state.evals.as_ref();
        evals.is_some_and(|evals| evals.has(rule, state.step) && evals.ends(rule).is_none())
    };
    // The checkpoint of a step is written before its evaluation, so its state may lack that
    // evaluation, and `best` may be older than the row. A finished run is evaluated once more.
    let again = all_done || !rule.as_ref().is_none_or(is_counted);
    let (is_evaluated, step_rows) = (Cell::new(false), RefCell::new(StepRows::default()));
    let sink = |name: &str| {
        JsonlSink::open_keeping(&config.output_dir.join(name), |row| {
            let Some(step) = row["step"].as_u64() else { return true };
            let is_eval = step == state.step && name == EVALS;
            is_evaluated.set(is_evaluated.get() || is_eval);
            if name == METRICS && step <= state.step {
                step_rows.borrow_mut().push(row);
            }
            let is_repeated = match name {
                EVALS => again,
                PREDICTIONS => again || !is_evaluated.get(),
                _ => false,
            };
            step < state.step || step == state.step && !is_repeated
        })
    };
    let (metrics, evals, rejects) = (sink(METRICS)?, sink(EVALS)?, sink("rejects.jsonl")?);
    if let Some(steps) = step_rows.take().finish(state.step) {
        let file = config.output_dir.join(METRICS);
        tracing::warn!(file = %file.display(), "rows of the steps before the checkpoint are {steps}");
    }
    let samples = config.log.samples.then(|| sink("samples.jsonl")).transpose()?;
    // after `eval.jsonl`, whose row is written last
    let predictions = config.eval.generate.as_ref().map(|_| sink(PREDICTIONS)).transpose()?;
    let is_evaluated = is_evaluated.get() && !again;
    let (metrics, evals, rejects) = (Some(metrics), Some(evals), Some(rejects));
    Ok((Logs { metrics, evals, predictions, rejects, samples }, is_evaluated))
}
