//! Checkpoints during a run.

use super::super::datasets::log_datasets;
use super::super::error::TrainError;
use super::super::saved::{saved_optimizer, saved_weights};
use super::Trainer;
use crate::checkpoint::{Contents, ModelFiles};
use crate::dist::DistError;
use std::error::Error;
use std::iter::successors;
use std::path::PathBuf;

impl Trainer {
    /// Writes the checkpoint of the current step unless it exists.
    pub(super) fn save(&mut self) -> Result<PathBuf, TrainError> {
        let step = self.parts.state.step;
        let folder = self.parts.checkpointer.step_folder(step);
        if self.saved_at != Some(step) {
            self.sync_logs();
            self.ranks().during("writing a checkpoint", || self.write_checkpoint(step))?;
            self.saved_at = Some(step);
        }
        Ok(folder)
    }

    /// As [`Self::save`]. If the checkpoint cannot be written, for example because the disk is full,
    /// this is logged, and the run continues.
    pub(super) fn try_save(&mut self) -> Result<(), TrainError> {
        let Err(error) = self.save() else { return Ok(()) };
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
                step = self.parts.state.step,
                "no checkpoint was written, and training continues; the next one is tried when it is \
                 due: {}",
                causes(&error)
            );
        }
        Ok(())
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

    fn write_checkpoint(&self, step: u64) -> Result<(), TrainError> {
        let parts = &self.parts;
        let weights = saved_weights(&parts.runner)?;
        let optimizer = saved_optimizer(&parts.runner)?;
        let state = serde_json::to_value(&parts.state).map_err(candle_core::Error::wrap)?;
        let folder = parts.checkpointer.save(
            step,
            &Contents {
                model: ModelFiles {
                    layout: parts.layout,
                    weights: &weights,
                    config_json: &parts.config_json,
                    carried: &parts.carried,
                    max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
                },
                optimizer: Some(&optimizer),
                state: &state,
            },
            self.ranks(),
        )?;
        if self.is_first() {
            tracing::info!(step, folder = %folder.display(), "checkpoint");
            log_datasets(&parts.state.datasets_seen);
        }
        Ok(())
    }
}

/// The messages of an error and of its causes.
pub(super) fn causes(error: &(dyn Error + 'static)) -> String {
    let messages = successors(Some(error), |error| {
        let error = *error;
        error.source()
    });
    messages.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
