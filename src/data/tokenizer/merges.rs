//! Byte pair encoding of one word: of all neighbours that can merge those of the lowest rank do,
//! the first of equal ones, until none can.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Longest word, in bytes, whose pairs are scanned for the lowest rank again after each merge; longer
/// ones keep a heap, so that no word takes quadratic time.
const SCANNED: usize = 40;

/// Rank of a pair that does not merge.
const NEVER: u32 = u32::MAX;

/// What two neighbours merge into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Merge {
    rank: u32,
    id: u32,
}

/// Tokens of single bytes and the merges of pairs of tokens.
#[derive(Debug)]
pub(super) struct Merges {
    byte_ids: Box<[u32; 256]>,
    byte_pairs: Vec<Merge>,   // [256 * 256] by two bytes
    slots: Vec<(u64, Merge)>, // open addressing by two ids; a power of two of them
}

/// Room that [`Merges::apply`] works in.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// The result.
    pub ids: Vec<u32>,
    pairs: Vec<Merge>,
    links: Vec<(u32, u32)>,
    heap: BinaryHeap<Reverse<(u32, u32, u32)>>,
}

impl Merges {
    /// Takes the token of each byte, and pairs of tokens with what they merge into, by ascending
    /// rank. Of equal pairs the last one holds.
    pub(super) fn new(byte_ids: Box<[u32; 256]>, pairs: &[((u32, u32), u32)]) -> Self {
        let num_slots = (pairs.len() * 3).next_power_of_two().max(16);
        let empty = Merge { rank: NEVER, id: 0 };
        let mut merges =
            Self { byte_ids, byte_pairs: vec![empty; 1 << 16], slots: vec![(0, empty); num_slots] };
        for (rank, ((left, right), id)) in (0u32..).zip(pairs) {
            let slot = merges.slot(*left, *right);
            merges.slots[slot] = (key(*left, *right), Merge { rank, id: *id });
        }
        for left in 0..256 {
            for right in 0..256 {
                let pair = (merges.byte_ids[left], merges.byte_ids[right]);
                merges.byte_pairs[left << 8 | right] = merges.find(pair.0, pair.1);
            }
        }
        merges
    }

    fn find(&self, left: u32, right: u32) -> Merge {
        self.slots[self.slot(left, right)].1
    }

    /// The slot that has this pair or, empty, would.
    fn slot(&self, left: u32, right: u32) -> usize {
        let key = key(left, right);
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut slot = (hash >> (64 - self.slots.len().ilog2())) as usize;
        while self.slots[slot].1.rank != NEVER && self.slots[slot].0 != key {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    /// The tokens of `word`, left in `work.ids`.
    pub(super) fn apply(&self, word: &[u8], work: &mut Workspace) {
        work.ids.clear();
        work.ids.extend(word.iter().map(|byte| self.byte_ids[usize::from(*byte)]));
        work.pairs.clear();
        work.pairs.extend(
            word.windows(2)
                .map(|two| self.byte_pairs[usize::from(two[0]) << 8 | usize::from(two[1])]),
        );
        if word.len() <= SCANNED { self.scan(work) } else { self.drain(work) }
    }

    fn scan(&self, Workspace { ids, pairs, .. }: &mut Workspace) {
        loop {
            let (mut at, mut rank) = (0, NEVER);
            for (i, pair) in pairs.iter().enumerate() {
                if pair.rank < rank {
                    (at, rank) = (i, pair.rank);
                }
            }
            if rank == NEVER {
                return;
            }
            ids[at] = pairs[at].id;
            ids.remove(at + 1);
            pairs.remove(at);
            if at > 0 {
                pairs[at - 1] = self.find(ids[at - 1], ids[at]);
            }
            if at < pairs.len() {
                pairs[at] = self.find(ids[at], ids[at + 1]);
            }
        }
    }

    /// The same with a heap. An entry whose place has another pair by now has another token too: a
    /// token names one text, and pairs at one place only ever grow.
    fn drain(&self, Workspace { ids, pairs, links, heap }: &mut Workspace) {
        const GONE: u32 = u32::MAX;
        let num = ids.len() as u32;
        links.clear(); // (previous, next); `GONE` before the first, `num` after the last
        links.extend((0..num).map(|at| (at.wrapping_sub(1), at + 1)));
        heap.clear();
        let entry = |at: u32, merge: Merge| Reverse((merge.rank, at, merge.id));
        let able = (0u32..).zip(&*pairs).filter(|(_, merge)| merge.rank != NEVER);
        heap.extend(able.map(|(at, merge)| entry(at, *merge)));
        while let Some(Reverse((_, at, id))) = heap.pop() {
            let (previous, next) = links[at as usize];
            // `pairs` has what the token at `at` and its next one merge into now
            let current = pairs.get(at as usize).is_some_and(|m| m.rank != NEVER && m.id == id);
            if ids[at as usize] == GONE || next == num || !current {
                continue;
            }
            let after = links[next as usize].1;
            ids[at as usize] = id;
            ids[next as usize] = GONE;
            links[at as usize].1 = after;
            if after < num {
                links[after as usize].0 = at;
                pairs[at as usize] = self.find(id, ids[after as usize]);
                heap.extend(
                    Some(pairs[at as usize]).filter(|m| m.rank != NEVER).map(|m| entry(at, m)),
                );
            }
            if previous != GONE {
                let merge = self.find(ids[previous as usize], id);
                pairs[previous as usize] = merge;
                heap.extend(Some(merge).filter(|m| m.rank != NEVER).map(|m| entry(previous, m)));
            }
        }
        ids.retain(|id| *id != GONE);
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `a`, `b`, `c` and four merges of them; the other bytes are token 0.
    fn merges() -> Merges {
        let mut byte_ids = Box::new([0; 256]);
        for (byte, id) in [(b'a', 1), (b'b', 2), (b'c', 3)] {
            byte_ids[usize::from(byte)] = id;
        }
        let pairs = [((2, 3), 4), ((1, 4), 5), ((1, 1), 6), ((6, 6), 7), ((1, 2), 8)];
        Merges::new(byte_ids, &pairs)
    }

    #[test]
    fn the_lowest_rank_merges_first_and_then_the_first_place() {
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
                work.pairs = work.ids.windows(2).map(|two| merges.find(two[0], two[1])).collect();
            }
            merges.scan(&mut scanned);
            merges.drain(&mut drained);
            prop_assert_eq!(scanned.ids, drained.ids);
        }
    }
}
