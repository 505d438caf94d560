//! A run that is stopped and resumed, compared with one that is not.

use super::super::build::{Run, RunOptions};
use super::report::Check;
use crate::checkpoint::Checkpointer;
use crate::config::RunConfig;
use crate::files;
use crate::metrics::{EvalMetrics, StepMetrics};
use crate::run::RunError;
use crate::train::{EvalConfig, Observer};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The name of the check.
pub(super) const RESUMED: &str =
    "a run that is stopped and resumed equals one that is not, to the bit";
/// Number of optimizer steps.
const STEPS: u64 = 4;
/// The step after which one of the runs stops.
const STOP_AFTER: u64 = 2;
/// Maximum number of micro-batches of a step.
const MICRO_BATCHES: usize = 2;

/// Trains a few steps of the config twice, once with a stop and a resume. Compares losses, gradient
/// norms, weights, optimizer state and the position in the data, all to the bit.
pub(super) fn resumed(config: &RunConfig, folder: &Path) -> Result<Check, RunError> {
    let mut config = config.clone();
    config.train.epochs = None;
    config.train.max_steps = NonZeroU64::new(STEPS);
    let most = NonZeroUsize::new(MICRO_BATCHES).unwrap_or(NonZeroUsize::MIN);
    let micro_batches = &mut config.train.gradient_accumulation_steps;
    *micro_batches = most.min(*micro_batches);
    config.data.eval.clear();
    (config.eval, config.checkpoint.every_steps) = (EvalConfig::default(), 0);
    (config.checkpoint.keep, config.checkpoint.best) = (NonZeroUsize::MIN, None);
    let whole = RunConfig { output_dir: folder.join("whole"), ..config.clone() };
    let parts = RunConfig { output_dir: folder.join("parts"), ..config };
    let mut expected = Steps::default();
    train(&whole, &mut expected)?;
    let mut found = Steps { stop_after: Some(STOP_AFTER), ..Steps::default() };
    train(&parts, &mut found)?;
    found.stop_after = None;
    train(&parts, &mut found)?;
    let problem = match expected.values.iter().zip(&found.values).find(|(x, y)| x != y) {
        Some((expected, _)) => {
            Some(format!("step {} has another loss or gradient norm", expected.0))
        }
        None if expected.values.len() != found.values.len() => {
            Some(format!("{} steps instead of {}", found.values.len(), expected.values.len()))
        }
        None => {
            let (expected, found) = (files(&whole)?, files(&parts)?);
            let differs = expected.iter().find(|(file, digest)| found.get(*file) != Some(digest));
            differs.map(|(file, _)| format!("`{file}` of the last checkpoint differs"))
        }
    };
    Ok(Check::of(RESUMED, problem, || {
        format!("{STEPS} steps, stopped after {STOP_AFTER}: losses, weights and optimizer state")
    }))
}

fn train(config: &RunConfig, steps: &mut Steps) -> Result<(), RunError> {
    steps.stop = Arc::default();
    let options = RunOptions { stop: Arc::clone(&steps.stop), ..RunOptions::default() };
    Run::with_options(config, &options)?.train(steps)?;
    Ok(())
}

/// Records the steps of a run, and stops it.
#[derive(Default)]
struct Steps {
    /// Number, loss and gradient norm of each step, in bits.
    values: Vec<(u64, u64, u64)>,
    stop_after: Option<u64>,
    stop: Arc<AtomicBool>,
}

impl Observer for Steps {
    fn step(&mut self, metrics: &StepMetrics, _: u64) {
        let StepMetrics { step, loss, grad_norm, .. } = metrics;
        self.values.push((*step, loss.to_bits(), grad_norm.to_bits()));
        if self.stop_after == Some(*step) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluating(&mut self, _: usize, _: usize) {}

    fn evaluated(&mut self, _: &EvalMetrics) {}
}

/// Digests of the tensor files and of the training state of the last checkpoint.
fn files(config: &RunConfig) -> Result<BTreeMap<String, String>, RunError> {
    let folder = Checkpointer::new(&config.output_dir, &config.checkpoint).step_folder(STEPS);
    let problem = |problem| RunError::TemporaryFolder { folder: folder.clone(), problem };
    let mut digests = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).map_err(problem)? {
        let entry = entry.map_err(problem)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") || name == "trainer_state.json" {
            let mut digest = Sha256::new();
            let mut file = files::open(entry.path()).map_err(problem)?;
            io::copy(&mut file, &mut digest).map_err(problem)?;
            digests.insert(name, format!("{:x}", digest.finalize()));
        }
    }
    Ok(digests)
}
