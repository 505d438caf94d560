//! Packs: samples that share one row of a batch.

use super::EncodedSample;

/// One or more concatenated samples. Exactly one if packing is off.
#[derive(Debug, Clone, PartialEq)]
pub struct Pack {
    /// Samples in their order in the row.
    pub samples: Vec<EncodedSample>,
}

impl Pack {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.samples.iter().map(EncodedSample::len).sum()
    }

    /// Whether the pack has no samples.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }
}
