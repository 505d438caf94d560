//! The training loop: steps, evaluations, checkpoints.

mod best;
mod evaluate;
mod parts;
mod save;
mod step;

pub use self::parts::{Checkpoints, Evaluation, Logs, StepRules, TrainData, TrainerParts};
use self::save::Saves;
use super::audit::Audit;
use super::error::TrainError;
use super::eval::EvalReport;
use super::ranks::Ranks;
use super::rejects::write_rejects;
use super::state::TrainState;
use super::step::{MicroBatches, PreparedStep, StepRunner};
use crate::data::{DatasetRows, LoaderError, StepData};
use crate::metrics::{EvalMetrics, JsonlSink, StepMetrics};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

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

#[derive(Debug)]
pub enum TrainOutcome {
    /// All steps are done, or evaluations no longer improve, and the folder `final` is written.
    Finished {
        /// `None` without eval data.
        eval: Option<EvalReport>,
        /// `<output_dir>/final`.
        folder: PathBuf,
        /// The reason why `eval.early_stopping` ended the run, if it did.
        stopped_early: Option<String>,
    },
    /// A signal stopped the run. The same command resumes from the checkpoint.
    Stopped {
        /// The checkpoint; `None` before the first step.
        folder: Option<PathBuf>,
    },
}

pub struct Trainer {
    parts: TrainerParts,
    audit: Audit,
    resumed: bool,
    saves: Saves,
    evaluated_at: Option<u64>,
    last_eval: Option<EvalReport>,
    ahead: Option<Result<ReadyStep, TrainError>>,
    squares: Vec<f64>,
}

/// The data of a step. The upload of its first micro-batch has started.
struct ReadyStep {
    data: StepData,
    prepared: PreparedStep,
    has_images: bool,
}

enum Waited {
    Step(Box<ReadyStep>),
    /// A signal stops the run.
    Stopped,
    /// The data has ended.
    End,
}

/// Time between two checks of the flag that a signal sets.
const POLL: Duration = Duration::from_millis(100);

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
        let is_here = step > 0 && parts.checkpoints.checkpointer.step_folder(step).is_dir();
        Self {
            parts,
            audit,
            saves: Saves::new(is_here.then_some(step)),
            evaluated_at: None,
            last_eval: None,
            resumed: step > 0,
            ahead: None,
            squares: Vec::new(),
        }
    }

    pub fn state(&self) -> &TrainState {
        &self.parts.state
    }

    pub fn runner(&self) -> &StepRunner {
        &self.parts.runner
    }

    /// Sum of the squares of the gradient of each trained parameter in the last step, before
    /// clipping; their parameters are those of
    /// [`Optimizer::trained`](crate::optim::Optimizer::trained).
    pub fn gradient_squares(&self) -> &[f64] {
        &self.squares
    }

    /// Trains until `step` is done, and writes no checkpoint; returns whether the data suffices.
    /// For a run in one process.
    pub fn train_to(&mut self, step: u64, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        while self.parts.state.step < step.min(self.parts.steps.max_steps) {
            let asked = Instant::now();
            match self.next_step(self.parts.state.step + 1)? {
                Some(ready) => self.step(ready, asked, observer)?,
                None => break,
            }
        }
        Ok(self.parts.state.step == step)
    }

    pub fn eval_rows(&self) -> Option<&DatasetRows> {
        self.parts.evaluation.rows.as_ref()
    }

    /// Trains until `max_steps` are done, the data ends, or a signal stops the run.
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<TrainOutcome, TrainError> {
        self.ranks().pass_on(&self.parts.stop);
        let result = self.train(observer);
        if let Err(error) = &result {
            self.ranks().fail(error); // before the connections close, and before a slow disk
            self.end_saves();
        }
        result
    }

    fn train(&mut self, observer: &mut dyn Observer) -> Result<TrainOutcome, TrainError> {
        // A signal may have ended the evaluation that follows the checkpoint.
        let is_evaluated = self.parts.evaluation.is_done || !self.is_first();
        let is_missing =
            self.resumed && due(self.parts.state.step, self.parts.evaluation.config.every_steps);
        if is_missing && self.ranks().gather(is_evaluated)?.contains(&false) {
            self.evaluate(observer)?;
        }
        // The loader may end earlier than planned: it omits a step with only broken images.
        while self.parts.state.step < self.parts.steps.max_steps {
            if self.ends_early().is_some() {
                break;
            }
            // a signal to one rank stops all, and a checkpoint is complete when all have written it
            let stop = self.parts.stop.load(Ordering::Relaxed);
            // before the first step there is nothing to save: the request waits
            let save = self.parts.state.step > 0 && self.parts.save.swap(false, Ordering::Relaxed);
            let all = self.ranks().gather([stop, save, self.saves.is_written()])?;
            if all.iter().all(|[.., is_written]| *is_written) {
                self.finish_save()?;
            }
            if all.iter().any(|[stop, ..]| *stop) {
                let folder = (self.parts.state.step > 0).then(|| self.save()).transpose()?;
                return Ok(TrainOutcome::Stopped { folder });
            }
            if all.iter().any(|[_, save, _]| *save) {
                self.try_save()?;
            }
            self.ranks().begin_step(self.parts.state.step + 1);
            let asked = Instant::now();
            let waited = match self.ahead.take() {
                Some(ready) => ready.map(|ready| Waited::Step(Box::new(ready))),
                None => self.wait_for_step(self.parts.state.step + 1),
            };
            let ready = match waited {
                Ok(Waited::Step(ready)) => *ready,
                Ok(Waited::Stopped) => continue,
                Ok(Waited::End) => break,
                Err(error) => {
                    self.save_before(&error);
                    return Err(error);
                }
            };
            self.step(ready, asked, observer)?;
            let step = self.parts.state.step;
            if due(step, self.parts.checkpoints.every_steps) {
                self.try_save()?;
            }
            if due(step, self.parts.evaluation.config.every_steps) {
                self.evaluate(observer)?;
            }
        }
        let last = self.save()?; // before the evaluation, which may fail
        if !self.evaluate(observer)? {
            return Ok(TrainOutcome::Stopped { folder: Some(last) });
        }
        let checkpointer = &self.parts.checkpoints.checkpointer;
        let folder = if self.is_first() {
            self.ranks().during("writing `final`", || checkpointer.save_final(&last))?
        } else {
            checkpointer.final_folder()
        };
        let stopped_early = self.ends_early();
        if let Some(reason) = stopped_early.as_ref().filter(|_| self.is_first()) {
            tracing::info!("{reason}");
        }
        self.finish_logs()?;
        self.ranks().wait_for_all()?;
        Ok(TrainOutcome::Finished { eval: self.last_eval.take(), folder, stopped_early })
    }

    /// Writes what is left of the logs, and says what went wrong in the run.
    fn finish_logs(&mut self) -> Result<(), TrainError> {
        if !self.is_first() {
            return Ok(());
        }
        let health = &self.parts.state.health;
        if health.skipped() > 0 {
            let steps = health.skipped();
            tracing::warn!(
                steps,
                "these steps changed no weight, because their loss or gradient was not finite"
            );
        }
        if let Some(found) = health.divergence() {
            let (first, last) = (found.first as f32, found.now as f32);
            tracing::warn!(
                %first,
                %last,
                "the loss ended above its first values: the run has diverged"
            );
        }
        Ok(self.logs().try_for_each(JsonlSink::sync)?)
    }

    fn logs(&mut self) -> impl Iterator<Item = &mut JsonlSink> {
        let Logs { metrics, evals, predictions, rejects, samples } = &mut self.parts.logs;
        [metrics, rejects, samples, evals, predictions].into_iter().flatten()
    }

    fn ranks(&self) -> &Ranks {
        &self.parts.runner.ranks
    }

    /// Whether this process writes the files of the run.
    fn is_first(&self) -> bool {
        self.ranks().rank().is_first()
    }

    /// Waits for the data of `step`, or for a signal.
    fn wait_for_step(&mut self, step: u64) -> Result<Waited, TrainError> {
        // Ranks that share the steps stop together, between two steps.
        let is_alone = self.ranks().rank().world == 1;
        while is_alone && !self.parts.data.loader.is_ready_within(POLL) {
            if self.parts.stop.load(Ordering::Relaxed) {
                return Ok(Waited::Stopped);
            }
        }
        Ok(match self.next_step(step)? {
            Some(ready) => Waited::Step(Box::new(ready)),
            None => Waited::End,
        })
    }

    /// Waits for the data of `step`; `None` at the end of the data.
    fn next_step(&mut self, step: u64) -> Result<Option<ReadyStep>, TrainError> {
        let Some(data) = self.parts.data.loader.next_step() else { return Ok(None) };
        let data = data.or_else(|error| self.fail(step, error))?;
        ReadyStep::new(&self.parts.runner, data).map(Some)
    }

    /// While the GPU computes a step, reads the next one, if its data is ready, and begins its
    /// upload. The state does not include it: a checkpoint has the position after the last step.
    fn look_ahead(&mut self) {
        let parts = &mut self.parts;
        let next = parts.state.step + 2; // the current step is not yet counted in the state
        let is_last = next > parts.steps.max_steps;
        if parts.runner.device.is_cpu() || is_last || !parts.data.loader.is_ready() {
            return;
        }
        self.ahead = self.next_step(next).transpose();
    }

    /// Writes the rows that caused the error to `rejects.jsonl` and returns the error.
    fn fail<T>(&mut self, step: u64, error: LoaderError) -> Result<T, TrainError> {
        write_rejects(self.parts.logs.rejects.as_mut(), step, error.unreported())?;
        if !error.unreported().is_empty() {
            self.ranks().wait_for_all()?; // all ranks have this error, and rank 0 writes the rows
        }
        Err(error.into())
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
