//! Short runs that leave no files: one measures the speed of a config, one trains a step again.

use super::build::{Run, RunOptions};
use super::error::RunError;
use super::inputs::SetupObserver;
use super::output_dir::TemporaryFolder;
use super::resume::Resume;
use super::runner::stages;
use crate::checkpoint::Checkpointer;
use crate::config::RunConfig;
use crate::dist::Distributed;
use crate::files;
use crate::metrics::{EvalMetrics, StepMetrics};
use crate::train::{EvalConfig, Observer, OnNonFinite, StepSamples};
use serde::Serialize;
use std::num::NonZeroU64;
use std::path::Path;

/// The config of a run in one process, whose files are in `folder`. It uses the caches of `config`.
pub(super) fn in_one_process(config: &RunConfig, folder: &Path) -> RunConfig {
    let mut config = config.clone();
    config.data.cache_dir = Some(config.cache_dir());
    folder.clone_into(&mut config.output_dir);
    let Distributed { exact, .. } = config.distributed;
    config.distributed = Distributed { exact, ..Distributed::default() };
    config
}

/// [`in_one_process`] for a run that does not evaluate.
fn without_evaluation(config: &RunConfig, folder: &Path) -> RunConfig {
    let mut config = in_one_process(config, folder);
    (config.eval, config.checkpoint.best) = (EvalConfig::default(), None);
    config
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// Number of steps that were timed.
    pub steps: u64,
    /// Of this rank.
    pub tokens_per_s: f64,
    /// Peak memory of the process, or of the tensors on the GPU, in bytes.
    pub peak_bytes: f64,
}

/// Trains one step and then `steps` that are timed, in a folder in `parent` that is removed
/// afterwards.
pub fn calibrate(
    config: &RunConfig,
    steps: NonZeroU64,
    parent: &Path,
    observer: &dyn SetupObserver,
) -> Result<Calibration, RunError> {
    let folder = TemporaryFolder::create(parent)
        .map_err(|(folder, problem)| RunError::TemporaryFolder { folder, problem })?;
    let mut config = without_evaluation(config, folder.path());
    (config.train.epochs, config.train.max_steps) = (None, Some(steps.saturating_add(1)));
    (config.optim.warmup_steps, config.optim.warmup_ratio) = (None, None);
    let options =
        RunOptions { resume: Resume::Never, evaluates: false, observer, ..RunOptions::default() };
    let mut run = Run::with_options(&config, &options)?;
    let mut timed = StepTimes::default();
    run.train_to(steps.get() + 1, &mut timed)?;
    Ok(Calibration {
        steps: timed.steps,
        tokens_per_s: timed.tokens as f64 / timed.seconds,
        peak_bytes: timed.peak_bytes as f64,
    })
}

/// Sums over all steps except for the first, in which caches are still empty.
#[derive(Default)]
struct StepTimes {
    steps: u64,
    tokens: u64,
    seconds: f64,
    peak_bytes: u64,
}

impl Observer for StepTimes {
    fn step(&mut self, metrics: &StepMetrics, _: u64) {
        self.peak_bytes = metrics.peak_device_memory_bytes.unwrap_or(metrics.peak_memory_bytes);
        if metrics.step > 1 {
            self.steps += 1;
            self.tokens += metrics.num_tokens;
            self.seconds += metrics.step_time_s;
        }
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replay {
    /// The checkpoint that it was trained from; 0: the beginning of the run.
    pub from_step: u64,
    pub metrics: StepMetrics,
    pub samples: StepSamples,
    /// The gradient of each stage, in the order of forward.
    pub stages: Vec<StageNorm>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageNorm {
    /// Common beginning of the names of its parameters.
    pub name: String,
    /// L2 norm before clipping; `null` as JSON if it is not finite.
    pub grad_norm: f64,
}

/// Trains `step` of the run of `config` again, from the newest checkpoint before it. Changes no
/// file of the run.
pub fn replay(
    config: &RunConfig,
    step: u64,
    observer: &dyn SetupObserver,
) -> Result<Replay, RunError> {
    let checkpoints = Checkpointer::new(&config.output_dir, &config.checkpoint);
    let steps = checkpoints.steps()?;
    let from = steps.into_iter().filter(|from| *from < step).max();
    let resume = from.map_or(Resume::Never, |from| Resume::From(checkpoints.step_folder(from)));
    let folder = TemporaryFolder::create(&config.output_dir)
        .map_err(|(path, problem)| RunError::OutputFile { action: "create", path, problem })?;
    let mut config = without_evaluation(config, folder.path());
    config.log.samples = true;
    // a step that is not finite is the usual reason for a replay
    (config.train.on_non_finite, config.train.max_skipped) = (OnNonFinite::Skip, u64::MAX);
    let options = RunOptions { resume, evaluates: false, observer, ..RunOptions::default() };
    let mut run = Run::with_options(&config, &options)?;
    let mut last = Last(None);
    let exists = run.train_to(step, &mut last)?;
    let samples = files::read_to_string(folder.path().join("samples.jsonl")).unwrap_or_default();
    let samples = samples.lines().last().and_then(|line| serde_json::from_str(line).ok());
    let done = last.0.zip(samples).filter(|_| exists);
    let (metrics, samples) = done.ok_or(RunError::NoStep { step })?;
    Ok(Replay { from_step: from.unwrap_or(0), metrics, samples, stages: stage_norms(&run) })
}

/// The norms of the gradients of the last step.
fn stage_norms(run: &Run) -> Vec<StageNorm> {
    let runner = run.trainer().runner();
    let trained = runner.optimizer.trained();
    let squares = run.trainer().gradient_squares();
    let square = |index: &usize| {
        let at = trained.iter().position(|param| param.index() == *index);
        at.and_then(|at| squares.get(at)).copied()
    };
    let norm = |(name, params): (String, Vec<usize>)| StageNorm {
        name,
        grad_norm: params.iter().filter_map(square).sum::<f64>().sqrt(),
    };
    stages(&runner.model).into_iter().map(norm).collect()
}

/// Keeps the metrics of the last step.
struct Last(Option<StepMetrics>);

impl Observer for Last {
    fn step(&mut self, metrics: &StepMetrics, _: u64) {
        self.0 = Some(metrics.clone());
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}
