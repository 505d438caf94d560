//! How the evaluations of a run are compared.

use super::error::RunError;
use crate::checkpoint::{Checkpointer, Found};
use crate::config::{RunConfig, ValueError};
use crate::data::JsonlRows;
use crate::train::{EvalRule, TrainState};

/// The rule of `checkpoint.best` and `eval.early_stopping`, whose data set must exist.
pub(super) fn eval_rule(
    config: &RunConfig,
    rows: Option<&JsonlRows>,
) -> Result<Option<EvalRule>, RunError> {
    let rule = EvalRule::new(config.checkpoint.best.as_ref(), config.eval.early_stopping);
    let name = rule.as_ref().and_then(|rule| rule.key().strip_prefix("loss/"));
    let names = rows.map_or(&[][..], JsonlRows::names);
    if name.is_some_and(|name| names.len() < 2 || !names.iter().any(|found| found == name)) {
        let found = rule.map_or(String::new(), |rule| rule.metric().to_owned());
        let expected = "the name of one of several data sets of `data.eval`";
        return Err(ValueError { key: "checkpoint.best.metric", found, expected }.into());
    }
    Ok(rule)
}

/// Makes the folder `best` that of the run before `found`, which may be in another `output_dir`. If it
/// is lost, the next evaluation counts as the best.
pub(super) fn bring_best(
    rule: Option<&EvalRule>,
    checkpointer: &Checkpointer,
    found: Option<&Found>,
    state: &mut TrainState,
) -> Result<(), RunError> {
    let (Some(rule), Some(found), Some(evals)) = (rule, found, &mut state.evals) else {
        return Ok(());
    };
    let Some(step) = evals.best_step().filter(|_| rule.keeps_best()) else { return Ok(()) };
    if checkpointer.best_folder().is_dir() || checkpointer.copy_best(&found.dir, step)? {
        return Ok(());
    }
    tracing::warn!(step, "the folder `best` is missing: the next evaluation counts as the best");
    evals.forget_best();
    Ok(())
}
