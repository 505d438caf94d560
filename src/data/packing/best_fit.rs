//! Best-fit decreasing in one window of samples.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::Item;

/// One bin in so many may wait for samples of the next window that fill it better.
const CARRIED_BINS: usize = 4;
/// A bin with less than one part in so many to spare is as good as full.
const FULL: usize = 512;

/// What a pack has or a sample takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) tokens: usize,
    pub(super) patches: u64,
}

impl Room {
    /// What is left when `taken` is gone; `None` if it is not there.
    pub(super) fn less(self, taken: Self) -> Option<Self> {
        Some(Self {
            tokens: self.tokens.checked_sub(taken.tokens)?,
            patches: self.patches.checked_sub(taken.patches)?,
        })
    }
}

/// Samples that share a pack.
#[derive(Debug)]
pub(super) struct Bin {
    /// Indices into the window; ascending, never empty.
    pub(super) samples: Vec<usize>,
    /// The one that opened the bin.
    pub(super) longest: usize,
    pub(super) free: Room,
}

/// Longest first, each into the fullest bin that has room; ties go to the earlier one. A sample that
/// has no room in an empty bin goes alone.
pub(super) fn best_fit_decreasing(sizes: &[Room], room: Room) -> Vec<Bin> {
    let mut by_length: Vec<usize> = (0..sizes.len()).collect();
    by_length.sort_by_key(|sample| std::cmp::Reverse(sizes[*sample].tokens));
    let mut bins: Vec<Bin> = Vec::new();
    let mut by_free = BTreeSet::new(); // (free tokens, bin)
    for sample in by_length {
        let size = sizes[sample];
        let mut fitting = by_free.range((size.tokens, 0)..);
        let best = fitting.find_map(|(tokens, bin): &(usize, usize)| {
            bins[*bin].free.less(size).map(|left| (*tokens, *bin, left))
        });
        if let Some((tokens, bin, left)) = best {
            by_free.remove(&(tokens, bin));
            bins[bin].samples.push(sample);
            bins[bin].free = left;
            by_free.insert((left.tokens, bin));
        } else {
            let free = room.less(size).unwrap_or(Room { tokens: 0, patches: 0 });
            by_free.insert((free.tokens, bins.len()));
            bins.push(Bin { samples: vec![sample], longest: sample, free });
        }
    }
    for bin in &mut bins {
        bin.samples.sort_unstable();
    }
    bins
}

/// Splits bins into those to emit, the fullest first, and those whose samples wait for the next
/// window: the emptiest quarter, at least one, but none that is as good as full. Of equal ones the
/// oldest is emitted.
pub(super) fn split_off_emptiest<T>(
    mut bins: Vec<Bin>,
    window: &[Item<T>],
    length: NonZeroU32,
) -> (Vec<Bin>, Vec<Bin>) {
    let arrival = |bin: &Bin| window[bin.samples[0]].position;
    bins.sort_unstable_by_key(|bin| (bin.free.tokens, arrival(bin)));
    let enough = length.get() as usize / FULL;
    let first_wasteful = bins.partition_point(|bin| bin.free.tokens <= enough);
    let most_carried = (bins.len() / CARRIED_BINS).max(1);
    let carried = bins.split_off(first_wasteful.max(bins.len() - most_carried));
    (bins, carried)
}
