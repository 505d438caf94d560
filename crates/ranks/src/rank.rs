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

    /// The place of this rank among the ranks of its sequence group, if `size` neighbouring ranks
    /// compute the same micro-batches.
    pub fn in_sequence(self, size: usize) -> SequencePlace {
        SequencePlace { place: self.rank % size, size }
    }

    /// The place of the sequence group of this rank among all sequence groups of `size` ranks: the
    /// groups share the micro-batches of a step as single ranks do otherwise.
    #[must_use]
    pub fn sequence_group(self, size: usize) -> Self {
        Self {
            rank: self.rank / size,
            world: self.world / size,
            local_rank: self.local_rank / size,
            local_world: self.local_world.div_ceil(size),
        }
    }
}

/// The place of a rank in its sequence group: ranks that compute the same micro-batches, each a
/// part of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequencePlace {
    /// Number of this rank in the group, from 0 to `size - 1`.
    pub place: usize,
    /// Number of ranks of the group.
    pub size: usize,
}

impl SequencePlace {
    /// The tokens of the rank at `place`, of `tokens` tokens.
    pub fn part_of(self, place: usize, tokens: usize) -> Range<usize> {
        own_part(place, self.size, tokens)
    }

    /// The tokens of this rank, of `tokens` tokens.
    pub fn part(self, tokens: usize) -> Range<usize> {
        self.part_of(self.place, tokens)
    }
}

/// Part number `of` of `0..len`, divided into `parts`.
pub fn own_part(of: usize, parts: usize, len: usize) -> Range<usize> {
    let start = |part: usize| (len as u128 * part as u128 / parts as u128) as usize;
    start(of)..start(of + 1)
}
