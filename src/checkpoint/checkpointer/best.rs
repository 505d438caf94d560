//! The folder `best`: the model of the best evaluation.

use super::super::CheckpointError;
use super::super::manifest::Manifest;
use super::super::together::Together;
use super::{Checkpointer, Contents, read_state};
use serde_json::Value;
use std::path::{Path, PathBuf};

const BEST: &str = "best";

impl Checkpointer {
    /// The folder that [`Self::save_best`] writes.
    pub fn best_folder(&self) -> PathBuf {
        self.output_dir.join(BEST)
    }

    /// Step and training state of the folder `best`; `None` if it cannot be read.
    pub fn best(&self) -> Option<(u64, Value)> {
        let (_, found) = read_state(&self.best_folder()).ok()?;
        Some((found.step, found.state))
    }

    /// Writes the folder `best` as [`Self::save`] writes a checkpoint. Replaces an older one when
    /// the new one is complete.
    pub fn save_best<T: Together>(
        &self,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        self.save_as(self.best_folder(), step, contents, together)
    }

    /// Copies `best` of the run that wrote `checkpoint`, if it is of `step`. Returns whether it is.
    pub fn copy_best(&self, checkpoint: &Path, step: u64) -> Result<bool, CheckpointError> {
        // <output_dir>/checkpoints/<folder>
        let Some(best) = checkpoint.ancestors().nth(2).map(|folder| folder.join(BEST)) else {
            return Ok(false);
        };
        if !Manifest::read(&best).is_ok_and(|manifest| manifest.step == step) {
            return Ok(false);
        }
        self.copy_model(&best, self.best_folder())?;
        Ok(true)
    }
}
