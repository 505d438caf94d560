//! The folder of a run: one process at a time, and nothing of an earlier run lost or mixed in.

use super::logging::Logging;
use super::report::{Exit, Failure};
use crate::checkpoint::{Checkpointer, Found, write_atomically};
use crate::config::{RunConfig, to_yaml};
use std::path::{Path, PathBuf};

pub(super) const WRITABLE: &str = "set `output_dir` to a folder that you may write to";

fn cannot_make(folder: &Path, error: &std::io::Error) -> Failure {
    let message = format!("cannot make folder `{}`: {error}", folder.display());
    Failure::new(Exit::CannotWrite, message).hint(WRITABLE)
}

/// Holds `output_dir` for this process; a second one would mix its files with ours.
pub(super) fn lock(output_dir: &Path) -> anyhow::Result<std::fs::File> {
    let file = std::fs::File::open(output_dir).map_err(|error| {
        let message = format!("cannot open `{}`: {error}", output_dir.display());
        Failure::new(Exit::CannotWrite, message).hint(WRITABLE)
    })?;
    match file.try_lock() {
        Err(std::fs::TryLockError::WouldBlock) => {
            let message = format!("another run is at work in `{}`", output_dir.display());
            Err(Failure::new(Exit::Usage, message)
                .hint("wait for it or stop it, or set another `output_dir`")
                .into())
        }
        // Some network file systems know no locks.
        Ok(()) | Err(std::fs::TryLockError::Error(_)) => Ok(file),
    }
}

/// Makes `output_dir` this run's own, once model and data are known to load.
pub(super) fn take_over(
    config: &RunConfig,
    checkpointer: &Checkpointer,
    found: Option<&Found>,
    logging: &Logging,
) -> anyhow::Result<()> {
    let output_dir = config.output_dir.as_path();
    if let Some(found) = found.filter(|found| lies_in(output_dir, found)) {
        set_later_aside(output_dir, checkpointer, found.step)?;
    } else {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let model = real(&config.model.path);
        let moved = ["checkpoints", "final"].map(|name| real(&output_dir.join(name)));
        if moved.iter().any(|folder| model.starts_with(folder)) {
            let message = format!(
                "`model.path` lies in `output_dir` `{}`, whose earlier run would be moved away",
                output_dir.display()
            );
            return Err(Failure::new(Exit::Usage, message)
                .hint("set another `output_dir` for the run that starts from these weights")
                .into());
        }
        set_aside(output_dir)?;
    }
    let log = output_dir.join("train.log");
    logging.write_to(&log).map_err(|error| {
        let message = format!("cannot write `{}`: {error}", log.display());
        Failure::new(Exit::CannotWrite, message).hint(WRITABLE)
    })?;
    Ok(write_atomically(&output_dir.join("config.yaml"), to_yaml(config)?.as_bytes())?)
}

/// Moves checkpoints of later steps away: the run that goes on from `step` will make its own.
fn set_later_aside(
    output_dir: &Path,
    checkpointer: &Checkpointer,
    step: u64,
) -> anyhow::Result<()> {
    let steps = checkpointer.steps()?;
    let later: Vec<u64> = steps.into_iter().filter(|later| *later > step).collect();
    if later.is_empty() {
        return Ok(());
    }
    let aside = next_aside(output_dir)?;
    for folder in later.iter().map(|step| checkpointer.step_folder(*step)) {
        let name = folder.file_name().unwrap_or_default();
        std::fs::rename(&folder, aside.join(name)).map_err(|error| {
            let message = format!("cannot move `{}`: {error}", folder.display());
            Failure::new(Exit::CannotWrite, message).hint(WRITABLE)
        })?;
    }
    tracing::info!(folder = %aside.display(), ?later, "checkpoints of later steps are moved there");
    Ok(())
}

/// A new folder `previous-N`.
fn next_aside(output_dir: &Path) -> anyhow::Result<PathBuf> {
    let mut number = 1;
    while output_dir.join(format!("previous-{number}")).exists() {
        number += 1;
    }
    let aside = output_dir.join(format!("previous-{number}"));
    std::fs::create_dir(&aside).map_err(|error| cannot_make(&aside, &error))?;
    Ok(aside)
}

/// Whether the checkpoint is one of this folder's own run.
fn lies_in(output_dir: &Path, found: &Found) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = real(&found.dir).and_then(|dir| dir.parent().map(Path::to_owned));
    parent.is_some() && parent == real(&output_dir.join("checkpoints"))
}

/// Moves what an earlier run left in `output_dir` out of the way: nothing is lost, nothing is mixed.
fn set_aside(output_dir: &Path) -> anyhow::Result<()> {
    const FILES: [&str; 7] = [
        "config.yaml",
        "metrics.jsonl",
        "rejects.jsonl",
        "train.log",
        "checkpoints",
        "final",
        "report.html",
    ];
    let left: Vec<&str> = FILES.into_iter().filter(|name| output_dir.join(name).exists()).collect();
    let metrics = std::fs::metadata(output_dir.join("metrics.jsonl"));
    let trained = metrics.is_ok_and(|file| file.len() > 0)
        || left.iter().any(|name| matches!(*name, "checkpoints" | "final" | "report.html"));
    if !trained {
        // A run that ended before its first step is no run; what it refused will be told again.
        let rejects = output_dir.join("rejects.jsonl");
        return match std::fs::remove_file(&rejects) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let message = format!("cannot remove `{}`: {error}", rejects.display());
                Err(Failure::new(Exit::CannotWrite, message).hint(WRITABLE).into())
            }
            _ => Ok(()),
        };
    }
    let aside = next_aside(output_dir)?;
    for name in left {
        std::fs::rename(output_dir.join(name), aside.join(name)).map_err(|error| {
            let message = format!("cannot move `{name}` to `{}`: {error}", aside.display());
            Failure::new(Exit::CannotWrite, message).hint(WRITABLE)
        })?;
    }
    tracing::info!(folder = %aside.display(), "an earlier run's files are moved there");
    Ok(())
}
