//! Saves the checkpoints of a run, removes old ones, and finds the newest undamaged one.

use super::atomic::{build_folder, recover, remove_folder, sync_folder};
use super::manifest::{MANIFEST, Manifest, WriteFault, copy_hashed, damaged};
use super::tensors::write_tensors;
use super::{CheckpointConfig, CheckpointError, ModelFiles, WeightFiles};
use candle_core::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

const FOLDER: &str = "checkpoints";
const FINAL: &str = "final";
const STEP: &str = "step-";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "trainer_state.json";

/// Everything that one checkpoint holds.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    /// Weights, config and the files copied from the model folder.
    pub model: ModelFiles<'a>,
    /// Moments and master weights, for `optimizer.safetensors`; with `None` that file is not
    /// written.
    pub optimizer: Option<&'a [(String, Tensor)]>,
    /// Content of `trainer_state.json`: everything that resuming needs besides tensors.
    pub state: &'a Value,
}

/// Writes and finds the checkpoints below one `output_dir`. Only one process may write there at a
/// time.
#[derive(Debug, Clone)]
pub struct Checkpointer {
    output_dir: PathBuf,
    keep: NonZeroUsize,
}

/// A complete checkpoint whose files match their checksums.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Folder of the checkpoint, which is also a model folder.
    pub dir: PathBuf,
    /// Number of optimizer steps done when it was written.
    pub step: u64,
    /// Content of `trainer_state.json`.
    pub state: Value,
}

impl Found {
    /// Opens `optimizer.safetensors`. Tensors are read on demand.
    pub fn optimizer(&self) -> Result<WeightFiles, CheckpointError> {
        WeightFiles::open_file(&self.dir.join(OPTIMIZER))
    }

    /// Opens the model weights. Tensors are read on demand.
    pub fn weights(&self) -> Result<WeightFiles, CheckpointError> {
        WeightFiles::open(&self.dir)
    }
}

impl Checkpointer {
    /// Does not access the disk.
    pub fn new(output_dir: &Path, config: &CheckpointConfig) -> Self {
        // The training loop decides when to save.
        let &CheckpointConfig { every_steps: _, keep } = config;
        Self { output_dir: output_dir.to_owned(), keep }
    }

    /// Cleans up after a killed run: finishes interrupted replacements and removes incomplete
    /// files. The process that will save here must call this once at its start.
    pub fn recover(&self) -> Result<(), CheckpointError> {
        recover(&self.folder())?;
        recover(&self.output_dir)
    }

    /// Writes `<output_dir>/checkpoints/step-<step>`, makes it durable, removes the oldest
    /// checkpoints beyond `keep`, and returns the path. Replaces an older checkpoint of this step.
    ///
    /// On an error no new folder appears and the older checkpoints are unchanged. Checkpoints of
    /// later steps belong to another run in the same folder: they are neither counted nor removed.
    pub fn save(&self, step: u64, contents: &Contents<'_>) -> Result<PathBuf, CheckpointError> {
        let &Contents { model, optimizer, state } = contents;
        let target = self.step_folder(step);
        build_folder(&target, |folder| {
            let mut manifest = Manifest::new(step);
            model.write(folder, &mut manifest)?;
            if let Some(tensors) = optimizer {
                let tensors: Vec<_> = tensors.iter().collect();
                manifest.write_file(folder, OPTIMIZER, |out| {
                    write_tensors(out, &tensors, &BTreeMap::new())
                })?;
            }
            let state = format!("{state:#}\n");
            manifest.write_file(folder, STATE, |out| Ok(out.write_all(state.as_bytes())?))?;
            manifest.write(folder)
        })?;
        // `checkpoints` itself may be new.
        sync_folder(&self.output_dir)?;
        self.remove_old(step);
        Ok(target)
    }

    /// Creates `<output_dir>/final` from a checkpoint: the same files without
    /// `optimizer.safetensors`. Replaces an older `final`.
    ///
    /// Weight files are hard links where the file system allows it. All other files are copied, so
    /// that editing one of them in `final` does not damage the checkpoint.
    pub fn save_final(&self, checkpoint: &Path) -> Result<PathBuf, CheckpointError> {
        let mut manifest = Manifest::read(checkpoint)?;
        manifest.check_sizes(checkpoint)?;
        manifest.files.remove(OPTIMIZER);
        let target = self.final_folder();
        build_folder(&target, |folder| {
            for name in manifest.files.keys() {
                link_or_copy(&manifest, name, checkpoint, folder)?;
            }
            manifest.write(folder)
        })?;
        Ok(target)
    }

    /// The folder that [`Self::save_final`] writes.
    pub fn final_folder(&self) -> PathBuf {
        self.output_dir.join(FINAL)
    }

    /// Returns the newest undamaged checkpoint whose `trainer_state.json` is accepted by `accept`,
    /// or `None`. Skips damaged ones with a warning that names the file and the problem.
    pub fn newest_good(
        &self,
        accept: impl Fn(&Value) -> bool,
    ) -> Result<Option<Found>, CheckpointError> {
        for (step, dir) in self.by_step()?.into_iter().rev() {
            // Read the state first: a checkpoint of another run need not be checked in full.
            let found = read_state(&dir).and_then(|(manifest, found)| {
                if !accept(&found.state) {
                    tracing::info!(
                        checkpoint = %dir.display(),
                        "skipped a checkpoint: it was made with another config"
                    );
                    return Ok(None);
                }
                if found.step != step {
                    return Err(damaged(&dir, MANIFEST, format!("is of step {}", found.step)));
                }
                manifest.check_sizes(&dir)?;
                manifest.check_contents(&dir)?;
                Ok(Some(found))
            });
            match found {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(cause, "skipped a checkpoint: {error}");
                }
            }
        }
        Ok(None)
    }

    /// Opens the checkpoint in `dir`. A damaged one is an error.
    pub fn open(dir: &Path) -> Result<Found, CheckpointError> {
        fs::read_dir(dir).map_err(CheckpointError::read(dir))?;
        let (manifest, found) = read_state(dir)?;
        manifest.check_sizes(dir)?;
        manifest.check_contents(dir)?;
        Ok(found)
    }

    /// Steps of all checkpoints on disk, ascending, damaged ones included.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        Ok(self.by_step()?.into_iter().map(|(step, _)| step).collect())
    }

    /// Path of the checkpoint of `step`, whether it exists or not.
    pub fn step_folder(&self, step: u64) -> PathBuf {
        self.folder().join(format!("{STEP}{step:08}"))
    }

    fn folder(&self) -> PathBuf {
        self.output_dir.join(FOLDER)
    }

    fn by_step(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let folder = self.folder();
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(CheckpointError::read(&folder)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(CheckpointError::read(&folder))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(Ok(step)) = name.strip_prefix(STEP).map(str::parse) {
                found.push((step, path));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes the oldest checkpoints beyond `keep`. The new one is durable by now, so a failure to
    /// delete is a warning and not an error.
    fn remove_old(&self, newest: u64) {
        let removed = self.by_step().and_then(|mut all| {
            all.retain(|&(step, _)| step <= newest);
            let num_old = all.len().saturating_sub(self.keep.get());
            all[..num_old].iter().try_for_each(|(_, path)| remove_folder(path))
        });
        if let Err(error) = removed {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(cause, "could not remove an old checkpoint: {error}");
        }
    }
}

fn read_state(dir: &Path) -> Result<(Manifest, Found), CheckpointError> {
    let manifest = Manifest::read(dir)?;
    let state = serde_json::from_slice(&manifest.read_checked(dir, STATE)?)
        .map_err(|error| damaged(dir, STATE, format!("is not JSON: {error}")))?;
    let found = Found { dir: dir.to_owned(), step: manifest.step, state };
    Ok((manifest, found))
}

fn link_or_copy(
    manifest: &Manifest,
    name: &str,
    from: &Path,
    to: &Path,
) -> Result<(), CheckpointError> {
    let (source, target) = (from.join(name), to.join(name));
    let is_weights = Path::new(name).extension().is_some_and(|ending| ending == "safetensors");
    if is_weights && fs::hard_link(&source, &target).is_ok() {
        return Ok(());
    }
    let mut file = File::open(&source).map_err(CheckpointError::read(&source))?;
    let mut copied = Manifest::new(manifest.step);
    copied.write_file(to, name, |out| {
        copy_hashed(&mut file, out)?;
        Ok::<_, WriteFault>(())
    })?;
    if copied.files[name] == manifest.files[name] {
        Ok(())
    } else {
        Err(damaged(from, name, format!("differs from its entry in `{MANIFEST}`")))
    }
}

#[cfg(test)]
mod tests;
