//! Shifts labels to targets, inside each sample.

use crate::batch::{IGNORE_INDEX, VarlenBatch};

/// The supervised rows of a token stream and the token that each must predict, `[S]` each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Targets {
    /// Rows of the token stream, ascending.
    pub rows: Vec<u32>,
    /// Id of the next token of each row.
    pub ids: Vec<u32>,
}

impl Targets {
    /// Row `i` predicts `labels[i + 1]` of its segment. The last row of a segment has no target.
    pub fn of(batch: &VarlenBatch) -> Self {
        let (mut rows, mut ids) = (Vec::new(), Vec::new());
        for segment in batch.cu_seqlens.segments() {
            for row in segment.start..segment.end - 1 {
                let label = batch.labels[row + 1];
                if label != IGNORE_INDEX {
                    rows.push(row as u32);
                    ids.push(label as u32);
                }
            }
        }
        Self { rows, ids }
    }

    /// `S`.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no row is supervised.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::CuSeqlens;

    fn stream(lengths: &[u32], labels: &[i64]) -> VarlenBatch {
        let cu_seqlens = CuSeqlens::from_lengths(lengths).unwrap();
        let num_tokens = cu_seqlens.num_tokens();
        VarlenBatch {
            input_ids: vec![0; num_tokens],
            labels: labels.to_vec(),
            position_ids: vec![[0; 3]; num_tokens],
            mask_boundaries: CuSeqlens::from_lengths(&[num_tokens as u32]).unwrap(),
            num_samples: lengths.len(),
            cu_seqlens,
            vision_rows: vec![],
            media: vec![],
            num_tokens,
        }
    }

    #[test]
    fn the_last_token_of_each_segment_predicts_nothing() {
        let targets = Targets::of(&stream(&[3, 2], &[1, 2, 3, 4, 5]));
        assert_eq!(targets, Targets { rows: vec![0, 1, 3], ids: vec![2, 3, 5] });
    }

    #[test]
    fn ignored_labels_and_single_tokens_give_no_targets() {
        let targets = Targets::of(&stream(&[1, 3], &[7, IGNORE_INDEX, IGNORE_INDEX, 9]));
        assert_eq!(targets, Targets { rows: vec![2], ids: vec![9] });
    }
}
