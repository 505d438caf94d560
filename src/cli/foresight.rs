//! What is known of a run before its first step: lengths of rows, and what follows from them.

use super::cache;
use super::logging::Logging;
use crate::config::RunConfig;
use crate::data::BackgroundCacheWriter;
use crate::data::{CacheWork, LoaderOptions, Order, Plan, RowReader, plan};
use crate::metrics::JsonlSink;
use crate::train::{
    CachedRows, DataSet, JsonlRows, LengthSummary, Planned, TrainState, write_rejects,
};
use std::sync::Arc;

/// Rows that are measured before a run that need not know their lengths: a matter of seconds.
const FEW_ROWS: usize = 32_768;

/// What [`foresee`] found.
pub(super) struct Foresight {
    /// Steps until the data ends; `None` if it never ends.
    pub(super) planned: Option<Planned>,
    /// The rows, with their lengths where these are known.
    pub(super) reader: Arc<dyn RowReader>,
    /// Caches for the next start; to be dropped at the end of the run.
    pub(super) beside: Option<BackgroundCacheWriter>,
}

/// Measures the rows that no cache knows, and plans the run with the lengths.
///
/// A run of `train.max_steps` alone needs no plan: where lengths are known already, or are a matter of
/// seconds, it says what an epoch would be. Otherwise it starts at once, and rows are measured beside it
/// for the next start. What it trains on is the same in each case.
pub(super) fn foresee(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    order: &Order,
    options: &LoaderOptions,
    resumed: Option<&TrainState>,
    logging: &Logging,
) -> anyhow::Result<Foresight> {
    let unmeasured = |planned| Foresight { planned, reader: rows.clone(), beside: None };
    let Some(epochs) = config.train.epoch_limit() else {
        let num_rows = num_chats(rows);
        let reader = if resumed.is_some() || num_rows == 0 {
            Ok(None)
        } else if num_rows <= FEW_ROWS {
            measured(config, rows, options, logging).map(Some)
        } else if CachedRows::exist(rows, &config.cache_dir()) {
            measured_before(config, rows, options, logging)
        } else {
            Ok(None)
        };
        return match reader {
            Ok(None) => {
                let start = || BackgroundCacheWriter::start(rows.clone(), config.cache_dir());
                Ok(Foresight { beside: (num_rows > 0).then(start), ..unmeasured(None) })
            }
            Ok(Some(reader)) => {
                match plan(&reader, order, options, 1, &|_, _| {}) {
                    Ok(plan) => log_plan(&plan, "an epoch"),
                    // the run may end before it would come to that
                    Err(error) => tracing::warn!(%error, "the first epoch will not end"),
                }
                Ok(Foresight { reader, ..unmeasured(None) })
            }
            Err(error) => {
                tracing::warn!("there is no length cache: {error:#}");
                Ok(unmeasured(None))
            }
        };
    };
    // A run of the same length has been planned when it began.
    let same = |plan: &Planned| plan.epochs == epochs;
    if let Some(plan) = resumed.and_then(|state| state.planned).filter(same) {
        return Ok(unmeasured(Some(plan)));
    }
    let reader = measured(config, rows, options, logging)?;
    let plan = match (plan(&reader, order, options, epochs, &|_, _| {}), resumed) {
        (Ok(plan), _) => plan,
        // The rows that the run would have told step by step.
        (Err(error), None) => {
            let mut rejects = JsonlSink::open(&config.output_dir.join("rejects.jsonl"))?;
            write_rejects(&mut rejects, 1, error.unreported())?;
            return Err(error.into());
        }
        (Err(error), Some(_)) => return Err(error.into()),
    };
    log_plan(&plan, "plan");
    let planned = Some(Planned { epochs, steps: plan.steps });
    Ok(Foresight { planned, reader, beside: None })
}

fn num_chats(rows: &JsonlRows) -> usize {
    rows.sets().iter().filter(|set| set.corpus().is_none()).map(DataSet::len).sum()
}

/// Brings the caches up to date, and says what becomes of the rows.
fn measured(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    options: &LoaderOptions,
    logging: &Logging,
) -> anyhow::Result<Arc<dyn RowReader>> {
    let (cached, work) = cache::update(config, rows.clone(), logging)?;
    Ok(told(config, cached, work, options))
}

/// The same where a moment is enough: the caches are of these rows, none is being written, and few images
/// have changed.
fn measured_before(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    options: &LoaderOptions,
    logging: &Logging,
) -> anyhow::Result<Option<Arc<dyn RowReader>>> {
    let updated = cache::update_if_quick(config, rows.clone(), FEW_ROWS, logging)?;
    Ok(updated.map(|(cached, work)| told(config, cached, work, options)))
}

fn told(
    config: &RunConfig,
    cached: CachedRows,
    work: CacheWork,
    options: &LoaderOptions,
) -> Arc<dyn RowReader> {
    tracing::info!(measured = work.measured, reused = work.reused, folder = %config.cache_dir().display(), "length cache");
    for lengths in cached.summaries(options) {
        let LengthSummary { file, rows, truncated, rejected, .. } = lengths;
        tracing::info!(file = %file.display(), rows, truncated, ?rejected, "lengths");
    }
    Arc::new(cached)
}

fn log_plan(plan: &Plan, what: &str) {
    tracing::info!(
        steps = plan.steps,
        packs = plan.packs,
        samples = plan.samples,
        tokens = plan.tokens,
        rejected = plan.rejected.values().sum::<u64>(),
        "{what}"
    );
}
