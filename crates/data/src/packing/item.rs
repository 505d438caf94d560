//! The item type of packers.

use crate::row::Length;

/// A sample to be packed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Item<T> {
    /// Position in the order of the epoch.
    pub position: u64,
    /// Number of tokens and of pixel bytes.
    pub length: Length,
    /// The sample, or `()` if packs are only counted.
    pub value: T,
}
