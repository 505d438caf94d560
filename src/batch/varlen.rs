//! The token stream: what the model eats, and the only layout behind its door.
//!
//! Shapes: `T` tokens of all samples, end to end; `M` merged vision tokens.
//! Invariants: `cu_seqlens` and `mask_boundaries` tile `0..T`, and each segment lies inside one row;
//! `vision_rows` ascends and holds one row for each merged token of `media`, in order.

use super::{CuSeqlens, Patches};

/// One micro-batch as one token stream.
///
/// From [`super::Batch::unpad`] it holds real tokens only and is one row. From
/// [`super::Batch::keep_padding`] it is the padded batch read row by row: padding is in the stream,
/// each run of it a segment of its own, so that no real token attends to it.
#[derive(Debug, Clone, PartialEq)]
pub struct VarlenBatch {
    /// `[T]`.
    pub input_ids: Vec<u32>,
    /// `[T]`, unshifted; padding is ignored.
    pub labels: Vec<i64>,
    /// `[T]`, starting at 0 in each segment.
    pub position_ids: Vec<[u32; 3]>,
    /// Boundaries of the samples.
    pub cu_seqlens: CuSeqlens,
    /// Boundaries of the rows that a dense mask covers: `[0, T]`, or multiples of the padded length.
    pub mask_boundaries: CuSeqlens,
    /// Rows that visual features fill; `[M]`.
    pub vision_rows: Vec<u32>,
    /// Patches of all images and videos.
    pub media: Vec<Patches>,
    /// Tokens that are not padding.
    pub num_tokens: usize,
    /// Segments that are not padding: one a sample, or one a document in windows of a corpus.
    pub num_samples: usize,
}
