//! The logs that a run appends to.

use super::error::RunError;
use crate::config::RunConfig;
use crate::metrics::{JsonlSink, StepRows};
use crate::train::TrainState;
use std::cell::{Cell, RefCell};

/// The logs of a run, on rank 0.
#[derive(Default)]
pub(super) struct Sinks {
    pub(super) metrics: Option<JsonlSink>,
    pub(super) rejects: Option<JsonlSink>,
    pub(super) samples: Option<JsonlSink>,
    /// Whether the metrics have the evaluation of the step to resume from.
    pub(super) is_evaluated: bool,
}

const METRICS: &str = "metrics.jsonl";

/// Opens the logs, and removes the lines of steps after `state`.
pub(super) fn open_sinks(config: &RunConfig, state: &TrainState) -> Result<Sinks, RunError> {
    let all_done = state.step > 0 && state.step >= state.total_steps;
    if all_done {
        tracing::info!(
            step = state.step,
            "all steps of this run are done: there is nothing to train"
        );
    }
    let (is_evaluated, step_rows) = (Cell::new(false), RefCell::new(StepRows::default()));
    let sink = |name: &str| {
        JsonlSink::open_keeping(&config.output_dir.join(name), |row| {
            let Some(step) = row["step"].as_u64() else { return true };
            let is_eval = step == state.step && row["eval"] == true;
            is_evaluated.set(is_evaluated.get() || is_eval);
            if name == METRICS && step <= state.step {
                step_rows.borrow_mut().push(row);
            }
            // A finished run is evaluated once more, which writes the last row again.
            step <= state.step && !(all_done && is_eval)
        })
    };
    let (metrics, rejects) = (sink(METRICS)?, sink("rejects.jsonl")?);
    if let Some(steps) = step_rows.take().finish(state.step) {
        let file = config.output_dir.join(METRICS);
        tracing::warn!(file = %file.display(), "rows of the steps before the checkpoint are {steps}");
    }
    let samples = config.log.samples.then(|| sink("samples.jsonl")).transpose()?;
    let is_evaluated = is_evaluated.get() && !all_done;
    Ok(Sinks { metrics: Some(metrics), rejects: Some(rejects), samples, is_evaluated })
}
