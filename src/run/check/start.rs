//! What stops a run at its start although each value, file and row can be used: its device, its
//! ranks, and the checkpoint that it resumes from.

use super::super::output_dir::check_model_stays;
use super::super::requirements;
use super::super::resume::likely_checkpoint;
use super::{CheckReport, Finding, Note, Topic};
use crate::checkpoint::{CarriedFiles, Checkpoint, Checkpointer};
use crate::config::{LeftOut, RunConfig};
use crate::dist::Processes;
use crate::train::{DeviceChoice, MatmulChoice};

/// Checks what a run requires of its config and of its device.
pub(super) fn check(config: &RunConfig, left_out: &LeftOut, report: &mut CheckReport) {
    // With `auto`, only FP8 depends on the device.
    let is_named = matches!(config.device, DeviceChoice::Cuda(_));
    let is_needed = is_named || config.model.matmul != MatmulChoice::Native;
    let device = is_needed.then(|| config.device.open()).transpose();
    let device = device.unwrap_or_else(|error| {
        report.error(Topic::Config, error);
        None
    });
    let world = match config.distributed.processes {
        Processes::Auto => None,
        Processes::Count(ranks) => Some(ranks.get()),
    };
    report.errors(Topic::Config, requirements::of_device(config, device.as_ref()));
    let has_all = |list: &str| !left_out.has(list);
    report.errors(Topic::Config, requirements::of_config(config, world, has_all));
}

/// Reads the files that checkpoints copy from the model folder.
pub(super) fn check_carried(config: &RunConfig, report: &mut CheckReport) {
    if let Err(error) = CarriedFiles::read(&config.model.path) {
        report.error(Topic::Model, error);
    }
}

/// The checkpoint that the run would resume from.
pub(super) fn resumes(config: &RunConfig, report: &mut CheckReport) -> Option<Checkpoint> {
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
