//! Decisions that need several settings of the other trainer.

mod adapter;
mod batch;
mod data_sets;
mod lengths;
mod media;
mod model;
mod optimizer;
mod steps;
mod tokens;

pub use data_sets::ReadEntry;

use crate::conversion::Conversion;
use crate::trainer::Trainer;
use std::num::NonZeroU64;

/// Makes all decisions.
pub(crate) fn all(
    conversion: &mut Conversion,
    world_size: Option<NonZeroU64>,
    read_entry: ReadEntry<'_>,
) {
    let family = model::model(conversion);
    let tuning = adapter::tuning(conversion, family);
    model::freeze(conversion, family, tuning);
    tokens::tokens(conversion, tuning);
    let step = batch::batch(conversion, world_size);
    let rows = data_sets::data_sets(conversion, read_entry);
    let packing = lengths::lengths(conversion);
    if family == model::Family::Text {
        media::none(conversion);
    } else {
        media::media(conversion, family);
    }
    optimizer::optimizer(conversion, tuning);
    let epoch = match (rows, step, packing) {
        (Some(rows), Some(samples), false) => Some(rows.div_ceil(samples.max(1))),
        _ => None,
    };
    steps::steps(conversion, epoch);
    notes(conversion);
}

/// Differences that no setting changes.
fn notes(conversion: &mut Conversion) {
    let title = conversion.trainer.title();
    match conversion.trainer {
        Trainer::MsSwift => conversion.note(
            "the loss of a step is one mean over all its supervised tokens; with several processes ms-swift takes the mean of their means",
        ),
        Trainer::LlamaFactory | Trainer::LmmsEngine => conversion.note(format!(
            "the loss of a step is one mean over all its supervised tokens; {title} takes the mean of the means of micro-batches"
        )),
    }
    if conversion.trainer == Trainer::LmmsEngine {
        conversion.note("lmms-engine also supervises special tokens: losses differ");
    }
    conversion.note(
        "the order of the rows differs, and rejected rows count: above 1 % of the rows (`data.max_rejected`) the run stops",
    );
}
