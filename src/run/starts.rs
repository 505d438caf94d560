//! The start of a process that trains a run: its lines in the log, and its line in `starts.jsonl`.

use super::device::device_name;
use crate::config::RunConfig;
use crate::data::JsonlRows;
use crate::metrics::JsonlSink;
use crate::ops::simd_level;
use crate::tape::Param;
use crate::train::{AdapterConfig, StepRunner, Targets, TrainState};
use serde::Serialize;
use std::time::SystemTime;

/// A line of `starts.jsonl`.
#[derive(Serialize)]
struct Start {
    after_step: u64,
    time: u64,
    version: &'static str,
    world: usize,
}

/// Logs the model and the position of a run that starts or resumes.
pub(super) fn log_start(
    config: &RunConfig,
    runner: &StepRunner,
    rows: &JsonlRows,
    state: &TrainState,
) {
    let count = |params: &mut dyn Iterator<Item = &Param>| {
        params.map(|param| param.shape().elem_count()).sum::<usize>()
    };
    tracing::info!(
        path = %config.model.path.display(),
        parameters = count(&mut runner.params.iter()),
        trained = count(&mut runner.optimizer.states().iter().map(|slot| &slot.param)),
        "model"
    );
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
        write_line(config, state.step, rank.world);
    }
}

/// Adds a line for a process that continues after `after_step`.
fn write_line(config: &RunConfig, after_step: u64, world: usize) {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let time = since.map_or(0, |since| since.as_secs());
    let start = Start { after_step, time, version: env!("CARGO_PKG_VERSION"), world };
    let file = JsonlSink::open(&config.output_dir.join("starts.jsonl"));
    if let Err(error) = file.and_then(|mut file| file.write(&start)) {
        tracing::warn!("{error}: the report of the run will not have this start");
    }
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
