//! The place of a process among the ranks of a run.

use std::ops::Range;

/// The place of a process among the ranks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Number of this rank, from 0 to `world - 1`. Rank 0 writes all files and log lines.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of this rank among those on the same machine.
    pub local_rank: usize,
    /// Number of ranks on the same machine.
    pub local_world: usize,
}

impl Rank {
    /// A run in a single process.
    pub const ALONE: Self = Self { rank: 0, world: 1, local_rank: 0, local_world: 1 };

    /// Whether this is rank 0.
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// This rank's part of `0..len`. The parts of two ranks differ by at most one in length.
    pub fn own_part(self, len: usize) -> Range<usize> {
        own_part(self.rank, self.world, len)
    }
}

/// Part number `of` of `0..len`, divided into `parts`.
pub(super) fn own_part(of: usize, parts: usize, len: usize) -> Range<usize> {
    let start = |part: usize| (len as u128 * part as u128 / parts as u128) as usize;
    start(of)..start(of + 1)
}
