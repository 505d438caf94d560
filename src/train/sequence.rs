//! The part of a micro-batch that one rank of a sequence group computes.

use crate::batch::{Patches, VarlenBatch};
use crate::dist::SequencePlace;
use crate::loss::{TargetLosses, Targets};
use crate::nn::DropoutPlace;
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
    /// Number of tokens and patches of the whole micro-batch.
    pub(super) rows: [u64; 2],
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
        DropoutPlace {
            step,
            first_token: first[0] + self.first_token as u64,
            patches: (first[1] + first_patch, num_patches),
        }
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
    let rows = [batch.input_ids.len() as u64, num_patches(&batch)];
    if sequence.size == 1 {
        let patches = (0, rows[1]);
        let own = OwnTargets { targets, numbers: 0..total, total, first_token: 0, rows, patches };
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
    (part, OwnTargets { targets, numbers, total, first_token, rows, patches })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::CuSeqlens;
    use crate::data::SampleSize;
    use crate::train::by_sample;

    #[test]
    fn the_losses_of_all_ranks_of_a_group_add_up_to_those_of_the_samples() {
        let cu_seqlens = CuSeqlens::from_lengths(&[5, 3, 4]).unwrap();
        let batch = VarlenBatch {
            input_ids: vec![1; 12],
            labels: vec![2; 12],
            weights: None,
            position_ids: vec![[0; 3]; 12],
            mask_boundaries: CuSeqlens::from_lengths(&[12]).unwrap(),
            cu_seqlens,
            vision_rows: vec![],
            media: vec![],
            num_tokens: 12,
            num_samples: 3,
            part: None,
        };
        let sample = |num_targets| SampleSize {
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
                let (_, own) = own_part(batch.clone(), sequence, NonZeroU32::MIN);
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
