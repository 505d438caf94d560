//! Sends the metrics of a run to the trackers of `log.trackers`.

use crate::config::RunConfig;
use crate::metrics::{EvalMetrics, EventFile, StepMetrics, scalars};
use crate::train::{Observer, Tracker, TrainState};
use serde::Serialize;
use std::io;
use std::time::SystemTime;

/// The trackers of a run. One that fails is left out from then on: the run continues.
#[derive(Debug, Default)]
pub(super) struct Trackers {
    events: Option<EventFile>,
}

impl Trackers {
    /// Opens the trackers for the steps after `state`. A run whose steps are all done has nothing
    /// to add.
    pub(super) fn open(config: &RunConfig, state: &TrainState) -> Self {
        let all_done = state.step > 0 && state.step >= state.total_steps;
        if all_done || !config.log.trackers.contains(&Tracker::Tensorboard) {
            return Self::default();
        }
        let folder = config.output_dir.join("tensorboard");
        let events = EventFile::create(&folder, state.step + 1, now());
        Self { events: events.map_err(|error| warn(&error)).ok() }
    }

    fn write(&mut self, kind: &str, step: u64, row: &impl Serialize) {
        let Some(events) = &mut self.events else { return };
        if let Err(error) = events.write(step, now(), &scalars(kind, row)) {
            warn(&error);
            self.events = None;
        }
    }
}

fn warn(error: &io::Error) {
    tracing::warn!("cannot write event files of TensorBoard: {error}; the run continues without");
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// An observer that also sends what it receives to trackers.
pub(super) struct Tracked<'a> {
    pub(super) observer: &'a mut dyn Observer,
    pub(super) trackers: &'a mut Trackers,
}

impl Observer for Tracked<'_> {
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64) {
        self.trackers.write("train", metrics.step, metrics);
        self.observer.step(metrics, total_steps);
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        self.observer.evaluating(done, total);
    }

    fn evaluated(&mut self, metrics: &EvalMetrics) {
        self.trackers.write("eval", metrics.step, metrics);
        self.observer.evaluated(metrics);
    }
}
