//! Checkpoints that a thread writes while training continues.

use super::{
    Alone, CarriedFiles, CheckpointError, Checkpointer, Contents, FolderLayout, ModelFiles,
    SavedTensor,
};
use serde_json::Value;
use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Owns what [`Contents`] refers to.
#[derive(Debug)]
pub struct OwnedContents {
    /// Names of the files.
    pub layout: FolderLayout,
    /// Tensors with their published names.
    pub weights: Vec<SavedTensor>,
    /// Content of `config.json`, or of `adapter_config.json`.
    pub config_json: Value,
    /// Tokenizer, template and processor files.
    pub carried: CarriedFiles,
    /// Moments and master weights.
    pub optimizer: Vec<SavedTensor>,
    /// Content of `trainer_state.json`.
    pub state: Value,
}

impl OwnedContents {
    /// What [`Checkpointer::save`] writes.
    pub fn contents(&self) -> Contents<'_> {
        Contents {
            model: ModelFiles {
                layout: self.layout,
                weights: &self.weights,
                config_json: &self.config_json,
                carried: &self.carried,
                max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
            },
            optimizer: Some(&self.optimizer),
            state: &self.state,
        }
    }

    /// Bytes that a copy needs.
    pub fn changing_bytes(&self) -> u64 {
        self.weights.iter().chain(&self.optimizer).map(SavedTensor::changing_bytes).sum()
    }

    /// A copy that later steps do not change: the values of all tensors but the
    /// [fixed](SavedTensor::fixed) ones are copied to host memory. For a process that holds all values.
    /// `None` if memory does not suffice.
    pub fn copy(&self) -> Result<Option<Self>, CheckpointError> {
        let Some(weights) = SavedTensor::copies(&self.weights)? else { return Ok(None) };
        let Some(optimizer) = SavedTensor::copies(&self.optimizer)? else { return Ok(None) };
        Ok(Some(Self {
            layout: self.layout,
            weights,
            config_json: self.config_json.clone(),
            carried: self.carried.clone(),
            optimizer,
            state: self.state.clone(),
        }))
    }
}

/// A thread that writes a checkpoint. Dropping it waits for the thread.
#[derive(Debug)]
pub struct BackgroundSave {
    step: u64,
    thread: Option<JoinHandle<Result<Duration, CheckpointError>>>,
}

impl BackgroundSave {
    /// Starts to write the checkpoint of `step`, as [`Checkpointer::save`] does for a run in one
    /// process. `contents` must not change: see [`OwnedContents::copy`].
    pub fn start(
        checkpointer: Checkpointer,
        step: u64,
        contents: OwnedContents,
    ) -> Result<Self, CheckpointError> {
        let folder = checkpointer.step_folder(step);
        let write = move || {
            let started = Instant::now();
            checkpointer.save(step, &contents.contents(), &Alone)?;
            Ok(started.elapsed())
        };
        let thread = Builder::new().name("checkpoint".to_owned()).spawn(write);
        Ok(Self { step, thread: Some(thread.map_err(CheckpointError::write(&folder))?) })
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether [`Self::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is complete; returns the time that writing took. After an error
    /// there is no new checkpoint. A panic of the thread continues here.
    pub fn wait(mut self) -> Result<Duration, CheckpointError> {
        let written = self.thread.take().map_or(Ok(Ok(Duration::ZERO)), JoinHandle::join);
        written.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // An error is there already; a checkpoint that is not complete is removed at the next start.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
