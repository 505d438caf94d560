//! Segment boundaries of a packed token sequence.

use crate::BatchError;
use std::ops::Range;
use std::sync::Arc;

/// Cumulative segment lengths in tokens: `[0, l0, l0 + l1, .., T]`, strictly increasing.
///
/// Clones share memory, and comparing two clones of one value takes constant time.
#[derive(Debug, Clone, Eq)]
pub struct CuSeqlens(Arc<[u32]>);

impl PartialEq for CuSeqlens {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl CuSeqlens {
    /// Builds the boundaries from the length of each segment in tokens. Fails if a segment is empty
    /// or the sum exceeds `u32`.
    pub fn from_lengths(lengths: &[u32]) -> Result<Self, BatchError> {
        let mut ends = Vec::with_capacity(lengths.len() + 1);
        ends.push(0);
        let mut total = 0u64;
        for (segment, length) in lengths.iter().enumerate() {
            if *length == 0 {
                return Err(BatchError::EmptySegment { segment });
            }
            total += u64::from(*length);
            let end = u32::try_from(total)
                .map_err(|_| BatchError::TooManyTokens { num_tokens: total })?;
            ends.push(end);
        }
        Ok(Self(ends.into()))
    }

    /// Boundaries as a slice of `num_segments + 1` values that starts with 0.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// Token range of each segment; together they tile `0..T`.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        self.0.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
    }

    /// Number of segments, which may be 0.
    pub fn num_segments(&self) -> usize {
        self.0.len() - 1
    }

    /// Number of tokens `T`.
    pub fn num_tokens(&self) -> usize {
        self.0.last().map_or(0, |end| *end as usize)
    }

    /// Length of the longest segment in tokens, 0 if there are no segments.
    pub fn max_seqlen(&self) -> usize {
        self.segments().map(|segment| segment.len()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_tile_the_sequence() {
        let cu_seqlens = CuSeqlens::from_lengths(&[3, 1, 2]).unwrap();
        assert_eq!(cu_seqlens.as_slice(), [0, 3, 4, 6]);
        assert_eq!(cu_seqlens.segments().collect::<Vec<_>>(), [0..3, 3..4, 4..6]);
        assert_eq!((cu_seqlens.num_tokens(), cu_seqlens.max_seqlen()), (6, 3));
    }

    #[test]
    fn an_empty_segment_is_rejected() {
        assert_eq!(CuSeqlens::from_lengths(&[3, 0]), Err(BatchError::EmptySegment { segment: 1 }));
    }
}
