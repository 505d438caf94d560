//! Collates the samples of a planned step.

use crate::loader::collate::collate;
use crate::loader::error::LoaderError;
use crate::loader::steps::{LoaderOptions, Rmpad, Step, StepData, fill};
use crate::packing::Item;
use crate::row::SampleSize;
use batch::{EncodedSample, Pack};

/// A step with its samples. Those of other ranks are `None`.
pub(super) struct FilledStep {
    pub(super) step: Step<Option<EncodedSample>>,
    /// Slot of each micro-batch.
    pub(super) slots: Vec<usize>,
    /// Counts of all samples.
    pub(super) sizes: Vec<SampleSize>,
    /// The sequence group that has read each of them.
    pub(super) owners: Vec<usize>,
    /// The sequence group of this rank.
    pub(super) rank: usize,
}

/// Collates the samples of this rank.
pub(super) fn collate_step(
    filled: FilledStep,
    options: &LoaderOptions,
) -> Result<StepData, LoaderError> {
    let FilledStep { step, slots, sizes, owners, rank } = filled;
    let num_tokens = step.num_tokens();
    let Step { micro_batches, epoch, rejected, state, .. } = step;
    let fill = fill(options.packing, &micro_batches);
    let mut data = StepData {
        micro_batches: Vec::new(),
        slots: Vec::new(),
        epoch,
        num_samples: sizes.len(),
        num_tokens,
        samples: sizes,
        owners,
        rank,
        fill,
        rejected,
        state,
    };
    for (slot, packs) in slots.into_iter().zip(micro_batches) {
        let samples = |items: Vec<Item<Option<EncodedSample>>>| {
            items.into_iter().filter_map(|item| item.value).collect::<Vec<_>>()
        };
        let packs = packs.into_iter().map(|items| Pack { samples: samples(items) });
        let packs: Vec<Pack> = packs.filter(|pack| !pack.samples.is_empty()).collect();
        if packs.is_empty() {
            continue; // another rank has it
        }
        let batch = collate(packs, options.pad_id, options.side, options.merge_size)?;
        data.slots.push(slot);
        data.micro_batches.push(match options.rmpad {
            Rmpad::Unpad => batch.unpad()?,
            Rmpad::KeepPadding => batch.keep_padding()?,
        });
    }
    Ok(data)
}

/// The items of a pack that another rank reads.
pub(super) fn of_another_rank<T>(pack: Vec<Item<T>>) -> Vec<Item<Option<EncodedSample>>> {
    pack.into_iter()
        .map(|Item { position, length, value: _ }| Item { position, length, value: None })
        .collect()
}
