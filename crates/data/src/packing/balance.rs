//! Orders packs so that the packs of one step have similar cost.
//!
//! The cost of a pack, in tokens, is `tokens + sum(tokens of a sample ^ 2) / 24,000 + patches / 4`.
//! For a 2B decoder, attention over a sample of 24,000 tokens costs as much as all matrix products
//! (8B: 48,000 tokens). A patch in a 0.4B vision encoder costs about a quarter of a token. Only the
//! order of the costs matters.

use std::num::NonZeroUsize;

use super::best_fit::{Bin, Capacity};

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
pub(super) fn cost(samples: impl Iterator<Item = Capacity>) -> u64 {
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
pub(super) fn group_by_cost(
    packs: Vec<Bin>,
    step: StepPacks,
    size: impl Fn(usize) -> Capacity,
) -> Vec<Bin> {
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
