//! Saves the checkpoints of a run, removes old ones, finds the newest undamaged one, and writes the
//! folder `best`.
//!
//! A save has three parts. The first and the last are common calls of all ranks and take little
//! time. The second writes the tensors, and can run in the background.

use super::atomic::{
    NewFolder, build_folder, check_place, recover, remove_folder, sync_folder, temporary_folder,
};
use super::hf::{INDEX, SINGLE};
use super::manifest::{Entry, MANIFEST, Manifest, Piece, damaged};
use super::peft::ADAPTER_WEIGHTS;
use super::ranks::{Together, agree, causes, exchange};
use super::tensors::{SavedTensor, TensorFile};
use super::{CheckpointConfig, CheckpointError, ModelFolder, WeightFiles};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FOLDER: &str = "checkpoints";
const FINAL: &str = "final";
const STEP: &str = "step-";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "trainer_state.json";

#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    /// Weights, config and the files copied from the model folder.
    pub model: ModelFolder<'a>,
    /// Moments and master weights, for `optimizer.safetensors`; with `None` that file is not
    /// written.
    pub optimizer: Option<&'a [SavedTensor]>,
    /// Content of `trainer_state.json`: everything that resuming needs besides tensors.
    pub state: &'a Value,
}

impl<'a> Contents<'a> {
    pub(super) fn tensor_files(&self) -> Result<Vec<TensorFile<'a>>, CheckpointError> {
        let mut files = self.model.weight_files()?;
        if let Some(tensors) = self.optimizer {
            let tensors: Vec<_> = tensors.iter().collect();
            files.push(TensorFile::new(OPTIMIZER, &tensors, &BTreeMap::new())?);
        }
        Ok(files)
    }

    /// Writes all files but those of tensors, and creates those.
    fn begin(
        &self,
        folder: &Path,
        step: u64,
        files: &[TensorFile<'_>],
    ) -> Result<Manifest, CheckpointError> {
        let mut manifest = Manifest::new(step);
        self.model.write_small(folder, &mut manifest)?;
        let state = self.state;
        manifest.write_file(folder, STATE, format!("{state:#}\n").as_bytes())?;
        files.iter().try_for_each(|file| file.create(folder))?;
        Ok(manifest)
    }
}

/// Writes and finds the checkpoints below one `output_dir`. Only one run may write there at a time.
#[derive(Debug, Clone)]
pub struct Checkpointer {
    output_dir: PathBuf,
    keep: NonZeroUsize,
    claimed: Option<Arc<File>>,
}

/// A complete checkpoint whose files match their checksums.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    pub dir: PathBuf,
    /// Number of optimizer steps done when it was written.
    pub step: u64,
    /// Content of `trainer_state.json`.
    pub state: Value,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens `optimizer.safetensors`. Tensors are read on demand.
    pub fn optimizer(&self) -> Result<WeightFiles, CheckpointError> {
        self.manifest.check_lists(&self.dir, &[OPTIMIZER])?;
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
        let &CheckpointConfig { every_steps: _, keep, background: _, best: _ } = config;
        Self { output_dir: output_dir.to_owned(), keep, claimed: None }
    }

    /// Saves only as long as `output_dir` is the path of the folder that `folder` was opened as.
    #[must_use]
    pub fn claimed(self, folder: Option<&File>) -> Self {
        let folder = folder.and_then(|folder| folder.try_clone().ok());
        Self { claimed: folder.map(Arc::new), ..self }
    }

    fn check_place(&self) -> Result<(), CheckpointError> {
        self.claimed.as_ref().map_or(Ok(()), |folder| check_place(&self.output_dir, folder))
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
    /// All ranks write their parts of the tensors at once, and return when the checkpoint is
    /// complete. Rank 0 writes all other files. On an error on any rank, all ranks return an error,
    /// no new folder appears and the older checkpoints are unchanged. Checkpoints of later steps
    /// belong to another run in the same folder: they are neither counted nor removed.
    pub fn save<T: Together>(
        &self,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        let target = self.save_as(self.step_folder(step), step, contents, together)?;
        if together.rank() == 0 {
            self.remove_old(step);
        }
        Ok(target)
    }

    /// Creates `<output_dir>/final` from a checkpoint: the same files without
    /// `optimizer.safetensors`. Replaces an older `final`.
    ///
    /// Weight files are hard links where the file system allows it. All other files are copied, so
    /// that editing one of them in `final` does not damage the checkpoint.
    pub fn save_final(&self, checkpoint: &Path) -> Result<PathBuf, CheckpointError> {
        self.copy_model(checkpoint, self.final_folder())
    }

    /// Creates or replaces `target` with the files of another folder without its optimizer.
    fn copy_model(&self, checkpoint: &Path, target: PathBuf) -> Result<PathBuf, CheckpointError> {
        self.check_place()?;
        let mut manifest = Manifest::read(checkpoint)?;
        manifest.check_sizes(checkpoint)?;
        manifest.files.remove(OPTIMIZER);
        build_folder(&target, |folder| {
            for name in manifest.files.keys() {
                link_or_copy(&manifest, name, checkpoint, folder)?;
            }
            manifest.write(folder)
        })?;
        Ok(target)
    }

    pub fn final_folder(&self) -> PathBuf {
        self.output_dir.join(FINAL)
    }

    /// Returns the newest undamaged checkpoint whose `trainer_state.json` is accepted by `accept`,
    /// or `None`: the same on all ranks, which divide the reading of its files. Skips damaged ones
    /// with a warning of rank 0 that names the file and the problem.
    pub fn newest_good<T: Together>(
        &self,
        accept: impl Fn(&Value) -> bool,
        together: &T,
    ) -> Result<Option<Checkpoint>, T::Error> {
        let listed = if together.rank() == 0 { self.by_step() } else { Ok(Vec::new()) };
        let mut candidates = agree(together, listed)?;
        loop {
            // Rank 0 looks for the next one. It reads the state first: a checkpoint of another run
            // need not be checked in full.
            let mut next = None;
            while next.is_none() {
                let Some((step, dir)) = candidates.pop() else { break };
                next = read_candidate(step, &dir, &accept).unwrap_or_else(|error| {
                    warn_skipped(&causes(&error));
                    None
                });
            }
            let step_folder = |step| self.step_folder(step);
            let Some((manifest, found)) = share(Ok(next), step_folder, together)? else {
                return Ok(None);
            };
            let damage = manifest.check_share(&found.dir, together.rank(), together.world()).err();
            let damages = exchange(together, Ok(damage.as_ref().map(causes)))?;
            match damages.iter().flatten().next() {
                None => return Ok(Some(found)),
                Some(problem) if together.rank() == 0 => warn_skipped(problem),
                Some(_) => {}
            }
        }
    }

    /// The checkpoint that [`Self::newest_good`] returns if all its files match their checksums,
    /// and the problems of newer ones. Reads the manifests and states, and compares the sizes of
    /// the files.
    pub fn newest_likely(
        &self,
        accept: impl Fn(&Value) -> bool,
    ) -> Result<(Option<Checkpoint>, Vec<String>), CheckpointError> {
        let mut problems = Vec::new();
        for (step, dir) in self.by_step()?.into_iter().rev() {
            match read_candidate(step, &dir, &accept) {
                Ok(Some((_, found))) => return Ok((Some(found), problems)),
                Ok(None) => {}
                Err(error) => problems.push(causes(&error)),
            }
        }
        Ok((None, problems))
    }

    /// Opens the checkpoint in `dir`, whose files the ranks check together. A damaged one is an
    /// error on all ranks.
    pub fn open<T: Together>(dir: &Path, together: &T) -> Result<Checkpoint, T::Error> {
        let open = || {
            fs::read_dir(dir).map_err(CheckpointError::read(dir))?;
            let (manifest, found) = read_state(dir)?;
            manifest.check_sizes(dir)?;
            Ok(Some((manifest, found)))
        };
        let of_first = if together.rank() == 0 { open() } else { Ok(None) };
        let shared = share(of_first, |_| dir.to_owned(), together)?;
        let (manifest, found) = shared.expect("rank 0 has a checkpoint or an error");
        agree(together, manifest.check_share(dir, together.rank(), together.world()))?;
        Ok(found)
    }

    /// Steps of all checkpoints on disk, ascending, damaged ones included.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        Ok(self.by_step()?.into_iter().map(|(step, _)| step).collect())
    }

    /// Path of the checkpoint of `step`, whether it exists or not.
    pub fn step_folder(&self, step: u64) -> PathBuf {
        self.output_dir.join(Self::step_name(step))
    }

    /// Path of the checkpoint of `step`, relative to `output_dir`.
    pub fn step_name(step: u64) -> PathBuf {
        Path::new(FOLDER).join(format!("{STEP}{step:08}"))
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

    /// Removes the oldest checkpoints beyond `keep` up to step `newest`, which is durable by now: a
    /// failure to delete is a warning and not an error. A run that resumes from `newest` calls
    /// this, because the run before may have been killed between a save and the deletion.
    pub fn remove_old(&self, newest: u64) {
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

/// Reads what rank 0 must know of a checkpoint before all ranks check it: `None` if it is of
/// another run.
fn read_candidate(
    step: u64,
    dir: &Path,
    accept: impl Fn(&Value) -> bool,
) -> Result<Option<(Manifest, Checkpoint)>, CheckpointError> {
    let (manifest, found) = read_state(dir)?;
    if !accept(&found.state) {
        tracing::info!(
            checkpoint = %dir.display(),
            "skipped a checkpoint: it was made with another config"
        );
        return Ok(None);
    }
    if found.step != step {
        return Err(damaged(dir, MANIFEST, format!("is of step {}", found.step)));
    }
    let weights = [INDEX, SINGLE, ADAPTER_WEIGHTS];
    let weights = weights.into_iter().find(|name| manifest.files.contains_key(*name));
    manifest.check_lists(dir, &[OPTIMIZER, weights.unwrap_or(SINGLE)])?;
    manifest.check_sizes(dir)?;
    Ok(Some((manifest, found)))
}

/// Opens the checkpoint that rank 0 has chosen on all ranks: `folder` is its folder by its step.
/// The result of other ranks in `of_first` is not used.
fn share<T: Together>(
    of_first: Result<Option<(Manifest, Checkpoint)>, CheckpointError>,
    folder: impl Fn(u64) -> PathBuf,
    together: &T,
) -> Result<Option<(Manifest, Checkpoint)>, T::Error> {
    let of_first = agree(together, of_first)?;
    let chosen = of_first.as_ref().map(|(manifest, _)| (manifest.step, manifest.digest()));
    let Some((step, digest)) = exchange(together, Ok(chosen))?.swap_remove(0) else {
        return Ok(None);
    };
    let own = of_first.map_or_else(|| read_state(&folder(step)), Ok);
    let own = match own {
        Ok(own) if own.0.digest() == digest => Ok(own),
        _ => Err(CheckpointError::NotShared { folder: folder(step) }),
    };
    agree(together, own).map(Some)
}

fn warn_skipped(problem: &str) {
    tracing::warn!("skipped a checkpoint: {problem}");
}

fn read_state(dir: &Path) -> Result<(Manifest, Checkpoint), CheckpointError> {
    let manifest = Manifest::read(dir)?;
    let state = serde_json::from_slice(&manifest.read_checked(dir, STATE)?)
        .map_err(|error| damaged(dir, STATE, format!("is not JSON: {error}")))?;
    let found =
        Checkpoint { dir: dir.to_owned(), step: manifest.step, state, manifest: manifest.clone() };
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
    manifest.copy_file(name, from, to)
}

/// A checkpoint whose folder exists under a hidden name, with all files but those of tensors, which
/// are empty. Dropping it removes the folder.
#[derive(Debug)]
pub(super) struct Begun {
    target: PathBuf,
    /// On rank 0.
    new: Option<(NewFolder, Manifest)>,
}

/// What a rank wrote into one file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Written {
    /// Checksum of the header, which must be the same on all ranks.
    header: String,
    pieces: Vec<Piece>,
}

impl Written {
    /// Writes what rank `rank` of `world` ranks holds into the files that [`Checkpointer::begin`]
    /// created.
    pub(super) fn write(
        target: &Path,
        contents: &Contents<'_>,
        rank: usize,
        world: usize,
    ) -> Result<Vec<Self>, CheckpointError> {
        let folder = temporary_folder(target);
        let write = |file: &TensorFile<'_>| {
            let pieces = file.write(&folder, rank, world)?;
            Ok(Self { header: checksum(file), pieces })
        };
        contents.tensor_files()?.iter().map(write).collect()
    }
}

fn checksum(file: &TensorFile<'_>) -> String {
    format!("{:x}", Sha256::digest(file.header()))
}

impl Begun {
    /// The folder of the checkpoint, once it is complete.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }
}

impl Checkpointer {
    /// [`Checkpointer::save`] with another name of the folder.
    fn save_as<T: Together>(
        &self,
        target: PathBuf,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        let begun = self.begin(target, step, contents, together)?;
        let own = Written::write(begun.target(), contents, together.rank(), together.world());
        self.complete(begun, contents, own, together)
    }

    /// Creates the hidden folder of a checkpoint on rank 0. On an error of any rank, all ranks
    /// return an error.
    pub(super) fn begin<T: Together>(
        &self,
        target: PathBuf,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<Begun, T::Error> {
        let folder = temporary_folder(&target);
        let begin = || {
            let files = contents.tensor_files()?;
            let mut new = None;
            if together.rank() == 0 {
                self.check_place()?;
                let begun = NewFolder::create(&target)?;
                new = Some((begun, contents.begin(&folder, step, &files)?));
            }
            Ok(Begun { target, new })
        };
        agree(together, begin())
    }

    /// Gives the folder its name after all ranks have written their parts: `own` is the result of
    /// this one. On an error of any rank, all ranks return an error, and no new folder appears.
    pub(super) fn complete<T: Together>(
        &self,
        begun: Begun,
        contents: &Contents<'_>,
        own: Result<Vec<Written>, CheckpointError>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        let written = exchange(together, own)?;
        let Begun { target, new } = begun;
        let finished = match new {
            Some((new, manifest)) => {
                let files = contents.tensor_files();
                files.and_then(|files| self.finish(new, manifest, &target, &files, written))
            }
            None => Ok(()),
        };
        agree(together, finished)?;
        Ok(target)
    }

    /// Writes the manifest and gives the folder its name.
    fn finish(
        &self,
        new: NewFolder,
        mut manifest: Manifest,
        target: &Path,
        files: &[TensorFile<'_>],
        mut written: Vec<Vec<Written>>,
    ) -> Result<(), CheckpointError> {
        for (index, file) in files.iter().enumerate() {
            let expected = checksum(file);
            let mut pieces = Vec::new();
            for (rank, of_rank) in written.iter_mut().enumerate() {
                match of_rank.get_mut(index) {
                    Some(written) if written.header == expected => {
                        pieces.append(&mut written.pieces);
                    }
                    _ => {
                        let file = file.name.clone();
                        return Err(CheckpointError::OtherTensors { rank, file });
                    }
                }
            }
            manifest.files.insert(file.name.clone(), Entry::new(file.joined(pieces)?));
        }
        manifest.write(&temporary_folder(target))?;
        new.complete()?;
        // `checkpoints` itself may be new.
        sync_folder(&self.output_dir)
    }
}

const BEST: &str = "best";

impl Checkpointer {
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

#[cfg(test)]
mod rank_tests;

#[cfg(test)]
mod tests;
