//! Checks the model folder, and the patterns that select parameters.

use super::super::adapter::{AdapterError, open_run_model};
use super::super::error::{RunError, SetupError};
use super::super::inputs::{of_pattern, pattern_groups};
use super::super::load_model::check_heads;
use super::super::new_tokens::check_rows;
use super::super::{OpenModel, trainable};
use super::{CheckReport, Topic};
use crate::config::RunConfig;
use crate::optim::ParamGroups;
use crate::tape::Trainable;
use crate::train::{AdapterConfig, Targets};
use candle_core::Device;

/// Compares the tensors of the model folder with its config, and applies the patterns. A wrong
/// pattern is left out after it was reported, so that it hides no other one.
pub(super) fn check(config: &RunConfig, report: &mut CheckReport) {
    let Some(open) = open_with_targets(config, report) else { return };
    if let Err(error) = check_heads(&open, config.distributed.sequence.get()) {
        report.error(Topic::Model, error);
    }
    let Some(groups) = groups(config, &open, report) else { return };
    if let Err(error) = check_rows(config, &open, &groups) {
        report.error(Topic::Model, error);
    }
    let trained = trainable(&groups);
    let count = |only: bool| -> usize {
        let specs = open.specs.iter().zip(&trained);
        let counted = specs.filter(|(_, kind)| !only || **kind == Trainable::Yes);
        counted.map(|(spec, _)| spec.shape.iter().product::<usize>()).sum()
    };
    let [all, trained] = [count(false), count(true)];
    let tensors = open.specs.len();
    let active = match open.text().idle_weights() {
        0 => String::new(),
        idle => format!("; {} of them compute a token", all - idle),
    };
    let text = format!("{all} parameters in {tensors} tensors; {trained} are trained{active}");
    report.fact(Topic::Model, text);
}

/// Opens the model with the targets of the adapter that exist.
fn open_with_targets(config: &RunConfig, report: &mut CheckReport) -> Option<OpenModel> {
    let mut config = config.clone();
    loop {
        let error = match open_run_model(&config, None, &Device::Cpu) {
            Ok((open, _)) => return Some(open),
            Err(error) => error,
        };
        let wrong = wrong_pattern(&error);
        report.error(Topic::Model, error);
        // Without targets, the patterns of the other sections are still checked.
        let adapter = config.adapter.as_mut()?;
        if !wrong.is_some_and(|wrong| leave_out(adapter, &wrong)) {
            config.adapter = None;
        }
    }
}

/// The entry of `adapter.parts`, `target` or `train_also` that an error is about.
fn wrong_pattern(error: &RunError) -> Option<String> {
    let RunError::Setup(SetupError::Adapter(error)) = error else { return None };
    match error {
        AdapterError::Part { part, .. } => Some(part.clone()),
        AdapterError::Target { pattern, .. } | AdapterError::Both { pattern, .. } => {
            Some(pattern.clone())
        }
        AdapterError::Pattern(problem) => problem.origin().1.map(str::to_owned),
        _ => None,
    }
}

/// Removes an entry; of an empty list of parts or targets, the default is used. Returns whether the
/// entry was there.
fn leave_out(adapter: &mut AdapterConfig, wrong: &str) -> bool {
    let AdapterConfig { parts, target, train_also, .. } = adapter;
    let mut removed = false;
    let mut remove = |entries: &mut Vec<String>| {
        let before = entries.len();
        entries.retain(|entry| entry != wrong);
        removed |= entries.len() < before;
        entries.is_empty()
    };
    let default = AdapterConfig::default();
    remove(train_also);
    if remove(parts) {
        *parts = default.parts;
    }
    if let Targets::Globs(globs) = target
        && remove(globs)
    {
        *target = default.target;
    }
    removed
}

/// Applies the patterns that are right. Returns `None` if one was wrong.
fn groups(config: &RunConfig, open: &OpenModel, report: &mut CheckReport) -> Option<ParamGroups> {
    let mut usable = config.clone();
    let mut all_are_right = true;
    loop {
        let (is_frozen, wrong) = match pattern_groups(&usable, open) {
            Ok(groups) => return Some(groups).filter(|_| all_are_right),
            Err(problem) => {
                let (key, pattern) = problem.origin();
                let wrong = pattern.map(str::to_owned);
                let is_frozen = key == "model.freeze";
                report.error(Topic::Model, of_pattern(config, problem));
                (is_frozen, wrong)
            }
        };
        all_are_right = false;
        let wrong = wrong?;
        if is_frozen {
            usable.model.freeze.retain(|entry| *entry != wrong);
        } else {
            usable.optim.lr_multipliers.shift_remove(&wrong);
        }
    }
}
