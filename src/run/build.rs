//! Assembles the model, data, optimizer and output files of a run from a config. Rank 0 creates and
//! moves files, and the others wait.

use super::adapter::open_run_model;
use super::check::{announce_memory, warn_about_disk};
use super::error::RunError;
use super::inputs::{
    SetupObserver, check, download, encoder, loader_options, open_both, order, param_groups,
};
use super::load_model::{OpenModel, check_heads};
use super::load_shares::RankModel;
use super::logs::{Tracked, Trackers, log_data_sets, log_share, log_start, open_logs};
use super::new_tokens::NewVocabulary;
use super::output_dir::{claim, take_over};
use super::plan::{RunPlan, choose_recompute, forecast, measure_part, plan_run};
use super::requirements;
use super::resume::{InputDigests, Resume, bring_best, eval_rule, find_checkpoint, resumed_state};
use super::runner::{rank_model, step_runner};
use super::trackers::Imports;
use crate::checkpoint::{CarriedFiles, Checkpoint, Checkpointer, FolderLayout, Together};
use crate::config::RunConfig;
use crate::data::{
    CachedRows, DataState, DatasetRows, Encoder, LengthCaching, Loader, LoaderShare, MediaLook,
    RowReader,
};
use crate::dist::{DistError, Group, Monitor, Rank, fail};
use crate::optim::{OptimConfig, ParamGroups, Schedule, Span};
use crate::train::{
    BaseModel, Checkpoints, DeviceChoice, EvalRule, Evaluation, Health, Logs, Observer, Ranks,
    Rejected, StepRules, TrainData, TrainError, TrainOutcome, TrainState, Trainer, TrainerParts,
    write_rejects,
};
use candle_core::Device;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A run that is ready to train.
///
/// It holds a lock on `output_dir` until it is dropped.
///
/// ```
/// use std::path::Path;
/// use trainer::config::{self, RunConfig};
/// use trainer::run::Run;
/// use trainer::train::TrainOutcome;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let overrides = [
///     format!("output_dir={}", folder.path().display()),
///     "train.max_steps=2".to_owned(),
///     "data.eval=[]".to_owned(),
/// ];
/// let config: RunConfig = config::load(Path::new("configs/quickstart.yaml"), &overrides)?;
/// // The observer receives the metrics of each step; `()` ignores them.
/// let outcome = Run::from_config(&config)?.train(&mut ())?;
/// assert!(matches!(outcome, TrainOutcome::Finished { .. }));
/// assert!(folder.path().join("final/model.safetensors").is_file());
/// # Ok(())
/// # }
/// ```
pub struct Run {
    trainer: Trainer,
    trackers: Trackers,
    monitor: Option<Arc<dyn Monitor>>, // of a run in one process
    _lock: Option<File>,               // rank 0 has it
}

/// Options of [`Run::with_options`] that are not part of the config.
pub struct RunOptions<'a> {
    /// The checkpoint to resume from; the newest good one by default.
    pub resume: Resume,
    /// When set, training saves a checkpoint after the current step and stops.
    pub stop: Arc<AtomicBool>,
    /// When set, training saves a checkpoint after the current step and continues.
    pub save: Arc<AtomicBool>,
    /// Receives what the training loop does, and its end, for a run in one process; ignored by
    /// default. Several ranks use that of their [`Group`].
    pub monitor: Option<Arc<dyn Monitor>>,
    /// The Python that has the clients of `log.trackers`; without it, the run uses TensorBoard only.
    pub python: Option<OsString>,
    /// Whether the run evaluates; true by default.
    pub evaluates: bool,
    /// Receives the progress of assembling the run; `()` by default.
    pub observer: &'a dyn SetupObserver,
}

impl Default for RunOptions<'_> {
    fn default() -> Self {
        Self {
            resume: Resume::default(),
            stop: Arc::default(),
            save: Arc::default(),
            monitor: None,
            python: None,
            evaluates: true,
            observer: &(),
        }
    }
}

impl Run {
    /// Assembles a run with default options: it resumes from the newest good checkpoint of the same
    /// config in `output_dir`, if there is one.
    pub fn from_config(config: &RunConfig) -> Result<Self, RunError> {
        Self::with_options(config, &RunOptions::default())
    }

    /// Assembles a run.
    ///
    /// Locks `output_dir`, and moves the files of an earlier run there to `previous-N` unless the
    /// run resumes from them. The files are moved after the model and the data are loaded; if
    /// loading fails, they stay.
    pub fn with_options(config: &RunConfig, options: &RunOptions<'_>) -> Result<Self, RunError> {
        Self::with_group(config, options, None)
    }

    /// Assembles a run that this process trains together with the other ranks of `group`. All ranks
    /// have the same config, and see the same files.
    pub fn with_group(
        config: &RunConfig,
        options: &RunOptions<'_>,
        group: Option<Group>,
    ) -> Result<Self, RunError> {
        let monitor = group.as_ref().map(|group| Arc::clone(&group.monitor));
        let mut config = config.clone();
        if !options.evaluates {
            config.data.eval.clear(); // else its files would be downloaded and opened
        }
        let result = Self::assemble(
            &config,
            options,
            SetupRanks::new(group, config.distributed.sequence.get()),
        );
        if let (Err(error), Some(monitor)) = (&result, monitor) {
            fail(&*monitor, error, error.lost());
        }
        result
    }

    fn assemble(
        config: &RunConfig,
        options: &RunOptions<'_>,
        ranks: SetupRanks,
    ) -> Result<Self, RunError> {
        check(config)?;
        let rank = ranks.rank();
        let is_first = rank.is_first();
        requirements::first(requirements::of_config(config, Some(rank.world), |_| true))?;
        let imports = imports(config, options, is_first)?;
        log_share(config, rank);
        let config =
            &ranks.first_then_others("downloading", || download(config, options.observer))?;
        let lock = is_first.then(|| claim(&config.output_dir)).transpose()?;
        let checkpointer = Checkpointer::new(&config.output_dir, &config.checkpoint);
        let checkpointer = checkpointer.claimed(lock.as_ref());
        let found = ranks.find_checkpoint(config, &options.resume, &checkpointer)?;
        let found = found.as_ref();
        is_first.then(|| announce_memory(config));
        let observer = options.observer;
        let device = ranks.device(config.device)?;
        requirements::first(requirements::of_device(config, Some(&device)))?;
        let encoder = encoder(config)?;
        let (rows, eval_rows) = ranks
            .first_then_others("opening the data", || open_all_data(config, &encoder, observer))?;
        let eval_rows = eval_rows.filter(|_| options.evaluates); // rows that are held out
        let eval_rule = eval_rule(config)?;
        let inputs = InputDigests::new(&rows, &encoder);
        let resumed = found.map(|found| resumed_state(config, &rows, &inputs, found, is_first));
        let resumed = resumed.transpose()?;
        compare_inputs(&ranks, config, &inputs)?;
        let (model, groups, base) = load_model(config, found, &ranks, &device)?;
        let checkpoints = checkpoints(config, checkpointer.clone(), &model.loaded.open)?;
        let clients = imports.map(Imports::finish).transpose()?;
        if is_first {
            take_over(config, &checkpointer, found, observer)?;
        }
        let loader_options = loader_options(config, &encoder);
        let order = order(config, &rows)?;
        ranks.during("measuring rows", || {
            measure_part(config, &rows, resumed.as_ref(), rank, observer)
        })?;
        ranks.wait_for_all()?;
        let plan = ranks.first_then_others("planning", || {
            plan_run(config, &rows, &order, &loader_options, resumed.as_ref(), rank, observer)
        })?;
        let RunPlan { planned, reader, packs, lengths } = plan;
        let config = &choose_recompute(config, &rows, packs.as_ref(), ranks.ranks(), &device)?;
        let predicted = forecast(config, &rows, packs.as_ref(), (rank.world, &device));
        let state = resumed.map_or_else(|| first_state(config, inputs.data, base, &rows), Ok)?;
        let max_steps = config.train.max_steps.map_or(u64::MAX, NonZeroU64::get);
        let total_steps = planned.map_or(max_steps, |plan| plan.steps.min(max_steps));
        let mut state = TrainState { total_steps, planned, inputs: inputs.others, ..state };
        let of_first = found.filter(|_| is_first);
        bring_best(config, (eval_rule.as_ref(), rank.world), &checkpointer, of_first, &mut state)?;
        let mut runner = ranks.during("loading the optimizer state", || {
            step_runner(config, model, &groups, found, &device)
        })?;
        let (share, ranks) = ranks.split();
        runner.ranks = watched(ranks, options);
        is_first.then(|| warn_about_disk(config, total_steps));
        log_start(config, &runner, &rows, &lengths, &state);
        let loader =
            Loader::start_shared(reader.clone(), order, loader_options, state.data.clone(), share);
        let (logs, is_done) = logs(config, &state, is_first, &rows)?;
        let trackers = Trackers::open(config, &state, &runner, clients)?;
        let trainer = Trainer::new(TrainerParts {
            runner,
            state,
            data: train_data(loader, reader, &rows),
            steps: step_rules(config, total_steps, max_steps, predicted),
            checkpoints,
            evaluation: evaluation(config, eval_rows, eval_rule, is_done),
            logs,
            stop: Arc::clone(&options.stop),
            save: Arc::clone(&options.save),
        });
        let monitor = options.monitor.clone().filter(|_| rank.world == 1);
        Ok(Self { trainer, trackers, monitor, _lock: lock })
    }

    /// Trains until all steps are done, the data ends, or [`RunOptions::stop`] is set.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<TrainOutcome, TrainError> {
        let outcome = self.trainer.run(&mut Tracked { observer, trackers: &mut self.trackers });
        if let Some(monitor) = &self.monitor {
            monitor.finish(); // what follows, such as a report, is not watched
        }
        self.trackers.end(matches!(outcome, Ok(TrainOutcome::Finished { .. })));
        outcome
    }

    /// Waits until the trackers of a finished run have its last rows, at most 30 seconds, or until
    /// `stop` is set.
    pub fn wait_for_trackers(&mut self, stop: &AtomicBool) {
        self.trackers.wait(stop);
    }

    /// Trains until `step` is done, as [`Trainer::train_to`].
    pub fn train_to(&mut self, step: u64, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        self.trainer.train_to(step, observer)
    }

    /// The model, the eval rows and the state of the run.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }
}

/// Compares what the ranks read before they load the model.
fn compare_inputs(
    ranks: &SetupRanks,
    config: &RunConfig,
    inputs: &InputDigests,
) -> Result<(), RunError> {
    ranks.compare("config", || Ok(config_digest(config)))?;
    ranks.compare("training data", || Ok(inputs.data.clone()))?;
    ranks.compare("tokenizer, template or processor", || Ok(format!("{:?}", inputs.others)))
}

/// The ranks, which report their work to the monitor of the options, if there is one.
fn watched(ranks: Ranks, options: &RunOptions<'_>) -> Ranks {
    match &options.monitor {
        Some(monitor) => ranks.watched_by(monitor),
        None => ranks,
    }
}

/// On rank 0, starts the imports of the clients of trackers.
fn imports(
    config: &RunConfig,
    options: &RunOptions<'_>,
    is_first: bool,
) -> Result<Option<Imports>, RunError> {
    let trackers = if options.python.is_some() { config.log.trackers.as_slice() } else { &[] };
    let python = options.python.clone().unwrap_or_default();
    is_first.then(|| Imports::start(&python, trackers)).transpose()
}

/// Opens and logs the data sets to train on and to evaluate on.
fn open_all_data(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<(Arc<DatasetRows>, Option<DatasetRows>), RunError> {
    let (rows, eval_rows) = open_both(config, encoder, observer)?;
    log_data_sets("data.train", &rows);
    if let Some(rows) = &eval_rows {
        log_data_sets("data.eval", rows);
    }
    Ok((Arc::new(rows), eval_rows))
}

fn checkpoints(
    config: &RunConfig,
    checkpointer: Checkpointer,
    open: &OpenModel,
) -> Result<Checkpoints, RunError> {
    let (layout, config_json) = match &open.adapter {
        None => (FolderLayout::Model, config.model.precision.stamp(&open.config_json)),
        Some(adapter) => {
            let json = serde_json::to_value(&adapter.peft).map_err(candle_core::Error::wrap)?;
            (FolderLayout::Adapter, json)
        }
    };
    // a model that continues from a checkpoint has its new tokens already
    let changed = match &open.vocabulary {
        Some(vocabulary) => vocabulary.files.clone(),
        None => NewVocabulary::of(&config.model)?.map_or_else(Vec::new, |of| of.files),
    };
    Ok(Checkpoints {
        checkpointer,
        carried: CarriedFiles::read(&config.model.path)?.with(changed),
        layout,
        config_json,
        every_steps: config.checkpoint.every_steps,
        in_background: config.checkpoint.background,
    })
}

/// Opens and loads the model. Also returns the groups of its parameters, and the base of an adapter.
fn load_model(
    config: &RunConfig,
    found: Option<&Checkpoint>,
    ranks: &SetupRanks,
    device: &Device,
) -> Result<(RankModel, ParamGroups, Option<BaseModel>), RunError> {
    let (open, base) = open_model(config, found, ranks, device)?;
    check_heads(&open, config.distributed.sequence.get())?;
    ranks.compare("model", || open.digest().map_err(candle_core::Error::wrap))?;
    // Checks the patterns before the rows are measured, which takes longer.
    let groups = param_groups(config, &open)?;
    let model = ranks
        .during("loading the model", || rank_model(config, open, &groups, ranks.ranks(), device))?;
    Ok((model, groups, base))
}

fn step_rules(
    config: &RunConfig,
    total_steps: u64,
    max_steps: u64,
    predicted_memory_bytes: Option<u64>,
) -> StepRules {
    StepRules {
        schedule: schedule(&config.optim, total_steps),
        max_steps,
        on_non_finite: config.train.on_non_finite,
        max_skipped: config.train.max_skipped,
        predicted_memory_bytes,
    }
}

/// The logs, in which a new run writes the rejected texts of its corpora, and whether `eval.jsonl` has
/// the evaluation of the step to resume from.
fn logs(
    config: &RunConfig,
    state: &TrainState,
    is_first: bool,
    rows: &DatasetRows,
) -> Result<(Logs, bool), RunError> {
    if !is_first {
        return Ok(Default::default());
    }
    let (mut logs, is_evaluated) = open_logs(config, state)?;
    if state.step == 0 {
        write_rejects(logs.rejects.as_mut(), 1, rows.rejected_texts())?;
    }
    Ok((logs, is_evaluated))
}

fn train_data(loader: Loader, reader: Arc<dyn RowReader>, rows: &DatasetRows) -> TrainData {
    TrainData {
        loader,
        reader,
        dataset_names: rows.names().to_vec(),
        rejected_texts: Rejected::of_texts(rows.rejected_texts()),
    }
}

fn evaluation(
    config: &RunConfig,
    rows: Option<DatasetRows>,
    rule: Option<EvalRule>,
    is_done: bool,
) -> Evaluation {
    Evaluation {
        rows,
        config: config.eval.clone(),
        rule,
        max_tokens: config.data.packing_length.get() as usize,
        is_done,
    }
}

/// The state of a new run. It has the media files of the length caches, which this start has updated,
/// unless `data.length_cache` is `off`.
fn first_state(
    config: &RunConfig,
    data_fingerprint: String,
    base: Option<BaseModel>,
    rows: &DatasetRows,
) -> Result<TrainState, RunError> {
    let media = match config.data.length_cache {
        LengthCaching::Complete => CachedRows::media(rows, &config.cache_dir(), MediaLook::Cache)?,
        LengthCaching::Off => None,
    };
    Ok(TrainState {
        version: TrainState::VERSION,
        step: 0,
        total_steps: 0,
        planned: None,
        targets_seen: 0,
        tokens_seen: 0,
        samples_seen: 0,
        datasets_seen: BTreeMap::new(),
        fingerprint: config.fingerprint(),
        data_fingerprint,
        health: Health::default(),
        inputs: BTreeMap::new(),
        media: media.map(|media| media.digests()),
        base,
        evals: None,
        data: DataState::default(),
    })
}

fn schedule(optim: &OptimConfig, total_steps: u64) -> Schedule {
    let warmup = match (optim.warmup_steps, optim.warmup_ratio) {
        (_, Some(ratio)) => Span::Ratio(ratio),
        (steps, None) => Span::Steps(steps.unwrap_or(0)),
    };
    let decay = Span::Ratio(optim.decay_ratio.unwrap_or(0.1));
    Schedule::new(optim.schedule, [optim.lr, optim.min_lr], [warmup, decay], total_steps)
}

/// Opens the model of a run, and the description of it in the checkpoints of an adapter. The first
/// rank of a new run reads all weights, for their digest.
fn open_model(
    config: &RunConfig,
    found: Option<&Checkpoint>,
    ranks: &SetupRanks,
    device: &Device,
) -> Result<(OpenModel, Option<BaseModel>), RunError> {
    let is_new = ranks.rank().is_first() && found.is_none();
    ranks.during("reading the model", || {
        let (open, mut base) = open_run_model(config, found, device)?;
        if let Some(base) = base.as_mut().filter(|_| is_new) {
            base.contents = Some(open.contents(None)?);
        }
        Ok((open, base))
    })
}

/// Digest of the settings of a run, which must be the same on all ranks.
fn config_digest(config: &RunConfig) -> String {
    let json = serde_json::to_string(config).expect("a config of plain values");
    format!("{:x}", Sha256::digest(json.as_bytes()))
}

/// The ranks of a run while it is assembled.
pub(super) struct SetupRanks {
    ranks: Ranks,
    share: Option<LoaderShare>,
    device: Option<Device>,
}

impl SetupRanks {
    /// `None`: a run in one process. `sequence` is the number of ranks of a sequence group.
    pub(super) fn new(group: Option<Group>, sequence: usize) -> Self {
        let Some(Group { rank, data, step, shard_group, sums, device, monitor }) = group else {
            return Self { ranks: Ranks::alone(), share: None, device: None };
        };
        let ranks = Ranks::new(rank, step, shard_group, sums, monitor).in_sequence_groups(sequence);
        let share = LoaderShare { group: ranks.sequence_group(), sequence, channel: data };
        Self { ranks, share: Some(share), device }
    }

    /// The connections of the training loop.
    pub(super) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The place of this rank.
    pub(super) fn rank(&self) -> Rank {
        self.ranks.rank()
    }

    /// The device that the sums over ranks need, or else that of `choice`.
    pub(super) fn device(&self, choice: DeviceChoice) -> Result<Device, RunError> {
        self.device.clone().map_or_else(|| choice.open_for(self.rank()), Ok)
    }

    /// Waits until all ranks have come to this point.
    pub(super) fn wait_for_all(&self) -> Result<(), DistError> {
        self.ranks.wait_for_all()
    }

    /// Calls `f`, which may take long.
    pub(super) fn during<T>(&self, work: &str, f: impl FnOnce() -> T) -> T {
        self.ranks.during(work, f)
    }

    /// Calls `f`, which may take long, on rank 0, and then on the other ranks, which find the files
    /// that rank 0 wrote.
    fn first_then_others<T>(
        &self,
        work: &str,
        f: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let is_first = self.rank().is_first();
        if !is_first {
            self.wait_for_all()?;
        }
        let result = self.during(work, f)?;
        if is_first {
            self.wait_for_all()?;
        }
        Ok(result)
    }

    /// Checks that `digest` of `what` is the same on all ranks. A single process does not compute
    /// it.
    pub(super) fn compare(
        &self,
        what: &str,
        digest: impl FnOnce() -> candle_core::Result<String>,
    ) -> Result<(), RunError> {
        if self.rank().world == 1 {
            return Ok(());
        }
        let all = self.ranks.gather(digest()?)?;
        match all.iter().position(|of_rank| *of_rank != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let problem = format!("its {what} differs from that of rank 0");
                Err(DistError::Message { rank, problem }.into())
            }
        }
    }

    /// The checkpoint that all ranks resume from. They check its files together.
    pub(super) fn find_checkpoint(
        &self,
        config: &RunConfig,
        resume: &Resume,
        checkpointer: &Checkpointer,
    ) -> Result<Option<Checkpoint>, RunError> {
        self.during("looking for a checkpoint", || {
            if self.rank().is_first() {
                checkpointer.recover()?;
            }
            find_checkpoint(config, resume, checkpointer, self)
        })
    }

    /// The connections of the loader and of the training loop.
    pub(super) fn split(self) -> (Option<LoaderShare>, Ranks) {
        (self.share, self.ranks)
    }
}

impl Together for SetupRanks {
    type Error = RunError;

    fn rank(&self) -> usize {
        self.rank().rank
    }

    fn world(&self) -> usize {
        self.rank().world
    }

    fn gather<V: Serialize + DeserializeOwned>(&self, value: V) -> Result<Vec<V>, RunError> {
        Ok(self.ranks.gather(value)?)
    }

    fn failed(&self, rank: usize, message: String) -> RunError {
        DistError::Failed { rank, message }.into()
    }
}
