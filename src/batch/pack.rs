//! Samples that share one row of a batch.

use super::EncodedSample;

/// One or more samples, end to end; with packing off, exactly one.
#[derive(Debug, Clone, PartialEq)]
pub struct Pack {
    /// In the order in which they stand in the row.
    pub samples: Vec<EncodedSample>,
}

impl Pack {
    /// Length in tokens.
    pub fn len(&self) -> usize {
        self.samples.iter().map(EncodedSample::len).sum()
    }

    /// True without samples.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }
}
