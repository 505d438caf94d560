//! Byte pair encoding of one word: repeatedly merges the adjacent pair of the lowest rank (the
//! first one if several have that rank) until no pair can merge.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Maximum length, in bytes, of a word whose pairs are all scanned after each merge. Longer words
/// use a heap, so that no word takes quadratic time.
const SCANNED: usize = 40;

/// Rank of a pair that does not merge.
const NEVER: u32 = u32::MAX;

/// Number of bits of an id in a hash table slot.
const ID_BITS: u32 = 20;
/// Number of bits of a rank in a hash table slot.
const RANK_BITS: u32 = 24;
/// Maximum number of ids and of merges.
pub(super) const MAX_IDS: usize = 1 << ID_BITS;
/// An empty hash table slot. No pair equals it, because no rank is that large.
const EMPTY: u64 = u64::MAX;

/// Token ids of single bytes, and the merges of pairs of tokens.
#[derive(Debug)]
pub(super) struct Merges {
    byte_ids: Box<[u32; 256]>,
    byte_ranks: Vec<u32>, // [256 * 256] by two bytes
    slots: Vec<u64>, // hash table with open addressing: (left id, right id, rank); a power of two
    merged: Vec<u32>, // by rank: id of the merged token
}

/// Buffers of [`Merges::apply`].
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Token ids of the word.
    pub ids: Vec<u32>,
    ranks: Vec<u32>, // rank of each id with the next one
    links: Vec<(u32, u32)>,
    heap: BinaryHeap<Reverse<(u32, u32)>>,
}

impl Workspace {
    /// Frees the buffers after a word of an unusual length.
    pub(super) fn free_if_large(&mut self) {
        if self.links.capacity() > 1 << 16 {
            *self = Self::default();
        }
    }
}

impl Merges {
    /// Builds the tables from the id of each byte and from `pairs` of ids with the id that they
    /// merge into, by ascending rank. If a pair occurs more than once, its last rank is used.
    ///
    /// Ids must be below [`MAX_IDS`], and there may be at most [`MAX_IDS`] pairs.
    pub(super) fn new(byte_ids: Box<[u32; 256]>, pairs: &[((u32, u32), u32)]) -> Self {
        let num_slots = (pairs.len() * 2).next_power_of_two().max(16);
        let mut merges = Self {
            byte_ids,
            byte_ranks: vec![NEVER; 1 << 16],
            slots: vec![EMPTY; num_slots],
            merged: pairs.iter().map(|(_, id)| *id).collect(),
        };
        for (rank, ((left, right), _)) in (0u64..).zip(pairs) {
            let slot = merges.slot(*left, *right);
            merges.slots[slot] = key(*left, *right) << RANK_BITS | rank;
        }
        for left in 0..256 {
            for right in 0..256 {
                let pair = (merges.byte_ids[left], merges.byte_ids[right]);
                merges.byte_ranks[left << 8 | right] = merges.rank(pair.0, pair.1);
            }
        }
        merges
    }

    /// Returns the rank of a pair; [`NEVER`] if it does not merge.
    fn rank(&self, left: u32, right: u32) -> u32 {
        match self.slots[self.slot(left, right)] {
            EMPTY => NEVER,
            slot => (slot & ((1 << RANK_BITS) - 1)) as u32,
        }
    }

    /// Returns the index of the slot of this pair, or of the empty slot where it belongs.
    fn slot(&self, left: u32, right: u32) -> usize {
        let key = key(left, right);
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut slot = (hash >> (64 - self.slots.len().ilog2())) as usize;
        while self.slots[slot] != EMPTY && self.slots[slot] >> RANK_BITS != key {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    /// Writes the token ids of `word` to `work.ids`.
    pub(super) fn apply(&self, word: &[u8], work: &mut Workspace) {
        let two_bytes = |two: &[u8]| usize::from(two[0]) << 8 | usize::from(two[1]);
        work.ids.clear();
        work.ids.extend(word.iter().map(|byte| self.byte_ids[usize::from(*byte)]));
        work.ranks.clear();
        work.ranks.extend(word.windows(2).map(|two| self.byte_ranks[two_bytes(two)]));
        if word.len() <= SCANNED { self.scan(work) } else { self.drain(work) }
    }

    /// Merges by scanning all ranks for the lowest after each merge.
    fn scan(&self, Workspace { ids, ranks, .. }: &mut Workspace) {
        loop {
            let (mut at, mut rank) = (0, NEVER);
            for (i, other) in ranks.iter().enumerate() {
                if *other < rank {
                    (at, rank) = (i, *other);
                }
            }
            if rank == NEVER {
                return;
            }
            ids[at] = self.merged[rank as usize];
            ids.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = self.rank(ids[at - 1], ids[at]);
            }
            if at < ranks.len() {
                ranks[at] = self.rank(ids[at], ids[at + 1]);
            }
        }
    }

    /// Merges with a heap of (rank, place). An entry is stale if the pair at its place has another
    /// rank by then.
    fn drain(&self, Workspace { ids, ranks, links, heap }: &mut Workspace) {
        const GONE: u32 = u32::MAX;
        let num = ids.len() as u32;
        links.clear(); // (previous, next); `GONE` before the first, `num` after the last
        links.extend((0..num).map(|at| (at.wrapping_sub(1), at + 1)));
        heap.clear();
        let mergeable = (0u32..).zip(&*ranks).filter(|(_, rank)| **rank != NEVER);
        heap.extend(mergeable.map(|(at, rank)| Reverse((*rank, at))));
        while let Some(Reverse((rank, at))) = heap.pop() {
            if ranks[at as usize] != rank {
                continue;
            }
            let (previous, next) = links[at as usize];
            let after = links[next as usize].1;
            let id = self.merged[rank as usize];
            ids[at as usize] = id;
            ids[next as usize] = GONE;
            links[at as usize].1 = after;
            if next + 1 < num {
                ranks[next as usize] = NEVER;
            }
            ranks[at as usize] = NEVER;
            if after < num {
                links[after as usize].0 = at;
                ranks[at as usize] = self.rank(id, ids[after as usize]);
                heap.extend(
                    Some(Reverse((ranks[at as usize], at))).filter(|entry| entry.0.0 != NEVER),
                );
            }
            if previous != GONE {
                let rank = self.rank(ids[previous as usize], id);
                ranks[previous as usize] = rank;
                heap.extend(Some(Reverse((rank, previous))).filter(|entry| entry.0.0 != NEVER));
            }
        }
        ids.retain(|id| *id != GONE);
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << ID_BITS | u64::from(right)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tokens 1 to 3 are `a`, `b` and `c`, with five merges; all other bytes are token 0.
    fn merges() -> Merges {
        let mut byte_ids = Box::new([0; 256]);
        for (byte, id) in [(b'a', 1), (b'b', 2), (b'c', 3)] {
            byte_ids[usize::from(byte)] = id;
        }
        let pairs = [((2, 3), 4), ((1, 4), 5), ((1, 1), 6), ((6, 6), 7), ((1, 2), 8)];
        Merges::new(byte_ids, &pairs)
    }

    #[test]
    fn the_lowest_rank_merges_first_and_equal_ranks_merge_from_the_left() {
        let mut work = Workspace::default();
        for (word, expected) in [
            ("abc", [5].as_slice()), // b c before a b
            ("aab", &[6, 2]),
            ("aaaaa", &[7, 1]),
            ("", &[]),
            ("x", &[0]),
        ] {
            merges().apply(word.as_bytes(), &mut work);
            assert_eq!(work.ids, expected, "{word}");
        }
    }

    proptest! {
        #[test]
        fn the_heap_and_the_scan_agree(word in "[abcx]{0,60}") {
            let merges = merges();
            let mut scanned = Workspace::default();
            merges.apply(b"", &mut scanned);
            let mut drained = Workspace::default();
            for work in [&mut scanned, &mut drained] {
                work.ids = word.bytes().map(|b| merges.byte_ids[usize::from(b)]).collect();
                work.ranks = work.ids.windows(2).map(|two| merges.rank(two[0], two[1])).collect();
            }
            merges.scan(&mut scanned);
            merges.drain(&mut drained);
            prop_assert_eq!(scanned.ids, drained.ids);
        }
    }
}
