//! The part of a loader when several ranks share each step.
//!
//! Every rank plans all steps and reads only the samples of its own micro-batches. Then the ranks
//! exchange which rows were rejected, so that a row that one rank cannot read is left out by all.
//!
//! The samples of a planned step are collated here.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::loader::collate::collate;
use crate::loader::error::LoaderError;
use crate::loader::steps::{DataState, LoaderOptions, MicroBatches, Rmpad, Step, StepData, fill};
use crate::packing::Item;
use crate::row::{Rejection, SampleCounts};
use batch::{EncodedSample, Pack};
use ranks::{Channel, DistError, Rank, gather};

/// The connection of a loader to those of the other ranks.
pub struct LoaderShare {
    /// The place of the sequence group of this rank among those that share each step. The ranks of
    /// a group read the same rows.
    pub group: Rank,
    /// Number of ranks of a sequence group.
    pub sequence: usize,
    /// Used by the loader alone.
    pub channel: Box<dyn Channel>,
}

/// The rows of one step that a rank has read.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RowsRead {
    /// Digest of the packs that this rank has planned for the step, see [`plan_digest`].
    pub(super) plan: String,
    /// Slot, position in the epoch and reason of each row that was rejected.
    pub(super) rejected: Vec<(usize, u64, Rejection)>,
    /// Counts of the samples in order, with their slots.
    pub(super) sizes: Vec<(usize, SampleCounts)>,
    /// The row that ends the run (`data.on_error: stop`), with its slot.
    pub(super) failed: Option<(usize, Rejection)>,
}

/// The rows of one step that all ranks have read.
#[derive(Default)]
pub(super) struct RowsOfAll {
    pub(super) rejected: Vec<Rejection>,
    /// Positions of the rejected rows.
    pub(super) without: BTreeSet<u64>,
    pub(super) sizes: Vec<SampleCounts>,
    /// The sequence group that has read each of them.
    pub(super) owners: Vec<usize>,
    pub(super) failed: Option<Rejection>,
}

/// Whether this rank reads the micro-batch of `slot`.
pub(super) fn is_own(share: Option<&LoaderShare>, slot: usize) -> bool {
    let Rank { rank, world, .. } = share.map_or(Rank::ALONE, |share| share.group);
    slot % world == rank
}

/// Digest of a planned step: of the rows and lengths of all packs, and of the position in the data.
/// Ranks that see different files would plan different packs, and train rows twice or not at all.
pub(super) fn plan_digest<T>(packs: &MicroBatches<T>, state: &DataState) -> String {
    let mut digest = Sha256::new();
    for (slot, packs) in packs.iter().enumerate() {
        for (pack, items) in packs.iter().enumerate() {
            for Item { position, length, .. } in items {
                let row = [slot as u64, pack as u64, *position, length.tokens as u64];
                for number in row {
                    digest.update(number.to_le_bytes());
                }
            }
        }
    }
    let position = (state.epoch, state.next, state.rows_read, &state.rejected);
    digest.update(format!("{position:?}"));
    format!("{:x}", digest.finalize())
}

/// Exchanges the rows of a step with the other ranks. Fails if they have planned different packs.
pub(super) fn exchange(
    share: Option<&mut LoaderShare>,
    read: RowsRead,
) -> Result<RowsOfAll, DistError> {
    let (sequence, all) = match share {
        Some(share) => (share.sequence, gather(&mut *share.channel, &read)?),
        None => (1, vec![read]),
    };
    if let Some(other) = all.iter().position(|read| read.plan != all[0].plan) {
        let problem = "it has planned other packs than rank 0: some data files, images or length \
                       caches differ between the ranks, or could not be read by one of them";
        return Err(DistError::Message { rank: other, problem: problem.to_owned() });
    }
    let mut rows = RowsOfAll::default();
    let (mut all_rejected, mut all_failed, mut all_sizes) = (Vec::new(), Vec::new(), Vec::new());
    for (of, RowsRead { plan: _, rejected, sizes, failed }) in all.into_iter().enumerate() {
        all_rejected.extend(rejected);
        all_failed.extend(failed);
        if of % sequence == 0 {
            all_sizes.extend(sizes.into_iter().map(|(slot, size)| (slot, of / sequence, size)));
        }
    }
    // In the order of a single process. Stable: the samples of a slot keep their order.
    all_rejected.sort_by_key(|(slot, ..)| *slot);
    all_sizes.sort_by_key(|(slot, ..)| *slot);
    rows.failed = all_failed.into_iter().min_by_key(|(slot, _)| *slot).map(|(_, row)| row);
    for (_, position, rejection) in all_rejected {
        if rows.without.insert(position) {
            rows.rejected.push(rejection);
        }
    }
    for (_, of, size) in all_sizes {
        rows.owners.push(of);
        rows.sizes.push(size);
    }
    Ok(rows)
}

/// A step with its samples. Those of other ranks are `None`.
pub(super) struct FilledStep {
    pub(super) step: Step<Option<EncodedSample>>,
    /// Slot of each micro-batch.
    pub(super) slots: Vec<usize>,
    /// Counts of all samples.
    pub(super) sizes: Vec<SampleCounts>,
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::row::Length;
    use dist::threads;

    fn digest(positions: &[u64], tokens: usize, next: u64) -> String {
        let item = |position: &u64| Item {
            position: *position,
            length: Length { tokens, pixel_bytes: 0 },
            value: (),
        };
        let packs = vec![vec![positions.iter().map(item).collect()]];
        plan_digest(&packs, &DataState { next, ..DataState::default() })
    }

    /// Exchanges these digests between ranks.
    fn exchanged(plans: [String; 2]) -> Vec<Result<usize, DistError>> {
        let groups = threads(2).unwrap().into_iter().zip(plans);
        let ranks: Vec<_> = groups
            .map(|(group, plan)| {
                thread::spawn(move || {
                    let mut share =
                        LoaderShare { group: group.rank, sequence: 1, channel: group.data };
                    let read = RowsRead { plan, ..RowsRead::default() };
                    exchange(Some(&mut share), read).map(|rows| rows.sizes.len())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn ranks_that_planned_different_packs_are_refused() {
        let plan = || digest(&[3, 1], 10, 4);
        assert!(exchanged([plan(), plan()]).iter().all(Result::is_ok));
        for other in [digest(&[1, 3], 10, 4), digest(&[3, 1], 11, 4), digest(&[3, 1], 10, 5)] {
            for result in exchanged([plan(), other]) {
                let error = result.unwrap_err().to_string();
                assert!(error.starts_with("rank 1 cannot take part: it has planned"), "{error}");
            }
        }
    }
}
