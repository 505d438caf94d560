//! What the log has about a run before its first step.

use super::device::device_name;
use crate::config::RunConfig;
use crate::data::{DataSet, JsonlRows};
use crate::dist::Rank;
use crate::ops::simd_level;
use crate::tape::Param;
use crate::train::{StepRunner, TrainState};

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
        "the ranks share the micro-batches of each step; other trainers count them per device"
    );
}

pub(super) fn log_data_sets(rows: &JsonlRows) {
    for set in rows.sets() {
        let file = set.path().display();
        match set {
            DataSet::Chats(chats) => {
                tracing::info!(%file, rows = chats.len(), form = %chats.form(), "data");
            }
            DataSet::Corpus(corpus) => {
                let (tokens, documents) = (corpus.num_tokens(), corpus.num_documents());
                let (samples, truncated) = (corpus.len(), corpus.num_truncated());
                tracing::info!(%file, samples, tokens, documents, truncated, "corpus");
                for rejection in corpus.rejected() {
                    tracing::warn!(row = %rejection, "rejected a text of the corpus");
                }
            }
        }
    }
}

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
