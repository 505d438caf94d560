//! Decisions that need several settings of the other trainer.

mod adapter;
mod batch;
mod data_sets;
mod lengths;
mod media;
mod model;
mod optimizer;
mod steps;

use super::trainer::Trainer;
use super::work::Work;
use std::num::NonZeroU64;

/// Makes all decisions.
pub(super) fn all(work: &mut Work, world_size: Option<NonZeroU64>) {
    let family = model::model(work);
    let tuning = adapter::tuning(work, family);
    model::freeze(work, family, tuning);
    let step = batch::batch(work, world_size);
    let rows = data_sets::data_sets(work);
    let packing = lengths::lengths(work);
    if family == model::Family::Text {
        media::none(work);
    } else {
        media::media(work, family);
    }
    optimizer::optimizer(work, tuning);
    let epoch = match (rows, step, packing) {
        (Some(rows), Some(samples), false) => Some(rows.div_ceil(samples.max(1))),
        _ => None,
    };
    steps::steps(work, epoch);
    notes(work);
}

/// Differences that no setting changes.
fn notes(work: &mut Work) {
    let title = work.trainer.title();
    match work.trainer {
        Trainer::MsSwift => work.note(
            "the loss of a step is one mean over all its supervised tokens; with several processes ms-swift takes the mean of their means",
        ),
        Trainer::LlamaFactory | Trainer::LmmsEngine => work.note(format!(
            "the loss of a step is one mean over all its supervised tokens; {title} takes the mean of the means of micro-batches"
        )),
    }
    if work.trainer == Trainer::LmmsEngine {
        work.note(
            "lmms-engine adds the system turn `You are a helpful assistant` to rows without one, and also supervises special tokens: losses differ",
        );
    }
    work.note(
        "the order of the rows differs, and rejected rows count: above 1 % of the rows (`data.max_rejected`) the run stops",
    );
}
