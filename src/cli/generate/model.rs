//! Finds the model and the adapter that the arguments name.

use super::super::failure::{Exit, Failure};
use crate::checkpoint::{ADAPTER_CONFIG, CheckpointConfig, Checkpointer, PeftConfig};
use std::path::{Path, PathBuf};

/// A model folder or hub id, and the adapter of the model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) model: PathBuf,
    pub(super) adapter: Option<PathBuf>,
}

/// Resolves `--model`: the folder of a run is its `final`, or else its newest checkpoint. If that
/// is an adapter, the model is the one that it was trained on.
pub(super) fn find(model: &Path, adapter: Option<&Path>) -> anyhow::Result<Found> {
    let folder = of_run(model)?;
    let given = || Found { model: folder.clone(), adapter: adapter.map(Path::to_owned) };
    if folder.join("config.json").exists() || !folder.join(ADAPTER_CONFIG).exists() {
        return Ok(given());
    }
    if let Some(other) = adapter {
        let (folder, other) = (folder.display(), other.display());
        let message = format!("`--model`: `{folder}` is an adapter, and `--adapter` is `{other}`");
        let hint = "name the model folder with `--model`, or leave `--adapter` out";
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    }
    let Some(base) = PeftConfig::read(&folder)?.base_model_name_or_path else {
        let message =
            format!("`--model`: `{}` is an adapter of an unknown model", folder.display());
        let hint = format!("pass `--model MODEL --adapter {}`", folder.display());
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    };
    tracing::info!(model = base, adapter = %folder.display(), "loading the adapter and the model it was trained on");
    Ok(Found { model: base.into(), adapter: Some(folder) })
}

/// The folder with weights of a run; for all other paths, `model` itself.
fn of_run(model: &Path) -> anyhow::Result<PathBuf> {
    let is_weights = |folder: &Path| {
        ["config.json", ADAPTER_CONFIG].iter().any(|name| folder.join(name).exists())
    };
    if !model.is_dir() || is_weights(model) {
        return Ok(model.to_owned());
    }
    let checkpoints = Checkpointer::new(model, &CheckpointConfig::default());
    let last = checkpoints.final_folder();
    if is_weights(&last) {
        tracing::info!(folder = %last.display(), "using the final model of the run");
        return Ok(last);
    }
    let Some(step) = checkpoints.steps()?.pop() else { return Ok(model.to_owned()) };
    let newest = checkpoints.step_folder(step);
    tracing::info!(
        folder = %newest.display(),
        "using the newest checkpoint, because the run has no `final`"
    );
    Ok(newest)
}
