//! Packs to the padded batch `[B, L]`.
//!
//! Shapes: `B` rows, one a pack; `L` the longest of them in tokens; `M` merged vision tokens.

use std::num::NonZeroU32;

use crate::batch::{Batch, EncodedSample, IGNORE_INDEX, Pack, PaddingSide, SampleId};

/// Packs that make no batch. All of them are mistakes of the encoder, none of the data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollateError {
    /// No pack, or one without samples.
    #[error("row {row}: no sample to collate")]
    NoSample {
        /// Row of the batch.
        row: usize,
    },
    /// A sample without tokens.
    #[error("{id}: the sample has no tokens")]
    NoTokens {
        /// Origin of the sample.
        id: SampleId,
    },
    /// Parts of a sample that should be equally long.
    #[error("{id}: {num_tokens} input ids, but {num_labels} labels and {num_positions} positions")]
    Lengths {
        /// Origin of the sample.
        id: SampleId,
        /// `input_ids`.
        num_tokens: usize,
        /// `labels`.
        num_labels: usize,
        /// `position_ids`.
        num_positions: usize,
    },
    /// A vision row that is no token of the sample, or out of order.
    #[error("{id}: vision row `{vision_row}` is not above the one before and below {num_tokens}")]
    VisionRow {
        /// Origin of the sample.
        id: SampleId,
        /// The row.
        vision_row: u32,
        /// Length of the sample.
        num_tokens: usize,
    },
    /// Not one vision row for each merged token of the images.
    #[error("{id}: {num_vision_rows} vision rows, but its images make {num_merged} merged tokens")]
    VisionRows {
        /// Origin of the sample.
        id: SampleId,
        /// Rows that visual features would fill.
        num_vision_rows: usize,
        /// Visual features that there will be.
        num_merged: usize,
    },
    /// More places than `u32` can count.
    #[error("a batch of {rows} rows of {length} tokens: at most {} places fit", u32::MAX)]
    TooLarge {
        /// `B`.
        rows: usize,
        /// `L`.
        length: usize,
    },
}

/// Lays packs side by side, one a row: `[B, L]`, rows filled up with `pad_id` on one side.
///
/// `merge_size` is the edge in patches of the square that becomes one vision token.
pub fn collate(
    packs: Vec<Pack>,
    pad_id: u32,
    side: PaddingSide,
    merge_size: NonZeroU32,
) -> Result<Batch, CollateError> {
    if let Some(row) = packs.iter().position(Pack::is_empty) {
        return Err(CollateError::NoSample { row });
    }
    for sample in packs.iter().flat_map(|pack| &pack.samples) {
        check(sample, merge_size)?;
    }
    let rows = packs.len();
    let length = packs.iter().map(Pack::len).max().ok_or(CollateError::NoSample { row: 0 })?;
    let places = rows.checked_mul(length).filter(|places| u32::try_from(*places).is_ok());
    let places = places.ok_or(CollateError::TooLarge { rows, length })?;
    let mut batch = Batch {
        input_ids: vec![pad_id; places],     // [B, L]
        labels: vec![IGNORE_INDEX; places],  // [B, L]
        attention_mask: vec![false; places], // [B, L]
        position_ids: vec![[0; 3]; places],  // [B, L]
        vision_rows: Vec::new(),             // [M]
        media: Vec::new(),
        segment_lengths: Vec::with_capacity(rows),
        length,
    };
    for (row, pack) in packs.into_iter().enumerate() {
        let padding = match side {
            PaddingSide::Left => length - pack.len(),
            PaddingSide::Right => 0,
        };
        let mut start = row * length + padding;
        let mut lengths = Vec::with_capacity(pack.samples.len());
        for sample in pack.samples {
            let places = start..start + sample.len();
            batch.input_ids[places.clone()].copy_from_slice(&sample.input_ids);
            batch.labels[places.clone()].copy_from_slice(&sample.labels);
            batch.attention_mask[places.clone()].fill(true);
            batch.position_ids[places.clone()].copy_from_slice(&sample.position_ids);
            batch.vision_rows.extend(sample.vision_rows.iter().map(|row| start as u32 + row));
            batch.media.extend(sample.media);
            lengths.push(places.len() as u32);
            start = places.end;
        }
        batch.segment_lengths.push(lengths);
    }
    Ok(batch)
}

/// What a sample must keep for visual features to meet their tokens.
fn check(sample: &EncodedSample, merge_size: NonZeroU32) -> Result<(), CollateError> {
    let id = || sample.id.clone();
    let num_tokens = sample.len();
    let (num_labels, num_positions) = (sample.labels.len(), sample.position_ids.len());
    if sample.is_empty() {
        return Err(CollateError::NoTokens { id: id() });
    }
    if num_labels != num_tokens || num_positions != num_tokens {
        return Err(CollateError::Lengths { id: id(), num_tokens, num_labels, num_positions });
    }
    let mut lowest = 0;
    for row in &sample.vision_rows {
        if *row < lowest || *row as usize >= num_tokens {
            return Err(CollateError::VisionRow { id: id(), vision_row: *row, num_tokens });
        }
        lowest = row + 1;
    }
    let merged_patches = (merge_size.get() as usize).pow(2);
    let num_merged = sample.media.iter().map(|media| media.num_patches() / merged_patches).sum();
    if sample.vision_rows.len() != num_merged {
        let num_vision_rows = sample.vision_rows.len();
        return Err(CollateError::VisionRows { id: id(), num_vision_rows, num_merged });
    }
    Ok(())
}
