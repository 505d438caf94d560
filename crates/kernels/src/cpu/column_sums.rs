//! Column sums computed inside a pass that also does other work on the rows. The result has the
//! same bits for any number of threads.

use super::{self as cpu, ROWS};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Column sums of `width` columns, with one partial sum for each block of [`ROWS`] rows.
pub(crate) struct ColumnSums {
    parts: Vec<Mutex<Vec<f32>>>,
    width: usize,
}

impl ColumnSums {
    /// Creates sums of zero. With `wanted == false` there are no columns, and [`Self::add`] does
    /// nothing.
    pub(crate) fn new(num_rows: usize, width: usize, wanted: bool) -> Self {
        let width = if wanted { width } else { 0 };
        let parts = (0..num_rows.div_ceil(ROWS)).map(|_| Mutex::default()).collect();
        Self { parts, width }
    }

    /// Calls `add` with the partial sum of the block that contains `rows`, unless there are no
    /// columns.
    pub(crate) fn add(&self, rows: &Range<usize>, add: impl FnOnce(&mut [f32])) {
        if self.width == 0 {
            return;
        }
        // Each block belongs to one task, so this lock is never contended.
        let mut part = self.parts[rows.start / ROWS].lock().unwrap_or_else(PoisonError::into_inner);
        part.resize(self.width, 0.0);
        add(&mut part);
    }

    /// Returns the total of the partial sums, added in the order of the blocks.
    pub(crate) fn finish(self) -> Vec<f32> {
        let mut sums = vec![0f32; self.width];
        for part in self.parts {
            cpu::add(&part.into_inner().unwrap_or_else(PoisonError::into_inner), &mut sums);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_sums_match_those_of_a_separate_pass() {
        let row = |i: usize| [(i as f32).sin(), (i as f32).cos()];
        let add = |rows: Range<usize>, sums: &mut [f32]| {
            rows.for_each(|i| cpu::add(&row(i), sums));
        };
        for n in [0, 1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 3] {
            let sums = ColumnSums::new(n, 2, true);
            for start in (0..n).step_by(7) {
                let end = (start + 7).min(n);
                let middle = (end / ROWS * ROWS).clamp(start, end); // stay within a block
                for rows in [start..middle, middle..end] {
                    if !rows.is_empty() {
                        sums.add(&rows, |sums| add(rows.clone(), sums));
                    }
                }
            }
            assert_eq!(sums.finish(), cpu::column_sums(n, 2, add));
            assert!(ColumnSums::new(n, 2, false).finish().is_empty());
        }
    }
}
