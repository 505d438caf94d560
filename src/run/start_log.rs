//! What the log has about a run before its first step.

use crate::config::RunConfig;
use crate::data::{DataSet, JsonlRows};
use crate::dist::Rank;

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
