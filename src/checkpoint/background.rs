//! Checkpoints that a thread writes while training continues.

use super::checkpointer::{Begun, Written};
use super::ranks::agree;
use super::{
    Alone, CarriedFiles, CheckpointError, Checkpointer, Contents, FolderLayout, ModelFolder,
    SavedTensor, Together,
};
use serde_json::Value;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct OwnedContents {
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
            model: ModelFolder {
                layout: self.layout,
                weights: &self.weights,
                config_json: &self.config_json,
                carried: &self.carried,
                max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
            },
            optimizer: Some(&self.optimizer),
            state: &self.state,
        }
    }

    /// Bytes that the copy of rank `rank` of `world` ranks needs.
    pub fn changing_bytes(&self, rank: usize, world: usize) -> Result<u64, CheckpointError> {
        let files = self.contents().tensor_files()?;
        Ok(files.iter().map(|file| file.changing_bytes(rank, world)).sum())
    }

    /// A copy that later steps do not change: what rank `rank` of `world` ranks writes is copied to
    /// host memory, except for [fixed](SavedTensor::fixed) tensors. `None` if memory does not
    /// suffice.
    pub fn copy(&self, rank: usize, world: usize) -> Result<Option<Self>, CheckpointError> {
        let contents = self.contents();
        let files = contents.tensor_files()?;
        let Some(mut copies) = SavedTensor::copies(&files, rank, world)? else { return Ok(None) };
        let mut copied = |tensors: &[SavedTensor]| -> Vec<SavedTensor> {
            tensors.iter().map(|tensor| copies.take(tensor)).collect()
        };
        let (weights, optimizer) = (copied(&self.weights), copied(&self.optimizer));
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

/// A thread that writes a checkpoint, or the part of this rank. Dropping it waits for the thread.
#[derive(Debug)]
pub struct BackgroundSave {
    checkpointer: Checkpointer,
    step: u64,
    contents: Arc<OwnedContents>,
    /// With several ranks, which complete the checkpoint together.
    begun: Option<Begun>,
    thread: Option<JoinHandle<WriteResult>>,
}

/// What the thread wrote for ranks to complete, and the time that writing took.
type WriteResult = Result<(Vec<Written>, Duration), CheckpointError>;

impl BackgroundSave {
    /// Starts to write the checkpoint of `step`. `contents` must not change: see
    /// [`OwnedContents::copy`].
    ///
    /// Without other ranks, the thread does all that [`Checkpointer::save`] does. With others, they
    /// begin here and complete in [`Self::wait`] together, because only the training may exchange
    /// messages. On an error of any rank, all ranks return an error.
    pub fn start<T: Together>(
        checkpointer: Checkpointer,
        step: u64,
        contents: OwnedContents,
        together: &T,
    ) -> Result<Self, T::Error> {
        let (rank, world) = (together.rank(), together.world());
        let folder = checkpointer.step_folder(step);
        let begin = || checkpointer.begin(folder.clone(), step, &contents.contents(), together);
        let begun = (world > 1).then(begin).transpose()?;
        let contents = Arc::new(contents);
        let (own, whole, target) = (contents.clone(), checkpointer.clone(), folder.clone());
        let write = move || {
            let (started, contents) = (Instant::now(), own.contents());
            let written = if world > 1 {
                Written::write(&target, &contents, rank, world)?
            } else {
                whole.save(step, &contents, &Alone)?;
                Vec::new()
            };
            Ok((written, started.elapsed()))
        };
        let spawned = Builder::new().name("checkpoint".to_owned()).spawn(write);
        let (thread, spawned) = match spawned.map_err(CheckpointError::write(&folder)) {
            Ok(thread) => (Some(thread), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let save = Self { checkpointer, step, contents, begun, thread };
        agree(together, spawned)?;
        Ok(save)
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is complete on all ranks; returns the time that writing took.
    /// After an error there is no new checkpoint. A panic of the thread continues here.
    pub fn wait<T: Together>(mut self, together: &T) -> Result<Duration, T::Error> {
        let thread = self.thread.take().expect("`start` has started it");
        let written = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        let Some(begun) = self.begun.take() else { return Ok(written?.1) };
        let (own, time) = match written {
            Ok((own, time)) => (Ok(own), time),
            Err(error) => (Err(error), Duration::ZERO),
        };
        self.checkpointer.complete(begun, &self.contents.contents(), own, together)?;
        if together.rank() == 0 {
            self.checkpointer.remove_old(self.step);
        }
        Ok(time)
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // An error is there already; a checkpoint that is not complete is removed at the next
            // start.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod rank_tests;
#[cfg(test)]
mod tests;
