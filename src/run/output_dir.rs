//! The folder of a run, which one process at a time uses; files of an earlier run are moved.
//! Folders of commands that leave no files.

use super::error::RunError;
use super::inputs::SetupObserver;
use crate::checkpoint::{Checkpoint, Checkpointer, write_atomically};
use crate::config::{RunConfig, to_yaml};
use crate::files;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const FILES: [&str; 14] = [
    "config.yaml",
    "metrics.jsonl",
    "eval.jsonl",
    "predictions.jsonl",
    "rejects.jsonl",
    "samples.jsonl",
    "train.log",
    "starts.jsonl",
    "tensorboard",
    "trackers",
    "checkpoints",
    "final",
    "best",
    "report.html",
];

/// Creates `output_dir` if necessary, and locks it for as long as the returned file is open.
pub(super) fn claim(output_dir: &Path) -> Result<File, RunError> {
    fs::create_dir_all(output_dir)
        .map_err(|problem| RunError::CreateOutputDir { folder: output_dir.to_owned(), problem })?;
    let file = files::open_folder(output_dir).map_err(cannot("open", output_dir))?;
    lock(&file, output_dir)?;
    Ok(file)
}

/// Number of attempts to lock a folder, and the pause between two of them.
const ATTEMPTS: (u32, Duration) = (20, Duration::from_millis(50));

/// Locks the open folder `output_dir`; an error if another run uses it.
///
/// A child process that is just being started has a copy of this process's locks until it executes
/// its program. So the lock of a run that has ended may remain for a moment.
fn lock(file: &File, output_dir: &Path) -> Result<(), RunError> {
    for _ in 0..ATTEMPTS.0 {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => thread::sleep(ATTEMPTS.1),
            // Some network file systems do not support locks.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
        }
    }
    Err(RunError::Busy { folder: output_dir.to_owned() })
}

/// Fails if another run uses `output_dir`.
pub(super) fn check_unused(output_dir: &Path) -> Result<(), RunError> {
    files::open_folder(output_dir).map_or(Ok(()), |file| lock(&file, output_dir))
}

/// Fails if the model is in one of the folders that a new run in `output_dir` moves aside.
pub(super) fn check_model_stays(config: &RunConfig) -> Result<(), RunError> {
    let output_dir = config.output_dir.as_path();
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let model = real(&config.model.path);
    let moved = ["checkpoints", "final", "best"].map(|name| real(&output_dir.join(name)));
    if moved.iter().any(|folder| model.starts_with(folder)) {
        return Err(RunError::ModelInOutputDir { output_dir: output_dir.to_owned() });
    }
    Ok(())
}

/// Moves the files of an earlier run to `previous-N` and writes `config.yaml`. Call this after the
/// model and the data are loaded, so that a run that cannot start moves no file.
pub(super) fn take_over(
    config: &RunConfig,
    checkpointer: &Checkpointer,
    found: Option<&Checkpoint>,
    observer: &dyn SetupObserver,
) -> Result<(), RunError> {
    let output_dir = config.output_dir.as_path();
    for file in FILES.map(|name| output_dir.join(name)) {
        let is_other = |found: fs::Metadata| !found.is_file() && !found.is_dir();
        if fs::metadata(&file).is_ok_and(is_other) {
            return Err(cannot("write", &file)(files::not_regular()));
        }
    }
    remove_empty_asides(output_dir);
    remove_left(output_dir);
    if let Some(found) = found.filter(|found| lies_in(output_dir, found)) {
        set_later_aside(output_dir, checkpointer, found.step)?;
        checkpointer.remove_old(found.step);
    } else {
        check_model_stays(config)?;
        set_aside(output_dir)?;
    }
    let log = output_dir.join("train.log");
    observer.log_to(&log).map_err(cannot("write", &log))?;
    let yaml = to_yaml(&config.portable().with_escaped_paths())?;
    Ok(write_atomically(&output_dir.join("config.yaml"), yaml.as_bytes())?)
}

/// Moves checkpoints of steps after `step` to `previous-N`: the resumed run writes these steps
/// again.
fn set_later_aside(
    output_dir: &Path,
    checkpointer: &Checkpointer,
    step: u64,
) -> Result<(), RunError> {
    let steps = checkpointer.steps()?;
    let later: Vec<u64> = steps.into_iter().filter(|later| *later > step).collect();
    if later.is_empty() {
        return Ok(());
    }
    let aside = next_aside(output_dir)?;
    later.iter().try_for_each(|step| move_into(&aside, &checkpointer.step_folder(*step)))?;
    tracing::info!(folder = %aside.display(), ?later, "moved the checkpoints of later steps aside");
    Ok(())
}

/// Removes empty folders `previous-N`, which a killed process has created before it moved files.
fn remove_empty_asides(output_dir: &Path) {
    let entries = fs::read_dir(output_dir).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("previous-").map(str::parse::<u64>);
        if matches!(number, Some(Ok(_))) {
            // Fails unless the folder is empty.
            let _ = fs::remove_dir(folder);
        }
    }
}

fn next_aside(output_dir: &Path) -> Result<PathBuf, RunError> {
    let mut number = 1;
    while output_dir.join(format!("previous-{number}")).exists() {
        number += 1;
    }
    let aside = output_dir.join(format!("previous-{number}"));
    fs::create_dir(&aside).map_err(cannot("create", &aside))?;
    Ok(aside)
}

/// Moves a folder to `previous-N`, and returns that folder.
pub(super) fn set_one_aside(output_dir: &Path, folder: &Path) -> Result<PathBuf, RunError> {
    let aside = next_aside(output_dir)?;
    move_into(&aside, folder)?;
    Ok(aside)
}

fn move_into(aside: &Path, path: &Path) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default();
    fs::rename(path, aside.join(name)).map_err(cannot("move", path))
}

/// Whether the checkpoint was written to this `output_dir`.
fn lies_in(output_dir: &Path, found: &Checkpoint) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = real(&found.dir).and_then(|dir| dir.parent().map(Path::to_owned));
    parent.is_some() && parent == real(&output_dir.join("checkpoints"))
}

/// Moves the files of an earlier run in `output_dir` to `previous-N`.
fn set_aside(output_dir: &Path) -> Result<(), RunError> {
    let left: Vec<&str> = FILES.into_iter().filter(|name| output_dir.join(name).exists()).collect();
    let metrics = fs::metadata(output_dir.join("metrics.jsonl"));
    let trained = metrics.is_ok_and(|file| file.len() > 0)
        || left
            .iter()
            .any(|name| matches!(*name, "checkpoints" | "final" | "best" | "report.html"));
    if !trained {
        // The earlier run ended before its first step. Its rejected rows will be reported again.
        let rejects = output_dir.join("rejects.jsonl");
        return match fs::remove_file(&rejects) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(cannot("remove", &rejects)(error))
            }
            _ => Ok(()),
        };
    }
    let aside = next_aside(output_dir)?;
    left.into_iter().try_for_each(|name| move_into(&aside, &output_dir.join(name)))?;
    tracing::info!(folder = %aside.display(), "moved the files of an earlier run aside");
    Ok(())
}

fn cannot(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunError + use<> {
    let path = path.to_owned();
    move |problem| RunError::OutputFile { action, path, problem }
}

/// Prefix of the names: process id and number follow.
const PREFIX: &str = ".trainer-";

/// Removes the folders in `parent` that killed commands have left.
fn remove_left(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        let Some(Ok(process)) = process.map(|(process, _)| process.parse::<u32>()) else {
            continue;
        };
        // A run in the folder locks it, on another machine too.
        let is_locked =
            || files::open_folder(&folder).is_ok_and(|folder| folder.try_lock().is_err());
        let is_left = !Path::new("/proc").join(process.to_string()).exists() && !is_locked();
        if is_left && let Err(error) = fs::remove_dir_all(&folder) {
            tracing::warn!(folder = %folder.display(), %error, "cannot remove a temporary folder");
        }
    }
}

/// A folder that is removed with its contents when the value is dropped.
pub(super) struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder in `parent`. An error has its path.
    pub(super) fn create(parent: &Path) -> Result<Self, (PathBuf, io::Error)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        remove_left(parent);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("{PREFIX}{}-{number}", process::id()));
        match fs::create_dir(&folder) {
            Ok(()) => Ok(Self(folder)),
            Err(problem) => Err((folder, problem)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(folder = %self.0.display(), %error, "cannot remove a temporary folder");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_released_in_a_moment_is_waited_for_and_another_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let first = claim(folder.path()).unwrap();
        let error = claim(folder.path()).unwrap_err();
        assert!(matches!(error, RunError::Busy { .. }), "{error}");
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(ATTEMPTS.1 * 3);
                drop(first);
            });
            claim(folder.path()).unwrap();
        });
    }
}
