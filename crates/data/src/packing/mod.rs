//! Packing: joins samples into packs.
//!
//! A packer uses only the lengths of samples, so that a plan can compute the packs of a run without
//! reading the samples. Its state is the list of positions of the pending samples, so that a
//! resumed run continues with the same packs.
//!
//! Packs are ordered so that the packs of one step have similar cost. The cost of a pack, in
//! tokens, is `tokens + sum(tokens of a sample ^ 2) / 24,000 + patches / 4`. For a 2B decoder,
//! attention over a sample of 24,000 tokens costs as much as all matrix products (8B: 48,000
//! tokens). A patch in a 0.4B vision encoder costs about a quarter of a token. Only the order of
//! the costs matters.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use serde::{Deserialize, Serialize};
use settings::Choice;

use crate::row::Length;

/// Default number of new samples per window of a best-fit packer.
pub(crate) const WINDOW_SAMPLES: usize = 1000;

/// Which samples share a pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum PackingStrategy {
    /// Consecutive samples. A pack is closed when the next sample does not fit.
    Sequential,
    /// Best-fit decreasing in windows of `packing_window` samples.
    #[default]
    BestFit,
}

/// How samples are joined into packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Each pack holds one sample.
    Off,
    /// A pack may hold several samples.
    On {
        /// Maximum number of tokens of one pack, vision tokens included.
        length: NonZeroU32,
        /// How the samples of a pack are chosen.
        strategy: PackingStrategy,
        /// How samples longer than `length` are handled.
        overlong: Overlong,
    },
}

/// How samples longer than a pack are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlong {
    /// The sample is rejected with the reason `overlong`.
    Reject,
    /// The sample becomes a pack of its own.
    Alone,
}

impl Packing {
    /// Maximum number of tokens of a pack of several samples; `None` with packing off.
    pub(crate) fn max_tokens(self) -> Option<usize> {
        match self {
            Self::Off => None,
            Self::On { length, .. } => Some(length.get() as usize),
        }
    }

    /// Number of tokens that a pack of `num_tokens` tokens could hold, for the packing efficiency:
    /// the maximum, or `num_tokens` for a longer sample. `None` with packing off.
    pub fn capacity(self, num_tokens: usize) -> Option<usize> {
        self.max_tokens().map(|max_tokens| num_tokens.max(max_tokens))
    }
}

/// Further settings that determine which samples share a pack, and the order of packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRules {
    /// Number of new samples that a best-fit packer packs together.
    pub window: NonZeroUsize,
    /// Maximum number of visual patches of one pack. A sample with more becomes a pack of its own.
    pub max_patches: Option<NonZeroU32>,
    /// Size of the pixel values of one patch, in bytes.
    pub patch_bytes: NonZeroU64,
    /// The packs of a step. If set, packs of similar cost are grouped into steps.
    pub balanced_step: Option<StepPacks>,
}

impl PackRules {
    fn patches(&self, length: Length) -> u64 {
        length.pixel_bytes / self.patch_bytes
    }
}

/// Joins the samples of one epoch, which must be pushed by ascending position.
#[derive(Debug)]
pub(crate) struct Packer<T> {
    packing: Packing,
    rules: PackRules,
    pending: Vec<Item<T>>, // ascending; sequential: the open pack, best fit: old and new samples
    new: usize, // number of samples at the end of `pending` that arrived after the last window
}

impl<T> Packer<T> {
    /// Creates a packer with the samples `pending`, whose positions [`Packer::held`] returned at
    /// the end of a step.
    pub(crate) fn new(packing: Packing, rules: PackRules, pending: Vec<Item<T>>) -> Self {
        Self { packing, rules, pending, new: 0 }
    }

    /// Positions of the pending samples, which are in no pack yet.
    pub(crate) fn held(&self) -> impl Iterator<Item = u64> + '_ {
        self.pending.iter().map(|item| item.position)
    }

    /// Adds the next sample and returns the completed packs, in order.
    ///
    /// If it returns no pack, a best-fit packer may be inside a window. [`Packer::held`] is its
    /// complete state only directly after a call that returned packs.
    pub(crate) fn push(&mut self, item: Item<T>) -> Vec<Vec<Item<T>>> {
        match self.packing {
            Packing::Off => vec![vec![item]],
            Packing::On { length, strategy: PackingStrategy::Sequential, .. } => {
                let capacity = self.capacity(length);
                let mut sizes = self.pending.iter().map(|pending| self.size(pending));
                let free = sizes.try_fold(capacity, Capacity::checked_sub);
                let fits = free.is_some_and(|free| free.checked_sub(self.size(&item)).is_some());
                let packed = if fits { Vec::new() } else { self.finish() };
                self.pending.push(item);
                packed
            }
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                self.new += 1;
                self.pending.push(item);
                if self.new < self.rules.window.get() {
                    return Vec::new();
                }
                self.new = 0;
                let bins = self.bins(length);
                let (mut packed, mut pending) = split_off_emptiest(bins, &self.pending, length);
                if let Some(step) = self.rules.balanced_step {
                    // emit whole steps only; the emptiest bins are at the end and stay pending
                    let step = step.count();
                    pending.extend(packed.split_off(packed.len() / step * step.get()));
                }
                self.take(packed, pending)
            }
        }
    }

    /// Ends the epoch: packs all pending samples.
    pub(crate) fn finish(&mut self) -> Vec<Vec<Item<T>>> {
        self.new = 0;
        if self.pending.is_empty() {
            return Vec::new();
        }
        match self.packing {
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                let bins = self.bins(length);
                self.take(bins, Vec::new())
            }
            _ => vec![std::mem::take(&mut self.pending)],
        }
    }

    fn bins(&self, length: NonZeroU32) -> Vec<Bin> {
        let sizes: Vec<Capacity> = self.pending.iter().map(|item| self.size(item)).collect();
        best_fit_decreasing(&sizes, self.capacity(length))
    }

    fn capacity(&self, length: NonZeroU32) -> Capacity {
        let patches = self.rules.max_patches.map_or(u64::MAX, |max| u64::from(max.get()));
        Capacity { tokens: length.get() as usize, patches }
    }

    /// Capacity that a sample uses.
    fn size(&self, item: &Item<T>) -> Capacity {
        Capacity { tokens: item.length.tokens, patches: self.rules.patches(item.length) }
    }

    /// Converts the bins `packed` to packs, ordered by the position of their longest samples or
    /// grouped into steps of similar cost. The samples of the bins `pending` stay.
    fn take(&mut self, mut packed: Vec<Bin>, pending: Vec<Bin>) -> Vec<Vec<Item<T>>> {
        // not by the first sample: packs of many short samples would come first, because their
        // first samples have low positions
        packed.sort_unstable_by_key(|bin| bin.longest);
        if let Some(step) = self.rules.balanced_step {
            let size = |sample: usize| self.size(&self.pending[sample]);
            packed = group_by_cost(packed, step, size);
        }
        let mut items: Vec<Option<Item<T>>> = self.pending.drain(..).map(Some).collect();
        let mut take = |sample: usize| items[sample].take().expect("a sample is in one bin");
        let packs = packed
            .into_iter()
            .map(|bin| bin.samples.into_iter().map(&mut take).collect())
            .collect();
        let mut rest: Vec<usize> = pending.into_iter().flat_map(|bin| bin.samples).collect();
        rest.sort_unstable();
        self.pending = rest.into_iter().map(take).collect();
        packs
    }
}

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

/// Inverse of the maximum share of bins that stay pending, to be filled better in the next window.
const PENDING_SHARE: usize = 4;
/// Inverse of the share of a bin's tokens that may be free if the bin counts as full.
const FULL: usize = 512;

/// Tokens and patches that a pack can hold, or that a sample uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capacity {
    tokens: usize,
    patches: u64,
}

impl Capacity {
    /// Subtracts the size of a sample; `None` if it does not fit.
    fn checked_sub(self, size: Self) -> Option<Self> {
        Some(Self {
            tokens: self.tokens.checked_sub(size.tokens)?,
            patches: self.patches.checked_sub(size.patches)?,
        })
    }
}

/// Samples that share a pack.
#[derive(Debug)]
struct Bin {
    /// Indices into the window, ascending; never empty.
    samples: Vec<usize>,
    /// Index of the longest sample.
    longest: usize,
    free: Capacity,
}

/// Puts each sample, from the longest to the shortest, into the fullest bin that it fits into; of
/// equally full bins, the earlier one is used. A sample that does not fit into an empty bin gets a
/// bin of its own.
fn best_fit_decreasing(sizes: &[Capacity], capacity: Capacity) -> Vec<Bin> {
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
fn split_off_emptiest<T>(
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

/// The packs of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepPacks {
    /// Number of micro-batches. Ranks take turns: micro-batch `n` belongs to rank `n % world`.
    pub micro_batches: NonZeroUsize,
    /// Number of packs of a micro-batch.
    pub batch_size: NonZeroUsize,
}

impl StepPacks {
    /// Number of packs.
    pub fn count(self) -> NonZeroUsize {
        self.micro_batches.saturating_mul(self.batch_size)
    }
}

/// Number of tokens of a sample at which attention costs as much as everything else.
const EVEN_TOKENS: u64 = 24_000;
/// Number of patches that cost as much as a token.
const PATCHES_PER_TOKEN: u64 = 4;

/// Cost of the samples of a pack, times [`EVEN_TOKENS`].
fn cost(samples: impl Iterator<Item = Capacity>) -> u64 {
    samples
        .map(|Capacity { tokens, patches }| {
            let tokens = tokens as u64;
            tokens.saturating_mul(EVEN_TOKENS + tokens)
                + patches.saturating_mul(EVEN_TOKENS / PATCHES_PER_TOKEN)
        })
        .fold(0, u64::saturating_add)
}

/// Groups packs of similar cost into steps, and returns the packs step by step.
///
/// Steps are ordered by the first of their packs in the given order, so that expensive and cheap
/// steps are mixed. Within a step, the micro-batches at even and at odd places have similar cost,
/// and so on for each of these halves: so `2^n` ranks that take turns have similar work.
fn group_by_cost(packs: Vec<Bin>, step: StepPacks, size: impl Fn(usize) -> Capacity) -> Vec<Bin> {
    let num_packs = step.count().get();
    let cost = |bin: &Bin| cost(bin.samples.iter().map(|sample| size(*sample)));
    let mut packs: Vec<(usize, u64, Bin)> =
        packs.into_iter().enumerate().map(|(place, bin)| (place, cost(&bin), bin)).collect();
    packs.sort_by_key(|(_, cost, _)| *cost); // stable: packs of equal cost keep their order
    let mut steps: Vec<Vec<(usize, Bin)>> = Vec::new();
    for (place, _, bin) in packs {
        match steps.last_mut().filter(|last| last.len() < num_packs) {
            Some(last) => last.push((place, bin)),
            None => steps.push(vec![(place, bin)]),
        }
    }
    // an incomplete step comes last; it occurs at the end of an epoch only
    let partial = steps.pop_if(|last| last.len() < num_packs);
    steps.sort_unstable_by_key(|packs| packs.iter().map(|(place, _)| *place).min());
    let halved = |packs: Vec<(usize, Bin)>| {
        let packs = packs.into_iter().map(|(_, bin)| (cost(&bin), bin)).collect();
        take_turns(halve(packs), step)
    };
    steps
        .into_iter()
        .flat_map(halved)
        .chain(partial.into_iter().flatten().map(|(_, bin)| bin))
        .collect()
}

/// Orders packs so that both halves have similar cost, and recursively the halves of each half.
fn halve(mut packs: Vec<(u64, Bin)>) -> Vec<Bin> {
    if packs.len() < 2 {
        return packs.into_iter().map(|(_, bin)| bin).collect();
    }
    packs.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    let room = [packs.len() / 2, packs.len() - packs.len() / 2];
    let mut halves = [Vec::new(), Vec::new()];
    let mut sums = [0u64; 2];
    // The most expensive pack goes to the cheaper half that has room, and so on.
    for pack in packs {
        let cheaper = usize::from(sums[1] < sums[0]);
        let half = if halves[cheaper].len() < room[cheaper] { cheaper } else { 1 - cheaper };
        sums[half] = sums[half].saturating_add(pack.0);
        halves[half].push(pack);
    }
    halves.into_iter().flat_map(halve).collect()
}

/// Orders packs whose halves have similar cost so that the micro-batches of the two halves
/// alternate, and recursively those of each half.
fn take_turns(packs: Vec<Bin>, step: StepPacks) -> Vec<Bin> {
    let batch_size = step.batch_size.get();
    let mut micro_batches = Vec::new();
    let mut packs = packs.into_iter();
    for _ in 0..step.micro_batches.get() {
        micro_batches.push(Some(packs.by_ref().take(batch_size).collect::<Vec<_>>()));
    }
    let order = turns(micro_batches.len());
    order.into_iter().filter_map(|at| micro_batches[at].take()).flatten().collect()
}

fn turns(len: usize) -> Vec<usize> {
    if !len.is_multiple_of(2) {
        return (0..len).collect();
    }
    turns(len / 2).into_iter().flat_map(|at| [at, at + len / 2]).collect()
}
