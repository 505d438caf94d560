//! Packs of two and three long samples, where best-fit decreasing wastes space.
//!
//! With lengths around 0.4 of a pack, best fit joins two samples of similar length, leaves a fifth of
//! the pack empty, and puts the short samples, which could fill this space, into packs of their own.
//! Here a single sample is added to a pack only if this wastes at most `spare` tokens; otherwise the
//! pair of samples that fills the pack best is added. `spare` determines how many short samples
//! remain for later packs, so several values are tried.

use std::cmp::Reverse;

use super::best_fit::{Bin, Capacity, best_fit_decreasing};

/// Maximum number of samples of a window. Larger windows use best fit only, because the search for a
/// pair is linear in the number of samples.
const MAX_SAMPLES: usize = 4096;
/// Inverse of the share of free tokens up to which the packs of best fit are accepted.
const FULL: usize = 200;
/// Inverse of the share of free tokens up to which a pair counts as filling a pack.
const FILLED: u32 = 1024;
/// Values of `spare` that are tried first, in 64ths of a pack.
const COARSE: [u64; 5] = [4, 8, 10, 12, 16];
/// Inverse of the share of a pack by which `spare` is then varied around the best value.
const FINE: u32 = 128;

/// A sample, ordered by tokens; of equally long samples, the later one comes first. It has only
/// eight bytes, because lists of keys are shifted often.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    tokens: u32,
    sample: Reverse<u32>,
}

impl Key {
    fn new(tokens: usize, sample: u32) -> Self {
        Self { tokens: u32::try_from(tokens).unwrap_or(u32::MAX), sample: Reverse(sample) }
    }
}

/// Packs samples with best fit and with pairs, and returns the result with the fewest bins; of equal
/// numbers of bins, the one with the least free space.
pub(super) fn fullest(sizes: &[Capacity], room: Capacity) -> Vec<Bin> {
    let bins = best_fit_decreasing(sizes, room);
    let plain = waste(bins.iter().map(|bin| bin.free.tokens as u32).collect());
    let is_full = plain.1 * FULL <= room.tokens * emitted(plain.0);
    if is_full || sizes.len() > MAX_SAMPLES || room.patches < u64::MAX {
        return bins;
    }
    let mut ascending: Vec<Key> =
        sizes.iter().zip(0..).map(|(size, sample)| Key::new(size.tokens, sample)).collect();
    ascending.sort_unstable();
    let room = room.tokens as u32;
    let mut best: Option<(Waste, u32, Flat)> = None;
    let try_with = |spare: u32, best: &mut Option<(Waste, u32, Flat)>| {
        let flat = pair_fit(ascending.clone(), room, spare);
        let waste = waste(flat.bins.iter().map(|(_, free)| *free).collect());
        if waste < best.as_ref().map_or(plain, |best| best.0) {
            *best = Some((waste, spare, flat));
        }
    };
    for part in COARSE {
        try_with((u64::from(room) * part / 64) as u32, &mut best);
    }
    if let Some((_, spare, _)) = best {
        try_with(spare.saturating_sub(room / FINE), &mut best);
        try_with(spare + room / FINE, &mut best);
    }
    best.map_or(bins, |(_, _, flat)| flat.into_bins())
}

/// Number of bins that become packs; the samples of the others are packed with the next window.
fn emitted(bins: usize) -> usize {
    bins - bins / 4
}

/// Number of bins, and number of free tokens in those that become packs.
type Waste = (usize, usize);

fn waste(mut free: Vec<u32>) -> Waste {
    let num_emitted = emitted(free.len());
    if num_emitted < free.len() {
        free.select_nth_unstable(num_emitted);
    }
    (free.len(), free[..num_emitted].iter().map(|free| *free as usize).sum())
}

/// Bins in two flat lists, because most results are compared and then dropped.
struct Flat {
    samples: Vec<u32>,     // bin by bin, the longest of each bin first
    bins: Vec<(u32, u32)>, // the end of each in `samples`, and its free tokens
}

impl Flat {
    fn into_bins(self) -> Vec<Bin> {
        let mut begin = 0;
        let bins = self.bins.into_iter().map(|(end, free)| {
            let own = &self.samples[std::mem::replace(&mut begin, end as usize)..end as usize];
            let longest = own[0] as usize;
            let mut samples: Vec<usize> = own.iter().map(|sample| *sample as usize).collect();
            samples.sort_unstable();
            Bin { samples, longest, free: Capacity { tokens: free as usize, patches: u64::MAX } }
        });
        bins.collect()
    }
}

/// Packs the longest samples first. Each is joined by the longest sample that fits if this leaves at
/// most `spare` tokens free, otherwise by the two samples that fill the bin best. This is repeated
/// until no sample fits.
fn pair_fit(mut ascending: Vec<Key>, room: u32, spare: u32) -> Flat {
    let filled = room / FILLED;
    let mut samples = Vec::with_capacity(ascending.len());
    let mut bins = Vec::with_capacity(ascending.len());
    while let Some(longest) = ascending.pop() {
        samples.push(longest.sample.0);
        let mut free = room.saturating_sub(longest.tokens);
        loop {
            let fitting = &ascending[..ascending.partition_point(|key| key.tokens <= free)];
            let Some(single) = fitting.last() else { break };
            let left = free - single.tokens;
            let pair = if left > spare.max(filled) {
                let most = left.min(fitting[0].tokens); // a larger rest would fit a third sample
                best_pair(fitting, free, most, filled)
            } else {
                None
            };
            let (first, second) = match pair {
                Some((short, long)) => (long, Some(short)),
                None => (fitting.len() - 1, None),
            };
            for at in [first].into_iter().chain(second) {
                let key = ascending.remove(at);
                free -= key.tokens;
                samples.push(key.sample.0);
            }
        }
        bins.push((samples.len() as u32, free));
    }
    Flat { samples, bins }
}

/// Indices of the two samples that leave the fewest of `free` tokens, if they leave fewer than
/// `left`; the shorter sample is first. The search stops at a pair that leaves at most `enough`.
fn best_pair(ascending: &[Key], free: u32, mut left: u32, enough: u32) -> Option<(usize, usize)> {
    let (mut short, mut long) = (0, ascending.len() - 1);
    // if the two longest samples leave at least `left`, every other pair does too
    let longest = free.checked_sub(ascending[long].tokens)?;
    let second = ascending[long.checked_sub(1)?].tokens;
    if longest.checked_sub(second).is_some_and(|rest| rest >= left) {
        return None;
    }
    let mut best = None;
    while short < long {
        let rest = (free - ascending[long].tokens).checked_sub(ascending[short].tokens);
        let Some(rest) = rest else {
            long -= 1;
            continue;
        };
        if rest < left {
            (left, best) = (rest, Some((short, long)));
            if rest <= enough {
                break;
            }
        }
        short += 1;
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn capacities(tokens: &[usize]) -> Vec<Capacity> {
        tokens.iter().map(|tokens| Capacity { tokens: *tokens, patches: 0 }).collect()
    }

    #[test]
    fn a_pair_that_fills_a_bin_is_preferred_to_one_sample_that_does_not() {
        let sizes = capacities(&[48, 35, 33, 27, 25, 23]);
        let room = Capacity { tokens: 100, patches: u64::MAX };
        assert_eq!(best_fit_decreasing(&sizes, room).len(), 3); // 48 + 35, 33 + 27 + 25, 23
        let bins: Vec<_> = fullest(&sizes, room).into_iter().map(|bin| bin.samples).collect();
        assert_eq!(bins, [[0, 3, 4], [1, 2, 5]]);
    }

    proptest! {
        #[test]
        fn bins_have_each_sample_once_and_are_no_more_than_those_of_best_fit(
            tokens in prop::collection::vec(200usize..700, 1..400), limit in 300usize..2000
        ) {
            let sizes = capacities(&tokens);
            let room = Capacity { tokens: limit, patches: u64::MAX };
            let bins = fullest(&sizes, room);
            prop_assert!(bins.len() <= best_fit_decreasing(&sizes, room).len());
            let mut seen = Vec::new();
            for bin in &bins {
                let used: usize = bin.samples.iter().map(|sample| tokens[*sample]).sum();
                prop_assert_eq!(bin.free.tokens, limit.saturating_sub(used));
                prop_assert!(used <= limit || bin.samples.len() == 1);
                prop_assert!(bin.samples.is_sorted());
                let longest = bin.samples.iter().map(|sample| tokens[*sample]).max();
                prop_assert_eq!(longest, Some(tokens[bin.longest]));
                seen.extend_from_slice(&bin.samples);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..tokens.len()).collect::<Vec<_>>());
        }
    }
}
