//! Segment boundaries of a token stream.

use std::ops::Range;
use std::sync::Arc;

/// Sample boundaries in tokens: `[0, l0, l0 + l1, .., T]`, strictly increasing.
///
/// Clones share memory, and comparing two clones of one value takes constant time.
#[derive(Debug, Clone, Eq)]
pub struct CuSeqlens(Arc<[u32]>);

impl PartialEq for CuSeqlens {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

/// Why lengths cannot become boundaries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CuSeqlensError {
    /// A segment without tokens.
    #[error("segment {segment} has no tokens")]
    EmptySegment {
        /// Index of the segment.
        segment: usize,
    },
    /// More tokens than `u32` can count.
    #[error("{num_tokens} tokens in one stream: at most {} fit", u32::MAX)]
    TooManyTokens {
        /// Sum of the lengths.
        num_tokens: u64,
    },
}

impl CuSeqlens {
    /// From the length of each segment.
    pub fn from_lengths(lengths: &[u32]) -> Result<Self, CuSeqlensError> {
        let mut ends = Vec::with_capacity(lengths.len() + 1);
        ends.push(0);
        let mut total = 0u64;
        for (segment, length) in lengths.iter().enumerate() {
            if *length == 0 {
                return Err(CuSeqlensError::EmptySegment { segment });
            }
            total += u64::from(*length);
            let end = u32::try_from(total)
                .map_err(|_| CuSeqlensError::TooManyTokens { num_tokens: total })?;
            ends.push(end);
        }
        Ok(Self(ends.into()))
    }

    /// `[num_segments + 1]`, beginning with 0.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// Token range of each segment; together they tile `0..T`.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        self.0.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
    }

    /// Number of segments.
    pub fn num_segments(&self) -> usize {
        self.0.len() - 1
    }

    /// `T`.
    pub fn num_tokens(&self) -> usize {
        self.0.last().map_or(0, |end| *end as usize)
    }

    /// Longest segment in tokens, 0 without segments.
    pub fn max_seqlen(&self) -> usize {
        self.segments().map(|segment| segment.len()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_tile_the_stream() {
        let cu_seqlens = CuSeqlens::from_lengths(&[3, 1, 2]).unwrap();
        assert_eq!(cu_seqlens.as_slice(), [0, 3, 4, 6]);
        assert_eq!(cu_seqlens.segments().collect::<Vec<_>>(), [0..3, 3..4, 4..6]);
        assert_eq!((cu_seqlens.num_tokens(), cu_seqlens.max_seqlen()), (6, 3));
    }

    #[test]
    fn an_empty_segment_is_refused() {
        assert_eq!(
            CuSeqlens::from_lengths(&[3, 0]),
            Err(CuSeqlensError::EmptySegment { segment: 1 })
        );
    }
}
