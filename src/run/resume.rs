//! The checkpoint that a run resumes from.

use super::error::RunError;
use crate::checkpoint::{Checkpointer, Found, Together};
use crate::config::RunConfig;
use crate::train::TrainState;
use std::path::PathBuf;

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
        Resume::Auto => Ok(checkpointer.newest_good(same_run, ranks)?),
        Resume::From(folder) => {
            let found = Checkpointer::open(folder, ranks)?;
            if !same_run(&found.state) {
                return Err(RunError::OtherConfig { folder: folder.clone() });
            }
            // Checked before any file is moved: `final/` has no optimizer state.
            found.optimizer().map_err(|problem| RunError::NoOptimizer { problem })?;
            Ok(Some(found))
        }
    }
}

/// The training state in a checkpoint; an error if the training files changed since.
pub(super) fn resumed_state(found: &Found, data_fingerprint: &str) -> Result<TrainState, RunError> {
    let state: TrainState = serde_json::from_value(found.state.clone())
        .map_err(|source| RunError::State { folder: found.dir.clone(), source })?;
    if state.data_fingerprint != data_fingerprint {
        return Err(RunError::DataChanged { folder: found.dir.clone() });
    }
    Ok(state)
}
