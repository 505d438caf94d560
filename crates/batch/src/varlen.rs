//! The packed token sequence: the only batch layout that the model accepts.
//!
//! Shapes: `T` tokens of all samples, concatenated; `M` merged vision tokens.
//! Invariants: `cu_seqlens` and `mask_boundaries` tile `0..T`, and no segment crosses a row;
//! `vision_rows` is ascending and has one entry for each merged token of `media`, in order.

use super::{BatchError, BatchPart, CuSeqlens, Patches};
use std::num::NonZeroU32;
use std::ops::Range;

/// One micro-batch as one token sequence.
///
/// [`super::Batch::unpad`] returns a single row of real tokens. [`super::Batch::keep_padding`]
/// returns the padded rows one after the other; each run of padding is a segment of its own, so no
/// real token attends to it.
#[derive(Debug, Clone, PartialEq)]
pub struct VarlenBatch {
    /// Token ids, `[T]`.
    pub input_ids: Vec<u32>,
    /// Labels, `[T]`, unshifted; [`super::IGNORE_INDEX`] on padding.
    pub labels: Vec<i64>,
    /// Factor of the loss of each supervised token, unshifted, `[T]`; `None`: 1 for all tokens.
    pub weights: Option<Vec<f32>>,
    /// Temporal, height and width positions, `[T]`. They start at 0 in each segment.
    pub position_ids: Vec<[u32; 3]>,
    /// Segment boundaries. A token attends only to its own segment.
    pub cu_seqlens: CuSeqlens,
    /// Boundaries of the rows that one dense mask covers: `[0, T]`, or multiples of the padded
    /// length.
    pub mask_boundaries: CuSeqlens,
    /// Indices of the tokens that receive visual features, `[M]`.
    pub vision_rows: Vec<u32>,
    /// Patches of all images and videos, in order.
    pub media: Vec<Patches>,
    /// The tokens that are padding, ascending; none unless padding was kept.
    pub padding: Vec<Range<usize>>,
    /// Number of tokens that are not padding.
    pub num_tokens: usize,
    /// Number of segments that are not padding: one per sample, or one per document in windows of a
    /// corpus.
    pub num_samples: usize,
    /// Set in a part of a micro-batch, which has only some of the tokens that `cu_seqlens` counts;
    /// see [`Self::part`].
    pub part: Option<BatchPart>,
}

impl VarlenBatch {
    /// The tokens of a batch of one sample from `start` on, with the media among them. `start` is
    /// not inside the tokens of a medium, and there is a token after it.
    pub fn tokens_from(mut self, start: usize, merge_size: NonZeroU32) -> Result<Self, BatchError> {
        let before = media_rows(&self.vision_rows, &self.media, merge_size)
            .filter(|rows| rows.start < start);
        let num_media = before.count();
        self.media.drain(..num_media);
        self.vision_rows.retain(|row| *row as usize >= start);
        self.vision_rows.iter_mut().for_each(|row| *row -= start as u32);
        self.input_ids.drain(..start);
        self.labels.drain(..start);
        if let Some(weights) = &mut self.weights {
            weights.drain(..start);
        }
        self.position_ids.drain(..start);
        self.cu_seqlens = CuSeqlens::from_lengths(&[self.input_ids.len() as u32])?;
        self.mask_boundaries = self.cu_seqlens.clone();
        self.num_tokens = self.input_ids.len();
        Ok(self)
    }
}

/// From the first to behind the last token that receives features of each medium.
pub fn media_rows<'a>(
    vision_rows: &'a [u32],
    media: &'a [Patches],
    merge_size: NonZeroU32,
) -> impl Iterator<Item = Range<usize>> + 'a {
    let merged = (merge_size.get() as usize).pow(2);
    let mut rest = vision_rows;
    media.iter().filter_map(move |patches| {
        let (own, after) = rest.split_at_checked(patches.num_patches() / merged)?;
        rest = after;
        Some(*own.first()? as usize..*own.last()? as usize + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{IGNORE_INDEX, MediumKind};
    use super::*;

    #[test]
    fn the_rest_of_a_sample_has_its_own_media_and_rows() {
        let image = |width: u32| Patches {
            pixel_values: vec![width as f32],
            grid_thw: [1, 2, 2 * width],
            kind: MediumKind::Image,
            continues_medium: false,
        };
        let all = CuSeqlens::from_lengths(&[8]).unwrap();
        let batch = VarlenBatch {
            input_ids: (10..18).collect(),
            labels: vec![IGNORE_INDEX; 8],
            weights: None,
            position_ids: (0..8).map(|at| [at; 3]).collect(),
            cu_seqlens: all.clone(),
            mask_boundaries: all,
            vision_rows: vec![1, 2, 5],
            media: vec![image(2), image(1)],
            padding: vec![],
            num_tokens: 8,
            num_samples: 1,
            part: None,
        };
        let two = NonZeroU32::new(2).unwrap();
        let rows: Vec<_> = media_rows(&batch.vision_rows, &batch.media, two).collect();
        assert_eq!(rows, [1..3, 5..6]);
        assert_eq!(batch.clone().tokens_from(0, two).unwrap(), batch);
        let rest = batch.tokens_from(4, two).unwrap();
        assert_eq!((rest.input_ids, rest.vision_rows), (vec![14, 15, 16, 17], vec![1]));
        assert_eq!(
            (rest.position_ids[0], rest.media, rest.num_tokens),
            ([4; 3], vec![image(1)], 4)
        );
        assert_eq!(rest.cu_seqlens, CuSeqlens::from_lengths(&[4]).unwrap());
    }
}
