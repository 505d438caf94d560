//! Checkpoints during a run.

use super::super::datasets::{DatasetCounts, log_datasets};
use super::super::error::TrainError;
use super::super::saved_tensors::{saved_optimizer, saved_weights};
use super::Trainer;
use crate::checkpoint::{BackgroundSave, Checkpointer, OwnedContents};
use crate::data::LoaderError;
use crate::dist::{DistError, Rank};
use crate::metrics::available_memory_bytes;
use std::collections::BTreeMap;
use std::error::Error;
use std::iter::successors;
use std::path::PathBuf;
use std::time::Instant;

pub(super) struct Saves {
    /// Step of the newest complete checkpoint in `output_dir`.
    at: Option<u64>,
    running: Option<RunningSave>,
    lacks_memory: bool,
    times: SaveTimes,
}

struct RunningSave {
    save: BackgroundSave,
    hold_s: f64,
    datasets: BTreeMap<String, DatasetCounts>,
}

/// Times since the last row of `metrics.jsonl`.
#[derive(Clone, Copy, Default)]
pub(super) struct SaveTimes {
    /// Seconds that training waited.
    pub(super) hold_s: Option<f64>,
    /// Seconds that writing took.
    pub(super) save_s: Option<f64>,
}

impl Saves {
    /// `at` is the step of the checkpoint that the run continues from.
    pub(super) fn new(at: Option<u64>) -> Self {
        Self { at, running: None, lacks_memory: false, times: SaveTimes::default() }
    }

    /// Whether the thread of this process has written its part of the running save.
    pub(super) fn is_written(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.save.is_done())
    }

    pub(super) fn take_times(&mut self) -> SaveTimes {
        std::mem::take(&mut self.times)
    }

    /// Training has waited since `started`.
    fn add_hold(&mut self, started: Instant) {
        *self.times.hold_s.get_or_insert(0.0) += started.elapsed().as_secs_f64();
    }
}

impl Trainer {
    /// Writes the checkpoint of the current step unless it exists, and returns when it is complete.
    pub(super) fn save(&mut self) -> Result<PathBuf, TrainError> {
        let started = Instant::now();
        self.finish_save()?;
        let step = self.parts.state.step;
        if self.saves.at != Some(step) {
            self.save_now()?;
            self.saves.add_hold(started);
        }
        Ok(self.parts.checkpoints.checkpointer.step_folder(step))
    }

    /// Saves the steps that are done before an error of the data ends the run, so that another limit
    /// on rejected rows continues it.
    pub(super) fn save_before(&mut self, error: &TrainError) {
        let TrainError::Data(error) = error else { return };
        // Ranks complete a checkpoint together, and the other errors may be of this rank alone.
        let is_shared =
            matches!(error, LoaderError::TooManyRejected { .. } | LoaderError::EmptyEpoch { .. });
        let is_alone = self.ranks().rank().world == 1;
        if self.parts.state.step == 0 || !(is_shared || is_alone) {
            return;
        }
        match self.save() {
            Ok(folder) => {
                tracing::info!(folder = %folder.display(), "saved the steps before the error");
            }
            Err(problem) => tracing::warn!("no checkpoint was written: {}", causes(&problem)),
        }
    }

    /// Saves the current step, in the background if this is possible. If the checkpoint cannot be
    /// written, for example because the disk is full, this is logged, and the run continues.
    pub(super) fn try_save(&mut self) -> Result<(), TrainError> {
        let started = Instant::now();
        self.finish_save()?;
        if self.saves.at == Some(self.parts.state.step) {
            return Ok(());
        }
        if !self.start_save(started)? {
            self.try_save_now()?;
        }
        self.saves.add_hold(started);
        Ok(())
    }

    /// Waits for the running save at the end of a run that has failed.
    pub(super) fn end_saves(&mut self) {
        if self.ranks().rank().world > 1 {
            // Ranks complete a checkpoint together, and only this one may have failed.
            self.saves.running = None;
            return;
        }
        if let Err(error) = self.finish_save() {
            tracing::warn!("no checkpoint was written: {}", causes(&error));
        }
    }

    /// Waits for the running save. That it could not write is logged, and the run continues.
    pub(super) fn finish_save(&mut self) -> Result<(), TrainError> {
        let Some(running) = self.saves.running.take() else { return Ok(()) };
        let RunningSave { save, hold_s, datasets } = running;
        let step = save.step();
        match self.ranks().during("writing a checkpoint", || save.wait(self.ranks())) {
            Ok(time) => self.completed(step, time.as_secs_f64(), hold_s, &datasets),
            Err(error) => self.continue_without(step, error)?,
        }
        Ok(())
    }

    /// Copies the training state, and starts the thread that writes it. Returns `false` if the
    /// checkpoint must be written at once.
    fn start_save(&mut self, started: Instant) -> Result<bool, TrainError> {
        let step = self.parts.state.step;
        // Nothing is left to train after the last step.
        if step >= self.parts.steps.max_steps || !self.parts.checkpoints.in_background {
            return Ok(false);
        }
        let contents = self.contents()?;
        let Rank { rank, world, local_world, .. } = self.ranks().rank();
        let need = contents.changing_bytes(rank, world)? * local_world as u64;
        let free = available_memory_bytes();
        // all ranks of a machine look at its memory before the first of them copies
        let fits_everywhere = !self.ranks().gather(copy_fits(need, free))?.contains(&false);
        let copy = if fits_everywhere { contents.copy(rank, world)? } else { None };
        let is_copied_everywhere = !self.ranks().gather(copy.is_some())?.contains(&false);
        let Some(copy) = copy.filter(|_| is_copied_everywhere) else {
            if !std::mem::replace(&mut self.saves.lacks_memory, true) {
                let mib = |bytes: u64| bytes >> 20;
                tracing::warn!(
                    need_mib = mib(need),
                    free_mib = free.map(mib),
                    "training waits while a checkpoint is written: a copy of the training state \
                     must fit in half of the free memory"
                );
            }
            return Ok(false);
        };
        self.sync_logs();
        let checkpointer = self.parts.checkpoints.checkpointer.clone();
        match BackgroundSave::start(checkpointer, step, copy, self.ranks()) {
            Ok(save) => {
                let datasets = self.parts.state.datasets_seen.clone();
                let hold_s = started.elapsed().as_secs_f64();
                self.saves.running = Some(RunningSave { save, hold_s, datasets });
            }
            Err(error) => self.continue_without(step, error)?,
        }
        Ok(true)
    }

    fn try_save_now(&mut self) -> Result<(), TrainError> {
        let Err(error) = self.save_now() else { return Ok(()) };
        self.continue_without(self.parts.state.step, error)
    }

    /// Logs that a checkpoint could not be written, on all ranks; returns any other error.
    fn continue_without(&self, step: u64, error: TrainError) -> Result<(), TrainError> {
        // an error of one rank is one of all
        let is_write = match &error {
            TrainError::Checkpoint(error) => error.is_write(),
            TrainError::Ranks(DistError::Failed { .. }) => true,
            _ => return Err(error), // of this rank alone, or of the connections
        };
        if self.ranks().gather(is_write)?.contains(&false) {
            return Err(error);
        }
        if self.is_first() {
            tracing::warn!(
                step,
                "cannot write a checkpoint; training continues until the next one is due: {}",
                causes(&error)
            );
        }
        Ok(())
    }

    /// Writes the checkpoint of the current step, while training waits.
    fn save_now(&mut self) -> Result<(), TrainError> {
        let (step, started) = (self.parts.state.step, Instant::now());
        self.sync_logs();
        self.ranks().during("writing a checkpoint", || {
            let contents = self.contents()?;
            self.parts.checkpoints.checkpointer.save(step, &contents.contents(), self.ranks())
        })?;
        let time_s = started.elapsed().as_secs_f64();
        let datasets = self.parts.state.datasets_seen.clone();
        self.completed(step, time_s, time_s, &datasets);
        Ok(())
    }

    /// Notes that the checkpoint of `step` is complete.
    fn completed(
        &mut self,
        step: u64,
        time_s: f64,
        hold_s: f64,
        datasets: &BTreeMap<String, DatasetCounts>,
    ) {
        self.saves.at = Some(step);
        self.saves.times.save_s = Some(time_s);
        if self.is_first() {
            // The whole path can exceed 100 columns.
            let folder = Checkpointer::step_name(step);
            tracing::info!(
                step,
                folder = %folder.display(),
                seconds = %format_args!("{time_s:.1}"),
                paused = %format_args!("{hold_s:.1}"),
                "checkpoint"
            );
            log_datasets("trained so far", datasets);
        }
    }

    /// What the checkpoint of the current step contains. The tensors are those of the model and of
    /// the optimizer, which the next step changes.
    fn contents(&self) -> Result<OwnedContents, TrainError> {
        let parts = &self.parts;
        Ok(OwnedContents {
            layout: parts.checkpoints.layout,
            weights: saved_weights(&parts.runner)?,
            config_json: parts.checkpoints.config_json.clone(),
            carried: parts.checkpoints.carried.clone(),
            optimizer: saved_optimizer(&parts.runner)?,
            state: serde_json::to_value(&parts.state).map_err(candle_core::Error::wrap)?,
        })
    }

    /// Makes the rows of the logs durable before the checkpoint, so that a run that resumes from it
    /// has the rows of all earlier steps.
    fn sync_logs(&mut self) {
        for file in self.logs() {
            if let Err(error) = file.sync() {
                tracing::warn!("{}", causes(&error));
            }
        }
    }
}

/// Whether a copy of `need` bytes may be made: the next steps need some of what is free now.
fn copy_fits(need: u64, free: Option<u64>) -> bool {
    free.is_none_or(|free| need <= free / 2)
}

/// The messages of an error and of its causes.
pub(super) fn causes(error: &(dyn Error + 'static)) -> String {
    let messages = successors(Some(error), |error| {
        let error = *error;
        error.source()
    });
    messages.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_at_most_half_of_the_free_memory() {
        assert!(copy_fits(50, Some(100)) && copy_fits(50, None));
        assert!(!copy_fits(51, Some(100)) && !copy_fits(1, Some(0)));
    }
}
