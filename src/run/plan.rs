//! The lengths of rows, packs, steps and tokens of a run, and the memory that it is predicted to
//! need, known before the first step.

use super::device::usable_gpu_memory;
use super::error::RunError;
use super::inputs::{
    DataList, SetupObserver, SetupWork, encoder, loader_options, open_data, order,
};
use super::memory::{Load, ModelShape, RunMemory, advice};
use crate::batch::{IGNORE_INDEX, Patches};
use crate::config::RunConfig;
use crate::data::{
    CacheError, CacheWork, CachedRows, DataSet, DatasetRows, Encoder, LengthCaching, LengthSummary,
    LoaderOptions, Order, Plan, RejectedCounts, RowReader, SampleIndex, plan,
};
use crate::dist::Rank;
use crate::metrics::{JsonlSink, available_memory_bytes, memory_text, resident_memory_bytes};
use crate::ops::{memory_advice, set_memory_advice, set_predicted_memory};
use crate::train::{DeviceChoice, Planned, Ranks, RecomputeChoice, TrainState, write_rejects};
use candle_core::Device;
use std::fs;
use std::num::NonZeroU64;
use std::sync::Arc;
use tracing::field::display;

/// Number of rows from which the log names the setting that begins without measuring them.
const MANY_ROWS: usize = 1 << 20;

pub(super) struct RunPlan {
    /// Steps until the data ends; `None` if it is repeated until `train.max_steps`.
    pub(super) planned: Option<Planned>,
    /// The rows, with cached lengths unless `data.length_cache` is `off`.
    pub(super) reader: Arc<dyn RowReader>,
    /// The packs of the run or of an epoch, if they were counted.
    pub(super) packs: Option<Plan>,
    /// The lengths of the rows of chats, if this process has measured them or read their lengths.
    pub(super) lengths: Vec<LengthSummary>,
}

/// Measures the rows that no length cache has, and counts the steps of the run, or of an epoch if it
/// ends at `train.max_steps`.
pub(super) fn plan_run(
    config: &RunConfig,
    rows: &Arc<DatasetRows>,
    order: &Order,
    options: &LoaderOptions,
    resumed: Option<&TrainState>,
    rank: Rank,
    observer: &dyn SetupObserver,
) -> Result<RunPlan, RunError> {
    if config.data.length_cache == LengthCaching::Off {
        let lengths = Vec::new();
        return Ok(RunPlan { planned: None, reader: rows.clone(), packs: None, lengths });
    }
    // A complete cache is used as it is by a resumed run that started with it, and by the ranks for
    // which rank 0 has completed it: a row that could not be read then would be measured again,
    // perhaps with another result.
    let as_it_is = started_with_cache(resumed) || !rank.is_first();
    let complete = as_it_is.then(|| complete_cache(config, rows));
    let (reader, lengths) = if let Some(reader) = complete.flatten() {
        (reader, Vec::new())
    } else {
        let (cached, work) = update_cache(config, rows.clone(), observer)?;
        log_lengths(config, cached, work, options)
    };
    let epochs = config.train.epoch_limit();
    // The first start of a run has planned it, and the length has not changed since.
    let planned = resumed.and_then(|state| state.planned).filter(|of| Some(of.epochs) == epochs);
    if planned.is_some() || resumed.is_some() && epochs.is_none() {
        return Ok(RunPlan { planned, reader, packs: None, lengths });
    }
    match plan(&reader, order, options, epochs.unwrap_or(1), &|_, _| {}) {
        Ok(plan) => {
            log_plan(&plan, if epochs.is_some() { "plan" } else { "plan of one epoch" });
            let planned = epochs.map(|epochs| Planned { epochs, steps: plan.steps });
            Ok(RunPlan { planned, reader, packs: Some(plan), lengths })
        }
        // The run may reach `train.max_steps` before that row.
        Err(error) if epochs.is_none() => {
            tracing::warn!(%error, "plan: the first epoch would stop with an error");
            Ok(RunPlan { planned: None, reader, packs: None, lengths })
        }
        Err(error) => {
            // Training does not start, so it cannot report these rows.
            if resumed.is_none() && rank.is_first() {
                let mut rejects = JsonlSink::open(&config.output_dir.join("rejects.jsonl"))?;
                write_rejects(Some(&mut rejects), 1, error.unreported())?;
            }
            Err(error.into())
        }
    }
}

/// Measures the part of one rank of the rows that [`plan_run`] will need, if there are several ranks.
pub(super) fn measure_part(
    config: &RunConfig,
    rows: &Arc<DatasetRows>,
    resumed: Option<&TrainState>,
    rank: Rank,
    observer: &dyn SetupObserver,
) -> Result<(), RunError> {
    if config.data.length_cache == LengthCaching::Off {
        return Ok(());
    }
    let num_rows = num_chats(rows);
    let is_long = num_rows >= MANY_ROWS && resumed.is_none() && rank.is_first();
    if is_long && complete_cache(config, rows).is_none() {
        tracing::info!(
            rows = num_rows,
            "measuring rows; with `data.length_cache: off` and `train.max_steps`, a run starts at once"
        );
    }
    if rank.world == 1 || started_with_cache(resumed) && complete_cache(config, rows).is_some() {
        return Ok(());
    }
    let chats = rows.sets().iter().filter(|set| set.corpus().is_none());
    let own: usize = chats.map(|set| rank.own_part(set.len()).len()).sum();
    let report = observer.begin(SetupWork::MeasureRows, own as u64);
    Ok(CachedRows::measure_part(rows, &config.cache_dir(), rank, &*report)?)
}

/// Whether a resumed run measured its rows when it started. With `data.length_cache: off` it did not,
/// and a cache of an earlier run may lack the changes since.
fn started_with_cache(resumed: Option<&TrainState>) -> bool {
    resumed.is_some_and(|state| state.media.is_some())
}

/// The rows with the lengths of complete caches, which are not changed; `None` if one is missing.
fn complete_cache(config: &RunConfig, rows: &Arc<DatasetRows>) -> Option<Arc<dyn RowReader>> {
    let cached = CachedRows::complete(rows.clone(), &config.cache_dir())?;
    Some(Arc::new(cached))
}

fn num_chats(rows: &DatasetRows) -> usize {
    rows.sets().iter().filter(|set| set.corpus().is_none()).map(DataSet::len).sum()
}

/// Brings the length caches of `data.train` up to date.
pub(crate) fn update_cache(
    config: &RunConfig,
    rows: Arc<DatasetRows>,
    observer: &dyn SetupObserver,
) -> Result<(CachedRows, CacheWork), RunError> {
    let report = observer.begin(SetupWork::MeasureRows, num_chats(&rows) as u64);
    Ok(CachedRows::update(rows, &config.cache_dir(), &*report)?)
}

/// The rows with cached lengths; `None` if the cache cannot be written.
pub(super) fn cached_if_possible(
    config: &RunConfig,
    rows: &Arc<DatasetRows>,
    observer: &dyn SetupObserver,
) -> Result<Option<CachedRows>, RunError> {
    match update_cache(config, Arc::clone(rows), observer) {
        Ok((cached, _)) => Ok(Some(cached)),
        Err(RunError::Cache(CacheError::Write { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}

fn log_lengths(
    config: &RunConfig,
    cached: CachedRows,
    work: CacheWork,
    options: &LoaderOptions,
) -> (Arc<dyn RowReader>, Vec<LengthSummary>) {
    let CacheWork { measured, reused } = work;
    if measured + reused > 0 {
        tracing::info!(measured, reused, folder = %config.cache_dir().display(), "length cache");
    }
    let lengths = cached.summaries(options);
    for LengthSummary { file, rows, truncated, rejected, .. } in &lengths {
        let rejected = (!rejected.is_empty()).then(|| display(RejectedCounts(rejected)));
        tracing::info!(file = %file.display(), rows, truncated, rejected, "lengths");
    }
    (Arc::new(cached), lengths)
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

/// Number of rows from which the fraction of supervised tokens is computed.
const NUM_SAMPLED: usize = 16;

#[derive(Debug, Clone, PartialEq)]
pub struct DataPlan {
    pub rows: usize,
    pub epochs: u64,
    /// Packs and tokens of these epochs.
    pub plan: Plan,
    pub steps: u64,
    /// Fraction of supervised tokens, of a few rows.
    pub targets: f64,
}

impl DataPlan {
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
fn plan_rows(
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
    rows: &Arc<DatasetRows>,
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
fn sample_fractions(rows: &DatasetRows) -> [f64; 2] {
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

/// The fractions of tokens of images and of supervised tokens before the data is read: an
/// assumption.
pub(crate) const FRACTIONS: (f64, f64) = (0.5, 0.25);

/// The fraction of the memory that `recompute: auto` uses by prediction, which may be too low.
const USED: f64 = 0.9;

impl RunMemory {
    /// The cheapest `model.recompute` with which the run needs at most `memory` bytes, otherwise
    /// the one that needs least.
    fn cheapest(&self, shape: &ModelShape, memory: f64) -> Result<RecomputeChoice, RunError> {
        let mut choice = self.config.model.recompute;
        for (_, tried) in self.with_recompute() {
            choice = tried.config.model.recompute;
            if tried.bytes(shape)? <= memory {
                break;
            }
        }
        Ok(choice)
    }

    /// A run whose data is not known.
    pub(super) fn before_data(shape: &ModelShape, config: &RunConfig, world: usize) -> Self {
        let mut config = config.clone();
        config.device = config.device.resolved();
        let load = Load::full(shape, &config, FRACTIONS);
        Self { config, load, world }
    }

    /// Sets the message of a process without memory; returns the predicted bytes.
    pub(super) fn announce(&self, shape: &ModelShape) -> Result<f64, RunError> {
        let bytes = self.bytes(shape)?;
        set_predicted_memory(bytes as u64);
        if let Some(advice) = advice(&self.savings()?) {
            set_memory_advice(advice);
        }
        Ok(bytes)
    }
}

/// The memory that this process can use on the device, with what it uses already. `processes` share
/// the free memory of the host.
fn capacity(device: &Device, processes: usize) -> Option<f64> {
    if device.is_cpu() {
        let free = available_memory_bytes()? as f64 / processes as f64;
        return Some(free + resident_memory_bytes() as f64);
    }
    usable_gpu_memory(device)
}

/// The config with the cheapest `model.recompute` that fits into the memory of all ranks, instead of
/// `auto`; `none` if the micro-batches or the memory are not known.
pub(super) fn choose_recompute(
    config: &RunConfig,
    rows: &DatasetRows,
    plan: Option<&Plan>,
    ranks: &Ranks,
    device: &Device,
) -> Result<RunConfig, RunError> {
    let mut config = config.clone();
    if config.model.recompute != RecomputeChoice::Auto {
        return Ok(config);
    }
    let world = ranks.rank().world;
    let own = run_memory(&config, rows, plan, (world, device)).zip(capacity(device, world));
    let own = own.and_then(|((run, shape), free)| run.cheapest(&shape, USED * free).ok());
    let own = own.unwrap_or(RecomputeChoice::None);
    let choices = ranks.gather(own)?;
    config.model.recompute = choices.into_iter().max_by_key(|choice| choice.place()).unwrap_or(own);
    tracing::info!(recompute = config.model.recompute.name(), "`model.recompute` was chosen");
    Ok(config)
}

/// Predicts the peak memory of a rank from the data of the run, and warns if it exceeds what is
/// free. `plan` has its packs, if they are known. `None`: the micro-batches are not known.
pub(super) fn forecast(
    config: &RunConfig,
    rows: &DatasetRows,
    plan: Option<&Plan>,
    (world, device): (usize, &Device),
) -> Option<u64> {
    let (run, shape) = run_memory(config, rows, plan, (world, device))?;
    let need = run.announce(&shape).ok()?;
    if let Some(free) = capacity(device, 1)
        && need > free
    {
        let (need, free, advice) = (memory_text(need), memory_text(free), memory_advice());
        tracing::warn!(need, free, "the predicted memory exceeds what is free: {advice}");
    }
    let parts = run.parts(&shape).ok()?;
    Some(if device.is_cpu() { parts.process() } else { parts.device() } as u64)
}

/// The run on this device, with the packs of `plan`; `None` if the micro-batches are not known.
fn run_memory(
    config: &RunConfig,
    rows: &DatasetRows,
    plan: Option<&Plan>,
    (world, device): (usize, &Device),
) -> Option<(RunMemory, ModelShape)> {
    let on_cpu = device.is_cpu();
    let mut config = config.clone();
    config.device = match config.device {
        DeviceChoice::Cuda(index) => DeviceChoice::Cuda(index),
        _ if on_cpu => DeviceChoice::Cpu,
        _ => DeviceChoice::Cuda(0),
    };
    let shape = ModelShape::read(&config).ok()?;
    let [patches, targets] = sample_fractions(rows);
    let load = match plan {
        Some(plan) => Load::of(&shape, plan, targets).ok()?,
        None if config.data.packing => {
            Load::full(&shape, &config, (patches / shape.patches_per_token(), targets))
        }
        None => return None,
    };
    Some((RunMemory { config, load, world }, shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;
    use std::path::Path;

    /// The quickstart trains the vision encoder too.
    #[test]
    fn the_cheapest_recomputation_that_fits_is_chosen() {
        let settings = ["device=cpu", "model.recompute=auto"].map(str::to_owned);
        let config = load(Path::new("configs/quickstart.yaml"), &settings).unwrap();
        let shape = ModelShape::read(&config).unwrap();
        let run = RunMemory::before_data(&shape, &config, 1);
        let chosen = |memory| run.cheapest(&shape, memory).unwrap();
        let tried: Vec<(RecomputeChoice, f64)> = run
            .with_recompute()
            .iter()
            .map(|(_, run)| (run.config.model.recompute, run.bytes(&shape).unwrap()))
            .collect();
        assert_eq!(
            tried.iter().map(|(choice, _)| choice.name()).collect::<Vec<_>>(),
            ["least", "none", "vision", "llm", "full"]
        );
        let [least, none, .., full] = tried[..] else { panic!("{tried:?}") };
        assert!(least.1 > none.1 && none.1 > full.1, "{tried:?}");
        assert_eq!(chosen(least.1), RecomputeChoice::Least);
        assert_eq!(chosen(least.1 - 1.0), RecomputeChoice::None);
        assert_eq!(chosen(0.0), RecomputeChoice::Full);
        let fits = tried.iter().find(|(_, bytes)| *bytes < none.1).unwrap();
        assert_eq!(chosen(none.1 - 1.0), fits.0);
    }

    #[test]
    fn ranks_on_the_cpu_share_the_free_memory() {
        let [alone, shared] = [1, 4].map(|ranks| capacity(&Device::Cpu, ranks).unwrap());
        assert!(shared < alone, "{shared} {alone}");
    }
}
