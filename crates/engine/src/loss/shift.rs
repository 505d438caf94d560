//! Shifts labels to targets, inside each sample.

use batch::{IGNORE_INDEX, VarlenBatch};
use std::ops::Range;

/// The supervised rows of a token stream and the token that each must predict, `[S]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Targets {
    /// Rows of the token stream, ascending.
    pub rows: Vec<u32>,
    /// Id of the next token of each row.
    pub ids: Vec<u32>,
    /// Factor of the loss of each row, a multiple of [`WEIGHT_UNIT`]; `None`: 1 for all rows.
    pub weights: Option<Vec<f32>>,
}

/// Weights of targets are rounded to multiples of this number. Sums of up to 2^29 in `f64` are then
/// exact, so that the divisor of the loss does not depend on how a step is split.
pub const WEIGHT_UNIT: f64 = 1.0 / (1u64 << 24) as f64;

impl Targets {
    /// Row `i` predicts `labels[i + 1]` of its segment. The last row of a segment has no target.
    pub fn of(batch: &VarlenBatch) -> Self {
        let (mut rows, mut ids) = (Vec::new(), Vec::new());
        let mut weights = batch.weights.as_ref().map(|_| Vec::new());
        for segment in batch.cu_seqlens.segments() {
            for row in segment.start..segment.end - 1 {
                let label = batch.labels[row + 1];
                if label != IGNORE_INDEX {
                    rows.push(row as u32);
                    ids.push(label as u32);
                    if let (Some(weights), Some(of_token)) = (&mut weights, &batch.weights) {
                        weights.push(rounded(of_token[row + 1]));
                    }
                }
            }
        }
        Self { rows, ids, weights }
    }

    /// The targets of the rows `tokens`, whose rows are counted from its start, and their numbers
    /// among all targets.
    pub fn part(&self, tokens: &Range<usize>) -> (Self, Range<usize>) {
        let place = |row: usize| self.rows.partition_point(|of| (*of as usize) < row);
        let own = place(tokens.start)..place(tokens.end);
        let rows = self.rows[own.clone()].iter().map(|row| row - tokens.start as u32).collect();
        let weights = self.weights.as_ref().map(|weights| weights[own.clone()].to_vec());
        (Self { rows, ids: self.ids[own.clone()].to_vec(), weights }, own)
    }

    /// Sum of the weights of all targets: their contribution to the divisor of the loss.
    pub fn weight(&self) -> f64 {
        let sum = |weights: &Vec<f32>| weights.iter().map(|weight| f64::from(*weight)).sum();
        self.weights.as_ref().map_or(self.len() as f64, sum)
    }

    /// `S`.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

fn rounded(weight: f32) -> f32 {
    ((f64::from(weight) / WEIGHT_UNIT).round() * WEIGHT_UNIT) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use batch::CuSeqlens;

    fn stream(lengths: &[u32], labels: &[i64]) -> VarlenBatch {
        let cu_seqlens = CuSeqlens::from_lengths(lengths).unwrap();
        let num_tokens = cu_seqlens.num_tokens();
        VarlenBatch {
            input_ids: vec![0; num_tokens],
            labels: labels.to_vec(),
            weights: None,
            position_ids: vec![[0; 3]; num_tokens],
            mask_boundaries: CuSeqlens::from_lengths(&[num_tokens as u32]).unwrap(),
            num_samples: lengths.len(),
            cu_seqlens,
            vision_rows: vec![],
            media: vec![],
            padding: vec![],
            num_tokens,
            part: None,
        }
    }

    #[test]
    fn the_last_token_of_each_segment_predicts_nothing() {
        let targets = Targets::of(&stream(&[3, 2], &[1, 2, 3, 4, 5]));
        assert_eq!(targets, Targets { rows: vec![0, 1, 3], ids: vec![2, 3, 5], weights: None });
    }

    #[test]
    fn ignored_labels_and_single_tokens_give_no_targets() {
        let targets = Targets::of(&stream(&[1, 3], &[7, IGNORE_INDEX, IGNORE_INDEX, 9]));
        assert_eq!(targets, Targets { rows: vec![2], ids: vec![9], weights: None });
    }

    #[test]
    fn a_target_has_the_weight_of_the_token_that_it_predicts() {
        let mut batch = stream(&[3, 2], &[1, 2, IGNORE_INDEX, 4, 5]);
        batch.weights = Some(vec![9.0, 0.5, 9.0, 9.0, 0.1]);
        let targets = Targets::of(&batch);
        assert_eq!(targets.ids, [2, 5]);
        let weights = targets.weights.as_ref().unwrap();
        assert_eq!(weights[0], 0.5);
        assert!((weights[1] - 0.1).abs() < 1e-7 && weights[1] != 0.1, "rounded: {weights:?}");
        assert_eq!(targets.weight(), 0.5 + f64::from(weights[1]));
    }

    #[test]
    fn parts_of_the_targets_tile_them() {
        let mut batch = stream(&[4, 3], &[1, 2, IGNORE_INDEX, 4, 5, 6, 7]);
        batch.weights = Some(vec![0.25; 7]);
        let all = Targets::of(&batch);
        for (tokens, rows, ids, numbers) in [
            (0..3, vec![0, 2], vec![2, 4], 0..2),
            (3..5, vec![1], vec![6], 2..3),
            (5..7, vec![0], vec![7], 3..4),
            (3..4, vec![], vec![], 2..2),
        ] {
            let weights = Some(vec![0.25; numbers.len()]);
            assert_eq!(all.part(&tokens), (Targets { rows, ids, weights }, numbers), "{tokens:?}");
        }
    }

    #[test]
    fn sums_of_weights_do_not_depend_on_their_order() {
        let weights: Vec<f64> =
            (0..100_000u32).map(|i| f64::from(rounded((i % 9973) as f32 * 0.137 + 1e-6))).collect();
        let forward: f64 = weights.iter().sum();
        let backward: f64 = weights.iter().rev().sum();
        let halves: f64 = weights.chunks(777).map(|part| part.iter().sum::<f64>()).sum();
        assert_eq!((forward, forward), (backward, halves));
    }
}
