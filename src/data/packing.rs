//! Which samples share a pack.
//!
//! A packer sees lengths only, so that a plan can foretell what a run does, and what it holds can
//! be told as stream positions, so that a resumed run goes on with the same packs.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::config::PackingStrategy;
use super::row::Length;

/// New samples after which a window is packed.
pub(super) const WINDOW_SAMPLES: usize = 256;
/// Bytes of new pixels after which a window is packed; it bounds memory.
pub(super) const WINDOW_PIXEL_BYTES: u64 = 256 << 20;
/// One bin in so many may wait for samples of the next window that fill it better.
const CARRIED_BINS: usize = 4;

/// How samples become packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// One sample a pack.
    Off,
    /// Several samples a pack.
    On {
        /// Upper bound on one pack, in tokens, vision tokens included.
        length: NonZeroU32,
        /// Which samples share one.
        strategy: PackingStrategy,
        /// What becomes of a sample that is longer than that.
        overlong: Overlong,
    },
}

/// What becomes of a sample longer than a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlong {
    /// It is rejected as `overlong`.
    Reject,
    /// It is a pack of its own.
    Alone,
}

impl Packing {
    /// Tokens that a pack of `num_tokens` offers room for; `None` with packing off.
    pub fn capacity(self, num_tokens: usize) -> Option<usize> {
        match self {
            Self::Off => None,
            Self::On { length, .. } => Some(num_tokens.max(length.get() as usize)),
        }
    }
}

/// A sample on its way into a pack.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Item<T> {
    /// Position in the order of the epoch.
    pub position: u64,
    /// Size.
    pub length: Length,
    /// The sample itself, or nothing when only packs are counted.
    pub value: T,
}

/// Joins the samples of one epoch, which arrive by ascending position.
#[derive(Debug)]
pub(super) struct Packer<T> {
    packing: Packing,
    held: Vec<Item<T>>, // ascending; sequential: the open pack, best fit: carried ones, new ones
    new: usize,         // the last of `held`, arrived since a window was packed
    new_pixel_bytes: u64,
}

impl<T> Packer<T> {
    /// A packer that holds `carry`, as [`Packer::held`] told it at the end of a step.
    pub(super) fn new(packing: Packing, carry: Vec<Item<T>>) -> Self {
        Self { packing, held: carry, new: 0, new_pixel_bytes: 0 }
    }

    /// Positions of the samples that are in no pack yet.
    pub(super) fn held(&self) -> impl Iterator<Item = u64> + '_ {
        self.held.iter().map(|item| item.position)
    }

    /// Takes the next sample; returns the packs that it completes, in order.
    ///
    /// While it returns none, a best-fit packer is in the middle of a window: only after packs came
    /// out is [`Packer::held`] all of its state.
    pub(super) fn push(&mut self, item: Item<T>) -> Vec<Vec<Item<T>>> {
        match self.packing {
            Packing::Off => vec![vec![item]],
            Packing::On { length, strategy: PackingStrategy::Sequential, .. } => {
                let held: usize = self.held.iter().map(|held| held.length.tokens).sum();
                let fits = held + item.length.tokens <= length.get() as usize;
                let closed = if fits { Vec::new() } else { self.finish() };
                self.held.push(item);
                closed
            }
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                self.new += 1;
                self.new_pixel_bytes += item.length.pixel_bytes;
                self.held.push(item);
                if self.new < WINDOW_SAMPLES && self.new_pixel_bytes < WINDOW_PIXEL_BYTES {
                    return Vec::new();
                }
                (self.new, self.new_pixel_bytes) = (0, 0);
                let capacity = length.get() as usize;
                let bins = best_fit_decreasing(&self.held, capacity);
                let (emitted, carried) = split_off_emptiest(bins, &self.held, capacity);
                self.take(emitted, carried)
            }
        }
    }

    /// Ends the epoch: everything held becomes packs.
    pub(super) fn finish(&mut self) -> Vec<Vec<Item<T>>> {
        (self.new, self.new_pixel_bytes) = (0, 0);
        if self.held.is_empty() {
            return Vec::new();
        }
        match self.packing {
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                let bins = best_fit_decreasing(&self.held, length.get() as usize);
                self.take(bins, Vec::new())
            }
            _ => vec![std::mem::take(&mut self.held)],
        }
    }

    /// Makes packs of the emitted bins, by the arrival of their longest samples; keeps the rest.
    fn take(&mut self, mut emitted: Vec<Bin>, carried: Vec<Bin>) -> Vec<Vec<Item<T>>> {
        // not by the first arrival: packs of many short samples have early ones and would come first
        emitted.sort_unstable_by_key(|bin| bin.longest);
        let mut held: Vec<Option<Item<T>>> = self.held.drain(..).map(Some).collect();
        let mut take = |sample: usize| held[sample].take().expect("a sample is in one bin");
        let packs = emitted
            .into_iter()
            .map(|bin| bin.samples.into_iter().map(&mut take).collect())
            .collect();
        let mut rest: Vec<usize> = carried.into_iter().flat_map(|bin| bin.samples).collect();
        rest.sort_unstable();
        self.held = rest.into_iter().map(take).collect();
        packs
    }
}

#[derive(Debug)]
struct Bin {
    samples: Vec<usize>, // indices into the window; ascending, never empty
    longest: usize,      // the one that opened the bin
    free: usize,
}

/// Longest first, each into the fullest bin that has room; ties go to the earlier one.
fn best_fit_decreasing<T>(window: &[Item<T>], capacity: usize) -> Vec<Bin> {
    let mut by_length: Vec<usize> = (0..window.len()).collect();
    by_length.sort_by_key(|sample| std::cmp::Reverse(window[*sample].length.tokens));
    let mut bins: Vec<Bin> = Vec::new();
    let mut by_free = BTreeSet::new(); // (free tokens, bin)
    for sample in by_length {
        let tokens = window[sample].length.tokens;
        let best = by_free.range((tokens, 0)..).next().copied();
        let bin = if let Some((free, bin)) = best {
            by_free.remove(&(free, bin));
            bin
        } else {
            bins.push(Bin { samples: Vec::new(), longest: sample, free: capacity.max(tokens) });
            bins.len() - 1
        };
        bins[bin].samples.push(sample);
        bins[bin].free -= tokens;
        by_free.insert((bins[bin].free, bin));
    }
    for bin in &mut bins {
        bin.samples.sort_unstable();
    }
    bins
}

/// Splits bins into those to emit and those whose samples wait for the next window: the emptiest
/// quarter, at least one, but none that is as good as full. Of equal ones the oldest is emitted.
fn split_off_emptiest<T>(
    mut bins: Vec<Bin>,
    window: &[Item<T>],
    capacity: usize,
) -> (Vec<Bin>, Vec<Bin>) {
    let arrival = |bin: &Bin| window[bin.samples[0]].position;
    bins.sort_unstable_by_key(|bin| (bin.free, arrival(bin)));
    let first_wasteful = bins.partition_point(|bin| bin.free <= capacity / 128);
    let most_carried = (bins.len() / CARRIED_BINS).max(1);
    let carried = bins.split_off(first_wasteful.max(bins.len() - most_carried));
    (bins, carried)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, LogNormal};

    use super::*;

    fn on(length: u32, strategy: PackingStrategy) -> Packing {
        let length = NonZeroU32::new(length).unwrap();
        Packing::On { length, strategy, overlong: Overlong::Alone }
    }

    fn item(position: usize, tokens: usize) -> Item<()> {
        let length = Length { tokens, pixel_bytes: 0 };
        Item { position: position as u64, length, value: () }
    }

    fn pack(packing: Packing, lengths: &[usize]) -> Vec<Vec<Item<()>>> {
        let mut packer = Packer::new(packing, Vec::new());
        let items = lengths.iter().enumerate().map(|(position, tokens)| item(position, *tokens));
        let mut packs: Vec<_> = items.flat_map(|item| packer.push(item)).collect();
        packs.extend(packer.finish());
        assert_eq!(packer.held().count(), 0);
        packs
    }

    fn positions(packs: &[Vec<Item<()>>]) -> Vec<Vec<u64>> {
        packs.iter().map(|pack| pack.iter().map(|item| item.position).collect()).collect()
    }

    fn tokens(pack: &[Item<()>]) -> usize {
        pack.iter().map(|item| item.length.tokens).sum()
    }

    #[test]
    fn packing_off_gives_one_sample_a_pack() {
        assert_eq!(positions(&pack(Packing::Off, &[3, 9, 1])), [[0], [1], [2]]);
    }

    #[test]
    fn sequential_closes_a_pack_when_the_next_sample_does_not_fit() {
        let packs = pack(on(10, PackingStrategy::Sequential), &[4, 6, 1, 10, 3, 12, 2]);
        assert_eq!(positions(&packs), [vec![0, 1], vec![2], vec![3], vec![4], vec![5], vec![6]]);
    }

    #[test]
    fn best_fit_finds_partners_that_are_no_neighbours() {
        let packs = pack(on(10, PackingStrategy::BestFit), &[6, 7, 3, 4, 12, 9]);
        assert_eq!(positions(&packs), [vec![0, 3], vec![1, 2], vec![4], vec![5]]);
    }

    #[test]
    fn a_window_is_packed_at_its_bound_of_pixels() {
        let mut packer = Packer::new(on(10, PackingStrategy::BestFit), Vec::new());
        let with_pixels = |position| {
            let length = Length { tokens: 10, pixel_bytes: WINDOW_PIXEL_BYTES / 2 };
            Item { position, length, value: () }
        };
        assert!(packer.push(with_pixels(0)).is_empty());
        assert_eq!(packer.push(with_pixels(1)).len(), 2);
        assert!(packer.push(with_pixels(2)).is_empty());
    }

    #[test]
    fn best_fit_fills_packs_of_a_log_normal_mix_and_beats_sequential() {
        for (mean_tokens, spread, length) in
            [(300.0f64, 1.0, 4096), (600.0, 0.8, 8192), (1200.0, 0.7, 8192), (150.0, 1.2, 2048)]
        {
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let distribution = LogNormal::new(mean_tokens.ln(), spread).unwrap();
            let lengths: Vec<usize> = (0..6000)
                .map(|_| (distribution.sample(&mut rng) as usize).clamp(1, length as usize))
                .collect();
            let fill = |strategy| {
                let packs = pack(on(length, strategy), &lengths).len();
                lengths.iter().sum::<usize>() as f64 / (packs * length as usize) as f64
            };
            let (best_fit, sequential) =
                (fill(PackingStrategy::BestFit), fill(PackingStrategy::Sequential));
            assert!(
                best_fit >= 0.97 && best_fit > sequential,
                "mean {mean_tokens}, length {length}: best_fit {best_fit}, sequential {sequential}"
            );
        }
    }

    #[test]
    fn packs_of_a_window_come_in_no_order_of_length() {
        let lengths: Vec<usize> = (0..255).map(|i| 1 + (i * 97) % 256).collect();
        let packs = pack(on(400, PackingStrategy::BestFit), &lengths);
        let (first, second) = packs.split_at(packs.len() / 2);
        let mean_len = |packs: &[Vec<_>]| {
            packs.iter().map(Vec::len).sum::<usize>() as f64 / packs.len() as f64
        };
        let (first, second) = (mean_len(first), mean_len(second));
        assert!((first / second - 1.0).abs() < 0.25, "samples a pack: {first}, then {second}");
    }

    proptest! {
        #[test]
        fn every_sample_is_in_one_pack_and_no_pack_is_over_the_limit(
            lengths in prop::collection::vec(1usize..40, 0..700),
            limit in 1u32..60,
            best_fit in any::<bool>(),
        ) {
            let strategy =
                if best_fit { PackingStrategy::BestFit } else { PackingStrategy::Sequential };
            let packs = pack(on(limit, strategy), &lengths);
            for pack in &packs {
                prop_assert!(tokens(pack) <= limit as usize || pack.len() == 1);
                prop_assert!(pack.is_sorted_by_key(|item| item.position));
            }
            let mut seen = positions(&packs).concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len() as u64).collect::<Vec<_>>());
        }

        #[test]
        fn a_packer_made_from_what_another_holds_goes_on_alike(
            lengths in prop::collection::vec(1usize..40, 300..900),
            best_fit in any::<bool>(),
        ) {
            let strategy =
                if best_fit { PackingStrategy::BestFit } else { PackingStrategy::Sequential };
            let packing = on(64, strategy);
            let mut packer = Packer::new(packing, Vec::new());
            let mut resumed = packer_of(packing, &lengths, &[]);
            for (position, tokens) in lengths.iter().enumerate() {
                let packs = packer.push(item(position, *tokens));
                prop_assert_eq!(&resumed.push(item(position, *tokens)), &packs);
                if !packs.is_empty() {
                    let held: Vec<_> = packer.held().collect();
                    resumed = packer_of(packing, &lengths, &held);
                }
            }
            prop_assert_eq!(packer.finish(), resumed.finish());
        }
    }

    fn packer_of(packing: Packing, lengths: &[usize], held: &[u64]) -> Packer<()> {
        let carry = held.iter().map(|p| item(*p as usize, lengths[*p as usize])).collect();
        Packer::new(packing, carry)
    }
}
