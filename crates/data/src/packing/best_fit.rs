//! Best-fit decreasing for one window of samples.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::item::Item;

/// Inverse of the maximum share of bins that stay pending, to be filled better in the next window.
const PENDING_SHARE: usize = 4;
/// Inverse of the share of a bin's tokens that may be free if the bin counts as full.
const FULL: usize = 512;

/// Tokens and patches that a pack can hold, or that a sample uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Capacity {
    pub(super) tokens: usize,
    pub(super) patches: u64,
}

impl Capacity {
    /// Subtracts the size of a sample; `None` if it does not fit.
    pub(super) fn checked_sub(self, size: Self) -> Option<Self> {
        Some(Self {
            tokens: self.tokens.checked_sub(size.tokens)?,
            patches: self.patches.checked_sub(size.patches)?,
        })
    }
}

/// Samples that share a pack.
#[derive(Debug)]
pub(super) struct Bin {
    /// Indices into the window, ascending; never empty.
    pub(super) samples: Vec<usize>,
    /// Index of the longest sample.
    pub(super) longest: usize,
    /// Capacity that is left.
    pub(super) free: Capacity,
}

/// Puts each sample, from the longest to the shortest, into the fullest bin that it fits into; of
/// equally full bins, the earlier one is used. A sample that does not fit into an empty bin gets a
/// bin of its own.
pub(super) fn best_fit_decreasing(sizes: &[Capacity], capacity: Capacity) -> Vec<Bin> {
    let mut by_length: Vec<usize> = (0..sizes.len()).collect();
    by_length.sort_by_key(|sample| std::cmp::Reverse(sizes[*sample].tokens));
    let mut bins: Vec<Bin> = Vec::new();
    let mut by_free = BTreeSet::new(); // (free tokens, bin)
    for sample in by_length {
        let size = sizes[sample];
        let mut fitting = by_free.range((size.tokens, 0)..);
        let best = fitting.find_map(|(tokens, bin): &(usize, usize)| {
            bins[*bin].free.checked_sub(size).map(|left| (*tokens, *bin, left))
        });
        if let Some((tokens, bin, left)) = best {
            by_free.remove(&(tokens, bin));
            bins[bin].samples.push(sample);
            bins[bin].free = left;
            by_free.insert((left.tokens, bin));
        } else {
            let free = capacity.checked_sub(size).unwrap_or(Capacity { tokens: 0, patches: 0 });
            by_free.insert((free.tokens, bins.len()));
            bins.push(Bin { samples: vec![sample], longest: sample, free });
        }
    }
    for bin in &mut bins {
        bin.samples.sort_unstable();
    }
    bins
}

/// Splits bins into packed ones, the fullest first, and pending ones, whose samples are packed
/// again with the next window.
///
/// Pending are the emptiest quarter of the bins, or one bin if there are fewer than four; bins that
/// count as full are always packed. Equally full bins are ordered by their first sample.
pub(super) fn split_off_emptiest<T>(
    mut bins: Vec<Bin>,
    window: &[Item<T>],
    length: NonZeroU32,
) -> (Vec<Bin>, Vec<Bin>) {
    let arrival = |bin: &Bin| window[bin.samples[0]].position;
    bins.sort_unstable_by_key(|bin| (bin.free.tokens, arrival(bin)));
    let max_free = length.get() as usize / FULL;
    let num_full = bins.partition_point(|bin| bin.free.tokens <= max_free);
    let max_pending = (bins.len() / PENDING_SHARE).max(1);
    let pending = bins.split_off(num_full.max(bins.len() - max_pending));
    (bins, pending)
}
