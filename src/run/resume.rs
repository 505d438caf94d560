//! The checkpoint that a run resumes from, and how its evaluations are compared.

use super::error::RunError;
use super::output_dir::set_one_aside;
use crate::checkpoint::{Checkpoint, CheckpointError, Checkpointer, Together};
use crate::config::{ConfigChange, RunConfig, ValueError, load};
use crate::data::{CachedRows, DatasetRows, Encoder, MediaLook, dataset_names};
use crate::train::{EvalHistory, EvalRule, TrainState};
use sha2::digest::generic_array::GenericArray;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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
) -> Result<Option<Checkpoint>, RunError> {
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

/// The checkpoint that a run would resume from by default, if its files match their checksums: of
/// the weights, only the sizes are compared here. Also the problems of newer ones.
pub(super) fn likely_checkpoint(
    config: &RunConfig,
    checkpointer: &Checkpointer,
) -> Result<(Option<Checkpoint>, Vec<String>), CheckpointError> {
    let fingerprint = config.fingerprint();
    checkpointer.newest_likely(|state| state["fingerprint"] == fingerprint.as_str())
}

/// Digests of what the steps of a run read besides weights.
pub(super) struct InputDigests {
    /// Of the contents of the training data.
    pub(super) data: String,
    /// Of the files of the encoder, each with a name for messages.
    pub(super) others: BTreeMap<String, String>,
}

impl InputDigests {
    pub(super) fn new(rows: &DatasetRows, encoder: &Encoder) -> Self {
        let data = format!("{:x}", GenericArray::from(rows.fingerprint()));
        Self { data, others: encoder.digests() }
    }
}

/// The state of the checkpoint `found`. Fails if an input of the steps has changed since then.
/// `reads_media`: whether the media files of the rows are compared as well.
pub(super) fn resumed_state(
    config: &RunConfig,
    rows: &DatasetRows,
    inputs: &InputDigests,
    found: &Checkpoint,
    reads_media: bool,
) -> Result<TrainState, RunError> {
    let state = state_of_inputs(found, inputs)?;
    if reads_media {
        check_media(config, rows, found, &state)?;
    }
    Ok(state)
}

/// The settings in which `config` differs from that of the run in `output_dir`; none if its config
/// cannot be read.
pub(super) fn changes(config: &RunConfig, output_dir: &Path) -> Vec<ConfigChange> {
    let earlier = load::<RunConfig>(&output_dir.join("config.yaml"), &[]);
    let changes = |earlier: RunConfig| config.changes_since(&earlier.with_unescaped_paths());
    earlier.map_or_else(|_| Vec::new(), changes)
}

fn warn_about_changes(config: &RunConfig, checkpointer: &Checkpointer) -> Result<(), RunError> {
    if checkpointer.steps()?.is_empty() {
        return Ok(());
    }
    for ConfigChange { key, old, new } in changes(config, &config.output_dir) {
        tracing::warn!(
            key,
            old,
            new,
            "a setting differs from the run in `output_dir`, which is therefore not resumed"
        );
    }
    Ok(())
}

/// Maximum number of rows whose media files have their sizes and times looked up.
const MAX_ROWS_STAMPED: usize = 32_768;
/// Maximum number of rows whose media files are read, even if their sizes and times are unchanged.
const MAX_ROWS_READ: usize = 1024;

/// Compares the media files of the rows with those at the first start of the run, if the length
/// caches had all rows then. Other sizes or contents are an error. Other times alone are not,
/// because a copy of the files has other times.
///
/// Of a large data set, some rows are compared, spread evenly; for the others, the check finds
/// changes that a length cache has.
fn check_media(
    config: &RunConfig,
    rows: &DatasetRows,
    found: &Checkpoint,
    state: &TrainState,
) -> Result<(), RunError> {
    let spread = |most: usize| rows.num_rows().div_ceil(most).max(1);
    let look =
        MediaLook::Every { stamps: spread(MAX_ROWS_STAMPED), contents: spread(MAX_ROWS_READ) };
    let Some(before) = &state.media else { return Ok(()) };
    let Some(now) = CachedRows::media(rows, &config.cache_dir(), look)? else { return Ok(()) };
    let digests = now.digests();
    let first = now.changed().map(str::to_owned);
    let [sizes, times] = [digests.sizes != before.sizes, digests.times != before.times];
    let contents = digests.contents != before.contents;
    if digests.files != before.files {
        // Rows became usable or unusable.
        tracing::warn!(
            first,
            "media files of the rows were written since the start of the run; if their pixels \
             differ, the resumed run differs too"
        );
    } else if sizes || contents {
        return Err(RunError::MediaChanged { folder: found.dir.clone(), first });
    } else if times && now.has_unread_bytes() {
        tracing::warn!(
            "media files have new modification times; their sizes, and their first and last 16 KiB, \
             are the same. If the bytes between differ, the resumed run differs too"
        );
    } else if times {
        tracing::info!("media files have new modification times and the same contents");
    }
    Ok(())
}

/// The training state in a checkpoint; an error if its run had other inputs.
fn state_of_inputs(found: &Checkpoint, inputs: &InputDigests) -> Result<TrainState, RunError> {
    let folder = || found.dir.clone();
    let version = found.state["version"].as_u64().and_then(|version| version.try_into().ok());
    if let Some(version) = version.filter(|version| *version != TrainState::VERSION) {
        return Err(RunError::StateVersion { folder: folder(), version });
    }
    let state: TrainState = serde_json::from_value(found.state.clone())
        .map_err(|source| RunError::State { folder: folder(), source })?;
    if state.data_fingerprint != inputs.data {
        return Err(RunError::DataChanged { folder: folder() });
    }
    let differs = |(name, digest): (&String, &String)| {
        (inputs.others.get(name) != Some(digest)).then(|| name.clone())
    };
    let what: Vec<String> = state.inputs.iter().filter_map(differs).collect();
    if what.is_empty() {
        Ok(state)
    } else {
        Err(RunError::InputsChanged { folder: folder(), what })
    }
}

/// The rule of `checkpoint.best` and `eval.early_stopping`, whose data set must exist.
pub(super) fn eval_rule(config: &RunConfig) -> Result<Option<EvalRule>, RunError> {
    let rule = EvalRule::new(config.checkpoint.best.as_ref(), config.eval.early_stopping);
    let name = rule.as_ref().and_then(|rule| rule.key().strip_prefix("loss/"));
    let names = dataset_names(config.data.eval_sets());
    if name.is_some_and(|name| names.len() < 2 || !names.iter().any(|found| found == name)) {
        let found = rule.map_or(String::new(), |rule| rule.metric().to_owned());
        let expected = "the name of one of several data sets that are evaluated";
        return Err(ValueError::new("checkpoint.best.metric", found, expected).into());
    }
    Ok(rule)
}

/// Makes the folder `best` that of the run before `found`, which may be in another `output_dir`. If
/// it is lost, the next evaluation counts as the best. A folder of an evaluation that this run does
/// not have is moved to `previous-N`. A run on `world` ranks makes the evaluation after the
/// checkpoint again, since only this rank reads the folder.
pub(super) fn bring_best(
    config: &RunConfig,
    (rule, world): (Option<&EvalRule>, usize),
    checkpointer: &Checkpointer,
    found: Option<&Checkpoint>,
    state: &mut TrainState,
) -> Result<(), RunError> {
    let Some(found) = found else { return Ok(()) };
    let rule = rule.filter(|rule| rule.keeps_best());
    let kept = checkpointer.best();
    // The evaluation after the checkpoint, with the same weights.
    if let (Some(rule), Some((step, kept))) = (rule, &kept)
        && world == 1
        && *step == found.step
        && let Some(evals) = EvalHistory::of_state(kept)
        && evals.best_step(rule) == Some(*step)
    {
        state.evals = Some(evals);
        return Ok(());
    }
    let best = rule.and_then(|rule| state.evals.as_ref()?.best_step(rule));
    let every = config.eval.every_steps;
    let is_due = |step: u64| every > 0 && step.is_multiple_of(every) || step == state.total_steps;
    let is_repeated = |step| rule.is_some() && step >= found.step && is_due(step);
    if kept.is_some_and(|(step, _)| best == Some(step) || is_repeated(step)) {
        return Ok(());
    }
    let folder = checkpointer.best_folder();
    if folder.exists() {
        let aside = set_one_aside(&config.output_dir, &folder)?;
        tracing::info!(folder = %aside.display(), "moved `best` of another evaluation aside");
    }
    let Some(step) = best else { return Ok(()) };
    if checkpointer.copy_best(&found.dir, step)? {
        return Ok(());
    }
    tracing::warn!(step, "the folder `best` is missing: the next evaluation counts as the best");
    if let Some(evals) = &mut state.evals {
        evals.forget_best();
    }
    Ok(())
}
