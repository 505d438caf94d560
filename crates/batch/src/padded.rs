//! The padded batch `[B, L]`, with the names of transformers, and its two conversions to a
//! [`VarlenBatch`].
//!
//! The mask is built from lengths, not from the pad id, because a real token may have that id.

use super::{BatchError, CuSeqlens, IGNORE_INDEX, Patches, VarlenBatch};
use std::ops::Range;

/// Side of a row on which padding is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaddingSide {
    /// Padding before the tokens.
    Left,
    /// Padding after the tokens.
    Right,
}

/// A batch of rows of equal length, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Token ids, `[B, L]`.
    pub input_ids: Vec<u32>,
    /// Labels, `[B, L]`, unshifted; [`IGNORE_INDEX`] on padding.
    pub labels: Vec<i64>,
    /// Factor of the loss of each supervised token, unshifted, `[B, L]`; `None`: 1 for all tokens.
    pub weights: Option<Vec<f32>>,
    /// `[B, L]`: true for real tokens, false for padding.
    pub attention_mask: Vec<bool>,
    /// Temporal, height and width positions, `[B, L]`. They restart in each sample and are 0 on
    /// padding.
    pub position_ids: Vec<[u32; 3]>,
    /// Flat indices (`b * L + l`) of the tokens that receive visual features, `[M]`.
    pub vision_rows: Vec<u32>,
    /// Patches of all images and videos, in row order.
    pub media: Vec<Patches>,
    /// Segment lengths of each row, in order; `B` lists.
    pub segment_lengths: Vec<Vec<u32>>,
    /// Padded length `L`.
    pub length: usize,
}

impl Batch {
    /// Number of rows, `B`.
    pub fn num_rows(&self) -> usize {
        self.segment_lengths.len()
    }

    /// Removes padding: `[B, L] -> [T]`, real tokens only, as one row. Fails if the batch is
    /// inconsistent.
    pub fn unpad(self) -> Result<VarlenBatch, BatchError> {
        let starts = self.row_starts()?;
        let lengths: Vec<u32> = self.segment_lengths.iter().flatten().copied().collect();
        let cu_seqlens = CuSeqlens::from_lengths(&lengths)?;
        let num_tokens = cu_seqlens.num_tokens();
        let mut new_row = vec![None; self.input_ids.len()]; // flat index in [B, L] -> index in [T]
        let mut kept = Vec::with_capacity(num_tokens);
        for (row, start) in starts.iter().enumerate() {
            let first = row * self.length + start;
            let slots = new_row.iter_mut().enumerate().skip(first);
            for (flat, slot) in slots.take(self.row_tokens(row)) {
                *slot = Some(kept.len() as u32);
                kept.push(flat);
            }
        }
        let vision_rows = self
            .vision_rows
            .iter()
            .map(|row| {
                new_row[*row as usize].ok_or(BatchError::VisionRowIsPadding { vision_row: *row })
            })
            .collect::<Result<_, _>>()?;
        Ok(VarlenBatch {
            input_ids: kept.iter().map(|flat| self.input_ids[*flat]).collect(),
            labels: kept.iter().map(|flat| self.labels[*flat]).collect(),
            weights: self.weights.map(|weights| kept.iter().map(|flat| weights[*flat]).collect()),
            position_ids: kept.iter().map(|flat| self.position_ids[*flat]).collect(),
            mask_boundaries: CuSeqlens::from_lengths(&[num_tokens as u32])?,
            num_samples: cu_seqlens.num_segments(),
            cu_seqlens,
            vision_rows,
            media: self.media,
            padding: Vec::new(),
            num_tokens,
            part: None,
        })
    }

    /// Keeps padding: flattens `[B, L]` row by row. Each run of padding becomes a segment without
    /// targets, so no real token attends to it. Fails if the batch is inconsistent.
    pub fn keep_padding(self) -> Result<VarlenBatch, BatchError> {
        let starts = self.row_starts()?;
        if let Some(row) = self.vision_rows.iter().find(|row| !self.attention_mask[**row as usize])
        {
            return Err(BatchError::VisionRowIsPadding { vision_row: *row });
        }
        let (mut lengths, mut padding) = (Vec::new(), Vec::new());
        for (row, start) in starts.iter().enumerate() {
            let after = self.length - start - self.row_tokens(row);
            let (first, end) = (row * self.length, (row + 1) * self.length);
            padding.extend([first..first + start, end - after..end]);
            lengths.extend((*start > 0).then_some(*start as u32));
            lengths.extend(&self.segment_lengths[row]);
            lengths.extend((after > 0).then_some(after as u32));
        }
        padding.retain(|range: &Range<usize>| !range.is_empty());
        let num_tokens = (0..self.num_rows()).map(|row| self.row_tokens(row)).sum();
        let labels = self.labels.iter().zip(&self.attention_mask);
        Ok(VarlenBatch {
            labels: labels.map(|(l, real)| if *real { *l } else { IGNORE_INDEX }).collect(),
            cu_seqlens: CuSeqlens::from_lengths(&lengths)?,
            mask_boundaries: CuSeqlens::from_lengths(&vec![self.length as u32; self.num_rows()])?,
            num_samples: self.segment_lengths.iter().map(Vec::len).sum(),
            input_ids: self.input_ids,
            weights: self.weights,
            position_ids: self.position_ids,
            vision_rows: self.vision_rows,
            media: self.media,
            padding,
            num_tokens,
            part: None,
        })
    }

    fn row_tokens(&self, row: usize) -> usize {
        self.segment_lengths[row].iter().map(|length| *length as usize).sum()
    }

    /// Returns the column of the first real token of each row. Checks the mask against the lengths.
    fn row_starts(&self) -> Result<Vec<usize>, BatchError> {
        let mut starts = Vec::with_capacity(self.num_rows());
        for row in 0..self.num_rows() {
            let mask = &self.attention_mask[row * self.length..(row + 1) * self.length];
            let in_mask = mask.iter().filter(|real| **real).count();
            let in_samples = self.row_tokens(row);
            if in_mask != in_samples {
                return Err(BatchError::MaskAndLengths { row, in_mask, in_samples });
            }
            let start = mask.iter().position(|real| *real).unwrap_or(0);
            if mask[start..start + in_mask].iter().any(|real| !real) {
                return Err(BatchError::PaddingInside { row });
            }
            starts.push(start);
        }
        Ok(starts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MediumKind;

    /// Two rows of five: samples of 2 and 1 tokens, then one of 5. Padding is on the left, and the
    /// pad id 9 also occurs in real tokens.
    fn batch() -> Batch {
        Batch {
            input_ids: vec![9, 9, 1, 9, 2, 3, 9, 4, 9, 5],
            labels: vec![-100, -100, -100, 9, 2, -100, 9, 4, -100, 5],
            weights: Some(vec![0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
            attention_mask: [[false; 2].as_slice(), &[true; 8]].concat(),
            position_ids: [0, 0, 0, 1, 0, 0, 1, 2, 3, 4].map(|p| [p, p, p]).to_vec(),
            vision_rows: vec![3, 6, 8],
            media: vec![Patches {
                pixel_values: vec![0.5; 12],
                grid_thw: [1, 2, 6],
                kind: MediumKind::Image,
                continues_medium: false,
            }],
            segment_lengths: vec![vec![2, 1], vec![5]],
            length: 5,
        }
    }

    #[test]
    fn unpad_keeps_real_tokens_that_have_the_pad_id() {
        let stream = batch().unpad().unwrap();
        assert_eq!(stream.input_ids, [1, 9, 2, 3, 9, 4, 9, 5]);
        assert_eq!(stream.labels, [-100, 9, 2, -100, 9, 4, -100, 5]);
        assert_eq!(stream.weights.unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(stream.position_ids, [0, 1, 0, 0, 1, 2, 3, 4].map(|p| [p, p, p]));
        assert_eq!(stream.cu_seqlens.as_slice(), [0, 2, 3, 8]);
        assert_eq!(stream.mask_boundaries.as_slice(), [0, 8]);
        assert_eq!(stream.vision_rows, [1, 4, 6]); // flat indices 3, 6 and 8 in [B, L]
        assert_eq!(stream.media, batch().media);
        assert_eq!((stream.num_tokens, stream.num_samples), (8, 3));
    }

    #[test]
    fn keep_padding_makes_each_run_of_padding_a_segment_without_targets() {
        let mut padded = batch();
        padded.labels[0] = 9; // a batch from another source may have labels on padding
        let stream = padded.keep_padding().unwrap();
        assert_eq!(stream.cu_seqlens.as_slice(), [0, 2, 4, 5, 10]);
        assert_eq!(stream.mask_boundaries.as_slice(), [0, 5, 10]);
        assert_eq!(stream.input_ids, batch().input_ids);
        assert_eq!(stream.labels, batch().labels);
        assert_eq!(stream.vision_rows, [3, 6, 8]);
        assert_eq!(stream.padding, [Range { start: 0, end: 2 }]);
        assert_eq!((stream.num_tokens, stream.num_samples), (8, 3));
    }

    #[test]
    fn padding_may_be_on_either_side() {
        let mut right = batch();
        for column in 0..2 {
            right.attention_mask.swap(column, column + 3);
        }
        right.vision_rows[0] = 1;
        let stream = right.clone().keep_padding().unwrap();
        assert_eq!(stream.cu_seqlens.as_slice(), [0, 2, 3, 5, 10]);
        assert_eq!(stream.padding, [Range { start: 3, end: 5 }]);
        assert_eq!(right.unpad().unwrap().vision_rows, [1, 4, 6]);
    }

    #[test]
    fn a_mask_that_contradicts_the_lengths_is_rejected() {
        let mut more = batch();
        more.attention_mask[1] = true;
        let error = BatchError::MaskAndLengths { row: 0, in_mask: 4, in_samples: 3 };
        assert_eq!(more.clone().unpad(), Err(error.clone()));
        assert_eq!(more.keep_padding(), Err(error));
        let mut hole = batch();
        hole.attention_mask.swap(1, 3);
        assert_eq!(hole.clone().unpad(), Err(BatchError::PaddingInside { row: 0 }));
        assert_eq!(hole.keep_padding(), Err(BatchError::PaddingInside { row: 0 }));
    }

    #[test]
    fn visual_features_on_padding_are_rejected() {
        let mut padded = batch();
        padded.vision_rows[0] = 1;
        let error = BatchError::VisionRowIsPadding { vision_row: 1 };
        assert_eq!(padded.clone().unpad(), Err(error.clone()));
        assert_eq!(padded.keep_padding(), Err(error));
    }
}
