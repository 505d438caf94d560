//! Orders packs so that the packs of one step have similar cost.
//!
//! The cost of a pack, in tokens, is `tokens + sum(tokens of a sample ^ 2) / 24,000 + patches / 4`.
//! For a 2B decoder, attention over a sample of 24,000 tokens costs as much as all matrix products
//! (8B: 48,000 tokens). A patch in a 0.4B vision encoder costs about a quarter of a token. Only the
//! order of the costs matters.

use std::num::NonZeroUsize;

use super::best_fit::{Bin, Capacity};

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

/// Groups packs of similar cost into steps of `step` packs, and returns the packs step by step.
///
/// Steps are ordered by the first of their packs in the given order, so that expensive and cheap
/// steps are mixed. Packs keep their order within a step.
pub(super) fn group_by_cost(
    packs: Vec<Bin>,
    step: NonZeroUsize,
    size: impl Fn(usize) -> Capacity,
) -> Vec<Bin> {
    let cost = |bin: &Bin| cost(bin.samples.iter().map(|sample| size(*sample)));
    let mut packs: Vec<(usize, u64, Bin)> =
        packs.into_iter().enumerate().map(|(place, bin)| (place, cost(&bin), bin)).collect();
    packs.sort_by_key(|(_, cost, _)| *cost); // stable: packs of equal cost keep their order
    let mut steps: Vec<Vec<(usize, Bin)>> = Vec::new();
    for (place, _, bin) in packs {
        match steps.last_mut().filter(|last| last.len() < step.get()) {
            Some(last) => last.push((place, bin)),
            None => steps.push(vec![(place, bin)]),
        }
    }
    // an incomplete step comes last; it occurs at the end of an epoch only
    let partial = steps.pop_if(|last| last.len() < step.get());
    for packs in &mut steps {
        packs.sort_unstable_by_key(|(place, _)| *place);
    }
    steps.sort_unstable_by_key(|packs| packs[0].0);
    steps.into_iter().chain(partial).flatten().map(|(_, bin)| bin).collect()
}
