//! Packing: joins samples into packs.
//!
//! A packer uses only the lengths of samples, so that a plan can compute the packs of a run without
//! reading the samples. Its state is the list of positions of the pending samples, so that a
//! resumed run continues with the same packs.

mod balance;
mod best_fit;
mod item;
#[cfg(test)]
mod tests;

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

pub use balance::StepPacks;
use balance::group_by_cost;
use best_fit::{Bin, Capacity, best_fit_decreasing, split_off_emptiest};
pub(crate) use item::Item;

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

    /// Capacity of an empty pack.
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
