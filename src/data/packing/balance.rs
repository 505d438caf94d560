//! Packs in an order in which those of one step cost alike.
//!
//! Cost, in tokens: `tokens + sum(tokens of a sample ^ 2) / 24,000 + patches / 4`. Attention costs as
//! much as all matrices of a 2B decoder at 24,000 tokens (an 8B one: at 48,000), and a patch of a 0.4B
//! vision tower about a quarter of a token. Only the order of costs matters.

use std::num::NonZeroUsize;

use super::best_fit::{Bin, Room};

/// Tokens of a sample at which attention costs as much as everything else.
const EVEN_TOKENS: u64 = 24_000;
/// Patches that cost as much as a token.
const PATCHES_A_TOKEN: u64 = 4;

/// Cost of samples that share a pack, times [`EVEN_TOKENS`].
pub(super) fn cost(samples: impl Iterator<Item = Room>) -> u64 {
    samples
        .map(|Room { tokens, patches }| {
            let tokens = tokens as u64;
            tokens.saturating_mul(EVEN_TOKENS + tokens)
                + patches.saturating_mul(EVEN_TOKENS / PATCHES_A_TOKEN)
        })
        .fold(0, u64::saturating_add)
}

/// Steps of packs that cost alike, one after the other: by the arrival of their first samples, so
/// that costly and cheap ones are mixed. Inside a step packs keep their order.
pub(super) fn in_steps_of_like_cost(
    packs: Vec<Bin>,
    step: NonZeroUsize,
    size: impl Fn(usize) -> Room,
) -> Vec<Bin> {
    let cost = |bin: &Bin| cost(bin.samples.iter().map(|sample| size(*sample)));
    let mut packs: Vec<(usize, u64, Bin)> =
        packs.into_iter().enumerate().map(|(place, bin)| (place, cost(&bin), bin)).collect();
    packs.sort_by_key(|(_, cost, _)| *cost); // stable: ties stay in order
    let mut steps: Vec<Vec<(usize, Bin)>> = Vec::new();
    for (place, _, bin) in packs {
        match steps.last_mut().filter(|last| last.len() < step.get()) {
            Some(last) => last.push((place, bin)),
            None => steps.push(vec![(place, bin)]),
        }
    }
    // the one that is not full is the last step of an epoch
    let partial = steps.pop_if(|last| last.len() < step.get());
    for packs in &mut steps {
        packs.sort_unstable_by_key(|(place, _)| *place);
    }
    steps.sort_unstable_by_key(|packs| packs[0].0);
    steps.into_iter().chain(partial).flatten().map(|(_, bin)| bin).collect()
}
