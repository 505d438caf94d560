//! Which samples share a pack.
//!
//! A packer sees lengths only, so that a plan can foretell what a run does, and what it holds can
//! be told as stream positions, so that a resumed run goes on with the same packs.

mod balance;
mod best_fit;
#[cfg(test)]
mod tests;

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use balance::in_steps_of_like_cost;
use best_fit::{Bin, Room, best_fit_decreasing, split_off_emptiest};

use crate::data::config::PackingStrategy;
use crate::data::row::Length;

/// New samples after which a window is packed, unless the config says otherwise.
pub(in crate::data) const WINDOW_SAMPLES: usize = 1000;

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
    /// Tokens that samples may share; `None` with packing off.
    pub(in crate::data) fn room(self) -> Option<usize> {
        match self {
            Self::Off => None,
            Self::On { length, .. } => Some(length.get() as usize),
        }
    }

    /// Tokens that a pack of `num_tokens` offers room for; `None` with packing off.
    pub fn capacity(self, num_tokens: usize) -> Option<usize> {
        self.room().map(|room| num_tokens.max(room))
    }
}

/// What else decides which samples share a pack, and in which order packs come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRules {
    /// New samples that a best-fit packer looks at together.
    pub window: NonZeroUsize,
    /// Upper bound on the visual patches of one pack; a sample with more goes alone.
    pub max_patches: Option<NonZeroU32>,
    /// Bytes of the pixel values of one patch.
    pub patch_bytes: NonZeroU64,
    /// Packs a step, if the packs of a step shall cost alike.
    pub balanced_step: Option<NonZeroUsize>,
}

impl PackRules {
    fn patches(&self, length: Length) -> u64 {
        length.pixel_bytes / self.patch_bytes
    }
}

/// A sample on its way into a pack.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::data) struct Item<T> {
    /// Position in the order of the epoch.
    pub position: u64,
    /// Size.
    pub length: Length,
    /// The sample itself, or nothing when only packs are counted.
    pub value: T,
}

/// Joins the samples of one epoch, which arrive by ascending position.
#[derive(Debug)]
pub(in crate::data) struct Packer<T> {
    packing: Packing,
    rules: PackRules,
    held: Vec<Item<T>>, // ascending; sequential: the open pack, best fit: carried ones, new ones
    new: usize,         // the last of `held`, arrived since a window was packed
}

impl<T> Packer<T> {
    /// A packer that holds `carry`, as [`Packer::held`] told it at the end of a step.
    pub(in crate::data) fn new(packing: Packing, rules: PackRules, carry: Vec<Item<T>>) -> Self {
        Self { packing, rules, held: carry, new: 0 }
    }

    /// Positions of the samples that are in no pack yet.
    pub(in crate::data) fn held(&self) -> impl Iterator<Item = u64> + '_ {
        self.held.iter().map(|item| item.position)
    }

    /// Takes the next sample; returns the packs that it completes, in order.
    ///
    /// While it returns none, a best-fit packer is in the middle of a window: only after packs came
    /// out is [`Packer::held`] all of its state.
    pub(in crate::data) fn push(&mut self, item: Item<T>) -> Vec<Vec<Item<T>>> {
        match self.packing {
            Packing::Off => vec![vec![item]],
            Packing::On { length, strategy: PackingStrategy::Sequential, .. } => {
                let room = self.room(length);
                let mut held = self.held.iter().map(|held| self.room_of(held));
                let free = held.try_fold(room, Room::less);
                let fits = free.is_some_and(|free| free.less(self.room_of(&item)).is_some());
                let closed = if fits { Vec::new() } else { self.finish() };
                self.held.push(item);
                closed
            }
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                self.new += 1;
                self.held.push(item);
                if self.new < self.rules.window.get() {
                    return Vec::new();
                }
                self.new = 0;
                let bins = self.bins(length);
                let (mut emitted, mut carried) = split_off_emptiest(bins, &self.held, length);
                if let Some(step) = self.rules.balanced_step {
                    // the emptiest are the last: so steps end where windows do
                    carried.extend(emitted.split_off(emitted.len() / step * step.get()));
                }
                self.take(emitted, carried)
            }
        }
    }

    /// Ends the epoch: everything held becomes packs.
    pub(in crate::data) fn finish(&mut self) -> Vec<Vec<Item<T>>> {
        self.new = 0;
        if self.held.is_empty() {
            return Vec::new();
        }
        match self.packing {
            Packing::On { length, strategy: PackingStrategy::BestFit, .. } => {
                let bins = self.bins(length);
                self.take(bins, Vec::new())
            }
            _ => vec![std::mem::take(&mut self.held)],
        }
    }

    fn bins(&self, length: NonZeroU32) -> Vec<Bin> {
        let sizes: Vec<Room> = self.held.iter().map(|item| self.room_of(item)).collect();
        best_fit_decreasing(&sizes, self.room(length))
    }

    /// What an empty pack has.
    fn room(&self, length: NonZeroU32) -> Room {
        let patches = self.rules.max_patches.map_or(u64::MAX, |most| u64::from(most.get()));
        Room { tokens: length.get() as usize, patches }
    }

    /// What a sample takes.
    fn room_of(&self, item: &Item<T>) -> Room {
        Room { tokens: item.length.tokens, patches: self.rules.patches(item.length) }
    }

    /// Makes packs of the emitted bins, by the arrival of their longest samples or in steps of like
    /// cost; keeps the rest.
    fn take(&mut self, mut emitted: Vec<Bin>, carried: Vec<Bin>) -> Vec<Vec<Item<T>>> {
        // not by the first arrival: packs of many short samples have early ones and would come first
        emitted.sort_unstable_by_key(|bin| bin.longest);
        if let Some(step) = self.rules.balanced_step {
            let size = |sample: usize| self.room_of(&self.held[sample]);
            emitted = in_steps_of_like_cost(emitted, step, size);
        }
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
