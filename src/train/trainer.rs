//! The loop: steps, evaluations, checkpoints, and the end.

use super::config::EvalConfig;
use super::datasets::{Rejected, by_dataset, count, log_shares, metric_keys};
use super::eval::{EvalError, EvalReport, Evaluator};
use super::state::TrainState;
use super::step::{PreparedStep, StepError, StepRunner};
use crate::checkpoint::{CarriedFiles, CheckpointError, Checkpointer, Contents, ModelFiles};
use crate::data::JsonlRows;
use crate::data::{Loader, LoaderError, Rejection, StepData};
use crate::metrics::{EvalMetrics, JsonlError, JsonlSink, StepMetrics, peak_memory_bytes};
use crate::nn::Inputs;
use crate::ops::gpu_memory;
use crate::optim::Schedule;
use candle_core::Tensor;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Everything a run needs, put together by the command.
pub struct TrainerParts {
    /// Model, gradients, optimizer.
    pub runner: StepRunner,
    /// Steps of data, from where `state` stands.
    pub loader: Loader,
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Where the run stands.
    pub state: TrainState,
    /// Writes checkpoints and `final/`.
    pub checkpointer: Checkpointer,
    /// Steps after which the run ends though there is data left.
    pub max_steps: u64,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: u64,
    /// The tokenizer and processor files of the model, which go into checkpoints.
    pub carried: CarriedFiles,
    /// `config.json` of checkpoints.
    pub config_json: serde_json::Value,
    /// Rows to evaluate on.
    pub eval_rows: Option<JsonlRows>,
    /// Names of the data sets that are trained on.
    pub dataset_names: Vec<String>,
    /// Texts of the corpora that are trained on that could not be used.
    pub rejected_texts: Rejected,
    /// When to.
    pub eval: EvalConfig,
    /// Tokens of one forward pass of an evaluation.
    pub eval_max_tokens: usize,
    /// `metrics.jsonl`.
    pub metrics: JsonlSink,
    /// `rejects.jsonl`.
    pub rejects: JsonlSink,
    /// Set by a signal: save and stop after the current step.
    pub stop: Arc<AtomicBool>,
}

/// Watches a run from outside: the command's progress bar, or nothing.
pub trait Observer {
    /// After each optimizer step.
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64);
    /// While an evaluation runs.
    fn evaluating(&mut self, done: usize, total: usize);
    /// After an evaluation.
    fn evaluated(&mut self, metrics: &EvalMetrics);
}

impl Observer for () {
    fn step(&mut self, _: &StepMetrics, _: u64) {}
    fn evaluating(&mut self, _: usize, _: usize) {}
    fn evaluated(&mut self, _: &EvalMetrics) {}
}

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    /// All steps are done and `final/` is written.
    Finished {
        /// The last evaluation, if there is eval data.
        eval: Option<EvalReport>,
        /// `<output_dir>/final`.
        folder: PathBuf,
    },
    /// A signal asked for it; the same command goes on from the checkpoint.
    Stopped {
        /// The checkpoint.
        folder: PathBuf,
    },
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data.
    #[error(transparent)]
    Data(#[from] LoaderError),
    /// The step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The evaluation.
    #[error("evaluation")]
    Eval(#[from] EvalError),
    /// The disk.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `metrics.jsonl` or `rejects.jsonl`.
    #[error(transparent)]
    Sink(#[from] JsonlError),
    /// An op failed outside of a step.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Whether gradients are still to be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Audit {
    Due,
    DueWithImages,
    Done,
}

impl Audit {
    /// Whether this step is to be audited; the answer is remembered.
    fn is_due(&mut self, has_images: bool) -> bool {
        let before = *self;
        if has_images {
            *self = Self::Done;
        } else if before == Self::Due {
            *self = Self::DueWithImages;
        }
        *self != before
    }
}

/// A run.
pub struct Trainer {
    parts: TrainerParts,
    audit: Audit,
    resumed: bool,
    saved_at: Option<u64>,
    evaluated_at: Option<u64>,
    last_eval: Option<EvalReport>,
    ahead: Option<Result<ReadyStep, TrainError>>,
}

/// A step of data, its first micro-batch on the way to the device.
struct ReadyStep {
    data: StepData,
    prepared: PreparedStep,
    has_images: bool,
}

impl ReadyStep {
    fn new(runner: &StepRunner, mut data: StepData) -> Result<Self, TrainError> {
        let micro_batches = std::mem::take(&mut data.micro_batches);
        let has_images = micro_batches.iter().any(|batch| !batch.media.is_empty());
        Ok(Self { data, prepared: runner.prepare(micro_batches)?, has_images })
    }
}

impl Trainer {
    /// Takes over what the command has put together.
    pub fn new(parts: TrainerParts) -> Self {
        let audit = match parts.state.step {
            0 => Audit::Due,
            _ => Audit::Done, // a resumed run has been audited when it began
        };
        // A run that goes on from another folder's checkpoint has none here.
        let step = parts.state.step;
        let is_here = step > 0 && parts.checkpointer.step_folder(step).is_dir();
        let saved_at = is_here.then_some(step);
        Self {
            parts,
            audit,
            saved_at,
            evaluated_at: None,
            last_eval: None,
            resumed: step > 0,
            ahead: None,
        }
    }

    /// Where the run stands.
    pub fn state(&self) -> &TrainState {
        &self.parts.state
    }

    /// The trained model, for showing answers.
    pub fn runner(&self) -> &StepRunner {
        &self.parts.runner
    }

    /// The eval rows, for showing answers.
    pub fn eval_rows(&self) -> Option<&JsonlRows> {
        self.parts.eval_rows.as_ref()
    }

    /// Trains until the planned steps are done, the data ends, or a signal comes.
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        // Not the planned number: a step of nothing but broken images is left out.
        while self.parts.state.step < self.parts.max_steps {
            let asked = Instant::now();
            let ready = match self.ahead.take() {
                Some(ready) => ready?,
                None => match self.next_step(self.parts.state.step + 1)? {
                    Some(ready) => ready,
                    None => break,
                },
            };
            self.step(ready, asked, observer)?;
            let step = self.parts.state.step;
            if due(step, self.parts.eval.every_steps) {
                self.evaluate(observer)?;
            }
            if due(step, self.parts.checkpoint_every) {
                self.save()?;
            }
            if self.parts.stop.load(Ordering::Relaxed) {
                return Ok(Outcome::Stopped { folder: self.save()? });
            }
        }
        let last = self.save()?; // first, so that nothing in an evaluation can lose it
        self.evaluate(observer)?;
        let folder = self.parts.checkpointer.save_final(&last)?;
        Ok(Outcome::Finished { eval: self.last_eval.take(), folder })
    }

    /// Waits for the data of `step`, and takes it over; `None` at the end.
    fn next_step(&mut self, step: u64) -> Result<Option<ReadyStep>, TrainError> {
        let Some(data) = self.parts.loader.next_step() else { return Ok(None) };
        let data = data.or_else(|error| self.give_up(step, error))?;
        ReadyStep::new(&self.parts.runner, data).map(Some)
    }

    /// While the GPU computes a step, the next is read and its upload begun, if its data is there. What is read ahead
    /// is not trained on yet: a checkpoint says where the last step ended.
    fn look_ahead(&mut self) {
        let parts = &mut self.parts;
        let next = parts.state.step + 2; // that of the state is done when this one is
        let is_last = next > parts.max_steps;
        if parts.runner.device.is_cpu() || is_last || !parts.loader.is_ready() {
            return;
        }
        self.ahead = self.next_step(next).transpose();
    }

    /// The rows that led to the error go to `rejects.jsonl`, as those of any step do.
    fn give_up<T>(&mut self, step: u64, error: LoaderError) -> Result<T, TrainError> {
        write_rejects(&mut self.parts.rejects, step, error.unreported())?;
        Err(error.into())
    }

    fn step(
        &mut self,
        ready: ReadyStep,
        asked: Instant,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let data_wait_s = asked.elapsed().as_secs_f64();
        let ReadyStep { data, prepared, has_images } = ready;
        let step = self.parts.state.step + 1;
        let lr = self.parts.schedule.lr(step);
        write_rejects(&mut self.parts.rejects, step, &data.rejected)?;
        let launched = self.parts.runner.launch(prepared, lr, step)?;
        self.look_ahead();
        let parts = &mut self.parts;
        let outcome = parts.runner.finish(&launched)?;
        if self.audit.is_due(has_images) {
            audit(&parts.runner, step, has_images)?;
        }
        let state = &mut parts.state;
        state.step = step;
        state.targets_seen += outcome.num_targets;
        state.tokens_seen += data.num_tokens as u64;
        state.samples_seen += data.num_samples as u64;
        let names = &parts.dataset_names;
        let sets = by_dataset(names.len(), &data.samples, &outcome.nll);
        count(&mut state.datasets_seen, names, &sets);
        state.data = data.state;
        let step_time_s = asked.elapsed().as_secs_f64();
        let rejected = parts.rejected_texts.with_rows(&state.data);
        let device_memory = gpu_memory(&parts.runner.device);
        let metrics = StepMetrics {
            step,
            epoch: data.epoch,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            lr,
            num_tokens: data.num_tokens as u64,
            num_target_tokens: outcome.num_targets,
            num_samples: data.num_samples as u64,
            fill: data.fill,
            step_time_s,
            data_wait_s,
            tokens_per_s: data.num_tokens as f64 / step_time_s,
            peak_memory_bytes: peak_memory_bytes(),
            peak_device_memory_bytes: device_memory.map(|memory| memory.peak),
            peak_device_reserved_bytes: device_memory.map(|memory| memory.reserved),
            rejected: rejected.total(),
            rejected_by_reason: rejected.by_reason,
            rejected_by_file: rejected.by_file,
            datasets: metric_keys(names, &sets),
        };
        parts.metrics.write(&metrics)?;
        observer.step(&metrics, state.total_steps);
        Ok(())
    }

    /// Scores the eval rows, once a step at most.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let parts = &mut self.parts;
        let step = parts.state.step;
        let Some(rows) = parts.eval_rows.as_ref().filter(|_| self.evaluated_at != Some(step))
        else {
            return Ok(());
        };
        let started = Instant::now();
        let total = rows.num_rows();
        let evaluator = Evaluator {
            rows,
            max_tokens: parts.eval_max_tokens,
            dtype: parts.runner.dtype,
            device: &parts.runner.device,
        };
        let watch = std::cell::RefCell::new(observer);
        let report = evaluator
            .run(&*parts.runner.model, &|done| watch.borrow_mut().evaluating(done, total))?;
        if self.evaluated_at.is_none() && !self.resumed {
            for rejection in &report.rejected {
                tracing::warn!(row = %rejection.message, "an eval row cannot be scored");
            }
            write_rejects(&mut parts.rejects, step, &report.rejected)?;
        }
        self.evaluated_at = Some(step);
        if report.samples.is_empty() {
            // A loss of nothing would read as a perfect one.
            tracing::warn!(step, "no eval row can be scored: this evaluation has no result");
            return Ok(());
        }
        let time_s = started.elapsed().as_secs_f64();
        let num_samples = report.samples.len() as u64;
        let metrics =
            EvalMetrics::new(step, report.loss(), report.num_targets(), num_samples, time_s)
                .with_accuracy(report.accuracy())
                .with_datasets(metric_keys(rows.names(), &report.by_dataset(rows.names().len())));
        parts.metrics.write(&metrics)?;
        watch.into_inner().evaluated(&metrics);
        self.last_eval = Some(report);
        Ok(())
    }

    /// Writes the checkpoint of the current step, once.
    fn save(&mut self) -> Result<PathBuf, TrainError> {
        let parts = &self.parts;
        let step = parts.state.step;
        if self.saved_at == Some(step) {
            return Ok(parts.checkpointer.step_folder(step));
        }
        let weights: Vec<(String, Tensor)> = parts
            .runner
            .params
            .iter()
            .map(|param| (param.name().to_owned(), param.tensor()))
            .collect();
        let mut optimizer = Vec::new();
        for state in parts.runner.optimizer.states() {
            let name = state.param.name();
            optimizer.push((format!("exp_avg.{name}"), state.exp_avg.clone()));
            optimizer.push((format!("exp_avg_sq.{name}"), state.exp_avg_sq.clone()));
            if let Some(master) = &state.master {
                optimizer.push((format!("master.{name}"), master.clone()));
            }
        }
        let state = serde_json::to_value(&parts.state).map_err(candle_core::Error::wrap)?;
        let folder = parts.checkpointer.save(
            step,
            &Contents {
                model: ModelFiles {
                    weights: &weights,
                    config_json: &parts.config_json,
                    carried: &parts.carried,
                    max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
                },
                optimizer: Some(&optimizer),
                state: &state,
            },
        )?;
        tracing::info!(step, folder = %folder.display(), "checkpoint");
        log_shares(&parts.state.datasets_seen);
        self.saved_at = Some(step);
        Ok(folder)
    }
}

/// A line of `rejects.jsonl`.
#[derive(serde::Serialize)]
struct RejectRow<'a> {
    step: u64,
    #[serde(flatten)]
    rejection: &'a Rejection,
}

/// Appends the rows that were found unusable on the way to `step` to `rejects.jsonl`.
pub fn write_rejects<'a>(
    sink: &mut JsonlSink,
    step: u64,
    rejections: impl IntoIterator<Item = &'a Rejection>,
) -> Result<(), JsonlError> {
    let mut rejections = rejections.into_iter();
    rejections.try_for_each(|rejection| sink.write(&RejectRow { step, rejection }))
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// Checks that every trained tensor received a gradient; names those that did not. Runs after the
/// first backward, and again after the first with images.
fn audit(runner: &StepRunner, step: u64, has_images: bool) -> Result<(), TrainError> {
    let specs = runner.model.param_specs();
    let needs_media = |index: usize| specs[index].component.inputs == Inputs::Media;
    let without = runner.without_gradient()?;
    let missing: Vec<&str> = without
        .iter()
        .filter(|param| has_images || !needs_media(param.index()))
        .map(|param| param.name())
        .collect();
    let trained = runner.grads.iter().flatten().count();
    if missing.is_empty() {
        let received = trained - without.len();
        tracing::info!(step, "audit: {received} of {trained} trained tensors received a gradient");
    } else {
        tracing::warn!(
            step,
            tensors = ?missing,
            "audit: {} of {trained} trained tensors received no gradient",
            missing.len()
        );
    }
    if without.len() > missing.len() {
        tracing::info!(step, "audit: vision gradients are checked at the first step with images");
    }
    Ok(())
}
