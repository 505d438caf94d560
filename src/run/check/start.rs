//! What stops a run at its start although each value, file and row can be used: its device, its
//! ranks, and the checkpoint that it resumes from.

use super::super::device::{input_digests, read_algorithms};
use super::super::error::{RunError, SetupError};
use super::super::load_model::{check_matmul, check_world};
use super::super::output_dir::check_model_stays;
use super::super::resume::{check_media, data_digest, eval_rule, likely_checkpoint, resumed_state};
use super::{CheckReport, Finding, Note, Topic};
use crate::checkpoint::{CarriedFiles, Checkpointer, Found};
use crate::config::{LeftOut, RunConfig};
use crate::data::{DatasetRows, Encoder};
use crate::dist::Processes;
use crate::train::{AttentionChoice, DeviceChoice, MatmulChoice};
use std::sync::Arc;

/// Checks the device, the algorithms of its products, the number of ranks and the rule of the best
/// evaluation.
pub(super) fn check(config: &RunConfig, left_out: &LeftOut, report: &mut CheckReport) {
    // With `auto`, only FP8 depends on the device.
    let is_named = matches!(config.device, DeviceChoice::Cuda(_));
    if is_named || config.model.matmul != MatmulChoice::Native {
        match config.device.open() {
            Ok(device) => {
                if let Err(error) = check_matmul(config.model.matmul, &device) {
                    report.error(Topic::Config, error);
                }
            }
            Err(error) => report.error(Topic::Config, error),
        }
    }
    let is_gpu = matches!(config.device.resolved(), DeviceChoice::Cuda(_));
    if is_gpu && config.model.attention == AttentionChoice::Masked {
        report.error(Topic::Config, SetupError::MaskedOnGpu);
    }
    if let Err(error) = read_algorithms(config) {
        report.error(Topic::Config, error);
    }
    // With `auto`, the launcher chooses the number.
    if let Processes::Count(ranks) = config.distributed.processes
        && let Err(error) = check_world(config, ranks.get())
    {
        report.error(Topic::Config, error);
    }
    // Only a complete list has all names.
    if !left_out.has("data.eval")
        && let Err(error) = eval_rule(config)
    {
        report.error(Topic::Config, error);
    }
}

/// Reads the files that checkpoints copy from the model folder.
pub(super) fn check_copied(config: &RunConfig, report: &mut CheckReport) {
    if let Err(error) = CarriedFiles::read(&config.model.path) {
        report.error(Topic::Model, error);
    }
}

/// The checkpoint that the run would resume from.
pub(super) fn resumes(config: &RunConfig, report: &mut CheckReport) -> Option<Found> {
    let checkpointer = Checkpointer::new(&config.output_dir, &config.checkpoint);
    let (found, problems) = match likely_checkpoint(config, &checkpointer) {
        Ok(likely) => likely,
        Err(error) => {
            report.error(Topic::Output, error);
            return None;
        }
    };
    for problem in problems {
        let text = format!("a checkpoint would be skipped: {problem}");
        let hint = match &found {
            Some(found) => format!("the run would resume from step {}", found.step),
            None => "the run would start at step 0".to_owned(),
        };
        report.add(Topic::Output, Finding::Warning(Note::new(text, &hint)));
    }
    if found.is_none()
        && let Err(error) = check_model_stays(config)
    {
        report.error(Topic::Output, error);
    }
    found
}

/// Fails if an input of the steps changed since the checkpoint was written.
pub(super) fn check_resumed(
    config: &RunConfig,
    encoder: &Encoder,
    rows: &Arc<DatasetRows>,
    found: &Found,
) -> Result<(), RunError> {
    let algorithms = read_algorithms(config)?;
    let inputs = input_digests(algorithms.as_ref(), encoder);
    let state = resumed_state(found, &data_digest(rows), &inputs)?;
    check_media(config, rows, Some(found), Some(&state))
}
