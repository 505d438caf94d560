//! Where the blocks of an op put their results: new memory, which nobody fills with zeros before; and
//! partial sums, added up in order.

#![expect(unsafe_code, reason = "memory counts as elements once every block has been written")]

use super::cpu::{self, ROWS};
use rayon::prelude::*;
use std::mem::MaybeUninit;

/// Elements that do not exist before a task has written them.
pub(super) struct Output {
    elements: Vec<f32>, // of length 0 until the end
    len: usize,
}

impl Output {
    /// Memory for `len` elements.
    pub(super) fn new(len: usize) -> Self {
        Self { elements: Vec::with_capacity(len), len }
    }

    /// Blocks of `block` elements in order, the last one shorter.
    pub(super) fn blocks(
        &mut self,
        block: usize,
    ) -> impl IndexedParallelIterator<Item = &mut [MaybeUninit<f32>]> {
        self.elements.spare_capacity_mut()[..self.len].par_chunks_mut(block.max(1))
    }

    /// All elements.
    ///
    /// # Safety
    /// Every element of every block has been written.
    pub(super) unsafe fn finish(mut self) -> Vec<f32> {
        // SAFETY: the capacity is at least `len`, and all of it was written by the caller's promise.
        unsafe { self.elements.set_len(self.len) };
        self.elements
    }
}

/// Sums over rows, in a part for each block of [`ROWS`] rows.
pub(super) struct ColumnSums {
    partials: Vec<Vec<f32>>,
    width: usize,
}

impl ColumnSums {
    /// For `width` sums over `num_rows` rows. Of width 0 where nobody asks for them.
    pub(super) fn new(num_rows: usize, width: usize) -> Self {
        Self { partials: vec![Vec::new(); num_rows.div_ceil(ROWS)], width }
    }

    /// Zeros to add to, one part a block.
    pub(super) fn blocks(&mut self) -> impl IndexedParallelIterator<Item = &mut [f32]> {
        let width = self.width;
        self.partials.par_iter_mut().map(move |partial| {
            partial.resize(width, 0.0);
            partial.as_mut_slice()
        })
    }

    /// The parts added up in the order of the blocks.
    pub(super) fn finish(self) -> Vec<f32> {
        let mut sums = vec![0f32; self.width];
        for partial in &self.partials {
            cpu::add(partial, &mut sums);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_and_in_order() {
        for (len, block) in [(0, 4), (1, 4), (7, 4), (8, 4), (1000, 1), (5, 0)] {
            let mut output = Output::new(len);
            output.blocks(block).enumerate().for_each(|(index, part)| {
                part.fill(MaybeUninit::new(index as f32));
            });
            let want: Vec<f32> = (0..len).map(|i| (i / block.max(1)) as f32).collect();
            // SAFETY: each block was filled.
            assert_eq!(unsafe { output.finish() }, want);
        }
    }

    #[test]
    fn partial_sums_are_those_of_column_sums() {
        let row = |i: usize| [(i as f32).sin(), (i as f32).cos()];
        let add = |rows: std::ops::Range<usize>, sums: &mut [f32]| {
            rows.for_each(|i| cpu::add(&row(i), sums));
        };
        for n in [0, 1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 3] {
            let mut sums = ColumnSums::new(n, 2);
            sums.blocks().enumerate().for_each(|(block, sums)| {
                add(block * ROWS..((block + 1) * ROWS).min(n), sums);
            });
            assert_eq!(sums.finish(), cpu::column_sums(n, 2, add));
        }
    }
}
