//! The logs that a run appends to.

use super::error::RunError;
use crate::checkpoint::write_atomically;
use crate::config::RunConfig;
use crate::metrics::{JsonlSink, StepRows};
use crate::train::{EvalRule, TrainState};
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::path::Path;

/// The logs of a run, on rank 0.
#[derive(Default)]
pub(super) struct Sinks {
    pub(super) metrics: Option<JsonlSink>,
    pub(super) evals: Option<JsonlSink>,
    pub(super) predictions: Option<JsonlSink>,
    pub(super) rejects: Option<JsonlSink>,
    pub(super) samples: Option<JsonlSink>,
    /// Whether `eval.jsonl` has the evaluation of the step to resume from.
    pub(super) is_evaluated: bool,
}

const METRICS: &str = "metrics.jsonl";
const EVALS: &str = "eval.jsonl";
const PREDICTIONS: &str = "predictions.jsonl";

/// Opens the logs, and removes the lines of steps after `state`.
pub(super) fn open_sinks(config: &RunConfig, state: &TrainState) -> Result<Sinks, RunError> {
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
    move_evaluations(&config.output_dir)?;
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
    Ok(Sinks {
        metrics: Some(metrics),
        evals: Some(evals),
        predictions,
        rejects: Some(rejects),
        samples,
        is_evaluated,
    })
}

/// Moves the evaluations of a run of an older version from `metrics.jsonl` to `eval.jsonl`.
fn move_evaluations(output_dir: &Path) -> Result<(), RunError> {
    let (metrics, evals) = (output_dir.join(METRICS), output_dir.join(EVALS));
    let is_eval = |row: &Value| row["eval"] == true;
    let rows = RefCell::new(String::new());
    JsonlSink::open_keeping(&metrics, |row| {
        if is_eval(row) {
            let mut row = row.clone();
            if let Some(row) = row.as_object_mut() {
                row.shift_remove("eval");
                row.entry("accuracy").or_insert(Value::Null);
                row.entry("best").or_insert(false.into());
                row.entry("early_stop").or_insert(false.into());
            }
            let _ = writeln!(rows.borrow_mut(), "{row}"); // writing to a String cannot fail
        }
        true
    })?;
    let rows = rows.take();
    if rows.is_empty() {
        return Ok(());
    }
    // Not removed from one file before the other has them: this process may be killed.
    if !evals.exists() {
        write_atomically(&evals, rows.as_bytes())?;
    }
    JsonlSink::open_keeping(&metrics, |row| !is_eval(row))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_of_an_older_version_get_a_file_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let steps = "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.25}\n";
        let old = format!("{steps}{{\"eval\":true,\"step\":2,\"loss\":1.5,\"time_s\":0.5}}\n");
        write_atomically(&path(METRICS), old.as_bytes()).unwrap();
        let moved = "{\"step\":2,\"loss\":1.5,\"time_s\":0.5,\"accuracy\":null,\"best\":false,\"early_stop\":false}\n";
        let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
        move_evaluations(folder.path()).unwrap();
        assert_eq!(read(METRICS), steps);
        assert_eq!(read(EVALS), moved);
        // killed after `eval.jsonl` was written
        write_atomically(&path(METRICS), old.as_bytes()).unwrap();
        move_evaluations(folder.path()).unwrap();
        assert_eq!(read(METRICS), steps);
        assert_eq!(read(EVALS).lines().count(), 1);
    }
}
