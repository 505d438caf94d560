//! The part of a micro-batch that one rank of a sequence group computes.

use crate::batch::{Patches, VarlenBatch};
use crate::dist::SequencePlace;
use crate::loss::{TargetLosses, Targets};
use crate::tape::DropoutPlace;
use std::num::NonZeroU32;
use std::ops::Range;

/// The targets of a micro-batch that belong to the tokens of this rank.
pub(super) struct OwnTargets {
    /// The targets; rows are counted from the first token of this rank.
    pub(super) targets: Targets,
    /// Their numbers among all targets of the micro-batch.
    numbers: Range<usize>,
    /// Number of targets of the micro-batch.
    total: usize,
    /// The first token of this rank.
    first_token: usize,
    /// Number of tokens, without padding, and of patches of the whole micro-batch.
    pub(super) rows: [u64; 2],
    /// The tokens of the whole micro-batch that are padding.
    padding: Vec<Range<usize>>,
    /// The first patch that this rank computes, and their number.
    patches: (u64, u64),
}

impl OwnTargets {
    /// The row of an own target in the whole micro-batch.
    pub(super) fn row(&self, target: usize) -> usize {
        self.first_token + self.targets.rows[target] as usize
    }

    /// The place of the rows of this rank in a step; the micro-batch has `first` tokens and patches
    /// before it.
    pub(super) fn dropout_place(&self, step: u64, first: [u64; 2]) -> DropoutPlace {
        let (first_patch, num_patches) = self.patches;
        let mut runs = vec![(0, first[0] + self.first_token as u64)];
        let mut padded = 0;
        for padding in &self.padding {
            padded += padding.len();
            let number = first[0] + (padding.end - padded) as u64;
            match padding.end.checked_sub(self.first_token) {
                Some(row) => runs.push((row, number)),
                None => runs[0].1 = number + (self.first_token - padding.end) as u64,
            }
        }
        DropoutPlace { step, runs: runs.into(), patches: (first[1] + first_patch, num_patches) }
    }

    /// Whether no rank of the group has a target.
    pub(super) fn is_without_any(&self) -> bool {
        self.total == 0
    }

    /// The losses of all targets of the micro-batch, with weight 0 for those of other ranks, so
    /// that sums over the ranks count each target once. `nll` are those of this rank.
    pub(super) fn losses(&self, nll: Vec<f32>) -> TargetLosses {
        if self.numbers.len() == self.total {
            return TargetLosses { nll, weights: self.targets.weights.clone() };
        }
        let own = self.numbers.clone();
        let all = |own_values: &[f32]| {
            let mut values = vec![0.0; self.total];
            values[own.clone()].copy_from_slice(own_values);
            values
        };
        let ones = vec![1.0; nll.len()];
        let weights = self.targets.weights.as_ref().unwrap_or(&ones);
        TargetLosses { nll: all(&nll), weights: Some(all(weights)) }
    }
}

/// The targets of a whole micro-batch, and the part of both that belongs to this rank. `merge_size`
/// is the number of patches on a side of a vision token.
pub(super) fn own_part(
    batch: VarlenBatch,
    sequence: SequencePlace,
    merge_size: NonZeroU32,
) -> (VarlenBatch, OwnTargets) {
    let targets = Targets::of(&batch);
    let total = targets.len();
    let num_patches =
        |batch: &VarlenBatch| batch.media.iter().map(Patches::num_patches).sum::<usize>() as u64;
    let rows = [batch.num_tokens as u64, num_patches(&batch)];
    let padding = batch.padding.clone();
    if sequence.size == 1 {
        let patches = (0, rows[1]);
        let (numbers, first_token) = (0..total, 0);
        let own = OwnTargets { targets, numbers, total, first_token, rows, padding, patches };
        return (batch, own);
    }
    let batch = batch.at_least(sequence.size); // each rank has a token
    let tokens = sequence.part(batch.input_ids.len());
    let (targets, numbers) = targets.part(&tokens);
    let first_token = tokens.start;
    let part = batch.part(tokens, merge_size);
    let first_feature = part.part.as_ref().map_or(0, |part| part.first_feature) as u64;
    let first_patch = first_feature * u64::from(merge_size.get()).pow(2);
    let patches = (first_patch, num_patches(&part));
    (part, OwnTargets { targets, numbers, total, first_token, rows, padding, patches })
}

#[cfg(test)]
mod tests {
    use super::super::step_result::by_sample;
    use super::*;
    use crate::batch::CuSeqlens;
    use crate::data::SampleCounts;

    fn batch(padding: Vec<Range<usize>>) -> VarlenBatch {
        VarlenBatch {
            input_ids: vec![1; 12],
            labels: vec![2; 12],
            weights: None,
            position_ids: vec![[0; 3]; 12],
            mask_boundaries: CuSeqlens::from_lengths(&[12]).unwrap(),
            cu_seqlens: CuSeqlens::from_lengths(&[5, 3, 4]).unwrap(),
            vision_rows: vec![],
            media: vec![],
            num_tokens: 12 - padding.iter().map(Range::len).sum::<usize>(),
            padding,
            num_samples: 3,
            part: None,
        }
    }

    #[test]
    fn a_token_has_the_same_number_for_dropout_with_and_without_padding_on_all_ranks() {
        for padding in [vec![], vec![0..2, 5..6], vec![3..5, 9..12], vec![0..1, 4..5, 11..12]] {
            let is_padding = |row: usize| padding.iter().any(|range| range.contains(&row));
            for (size, place) in (1..=12).flat_map(|size| (0..size).map(move |at| (size, at))) {
                let sequence = SequencePlace { place, size };
                let (part, own) = own_part(batch(padding.clone()), sequence, NonZeroU32::MIN);
                let runs = own.dropout_place(1, [100, 0]).runs;
                for row in 0..part.input_ids.len() {
                    let (start, number) = runs.iter().rfind(|(start, _)| *start <= row).unwrap();
                    let whole = own.first_token + row;
                    let before = (0..whole).filter(|row| !is_padding(*row)).count();
                    let found = *number + (row - start) as u64;
                    assert!(is_padding(whole) || found == 100 + before as u64, "{padding:?} {row}");
                }
            }
        }
    }

    #[test]
    fn the_losses_of_all_ranks_of_a_group_add_up_to_those_of_the_samples() {
        let sample = |num_targets| SampleCounts {
            dataset: 0,
            row: 0,
            num_tokens: num_targets + 1,
            num_targets,
            num_images: 0,
            num_videos: 0,
        };
        let samples = [sample(4), sample(2), sample(3)];
        let sums = |size: usize| {
            let mut sums = [(0.0, 0.0); 3];
            for place in 0..size {
                let sequence = SequencePlace { place, size };
                let (_, own) = own_part(batch(vec![]), sequence, NonZeroU32::MIN);
                assert!(!own.is_without_any());
                let nll = own.numbers.clone().map(|number| number as f32).collect();
                let losses = by_sample(&samples, &[own.losses(nll)]);
                for (sum, loss) in sums.iter_mut().zip(losses) {
                    *sum = (sum.0 + loss.nll_sum, sum.1 + loss.target_weight);
                }
            }
            sums
        };
        assert_eq!(sums(1), [(6.0, 4.0), (9.0, 2.0), (21.0, 3.0)]);
        for size in 2..13 {
            assert_eq!(sums(size), sums(1), "{size} ranks");
        }
    }
}
