//! The gradients of a run in one process.

use super::super::error::Result;
use super::rounds::{num_open, pairs_after};
use crate::ops;
use crate::tape::{Gradients, Param};

/// The sums of the ranges of slots that are complete so far, from left to right.
pub(in super::super) struct Tree<'a> {
    buffers: &'a [Gradients],
    params: &'a [Param],
    /// For each range, the index of its buffer; `None` if no slot of it has a micro-batch.
    sums: Vec<Option<usize>>,
}

/// The number of gradient buffers that the sum of `slots` micro-batches needs at a time.
pub fn buffers_of_tree(slots: usize) -> usize {
    (0..slots).map(num_open).max().unwrap_or_default() + 1
}

impl<'a> Tree<'a> {
    /// With a single buffer, all gradients are added in place, in the order of the slots.
    pub(super) fn new(buffers: &'a [Gradients], params: &'a [Param]) -> Self {
        Self { buffers, params, sums: Vec::new() }
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
            buffer.begin(self.params)?;
        }
        Ok(buffer)
    }

    /// Records the micro-batch of `slot`, whose gradients are in [`Self::next_buffer`], or that the
    /// slot has none. Adds up the ranges that end with it.
    pub(super) fn complete(&mut self, slot: usize, has_batch: bool) -> Result<()> {
        if has_batch {
            self.buffers[self.next_index()].end(self.params)?;
        }
        self.sums.push(has_batch.then(|| self.next_index()));
        (0..pairs_after(slot)).try_for_each(|_| self.join())
    }

    /// Adds up all ranges. The sum is in the first buffer.
    pub(super) fn finish(mut self) -> Result<()> {
        if self.sums.iter().all(Option::is_none) {
            self.buffers[0].begin(self.params)?;
            return Ok(self.buffers[0].end(self.params)?);
        }
        while self.sums.len() > 1 {
            self.join()?;
        }
        Ok(())
    }

    /// Adds the last sum to the one before it.
    fn join(&mut self) -> Result<()> {
        let (right, left) = (self.sums.pop().flatten(), self.sums.pop().flatten());
        if let (Some(left), Some(right)) = (left, right)
            && !self.is_in_place()
        {
            add(&self.buffers[left], &self.buffers[right])?;
        }
        self.sums.push(left.or(right));
        Ok(())
    }
}

fn add(sum: &Gradients, other: &Gradients) -> Result<()> {
    let mut pairs = sum.iter().flatten().zip(other.iter().flatten());
    Ok(pairs.try_for_each(|(sum, other)| ops::add_in_place(sum, other))?)
}

#[cfg(test)]
mod tests {
    use super::super::rounds::tests::expected;
    use super::*;
    use crate::tape::{Param, Trainable};
    use candle_core::{DType, Device, Tensor};

    /// The sum that the tree computes with buffers of one element.
    fn sum(leaves: &[Option<f32>]) -> f32 {
        let zeros = || Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let params = [Param::new("w", 0, zeros())];
        let buffers: Vec<Gradients> = (0..buffers_of_tree(leaves.len()))
            .map(|_| Gradients::zeros(&params, &[Trainable::Yes], &Device::Cpu).unwrap())
            .collect();
        let mut tree = Tree::new(&buffers, &params);
        for (slot, leaf) in leaves.iter().enumerate() {
            if let Some(leaf) = leaf {
                let grads = tree.next_buffer().unwrap();
                let leaf = Tensor::new(&[*leaf], &Device::Cpu).unwrap();
                ops::add_in_place(grads.get(0).unwrap(), &leaf).unwrap();
            }
            tree.complete(slot, leaf.is_some()).unwrap();
        }
        tree.finish().unwrap();
        buffers[0].get(0).unwrap().to_vec1::<f32>().unwrap()[0]
    }

    #[test]
    fn the_tree_is_that_of_the_definition_for_any_number_of_slots_and_gaps() {
        for slots in 1..=13usize {
            for missing in 0..1u32 << slots {
                let leaf = |slot: usize| 0.1 * (slot as f32 + 1.0).powi(3) + 1e-3;
                let leaves: Vec<Option<f32>> =
                    (0..slots).map(|slot| (missing >> slot & 1 == 0).then(|| leaf(slot))).collect();
                let expected = expected(&leaves).unwrap_or_default();
                assert_eq!(sum(&leaves).to_bits(), expected.to_bits(), "{leaves:?}");
            }
        }
    }
}
