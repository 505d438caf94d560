//! Measures the speed of a config on a few steps that leave no files.

use super::build::{Run, RunOptions};
use super::error::RunError;
use super::observer::SetupObserver;
use super::resume::Resume;
use super::temporary::TemporaryFolder;
use crate::config::RunConfig;
use crate::dist::Distributed;
use crate::metrics::{EvalMetrics, StepMetrics};
use crate::train::{EvalConfig, Observer};
use std::num::NonZeroU64;
use std::path::Path;

/// The speed and memory of a few steps of one process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// Number of steps that were timed.
    pub steps: u64,
    /// Tokens per second.
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
    let mut config = config.clone();
    config.data.cache_dir = Some(config.cache_dir());
    folder.path().clone_into(&mut config.output_dir);
    config.data.eval.clear();
    (config.eval, config.checkpoint.best) = (EvalConfig::default(), None);
    let Distributed { exact, .. } = config.distributed;
    config.distributed = Distributed { exact, ..Distributed::default() };
    (config.train.epochs, config.train.max_steps) = (None, Some(steps.saturating_add(1)));
    (config.optim.warmup_steps, config.optim.warmup_ratio) = (None, None);
    let options = RunOptions { resume: Resume::Never, observer, ..RunOptions::default() };
    let mut run = Run::with_options(&config, &options)?;
    let mut timed = Timed::default();
    run.train_to(steps.get() + 1, &mut timed)?;
    Ok(Calibration {
        steps: timed.steps,
        tokens_per_s: timed.tokens as f64 / timed.seconds,
        peak_bytes: timed.peak_bytes as f64,
    })
}

/// Sums over all steps except for the first, in which caches are still empty.
#[derive(Default)]
struct Timed {
    steps: u64,
    tokens: u64,
    seconds: f64,
    peak_bytes: u64,
}

impl Observer for Timed {
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
