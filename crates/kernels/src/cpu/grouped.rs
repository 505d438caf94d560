//! Matrix products of the rows of each expert with its own weight, on the CPU.
//!
//! Shapes: `R` rows, of which expert `e` has rows `offsets[e]..offsets[e + 1]`.
//!
//! A task computes a block of the product of one expert, and threads take the next task, so uneven
//! experts do not leave a core idle.

#![expect(unsafe_code, reason = "tasks write disjoint parts of one matrix")]

use super::blocks::{Filled, Scratch, Values, to_bf16_block};
use super::products::{Matrix, Raw, Store, Threads, product};
use super::{Shared, for_each_task};
use candle_core::DType;
use half::bf16;
use std::ops::Range;

/// How the matrix of an expert is stored, for a product with `N` outputs and `K` inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightLayout {
    /// `[N, K]`: a row has the weights of an output.
    OfOutputs,
    /// `[K, N]`: a row has the weights of an input.
    OfInputs,
}

/// Maximum number of rows and of columns of a task.
const MAX_ROWS: usize = 384;
const MAX_COLUMNS: usize = 480;

/// A block of a matrix of an expert, or of its rows.
struct Task {
    expert: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// Splits a range into parts of nearly the same size, of at most `most` elements.
fn parts(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let num_parts = range.len().div_ceil(most).max(1);
    // A multiple of the sizes of tiles.
    let size = range.len().div_ceil(num_parts).next_multiple_of(48);
    let end = range.end;
    range.step_by(size.max(1)).map(move |start| start..(start + size).min(end))
}

/// Rows of each expert that has any.
fn experts(offsets: &[u32]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let rows = offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
    rows.enumerate().filter(|(_, rows)| !rows.is_empty())
}

/// Blocks of the matrix `rows x 0..n` of an expert.
fn tasks(expert: usize, rows: Range<usize>, n: usize) -> impl Iterator<Item = Task> {
    let columns = parts(0..n, MAX_COLUMNS);
    parts(rows, MAX_ROWS).flat_map(move |rows| {
        let task = move |columns| Task { expert, rows: rows.clone(), columns };
        columns.clone().map(task)
    })
}

/// Returns the products of the rows of `x [R, k]` with the matrices `w [E, n, k]` or `[E, k, n]` of
/// their experts, `[R, n]`.
pub(crate) fn products(
    (n, k): (usize, usize),
    offsets: &[u32],
    x: Values<'_>,
    (w, stored): (Values<'_>, WeightLayout),
    dtype: DType,
) -> Filled {
    let len = offsets.last().map_or(0, |rows| *rows as usize) * n;
    let tasks: Vec<Task> =
        experts(offsets).flat_map(|(expert, rows)| tasks(expert, rows, n)).collect();
    let compute = |task: &Task, dst: Raw<*mut f32>| {
        let (rows, columns) = (&task.rows, &task.columns);
        let x = Matrix::rows(x.part(rows.start * k..rows.end * k), k);
        let w = w.part(task.expert * n * k..(task.expert + 1) * n * k);
        let w = match stored {
            WeightLayout::OfOutputs => Matrix::rows(w, k).t(),
            WeightLayout::OfInputs => Matrix::rows(w, n),
        };
        let size = (rows.len(), columns.len(), k);
        // SAFETY: the operands are inside their slices, and no other task writes to `dst`.
        unsafe {
            let (x, w) = (x.raw(rows.len(), k), w.raw(k, n).at(0, columns.start));
            product(size, dst, Store::Overwrite, x, w, Threads::One);
        }
    };
    if dtype == DType::BF16 {
        let mut y = vec![bf16::ZERO; len];
        let shared = Shared::of(&mut y);
        for_each_task(
            tasks.len(),
            || (),
            |(), index| {
                let task = &tasks[index];
                let width = task.columns.len();
                let mut sums = Scratch::of(task.rows.len() * width);
                compute(task, Raw::rows(sums.all().as_mut_ptr(), width));
                for (row, sums) in task.rows.clone().zip(sums.all().chunks_exact(width)) {
                    let at = row * n + task.columns.start;
                    // SAFETY: the span is inside `y`, and each element belongs to one task.
                    to_bf16_block(sums, unsafe { shared.slice(at..at + width) });
                }
            },
        );
        return Filled::Bf16(y);
    }
    let mut y = vec![0f32; len];
    let shared = Shared::of(&mut y);
    for_each_task(
        tasks.len(),
        || (),
        |(), index| {
            let task = &tasks[index];
            // SAFETY: the block is inside `y`.
            let start = unsafe { shared.at(task.rows.start * n + task.columns.start) };
            compute(task, Raw::rows(start, n));
        },
    );
    Filled::F32(y)
}

/// Adds `a^T b` of the rows of each expert to its matrix of `dw [E, m, n]`, for `a [R, m]` and
/// `b [R, n]`. Matrices of experts without rows are not accessed.
pub(crate) fn add_outer_products(
    (m, n): (usize, usize),
    offsets: &[u32],
    a: Values<'_>,
    b: Values<'_>,
    dw: &mut [f32],
) {
    let tasks: Vec<(Task, Range<usize>)> = experts(offsets)
        .flat_map(|(expert, terms)| tasks(expert, 0..m, n).map(move |task| (task, terms.clone())))
        .collect();
    let shared = Shared::of(dw);
    for_each_task(
        tasks.len(),
        || (),
        |(), index| {
            let (Task { expert, rows, columns }, terms) = &tasks[index];
            let a = Matrix::rows(a.part(terms.start * m..terms.end * m), m).t();
            let b = Matrix::rows(b.part(terms.start * n..terms.end * n), n);
            let size = (rows.len(), columns.len(), terms.len());
            // SAFETY: the operands are inside their slices and the block is inside `dw`, and each
            // element belongs to one task.
            unsafe {
                let dst = shared.at((expert * m + rows.start) * n + columns.start);
                let a = a.raw(m, terms.len()).at(rows.start, 0);
                let b = b.raw(terms.len(), n).at(0, columns.start);
                product(size, Raw::rows(dst, n), Store::Add, a, b, Threads::One);
            }
        },
    );
}
