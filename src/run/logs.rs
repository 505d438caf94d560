//! What a run logs: its start, the files that it appends to, and the trackers of `log.trackers`.

use super::device::{device_name, machine_name};
use super::error::RunError;
use super::trackers::{Clients, Follower, MAX_WAIT, wait};
use crate::config::RunConfig;
use crate::data::{DataSet, DatasetRows, LengthSummary};
use crate::dist::Rank;
use crate::metrics::{EvalMetrics, EventFile, JsonlSink, StepMetrics, StepRows, scalars};
use crate::ops::simd_level;
use crate::tape::Param;
use crate::train::{
    AdapterConfig, EvalRule, Logs, Observer, StepRunner, Targets, Tracker, TrainState,
};
use serde::Serialize;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

/// A line of `starts.jsonl`.
#[derive(Serialize)]
struct StartRecord {
    after_step: u64,
    time: u64,
    version: &'static str,
    world: usize,
    machine: String,
    /// Number of parameters of the model and its adapter, and number of trained ones.
    parameters: usize,
    trained: usize,
    data: Vec<StartData>,
}

/// A data set of `data.train`.
#[derive(Serialize)]
struct StartData {
    name: String,
    rows: usize,
    /// Number of rows that are truncated; `None` if this process has not measured them.
    truncated: Option<u64>,
}

/// Logs the model and the position of a run that starts or resumes.
pub(super) fn log_start(
    config: &RunConfig,
    runner: &StepRunner,
    rows: &DatasetRows,
    lengths: &[LengthSummary],
    state: &TrainState,
) {
    let count = |params: &mut dyn Iterator<Item = &Param>| {
        params.map(|param| param.shape().elem_count()).sum::<usize>()
    };
    let parameters = count(&mut runner.params.iter());
    let trained = count(&mut runner.optimizer.states().iter().map(|slot| &slot.param));
    tracing::info!(path = %config.model.path.display(), parameters, trained, "model");
    let takes_all = |adapter: &AdapterConfig| adapter.target == Targets::AllLinear;
    if runner.model.routers().is_some() && config.adapter.as_ref().is_some_and(takes_all) {
        tracing::info!(
            "`adapter.target: all-linear` leaves out the experts; the glob `*.mlp.experts.*` \
             names them"
        );
    }
    tracing::info!(
        device = %device_name(&runner.device),
        threads = rayon::current_num_threads(),
        simd = simd_level().ok().map(tracing::field::display),
        precision = %config.model.precision.hf_name(),
        attention = %attention_kernels(config, runner),
        "compute"
    );
    tracing::info!(
        from_step = state.step,
        steps = state.total_steps,
        rows = rows.num_rows(),
        fingerprint = %state.fingerprint,
        "{}",
        if state.step == 0 { "start" } else { "resume" }
    );
    // A process that finds all steps done trains nothing.
    let rank = runner.ranks.rank();
    if rank.is_first() && (state.step == 0 || state.step < state.total_steps) {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let start = StartRecord {
            after_step: state.step,
            time: since.map_or(0, |since| since.as_secs()),
            version: env!("CARGO_PKG_VERSION"),
            world: rank.world,
            machine: machine_name(&runner.device),
            parameters,
            trained,
            data: start_data(rows, lengths),
        };
        let file = JsonlSink::open(&config.output_dir.join("starts.jsonl"));
        if let Err(error) = file.and_then(|mut file| file.write(&start)) {
            tracing::warn!("{error}: the report of the run will not have this start");
        }
    }
}

/// The data sets with the truncated rows in `lengths`, which has those of chats in the same order.
fn start_data(rows: &DatasetRows, lengths: &[LengthSummary]) -> Vec<StartData> {
    let mut lengths = lengths.iter();
    let data = |(name, set): (&String, &DataSet)| {
        let truncated = match set {
            DataSet::Chats(_) => lengths.next().map(|of| of.truncated),
            DataSet::Corpus(corpus) => Some(corpus.num_truncated() as u64),
        };
        StartData { name: name.clone(), rows: set.len(), truncated }
    };
    rows.names().iter().zip(rows.sets()).map(data).collect()
}

/// Returns the name of the decoder's attention kernel, and the kernels of other components if they
/// differ.
fn attention_kernels(config: &RunConfig, runner: &StepRunner) -> String {
    let backend = config.model.attention.backend();
    let mut kernels = String::new();
    let mut first = "";
    for (name, head_dim) in runner.model.head_dims() {
        let kernel = backend.kernel(&runner.device, runner.dtype, head_dim);
        if kernels.is_empty() {
            (kernels, first) = (kernel.to_owned(), kernel);
        } else if kernel != first {
            kernels.extend(["; ", name, ": ", kernel]);
        }
    }
    kernels
}

/// Logs the part of each step that a rank computes.
pub(super) fn log_share(config: &RunConfig, rank: Rank) {
    if rank.world == 1 {
        return;
    }
    let train = &config.train;
    let micro_batches = train.gradient_accumulation_steps.get();
    let sequence = config.distributed.sequence.get();
    tracing::info!(
        ranks = rank.world,
        micro_batches,
        micro_batches_of_each = micro_batches * sequence / rank.world,
        sequence,
        batch_size = train.batch_size,
        "the ranks share the micro-batches of a step: more ranks do not make the batch larger"
    );
}

/// Logs the data sets of `list`, a key of the config.
pub(super) fn log_data_sets(list: &str, rows: &DatasetRows) {
    for set in rows.sets() {
        let file = set.path().display();
        match set {
            DataSet::Chats(chats) => {
                tracing::info!(%file, rows = chats.len(), form = %chats.file().form(), "{list}");
            }
            DataSet::Corpus(corpus) => {
                let (tokens, documents) = (corpus.num_tokens(), corpus.num_documents());
                let (samples, truncated) = (corpus.len(), corpus.num_truncated());
                tracing::info!(%file, samples, tokens, documents, truncated, "{list}");
                for rejection in corpus.rejected() {
                    tracing::warn!(row = %rejection, "rejected a text of the corpus");
                }
            }
        }
    }
}

const METRICS: &str = "metrics.jsonl";
const EVALS: &str = "eval.jsonl";
const PREDICTIONS: &str = "predictions.jsonl";

/// Opens the logs of rank 0, and removes the lines of steps after `state`. Also returns whether
/// `eval.jsonl` has the evaluation of the step to resume from.
pub(super) fn open_logs(config: &RunConfig, state: &TrainState) -> Result<(Logs, bool), RunError> {
    let all_done = state.step > 0 && state.step >= state.total_steps;
    if all_done {
        tracing::info!(
            step = state.step,
            "all steps of this run are done: there is nothing to train"
        );
    }
    let rule = EvalRule::new(config.checkpoint.best.as_ref(), config.eval.early_stopping);
    let is_counted = |rule: &EvalRule| {
        let evals = state.evals.as_ref();
        evals.is_some_and(|evals| evals.has(rule, state.step) && evals.ends(rule).is_none())
    };
    // The checkpoint of a step is written before its evaluation, so its state may lack that
    // evaluation, and `best` may be older than the row. A finished run is evaluated once more.
    let again = all_done || !rule.as_ref().is_none_or(is_counted);
    let (is_evaluated, step_rows) = (Cell::new(false), RefCell::new(StepRows::default()));
    let sink = |name: &str| {
        JsonlSink::open_keeping(&config.output_dir.join(name), |row| {
            let Some(step) = row["step"].as_u64() else { return true };
            let is_eval = step == state.step && name == EVALS;
            is_evaluated.set(is_evaluated.get() || is_eval);
            if name == METRICS && step <= state.step {
                step_rows.borrow_mut().push(row);
            }
            let is_repeated = match name {
                EVALS => again,
                PREDICTIONS => again || !is_evaluated.get(),
                _ => false,
            };
            step < state.step || step == state.step && !is_repeated
        })
    };
    let (metrics, evals, rejects) = (sink(METRICS)?, sink(EVALS)?, sink("rejects.jsonl")?);
    if let Some(steps) = step_rows.take().finish(state.step) {
        let file = config.output_dir.join(METRICS);
        tracing::warn!(file = %file.display(), "rows of the steps before the checkpoint are {steps}");
    }
    let samples = config.log.samples.then(|| sink("samples.jsonl")).transpose()?;
    // after `eval.jsonl`, whose row is written last
    let predictions = config.eval.generate.as_ref().map(|_| sink(PREDICTIONS)).transpose()?;
    let is_evaluated = is_evaluated.get() && !again;
    let (metrics, evals, rejects) = (Some(metrics), Some(evals), Some(rejects));
    Ok((Logs { metrics, evals, predictions, rejects, samples }, is_evaluated))
}

/// The trackers of a run. One that fails is left out from then on: the run continues.
#[derive(Debug, Default)]
pub(super) struct Trackers {
    events: Option<EventFile>,
    followers: Vec<Follower>,
}

impl Trackers {
    /// Opens the trackers for the steps after `state`, when the logs have no later steps. Ranks
    /// without `clients` have no trackers.
    pub(super) fn open(
        config: &RunConfig,
        state: &TrainState,
        runner: &StepRunner,
        clients: Option<Clients>,
    ) -> Result<Self, RunError> {
        let Some(clients) = clients else { return Ok(Self::default()) };
        let all_done = state.step > 0 && state.step >= state.total_steps;
        let has_events = config.log.trackers.contains(&Tracker::Tensorboard) && !all_done;
        let events = has_events.then(|| {
            let folder = config.output_dir.join("tensorboard");
            EventFile::create(&folder, state.step + 1, now()).map_err(|error| warn(&error)).ok()
        });
        let about = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "gpu_code": env!("TRAINER_GPU_CODE"),
            "device": device_name(&runner.device),
            "ranks": runner.ranks.rank().world,
            "total_steps": state.total_steps,
            "data_fingerprint": state.fingerprint,
        });
        Ok(Self { events: events.flatten(), followers: clients.follow(config, &about)? })
    }

    /// Lets the trackers send the last rows and end.
    pub(super) fn end(&mut self, is_finished: bool) {
        for follower in &mut self.followers {
            follower.end(is_finished);
        }
    }

    /// Waits until the trackers of a finished run have sent the last rows, or until `stop` is set.
    pub(super) fn wait(&mut self, stop: &AtomicBool) {
        wait(&mut self.followers, MAX_WAIT, stop);
    }

    fn write(&mut self, kind: &str, step: u64, row: &impl Serialize) {
        for follower in &mut self.followers {
            follower.watch();
        }
        let Some(events) = &mut self.events else { return };
        if let Err(error) = events.write(step, now(), &scalars(kind, row)) {
            warn(&error);
            self.events = None;
        }
    }
}

fn warn(error: &io::Error) {
    tracing::warn!("cannot write event files of TensorBoard: {error}; the run continues without");
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// An observer that also sends what it receives to trackers.
pub(super) struct Tracked<'a> {
    pub(super) observer: &'a mut dyn Observer,
    pub(super) trackers: &'a mut Trackers,
}

impl Observer for Tracked<'_> {
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64) {
        self.trackers.write("train", metrics.step, metrics);
        self.observer.step(metrics, total_steps);
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        self.trackers.followers.iter_mut().for_each(Follower::watch);
        self.observer.evaluating(done, total);
    }

    fn evaluated(&mut self, metrics: &EvalMetrics) {
        self.trackers.write("eval", metrics.step, metrics);
        self.observer.evaluated(metrics);
    }
}
