//! Lengths of rows and number of steps, known before the first step.

use super::error::RunError;
use super::observer::{SetupObserver, SetupWork};
use crate::config::RunConfig;
use crate::data::{
    BackgroundCacheWriter, CacheError, CacheWork, CachedRows, DataSet, JsonlRows, LengthSummary,
    LoaderOptions, Order, Plan, RejectedCounts, RowReader, plan,
};
use crate::dist::Rank;
use crate::metrics::JsonlSink;
use crate::train::{Planned, TrainState, write_rejects};
use std::sync::Arc;
use tracing::field::display;

/// Maximum number of rows that a run with `train.max_steps` alone measures at its start in one
/// process. This takes a few seconds.
pub(super) const MAX_ROWS_AT_START: usize = 32_768;

/// Maximum number of rows that each of several ranks measures at the start. This takes a minute or
/// two; without the lengths, each rank would read the text of the rows of all ranks during
/// training.
const MAX_ROWS_OF_RANK: usize = 1 << 20;

/// The result of [`plan_run`].
pub(super) struct RunPlan {
    /// Steps until the data ends; `None` if it is repeated until `train.max_steps`.
    pub(super) planned: Option<Planned>,
    /// The rows, with cached lengths where these are known.
    pub(super) reader: Arc<dyn RowReader>,
    /// The packs of the run or of an epoch, if they were counted.
    pub(super) packs: Option<Plan>,
    /// Whether this start has updated the length caches of all rows.
    pub(super) has_new_cache: bool,
    /// Writes length caches for the next start; dropped at the end of the run.
    pub(super) background: Option<BackgroundCacheWriter>,
}

/// Measures the rows that no length cache has, and counts the steps of the run.
///
/// A run with `train.max_steps` alone needs no plan. If the lengths are cached or can be measured
/// in seconds, it logs the size of an epoch. Otherwise it starts at once, and a background thread
/// measures the rows for the next start. The run trains on the same data in both cases.
pub(super) fn plan_run(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    order: &Order,
    options: &LoaderOptions,
    resumed: Option<&TrainState>,
    rank: Rank,
    observer: &dyn SetupObserver,
) -> Result<RunPlan, RunError> {
    let unmeasured = |planned, cached: Option<Arc<dyn RowReader>>| {
        let reader = cached.unwrap_or_else(|| rows.clone());
        RunPlan { planned, reader, packs: None, has_new_cache: false, background: None }
    };
    let Some(epochs) = config.train.epoch_limit() else {
        if rank.is_first() {
            return Ok(without_epochs(config, rows, order, options, (resumed, rank), observer));
        }
        // With the lengths from a cache, a rank reads only its own rows.
        return Ok(unmeasured(None, complete_cache(config, rows)));
    };
    // The first start of a run has planned it, and the length has not changed since.
    if let Some(plan) = resumed.and_then(|state| state.planned).filter(|plan| plan.epochs == epochs)
    {
        let reader = cache_of_resumed_ranks(config, rows, options, rank, observer);
        return Ok(unmeasured(Some(plan), reader));
    }
    // Rank 0 has completed the cache. The others use it as it is: a row that could not be read then
    // would be measured again, perhaps with another result.
    let complete = (!rank.is_first()).then(|| complete_cache(config, rows)).flatten();
    let reader = if let Some(reader) = complete {
        reader
    } else {
        let (cached, work) = update_cache(config, rows.clone(), observer)?;
        log_lengths(config, cached, work, options)
    };
    let plan = match (plan(&reader, order, options, epochs, &|_, _| {}), resumed) {
        (Ok(plan), _) => plan,
        // Training does not start, so it cannot report these rows.
        (Err(error), None) => {
            if rank.is_first() {
                let mut rejects = JsonlSink::open(&config.output_dir.join("rejects.jsonl"))?;
                write_rejects(Some(&mut rejects), 1, error.unreported())?;
            }
            return Err(error.into());
        }
        (Err(error), Some(_)) => return Err(error.into()),
    };
    log_plan(&plan, "plan");
    let planned = Some(Planned { epochs, steps: plan.steps });
    Ok(RunPlan { planned, reader, packs: Some(plan), has_new_cache: true, background: None })
}

/// Measures the part of one rank of the rows that [`plan_run`] will need.
pub(super) fn measure_part(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    resumed: Option<&TrainState>,
    rank: Rank,
    observer: &dyn SetupObserver,
) -> Result<(), RunError> {
    if rank.world == 1 {
        return Ok(());
    }
    let epochs = config.train.epoch_limit();
    let is_planned =
        resumed.and_then(|state| state.planned).is_some_and(|plan| Some(plan.epochs) == epochs);
    let needs_plan = epochs.is_some() && !is_planned;
    let is_needed = needs_plan
        || are_measured_at_start(num_chats(rows), rank.world)
            && (resumed.is_none() || complete_cache(config, rows).is_none());
    if !is_needed {
        return Ok(());
    }
    let chats = rows.sets().iter().filter(|set| set.corpus().is_none());
    let own: usize = chats.map(|set| rank.own_part(set.len()).len()).sum();
    let report = observer.begin(SetupWork::MeasureRows, own as u64);
    match CachedRows::measure_part(rows, &config.cache_dir(), rank, &*report) {
        Err(error) if !needs_plan => warn_without_cache(&error),
        result => result?,
    }
    Ok(())
}

/// Whether a run of `world` ranks that needs no plan measures its rows before the first step.
fn are_measured_at_start(num_rows: usize, world: usize) -> bool {
    let most = match world {
        1 => MAX_ROWS_AT_START,
        _ => MAX_ROWS_OF_RANK.saturating_mul(world),
    };
    (1..=most).contains(&num_rows)
}

/// The rows with cached lengths, if several ranks resume a run. Rank 0 completes the caches, with
/// the rows that all ranks have measured. `None` if this takes long or is not possible.
fn cache_of_resumed_ranks(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    options: &LoaderOptions,
    rank: Rank,
    observer: &dyn SetupObserver,
) -> Option<Arc<dyn RowReader>> {
    if rank.world == 1 {
        return None;
    }
    let complete = complete_cache(config, rows);
    if complete.is_some() || !rank.is_first() || !are_measured_at_start(num_chats(rows), rank.world)
    {
        return complete;
    }
    match update_cache(config, rows.clone(), observer) {
        Ok((cached, work)) => Some(log_lengths(config, cached, work, options)),
        Err(error) => {
            warn_without_cache(&error);
            None
        }
    }
}

fn warn_without_cache(error: &(dyn std::error::Error + 'static)) {
    tracing::warn!(error, "cannot use the length cache; continuing without it");
}

/// Plans a run that ends at `train.max_steps`. Errors are logged and do not stop the run.
fn without_epochs(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    order: &Order,
    options: &LoaderOptions,
    (resumed, rank): (Option<&TrainState>, Rank),
    observer: &dyn SetupObserver,
) -> RunPlan {
    let num_rows = num_chats(rows);
    if resumed.is_some()
        && let Some(reader) = cache_of_resumed_ranks(config, rows, options, rank, observer)
    {
        let (packs, has_new_cache, background) = (None, false, None);
        return RunPlan { planned: None, reader, packs, has_new_cache, background };
    }
    let cached = if resumed.is_some() || num_rows == 0 {
        Ok(None)
    } else if are_measured_at_start(num_rows, rank.world) {
        update_cache(config, rows.clone(), observer).map(Some)
    } else if CachedRows::exist(rows, &config.cache_dir()) {
        update_cache_if_quick(config, rows.clone(), observer)
    } else {
        Ok(None)
    };
    let (mut reader, mut background) = (rows.clone() as Arc<dyn RowReader>, None);
    let mut packs = None;
    let has_new_cache = matches!(cached, Ok(Some(_)));
    match cached {
        Ok(None) if num_rows > 0 => {
            background = Some(BackgroundCacheWriter::start(rows.clone(), config.cache_dir()));
        }
        Ok(None) => {}
        Ok(Some((cached, work))) => {
            reader = log_lengths(config, cached, work, options);
            match plan(&reader, order, options, 1, &|_, _| {}) {
                Ok(plan) => {
                    log_plan(&plan, "plan of one epoch");
                    packs = Some(plan);
                }
                // The run may reach `train.max_steps` before that row.
                Err(error) => {
                    tracing::warn!(%error, "plan: the first epoch would stop with an error");
                }
            }
        }
        Err(error) => warn_without_cache(&error),
    }
    RunPlan { planned: None, reader, packs, has_new_cache, background }
}

/// The rows with the lengths of complete caches, which are not changed; `None` if one is missing.
fn complete_cache(config: &RunConfig, rows: &Arc<JsonlRows>) -> Option<Arc<dyn RowReader>> {
    let cached = CachedRows::complete(rows.clone(), &config.cache_dir())?;
    Some(Arc::new(cached))
}

fn num_chats(rows: &JsonlRows) -> usize {
    rows.sets().iter().filter(|set| set.corpus().is_none()).map(DataSet::len).sum()
}

/// Brings the length caches of `data.train` up to date.
pub(crate) fn update_cache(
    config: &RunConfig,
    rows: Arc<JsonlRows>,
    observer: &dyn SetupObserver,
) -> Result<(CachedRows, CacheWork), RunError> {
    let report = observer.begin(SetupWork::MeasureRows, num_chats(&rows) as u64);
    Ok(CachedRows::update(rows, &config.cache_dir(), &*report)?)
}

/// The rows with cached lengths; `None` if the cache cannot be written.
pub(super) fn cached_if_possible(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    observer: &dyn SetupObserver,
) -> Result<Option<CachedRows>, RunError> {
    match update_cache(config, Arc::clone(rows), observer) {
        Ok((cached, _)) => Ok(Some(cached)),
        Err(RunError::Cache(CacheError::Write { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Like [`update_cache`], but returns `None` if it would take long: if a cache has other rows, if
/// another process is writing it, or if more than [`MAX_ROWS_AT_START`] rows have changed images.
fn update_cache_if_quick(
    config: &RunConfig,
    rows: Arc<JsonlRows>,
    observer: &dyn SetupObserver,
) -> Result<Option<(CachedRows, CacheWork)>, RunError> {
    let report = observer.begin(SetupWork::MeasureRows, num_chats(&rows) as u64);
    Ok(CachedRows::update_if_quick(rows, &config.cache_dir(), MAX_ROWS_AT_START, &*report)?)
}

fn log_lengths(
    config: &RunConfig,
    cached: CachedRows,
    work: CacheWork,
    options: &LoaderOptions,
) -> Arc<dyn RowReader> {
    let CacheWork { measured, reused } = work;
    tracing::info!(measured, reused, folder = %config.cache_dir().display(), "length cache");
    for lengths in cached.summaries(options) {
        let LengthSummary { file, rows, truncated, rejected, .. } = lengths;
        let rejected = (!rejected.is_empty()).then(|| display(RejectedCounts(&rejected)));
        tracing::info!(file = %file.display(), rows, truncated, rejected, "lengths");
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
