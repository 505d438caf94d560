//! The packed token sequence: the only batch layout that the model accepts.
//!
//! Shapes: `T` tokens of all samples, concatenated; `M` merged vision tokens.
//! Invariants: `cu_seqlens` and `mask_boundaries` tile `0..T`, and no segment crosses a row;
//! `vision_rows` is ascending and has one entry for each merged token of `media`, in order.

use super::{BatchPart, CuSeqlens, Patches};

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
    /// Number of tokens that are not padding.
    pub num_tokens: usize,
    /// Number of segments that are not padding: one per sample, or one per document in windows of a
    /// corpus.
    pub num_samples: usize,
    /// Set in a part of a micro-batch, which has only some of the tokens that `cu_seqlens` counts; see
    /// [`Self::part`].
    pub part: Option<BatchPart>,
}
