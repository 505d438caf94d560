//! The packs, steps and tokens of a run, from the lengths of its rows.

use super::error::RunError;
use super::inputs::{DataList, encoder, loader_options, open_data, order};
use super::observer::SetupObserver;
use super::plan::cached_if_possible;
use crate::batch::{IGNORE_INDEX, Patches};
use crate::config::RunConfig;
use crate::data::{DataSet, Encoder, JsonlRows, Plan, RowReader, SampleIndex, plan};
use std::fs;
use std::num::NonZeroU64;
use std::sync::Arc;

/// Number of rows from which the fraction of supervised tokens is computed.
const NUM_SAMPLED: usize = 16;

/// The size of a run over its data.
#[derive(Debug, Clone, PartialEq)]
pub struct DataPlan {
    /// Its rows.
    pub rows: usize,
    /// Number of epochs that `plan` counts.
    pub epochs: u64,
    /// Packs and tokens of these epochs.
    pub plan: Plan,
    /// Steps of the run.
    pub steps: u64,
    /// Fraction of supervised tokens, of a few rows.
    pub targets: f64,
}

impl DataPlan {
    /// Tokens of the whole run.
    pub fn tokens(&self) -> f64 {
        self.plan.tokens as f64 * self.steps as f64 / self.plan.steps.max(1) as f64
    }
}

/// Measures the rows of `data.train` and counts the steps of the run, as `sft` does at its start.
/// Like `check` it writes caches of the data only.
pub fn plan_data(config: &RunConfig, observer: &dyn SetupObserver) -> Result<DataPlan, RunError> {
    let exists = config.output_dir.exists();
    // If this fails, the update of the cache reports it.
    let _ = fs::create_dir_all(config.cache_dir());
    let planned = encoder(config).and_then(|encoder| plan_rows(config, &encoder, observer));
    if planned.is_err() && !exists {
        // only if they are empty
        let _ = fs::remove_dir(config.cache_dir());
        let _ = fs::remove_dir(&config.output_dir);
    }
    planned
}

/// As [`plan_data`], with the encoder of the config.
pub(super) fn plan_rows(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<DataPlan, RunError> {
    let rows = Arc::new(open_data(config, DataList::Train, encoder, observer)?);
    plan_opened(config, encoder, &rows, observer)
}

/// As [`plan_rows`], with the rows of `data.train`.
pub(super) fn plan_opened(
    config: &RunConfig,
    encoder: &Encoder,
    rows: &Arc<JsonlRows>,
    observer: &dyn SetupObserver,
) -> Result<DataPlan, RunError> {
    let order = order(config, rows)?;
    let reader: Arc<dyn RowReader> = match cached_if_possible(config, rows, observer)? {
        Some(cached) => Arc::new(cached),
        None => Arc::clone(rows) as Arc<dyn RowReader>,
    };
    let epochs = config.train.epoch_limit().unwrap_or(1);
    let plan = plan(&reader, &order, &loader_options(config, encoder), epochs, &|_, _| {})?;
    let max_steps = config.train.max_steps.map(NonZeroU64::get);
    let steps = match (max_steps, config.train.epochs) {
        (Some(steps), None) => steps,
        (Some(steps), Some(_)) => steps.min(plan.steps),
        (None, _) => plan.steps,
    };
    let [_, targets] = sample_fractions(rows);
    Ok(DataPlan { rows: rows.num_rows(), epochs, plan, steps, targets })
}

/// Patches per token, and the fraction of supervised tokens, of a few rows; 0 and 1 if none of them
/// can be read.
pub(super) fn sample_fractions(rows: &JsonlRows) -> [f64; 2] {
    let (mut tokens, mut patches, mut targets) = (0, 0, 0);
    let sets = rows.sets();
    let each = NUM_SAMPLED.div_ceil(sets.len().max(1));
    for (dataset, set) in (0u32..).zip(sets) {
        let step = DataSet::len(set).div_ceil(each).max(1);
        for row in (0..DataSet::len(set)).step_by(step) {
            let Ok(sample) = rows.read(SampleIndex { dataset, row: row as u32 }) else { continue };
            tokens += sample.labels.len();
            patches += sample.media.iter().map(Patches::num_patches).sum::<usize>();
            targets += sample.labels.iter().filter(|label| **label != IGNORE_INDEX).count();
        }
    }
    if tokens == 0 {
        return [0.0, 1.0];
    }
    [patches, targets].map(|count| count as f64 / tokens as f64)
}
