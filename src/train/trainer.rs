//! The training loop: steps, evaluations, checkpoints.

use super::audit::{Audit, audit};
use super::config::EvalConfig;
use super::datasets::{Rejected, by_dataset, by_sample, count, log_datasets, metric_keys};
use super::error::TrainError;
use super::eval::{EvalReport, Evaluator};
use super::ranks::Ranks;
use super::rejects::write_rejects;
use super::saved::{saved_optimizer, saved_weights};
use super::state::TrainState;
use super::step::{MicroBatches, PreparedStep, StepRunner};
use super::step_report::{StepReport, StepReports};
use crate::checkpoint::{CarriedFiles, Checkpointer, Contents, FolderLayout, ModelFiles};
use crate::data::JsonlRows;
use crate::data::{Loader, LoaderError, StepData};
use crate::metrics::{EvalMetrics, JsonlSink, StepMetrics, peak_memory_bytes};
use crate::ops::gpu_memory;
use crate::optim::Schedule;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Arguments of [`Trainer::new`].
pub struct TrainerParts {
    /// Model, gradients, optimizer.
    pub runner: StepRunner,
    /// Steps of data, from the position in `state` on.
    pub loader: Loader,
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Progress of the run.
    pub state: TrainState,
    /// Writes checkpoints and the folder `final`.
    pub checkpointer: Checkpointer,
    /// Maximum number of steps, even if there is more data.
    pub max_steps: u64,
    /// Number of steps between checkpoints; 0 writes one at the end only.
    pub checkpoint_every: u64,
    /// Tokenizer and processor files of the model, copied to checkpoints.
    pub carried: CarriedFiles,
    /// Whether checkpoints contain a model or an adapter.
    pub layout: FolderLayout,
    /// `config.json`, or `adapter_config.json`, of checkpoints.
    pub config_json: serde_json::Value,
    /// Rows of the evaluation.
    pub eval_rows: Option<JsonlRows>,
    /// Names of the training data sets.
    pub dataset_names: Vec<String>,
    /// Rejected texts of the training corpora.
    pub rejected_texts: Rejected,
    /// When to evaluate.
    pub eval: EvalConfig,
    /// Maximum number of tokens of one forward pass of an evaluation.
    pub eval_max_tokens: usize,
    /// `metrics.jsonl`; `None` if another rank writes it.
    pub metrics: Option<JsonlSink>,
    /// `rejects.jsonl`; `None` if another rank writes it.
    pub rejects: Option<JsonlSink>,
    /// Set by a signal handler: the run saves and stops after the current step.
    pub stop: Arc<AtomicBool>,
}

/// Receives the progress of a run, for example to draw a bar. `()` ignores it.
pub trait Observer {
    /// Called after each optimizer step.
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64);
    /// Called during an evaluation, with the number of scored rows.
    fn evaluating(&mut self, done: usize, total: usize);
    /// Called after an evaluation.
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
    /// All steps are done, and the folder `final` is written.
    Finished {
        /// The last evaluation, if there is eval data.
        eval: Option<EvalReport>,
        /// `<output_dir>/final`.
        folder: PathBuf,
    },
    /// A signal stopped the run. The same command resumes from the checkpoint.
    Stopped {
        /// The checkpoint.
        folder: PathBuf,
    },
}

/// A run in progress.
pub struct Trainer {
    parts: TrainerParts,
    audit: Audit,
    resumed: bool,
    saved_at: Option<u64>,
    evaluated_at: Option<u64>,
    last_eval: Option<EvalReport>,
    ahead: Option<Result<ReadyStep, TrainError>>,
}

/// The data of a step. The upload of its first micro-batch has started.
struct ReadyStep {
    data: StepData,
    prepared: PreparedStep,
    has_images: bool,
}

impl ReadyStep {
    fn new(runner: &StepRunner, mut data: StepData) -> Result<Self, TrainError> {
        let batches = std::mem::take(&mut data.micro_batches);
        let micro_batches = MicroBatches(data.slots.iter().copied().zip(batches).collect());
        // of any rank
        let has_images = data.samples.iter().any(|size| size.num_images + size.num_videos > 0);
        Ok(Self { data, prepared: runner.prepare(micro_batches)?, has_images })
    }
}

impl Trainer {
    /// Starts or resumes a run; steps are trained by [`Self::run`].
    pub fn new(parts: TrainerParts) -> Self {
        let audit = match parts.state.step {
            0 => Audit::Due,
            _ => Audit::Done, // a resumed run was audited at its first start
        };
        // A run resumed from the checkpoint of another folder has no checkpoint here.
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

    /// Progress of the run.
    pub fn state(&self) -> &TrainState {
        &self.parts.state
    }

    /// The model in training.
    pub fn runner(&self) -> &StepRunner {
        &self.parts.runner
    }

    /// The rows of the evaluation.
    pub fn eval_rows(&self) -> Option<&JsonlRows> {
        self.parts.eval_rows.as_ref()
    }

    /// Trains until `max_steps` are done, the data ends, or a signal stops the run.
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        let result = self.train(observer);
        if let Err(error) = &result {
            self.ranks().fail(error); // before the connections close
        }
        result
    }

    fn train(&mut self, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        // The loader may end earlier than planned: it omits a step with only broken images.
        while self.parts.state.step < self.parts.max_steps {
            self.ranks().begin_step(self.parts.state.step + 1);
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
            // a signal to one rank stops all
            let stop = self.parts.stop.load(Ordering::Relaxed);
            if self.ranks().gather(stop)?.contains(&true) {
                return Ok(Outcome::Stopped { folder: self.save()? });
            }
        }
        let last = self.save()?; // before the evaluation, which may fail
        self.evaluate(observer)?;
        let checkpointer = &self.parts.checkpointer;
        let folder = if self.is_first() {
            self.ranks().during("writing `final`", || checkpointer.save_final(&last))?
        } else {
            checkpointer.final_folder()
        };
        self.ranks().wait_for_all()?;
        Ok(Outcome::Finished { eval: self.last_eval.take(), folder })
    }

    fn ranks(&self) -> &Ranks {
        &self.parts.runner.ranks
    }

    /// Whether this process writes the files of the run.
    fn is_first(&self) -> bool {
        self.ranks().rank().is_first()
    }

    /// Waits for the data of `step`; `None` at the end of the data.
    fn next_step(&mut self, step: u64) -> Result<Option<ReadyStep>, TrainError> {
        let Some(data) = self.parts.loader.next_step() else { return Ok(None) };
        let data = data.or_else(|error| self.fail(step, error))?;
        ReadyStep::new(&self.parts.runner, data).map(Some)
    }

    /// While the GPU computes a step, reads the next one, if its data is ready, and begins its
    /// upload. The state does not include it: a checkpoint has the position after the last step.
    fn look_ahead(&mut self) {
        let parts = &mut self.parts;
        let next = parts.state.step + 2; // the current step is not yet counted in the state
        let is_last = next > parts.max_steps;
        if parts.runner.device.is_cpu() || is_last || !parts.loader.is_ready() {
            return;
        }
        self.ahead = self.next_step(next).transpose();
    }

    /// Writes the rows that caused the error to `rejects.jsonl` and returns the error.
    fn fail<T>(&mut self, step: u64, error: LoaderError) -> Result<T, TrainError> {
        write_rejects(self.parts.rejects.as_mut(), step, error.unreported())?;
        if !error.unreported().is_empty() {
            self.ranks().wait_for_all()?; // all ranks have this error, and rank 0 writes the rows
        }
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
        write_rejects(self.parts.rejects.as_mut(), step, &data.rejected)?;
        let launched = self.parts.runner.launch(prepared, lr, step)?;
        self.look_ahead();
        let parts = &mut self.parts;
        let outcome = parts.runner.finish(&launched)?;
        let step_time_s = asked.elapsed().as_secs_f64();
        let peak_memory_bytes = peak_memory_bytes();
        let sequence = parts.runner.ranks.sequence();
        let own_samples = data.own_samples();
        let own_tokens: u64 = own_samples.iter().map(|size| u64::from(size.num_tokens)).sum();
        let report = StepReport {
            samples: by_sample(&own_samples, &outcome.losses),
            data_wait_s,
            tokens_per_s: own_tokens as f64 / sequence.size as f64 / step_time_s,
            peak_memory_bytes,
        };
        let StepReports { samples: losses, ranks } =
            report.gather(&data.owners, &parts.runner.ranks)?;
        // In the first step of an adapter, `A` has no gradient because `B` is zero.
        let is_first_of_adapter = step == 1 && parts.layout == FolderLayout::Adapter;
        if !is_first_of_adapter && self.audit.is_due(has_images) {
            audit(&parts.runner, &outcome.squares, step, has_images);
        }
        let state = &mut parts.state;
        state.step = step;
        state.targets_seen += outcome.counts.num_targets;
        state.tokens_seen += data.num_tokens as u64;
        state.samples_seen += data.num_samples as u64;
        let names = &parts.dataset_names;
        let sets = by_dataset(names.len(), &data.samples, &losses);
        count(&mut state.datasets_seen, names, &sets);
        state.data = data.state;
        let rejected = parts.rejected_texts.with_rows(&state.data);
        let device_memory = gpu_memory(&parts.runner.device);
        let metrics = StepMetrics {
            step,
            epoch: data.epoch,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            lr,
            num_tokens: data.num_tokens as u64,
            num_target_tokens: outcome.counts.num_targets,
            target_weight: Some(outcome.counts.target_weight)
                .filter(|weight| *weight != outcome.counts.num_targets as f64),
            num_samples: data.num_samples as u64,
            fill: data.fill,
            step_time_s,
            data_wait_s,
            tokens_per_s: data.num_tokens as f64 / step_time_s,
            peak_memory_bytes,
            peak_device_memory_bytes: device_memory.map(|memory| memory.peak),
            peak_device_reserved_bytes: device_memory.map(|memory| memory.reserved),
            rejected: rejected.total(),
            rejected_by_reason: rejected.by_reason,
            rejected_by_file: rejected.by_file,
            ranks,
            datasets: metric_keys(names, &sets),
        };
        if let Some(file) = &mut parts.metrics {
            file.write(&metrics)?;
        }
        observer.step(&metrics, state.total_steps);
        Ok(())
    }

    /// Scores the eval rows, at most once per step.
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
            ranks: &parts.runner.ranks,
            weights: &parts.runner.weights,
        };
        let watch = std::cell::RefCell::new(observer);
        let report = evaluator
            .run(&*parts.runner.model, &|done| watch.borrow_mut().evaluating(done, total))?;
        if self.evaluated_at.is_none() && !self.resumed {
            for rejection in &report.rejected {
                tracing::warn!(row = %rejection.message, "cannot score an eval row");
            }
            write_rejects(parts.rejects.as_mut(), step, &report.rejected)?;
        }
        self.evaluated_at = Some(step);
        if report.samples.is_empty() {
            // The loss of no rows would be 0, like a perfect loss.
            tracing::warn!(step, "no eval row can be scored: this evaluation has no result");
            return Ok(());
        }
        let time_s = started.elapsed().as_secs_f64();
        let num_samples = report.samples.len() as u64;
        let metrics =
            EvalMetrics::new(step, report.loss(), report.num_targets(), num_samples, time_s)
                .with_accuracy(report.accuracy())
                .with_datasets(metric_keys(rows.names(), &report.by_dataset(rows.names().len())));
        if let Some(file) = &mut parts.metrics {
            file.write(&metrics)?;
        }
        watch.into_inner().evaluated(&metrics);
        self.last_eval = Some(report);
        Ok(())
    }

    /// Writes the checkpoint of the current step unless it exists.
    fn save(&mut self) -> Result<PathBuf, TrainError> {
        let step = self.parts.state.step;
        let folder = self.parts.checkpointer.step_folder(step);
        if self.saved_at != Some(step) {
            self.ranks().during("writing a checkpoint", || self.write_checkpoint(step))?;
            self.saved_at = Some(step);
        }
        Ok(folder)
    }

    fn write_checkpoint(&self, step: u64) -> Result<(), TrainError> {
        let parts = &self.parts;
        let weights = saved_weights(&parts.runner)?;
        let optimizer = saved_optimizer(&parts.runner)?;
        let state = serde_json::to_value(&parts.state).map_err(candle_core::Error::wrap)?;
        let folder = parts.checkpointer.save(
            step,
            &Contents {
                model: ModelFiles {
                    layout: parts.layout,
                    weights: &weights,
                    config_json: &parts.config_json,
                    carried: &parts.carried,
                    max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
                },
                optimizer: Some(&optimizer),
                state: &state,
            },
            self.ranks(),
        )?;
        if self.is_first() {
            tracing::info!(step, folder = %folder.display(), "checkpoint");
            log_datasets(&parts.state.datasets_seen);
        }
        Ok(())
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
