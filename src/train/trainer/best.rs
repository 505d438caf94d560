//! The best evaluation, and the end of a run that no longer improves.

use super::super::error::TrainError;
use super::super::saved_tensors::saved_weights;
use super::Trainer;
use super::save::causes;
use crate::checkpoint::{Contents, ModelFolder};
use crate::dist::DistError;
use crate::metrics::EvalMetrics;

impl Trainer {
    /// Compares an evaluation with those before it, and keeps the model if it is the best.
    pub(super) fn compare(&mut self, metrics: &mut EvalMetrics) -> Result<(), TrainError> {
        let Some(rule) = self.parts.evaluation.rule.clone() else { return Ok(()) };
        let row = serde_json::to_value(&*metrics).map_err(candle_core::Error::wrap)?;
        let history = self.parts.state.evals.get_or_insert_default();
        let before = history.clone();
        let is_best = history.add(&rule, metrics.step, &row);
        metrics.early_stop = history.ends(&rule).is_some();
        // Rank 0 decides: only its history leaves out a best model whose folder is lost.
        let is_best = self.ranks().gather(is_best)?.first() == Some(&true);
        if !is_best || !rule.keeps_best() {
            return Ok(());
        }
        metrics.best = self.try_save_best(metrics.step)?;
        if !metrics.best {
            self.parts.state.evals.get_or_insert_default().restore_best(&before);
        } else if self.is_first() {
            let folder = self.parts.checkpoints.checkpointer.best_folder();
            let value = row[rule.key()].as_f64().unwrap_or(f64::NAN);
            tracing::info!(
                step = metrics.step,
                metric = %rule.metric(),
                value = %format_args!("{value:.4}"),
                folder = %folder.display(),
                "best"
            );
        }
        Ok(())
    }

    /// Writes the folder `best`. If this is not possible, for example because the disk is full,
    /// this is logged, the older folder stays, and the result is `false`.
    fn try_save_best(&self, step: u64) -> Result<bool, TrainError> {
        let Err(error) = self.ranks().during("writing `best`", || self.save_best(step)) else {
            return Ok(true);
        };
        // an error of one rank is one of all
        let is_write = match &error {
            TrainError::Checkpoint(error) => error.is_write(),
            TrainError::Ranks(DistError::Failed { .. }) => true,
            _ => return Err(error), // of this rank alone, or of the connections
        };
        if self.ranks().gather(is_write)?.contains(&false) {
            return Err(error);
        }
        if self.is_first() {
            let problem = causes(&error);
            tracing::warn!(step, "`best` was not written, and training continues: {problem}");
        }
        Ok(false)
    }

    fn save_best(&self, step: u64) -> Result<(), TrainError> {
        let parts = &self.parts;
        let weights = saved_weights(&parts.runner)?;
        let state = serde_json::to_value(&parts.state).map_err(candle_core::Error::wrap)?;
        let model = ModelFolder {
            layout: parts.checkpoints.layout,
            weights: &weights,
            config_json: &parts.checkpoints.config_json,
            carried: &parts.checkpoints.carried,
            max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
        };
        let contents = Contents { model, optimizer: None, state: &state };
        parts.checkpoints.checkpointer.save_best(step, &contents, self.ranks())?;
        Ok(())
    }

    /// The reason why the run ends before its last step, if it does.
    pub(super) fn ends_early(&self) -> Option<String> {
        let state = &self.parts.state;
        let (rule, evals) = (self.parts.evaluation.rule.as_ref()?, state.evals.as_ref()?);
        evals.ends(rule).filter(|_| state.step < state.total_steps)
    }
}
