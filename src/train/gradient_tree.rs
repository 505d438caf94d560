//! Adds up the gradients of the micro-batches of a step, in an order that is the same for every
//! number of ranks.
//!
//! The micro-batches have numbered slots. The sum of a range of slots is the sum of its first half
//! plus the sum of its second half, each computed in the same way. A rank owns an aligned range, and
//! the ranks are added by the same rule, so 1, 2 and 4 ranks compute the same bits.

use super::step::StepError;
use crate::dist::Collective;
use crate::ops;
use crate::tape::{GradSink, Gradients, Param};
use candle_core::Tensor;
use std::cell::RefCell;

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

/// The number of gradient buffers that the tree over `slots` micro-batches needs at a time.
pub fn buffers_of_tree(slots: usize) -> usize {
    let depth = slots.max(1).next_power_of_two().trailing_zeros();
    depth as usize + 1
}

/// The sums of the ranges of slots that are complete so far, from left to right.
pub(super) struct GradientTree<'a> {
    buffers: &'a [Gradients],
    num_slots: usize,
    /// For each range, the index of its buffer; `None` if no slot of it has a micro-batch.
    sums: Vec<Option<usize>>,
}

impl<'a> GradientTree<'a> {
    /// With a single buffer, all gradients are added in place, in the order of the slots.
    pub(super) fn new(buffers: &'a [Gradients], num_slots: usize) -> Self {
        Self { buffers, num_slots, sums: Vec::new() }
    }

    fn is_in_place(&self) -> bool {
        self.buffers.len() == 1
    }

    /// The index of the buffer for the next micro-batch: sums use the buffers before it.
    fn next_index(&self) -> usize {
        if self.is_in_place() { 0 } else { self.sums.iter().flatten().count() }
    }

    /// The buffer for the gradients of the next micro-batch.
    pub(super) fn next_buffer(&self) -> Result<&'a Gradients> {
        let buffer = &self.buffers[self.next_index()];
        if !self.is_in_place() || self.sums.iter().all(Option::is_none) {
            zero(buffer)?;
        }
        Ok(buffer)
    }

    /// Records the micro-batch of `slot`, whose gradients are in [`Self::next_buffer`], or that the
    /// slot has none. Adds up the ranges that end with it.
    pub(super) fn complete(&mut self, slot: usize, has_batch: bool) -> Result<()> {
        self.sums.push(has_batch.then(|| self.next_index()));
        for _ in 0..ranges_ending_after(slot, 0, self.num_slots) {
            let (right, left) = (self.sums.pop().flatten(), self.sums.pop().flatten());
            if let (Some(left), Some(right)) = (left, right)
                && !self.is_in_place()
            {
                add(&self.buffers[left], &self.buffers[right])?;
            }
            self.sums.push(left.or(right));
        }
        Ok(())
    }

    /// The sums that the last micro-batch joins, from the nearest to the first.
    pub(super) fn open_sums(&self) -> Vec<&'a Gradients> {
        if self.is_in_place() {
            return Vec::new();
        }
        self.sums.iter().rev().flatten().map(|index| &self.buffers[*index]).collect()
    }
}

/// The number of ranges of two or more slots that end with `slot`.
fn ranges_ending_after(slot: usize, start: usize, end: usize) -> usize {
    if end - start < 2 {
        return 0;
    }
    let middle = start + (end - start) / 2;
    if slot + 1 == end {
        1 + ranges_ending_after(slot, middle, end)
    } else if slot < middle {
        ranges_ending_after(slot, start, middle)
    } else {
        ranges_ending_after(slot, middle, end)
    }
}

/// Sets all buffers to 0.
pub(super) fn zero(grads: &Gradients) -> Result<()> {
    let buffers: Vec<&Tensor> = grads.iter().flatten().collect();
    ops::fill_zero_all(&buffers)
}

fn add(sum: &Gradients, other: &Gradients) -> Result<()> {
    let mut pairs = sum.iter().flatten().zip(other.iter().flatten());
    pairs.try_for_each(|(sum, other)| ops::add_in_place(sum, other))
}

/// Receives the gradients of the last micro-batch of a rank. As soon as a stage is finished, its
/// gradients are added to the sums before it, and the sum over ranks starts.
pub(super) struct LastMicroBatch<'a> {
    grads: &'a Gradients,
    open_sums: Vec<&'a Gradients>,
    sums: Option<&'a dyn Collective>,
    /// The first error of [`GradSink::finished`], which cannot return one.
    error: RefCell<Result<(), StepError>>,
}

impl<'a> LastMicroBatch<'a> {
    pub(super) fn new(
        grads: &'a Gradients,
        open_sums: Vec<&'a Gradients>,
        sums: Option<&'a dyn Collective>,
    ) -> Self {
        Self { grads, open_sums, sums, error: RefCell::new(Ok(())) }
    }

    /// Returns the first error.
    pub(super) fn result(self) -> Result<(), StepError> {
        self.error.into_inner()
    }

    fn add_up(&self, params: &[&Param]) -> Result<(), StepError> {
        let mut sums = Vec::new();
        for param in params {
            let Some(mut sum) = self.grads.buffer(param) else { continue };
            for earlier in self.open_sums.iter().filter_map(|open| open.buffer(param)) {
                ops::add_in_place(earlier, sum)?;
                sum = earlier;
            }
            sums.push(sum.clone());
        }
        match self.sums {
            Some(collective) if !sums.is_empty() => Ok(collective.start_sum(sums).map(|_| ())?),
            _ => Ok(()),
        }
    }
}

impl GradSink for LastMicroBatch<'_> {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        self.grads.buffer(param)
    }

    fn finished(&self, params: &[&Param]) {
        let mut result = self.error.borrow_mut();
        if result.is_ok() {
            *result = self.add_up(params);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::Trainable;
    use candle_core::{DType, Device};

    /// The sum of `leaves[start..end]` by the definition; `None` if all are missing.
    fn expected(leaves: &[Option<f32>]) -> Option<f32> {
        match leaves {
            [] => None,
            [leaf] => *leaf,
            _ => {
                let (left, right) = leaves.split_at(leaves.len() / 2);
                match (expected(left), expected(right)) {
                    (Some(left), Some(right)) => Some(left + right),
                    (left, right) => left.or(right),
                }
            }
        }
    }

    /// The sum that the tree computes with a buffer of one element.
    fn sum(leaves: &[Option<f32>]) -> f32 {
        let zeros = || Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let params = [Param::new("w", 0, zeros())];
        let buffers: Vec<Gradients> = (0..buffers_of_tree(leaves.len()))
            .map(|_| Gradients::zeros(&params, &[Trainable::Yes], &Device::Cpu).unwrap())
            .collect();
        let mut tree = GradientTree::new(&buffers, leaves.len());
        let last = leaves.iter().rposition(Option::is_some).unwrap();
        for (slot, leaf) in leaves.iter().enumerate().take(last + 1) {
            if let Some(leaf) = leaf {
                let grads = tree.next_buffer().unwrap();
                let leaf = Tensor::new(&[*leaf], &Device::Cpu).unwrap();
                ops::add_in_place(grads.get(0).unwrap(), &leaf).unwrap();
                if slot == last {
                    let sink = LastMicroBatch::new(grads, tree.open_sums(), None);
                    sink.finished(&[&params[0]]);
                    sink.result().unwrap();
                    break;
                }
            }
            tree.complete(slot, leaf.is_some()).unwrap();
        }
        buffers[0].get(0).unwrap().to_vec1::<f32>().unwrap()[0]
    }

    #[test]
    fn the_tree_is_that_of_the_definition_for_any_number_of_slots_and_gaps() {
        for slots in 1..=13usize {
            for missing in 0..1u32 << slots {
                let leaf = |slot: usize| 0.1 * (slot as f32 + 1.0).powi(3) + 1e-3;
                let leaves: Vec<Option<f32>> =
                    (0..slots).map(|slot| (missing >> slot & 1 == 0).then(|| leaf(slot))).collect();
                let Some(expected) = expected(&leaves) else { continue };
                assert_eq!(sum(&leaves).to_bits(), expected.to_bits(), "{leaves:?}");
            }
            assert!(buffers_of_tree(slots) <= slots.ilog2() as usize + 2);
        }
    }
}
