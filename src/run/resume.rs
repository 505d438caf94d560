//! The checkpoint that a run resumes from.

use super::error::RunError;
use crate::checkpoint::{Checkpointer, Found, Together};
use crate::config::{Change, RunConfig, load};
use crate::train::TrainState;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where a run starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Resume {
    /// From the newest undamaged checkpoint in `output_dir` that was written with the same config,
    /// or else at step 0.
    #[default]
    Auto,
    /// At step 0.
    Never,
    /// From this checkpoint folder; it is an error if the folder belongs to another config.
    From(PathBuf),
}

/// The checkpoint to resume from; `None` for a new run.
pub(super) fn find_checkpoint(
    config: &RunConfig,
    resume: &Resume,
    checkpointer: &Checkpointer,
    ranks: &impl Together<Error = RunError>,
) -> Result<Option<Found>, RunError> {
    let fingerprint = config.fingerprint();
    let same_run = |state: &serde_json::Value| state["fingerprint"] == fingerprint.as_str();
    match resume {
        Resume::Never => Ok(None),
        Resume::Auto => {
            let found = checkpointer.newest_good(same_run, ranks)?;
            if found.is_none() && ranks.rank() == 0 {
                warn_about_changes(config, checkpointer)?;
            }
            Ok(found)
        }
        Resume::From(folder) => {
            let found = Checkpointer::open(folder, ranks)?;
            if !same_run(&found.state) {
                // <output_dir>/checkpoints/<folder>
                let changes = folder.ancestors().nth(2).map(|dir| changes(config, dir));
                let changes = changes.unwrap_or_default();
                return Err(RunError::OtherConfig { folder: folder.clone(), changes });
            }
            // Checked before any file is moved: `final/` has no optimizer state.
            found.optimizer().map_err(|problem| RunError::NoOptimizer { problem })?;
            Ok(Some(found))
        }
    }
}

/// The settings in which `config` differs from that of the run in `output_dir`; none if its config
/// cannot be read.
pub(super) fn changes(config: &RunConfig, output_dir: &Path) -> Vec<Change> {
    let earlier = load::<RunConfig>(&output_dir.join("config.yaml"), &[]);
    earlier.map_or_else(|_| Vec::new(), |earlier| config.changes_since(&earlier))
}

/// Says why the run in `output_dir` is not resumed.
fn warn_about_changes(config: &RunConfig, checkpointer: &Checkpointer) -> Result<(), RunError> {
    if checkpointer.steps()?.is_empty() {
        return Ok(());
    }
    for Change { key, old, new } in changes(config, &config.output_dir) {
        tracing::warn!(
            key,
            old,
            new,
            "this setting differs from that of the run in `output_dir`, which is not resumed"
        );
    }
    Ok(())
}

/// The training state in a checkpoint; an error if an input of the steps changed since.
///
/// `inputs` are the digests of [`Encoder::digests`](crate::data::Encoder::digests).
pub(super) fn resumed_state(
    found: &Found,
    data_fingerprint: &str,
    inputs: &BTreeMap<String, String>,
) -> Result<TrainState, RunError> {
    let folder = || found.dir.clone();
    let version = found.state["version"].as_u64().and_then(|version| version.try_into().ok());
    if let Some(version) = version.filter(|version| *version != TrainState::VERSION) {
        return Err(RunError::StateVersion { folder: folder(), version });
    }
    let state: TrainState = serde_json::from_value(found.state.clone())
        .map_err(|source| RunError::State { folder: folder(), source })?;
    if state.data_fingerprint != data_fingerprint {
        return Err(RunError::DataChanged { folder: folder() });
    }
    let differs = |(name, digest): (&String, &String)| {
        (inputs.get(name) != Some(digest)).then(|| name.clone())
    };
    let what: Vec<String> = state.inputs.iter().filter_map(differs).collect();
    if what.is_empty() {
        Ok(state)
    } else {
        Err(RunError::InputsChanged { folder: folder(), what })
    }
}
