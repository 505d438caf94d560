//! Packs of two and three long samples, where best-fit decreasing wastes room.
//!
//! With lengths around 0.4 of a pack, best fit joins two of like length, leaves a fifth of the pack empty, and
//! has the short ones, of which one would go with two such, left over. Here a sample takes a single partner
//! only if that leaves little to spare, and a pair that fills the pack otherwise. How little decides how
//! many short ones are left for the middle ones, so several values are tried.

use std::cmp::Reverse;

use super::best_fit::{Bin, Capacity, best_fit_decreasing};

/// Larger windows are left to best fit: finding a pair takes up to the window's length.
const MOST_SAMPLES: usize = 4096;
/// Packs whose room is used to one part in so many less are full enough.
const FULL: usize = 200;
/// A pair that leaves one part in so many fills a pack.
const FILLED: u32 = 1024;
/// What a single partner may leave, in 64ths of a pack: the first values that are tried.
const COARSE: [u64; 5] = [4, 8, 10, 12, 16];
/// One part of a pack in so many more, and less, than the best of them is tried then.
const FINE: u32 = 128;

/// A sample, ordered by tokens, of the same number the later first. Eight bytes, as lists of them are shifted a lot.
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

/// The fewest and fullest bins of those that best fit and pairs make.
pub(super) fn fullest(sizes: &[Capacity], room: Capacity) -> Vec<Bin> {
    let bins = best_fit_decreasing(sizes, room);
    let plain = waste(bins.iter().map(|bin| bin.free.tokens as u32).collect());
    let is_full = plain.1 * FULL <= room.tokens * emitted(plain.0);
    if is_full || sizes.len() > MOST_SAMPLES || room.patches < u64::MAX {
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

/// Bins that no window carries on.
fn emitted(bins: usize) -> usize {
    bins - bins / 4
}

/// The number of bins, and what is free in the fullest of them.
type Waste = (usize, usize);

fn waste(mut free: Vec<u32>) -> Waste {
    let num_emitted = emitted(free.len());
    if num_emitted < free.len() {
        free.select_nth_unstable(num_emitted);
    }
    (free.len(), free[..num_emitted].iter().map(|free| *free as usize).sum())
}

/// Bins without a list of each, as most of them are only compared.
struct Flat {
    samples: Vec<u32>,     // bin after bin, the longest of each first
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

/// Longest first. It goes with the longest that has room if that leaves at most `spare`, or with the two that
/// fill the bin best; and so on with what is left.
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
                let most = left.min(fitting[0].tokens); // else there is room for a third
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

/// The two that leave least of `free`, if that is less than `left`; of those that do, the most unequal ones that
/// leave at most `enough` are as good as any. The shorter one is named first.
fn best_pair(ascending: &[Key], free: u32, mut left: u32, enough: u32) -> Option<(usize, usize)> {
    let (mut short, mut long) = (0, ascending.len() - 1);
    // where even the two longest leave more, as short ones do, none do better
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

    fn rooms(tokens: &[usize]) -> Vec<Capacity> {
        tokens.iter().map(|tokens| Capacity { tokens: *tokens, patches: 0 }).collect()
    }

    #[test]
    fn two_that_fill_a_bin_go_before_one_that_does_not() {
        let sizes = rooms(&[48, 35, 33, 27, 25, 23]);
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
            let sizes = rooms(&tokens);
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
