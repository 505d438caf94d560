//! How the evaluations of a run are compared.

use super::error::RunError;
use super::output_dir::set_one_aside;
use crate::checkpoint::{Checkpointer, Found};
use crate::config::{RunConfig, ValueError};
use crate::data::dataset_names;
use crate::train::{EvalHistory, EvalRule, TrainState};

/// The rule of `checkpoint.best` and `eval.early_stopping`, whose data set must exist.
pub(super) fn eval_rule(config: &RunConfig) -> Result<Option<EvalRule>, RunError> {
    let rule = EvalRule::new(config.checkpoint.best.as_ref(), config.eval.early_stopping);
    let name = rule.as_ref().and_then(|rule| rule.key().strip_prefix("loss/"));
    let names = dataset_names(&config.data.eval);
    if name.is_some_and(|name| names.len() < 2 || !names.iter().any(|found| found == name)) {
        let found = rule.map_or(String::new(), |rule| rule.metric().to_owned());
        let expected = "the name of one of several data sets of `data.eval`";
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
    found: Option<&Found>,
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
