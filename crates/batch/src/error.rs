//! Errors of batches.

use crate::SampleId;

/// An inconsistent batch, or packs of which none can be made: a bug of the encoder or of the loader,
/// not an error of the data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Data, hint = "this is a bug in trainer: please report it with the row")]
pub enum BatchError {
    #[error("row {row}: no sample to collate")]
    NoSample { row: usize },
    #[error("{id}: the sample has no tokens")]
    NoTokens { id: SampleId },
    #[error("{id}: {num_tokens} input ids, but {num_weights} weights of the loss")]
    Weights { id: SampleId, num_tokens: usize, num_weights: usize },
    #[error("{id}: {num_tokens} input ids, but {num_labels} labels and {num_positions} positions")]
    Lengths { id: SampleId, num_tokens: usize, num_labels: usize, num_positions: usize },
    #[error("{id}: vision row `{vision_row}` is not above the one before and below {num_tokens}")]
    VisionRow { id: SampleId, vision_row: u32, num_tokens: usize },
    #[error("{id}: {num_vision_rows} vision rows, but its images make {num_merged} merged tokens")]
    VisionRows { id: SampleId, num_vision_rows: usize, num_merged: usize },
    #[error("a batch has {rows} rows of {length} tokens, expected at most {} tokens", u32::MAX)]
    TooLarge { rows: usize, length: usize },
    #[error("segment {segment} has 0 tokens, expected at least 1")]
    EmptySegment { segment: usize },
    #[error("found {num_tokens} tokens in one batch, expected at most {}", u32::MAX)]
    TooManyTokens { num_tokens: u64 },
    #[error(
        "row {row}: the attention mask has {in_mask} tokens, but the samples have {in_samples}"
    )]
    MaskAndLengths { row: usize, in_mask: usize, in_samples: usize },
    #[error("row {row}: found padding between tokens, expected it on one side")]
    PaddingInside { row: usize },
    #[error("vision row {vision_row} is padding, expected a vision token")]
    VisionRowIsPadding { vision_row: u32 },
}
