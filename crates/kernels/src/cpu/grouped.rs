//! Matrix products of the rows of each expert with its own weight, on the CPU.
//!
//! Shapes: `R` rows, of which expert `e` has rows `offsets[e]..offsets[e + 1]`.
//!
//! A task computes a block of the rows of one expert, and threads take the next task, so uneven
//! experts do not leave a core idle. Tasks differ in the elements that they compute and not in the
//! order of the terms of a sum: a row has the same bits for any number of threads and of rows of
//! its expert. The `gemm` crate does not guarantee the latter, and it would copy the weight of an
//! expert for each few rows.

#![expect(unsafe_code, reason = "tasks write disjoint parts of one matrix")]

use super::blocks::{Filled, Scratch, Values, to_bf16_block};
use super::tile_copies::{
    columns_bf16, columns_f32, panel_len, panels_bf16, panels_f32, row_bf16, rows_bf16, rows_f32,
};
use super::tiles::{DOTS, LANES, Left, PANEL, TILE_ROWS, Tile, add_product, dots};
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

/// Number of terms of a dot product that are added in registers. The right operands of a tile and
/// the left ones fit in the L1 cache.
const DOT_TERMS: usize = 512;
/// Number of terms that are added in registers where the right operand is copied.
const TERMS: usize = 128;
/// The same for sums over the rows of an expert.
const ROW_TERMS: usize = 256;
/// Maximum number of rows and of columns of a task: the copied operand and the sums fit in the L2
/// cache.
const MAX_ROWS: usize = 192;
const MAX_COLUMNS: usize = 10 * PANEL;
/// Maximum number of columns of a task that adds to gradients of an expert with few rows. It is
/// limited by the time to read and write the gradients, of which longer rows are accessed at a
/// time.
const MAX_COLUMNS_OF_FEW: usize = 40 * PANEL;
const FEW_ROWS: usize = 32;
/// Number of outputs whose weights are read for all tiles of rows.
const OUTPUTS: usize = 32 * DOTS;

/// A block of a matrix of an expert, or of its rows.
struct Task {
    expert: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// Splits a range into parts of at most `most` elements, all but the last of them of the same
/// multiple of `step`.
fn parts(
    range: Range<usize>,
    most: usize,
    step: usize,
) -> impl Iterator<Item = Range<usize>> + Clone {
    let num_parts = range.len().div_ceil(most).max(1);
    let size = range.len().div_ceil(num_parts).next_multiple_of(step).max(step);
    let end = range.end;
    range.step_by(size).map(move |start| start..(start + size).min(end))
}

/// Rows of each expert that has any.
fn experts(offsets: &[u32]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let rows = offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
    rows.enumerate().filter(|(_, rows)| !rows.is_empty())
}

/// Calls a kernel for the type of the elements.
macro_rules! by_type {
    ($values:expr, $range:expr, $f32:ident, $bf16:ident, $($arg:expr),*) => {
        match $values {
            Values::F32(all) => $f32(&all[$range], $($arg),*),
            Values::Bf16(all) => $bf16(&all[$range], $($arg),*),
        }
    };
}

/// A product of rows with the matrices of their experts.
struct GroupedProduct<'a> {
    x: Values<'a>,
    w: Values<'a>,
    stored: WeightLayout,
    n: usize,
    k: usize,
}

impl GroupedProduct<'_> {
    /// Computes a task in `sums`, rows of `width` elements, which are zero before. There are as
    /// many as whole tiles need.
    fn compute(&self, task: &Task, sums: &mut [f32], width: usize) {
        match self.stored {
            WeightLayout::OfOutputs => self.dots(task, sums, width),
            WeightLayout::OfInputs => self.panels(task, sums, width),
        }
    }

    /// Copies `terms` of tile `tile` of the rows.
    fn copy_tile(&self, rows: &Range<usize>, tile: usize, terms: &Range<usize>, y: &mut [f32]) {
        let first = rows.start + tile * TILE_ROWS;
        let num_rows = TILE_ROWS.min(rows.end - first);
        let start = first * self.k + terms.start;
        let end = start + (num_rows - 1) * self.k + terms.len();
        by_type!(self.x, start..end, rows_f32, rows_bf16, self.k, num_rows, terms.len(), y);
    }

    /// Products with rows of weights of outputs, which are read in place if they are `f32`.
    fn dots(&self, task: &Task, sums: &mut [f32], width: usize) {
        let tiles = task.rows.len().div_ceil(TILE_ROWS);
        let chunks = || (0..self.k).step_by(DOT_TERMS).map(|at| at..self.k.min(at + DOT_TERMS));
        let padded = |terms: &Range<usize>| terms.len().next_multiple_of(LANES);
        let of_tiles = TILE_ROWS * tiles;
        let mut x = Scratch::of(of_tiles * self.k.next_multiple_of(LANES));
        for terms in chunks() {
            let (len, start) = (padded(&terms), of_tiles * terms.start);
            let x = &mut x.all()[start..start + of_tiles * len];
            for (tile, x) in x.chunks_exact_mut(TILE_ROWS * len).enumerate() {
                self.copy_tile(&task.rows, tile, &terms, x);
            }
        }
        // With one tile of rows, all terms of an output are read before the next output.
        let step = if tiles == 1 { DOTS } else { OUTPUTS };
        let mut copied = Scratch::of(step * DOT_TERMS);
        for first in task.columns.clone().step_by(step) {
            let outputs = first..task.columns.end.min(first + step);
            for terms in chunks() {
                let (len, start) = (padded(&terms), of_tiles * terms.start);
                let x = &x.all()[start..start + of_tiles * len];
                let right = self.weights(task.expert, &outputs, &terms, copied.all());
                for (tile, x) in x.chunks_exact(TILE_ROWS * len).enumerate() {
                    for at in (0..outputs.len()).step_by(DOTS) {
                        let row = |c: usize| right.row((at + c).min(outputs.len() - 1), len);
                        let products =
                            dots(x, task.rows.len() - tile * TILE_ROWS, std::array::from_fn(row));
                        let start =
                            tile * TILE_ROWS * width + outputs.start - task.columns.start + at;
                        for (r, products) in products.iter().enumerate() {
                            let sums = &mut sums[start + r * width..start + r * width + DOTS];
                            for c in 0..DOTS {
                                sums[c] += products[c];
                            }
                        }
                    }
                }
            }
        }
    }

    /// The weights of some outputs for some terms.
    fn weights<'s>(
        &'s self,
        expert: usize,
        outputs: &Range<usize>,
        terms: &Range<usize>,
        copied: &'s mut [f32],
    ) -> Weights<'s> {
        let start = (expert * self.n + outputs.start) * self.k + terms.start;
        let len = terms.len().next_multiple_of(LANES);
        match self.w {
            Values::F32(w) if len == terms.len() => Weights { all: &w[start..], stride: self.k },
            w => {
                for (at, y) in copied.chunks_exact_mut(len).take(outputs.len()).enumerate() {
                    let (y, rest) = y.split_at_mut(terms.len());
                    let row = start + at * self.k..start + at * self.k + terms.len();
                    match w {
                        Values::F32(w) => y.copy_from_slice(&w[row]),
                        Values::Bf16(w) => row_bf16(&w[row], y),
                    }
                    rest.fill(0.0);
                }
                Weights { all: copied, stride: len }
            }
        }
    }

    /// Products with rows of weights of inputs, which are copied in panels.
    fn panels(&self, task: &Task, sums: &mut [f32], width: usize) {
        let mut copied = Scratch::of(width / PANEL * panel_len(TERMS));
        let mut x = Scratch::of(TILE_ROWS * TERMS);
        for first in (0..self.k).step_by(TERMS) {
            let terms = first..self.k.min(first + TERMS);
            let start = (task.expert * self.k + first) * self.n + task.columns.start;
            let end = start + (terms.len() - 1) * self.n + task.columns.len();
            let w = &mut copied.all()[..width / PANEL * panel_len(terms.len())];
            let columns = task.columns.len();
            by_type!(self.w, start..end, panels_f32, panels_bf16, self.n, terms.len(), columns, w);
            let x = &mut x.all()[..TILE_ROWS * terms.len()];
            for (tile, sums) in sums.chunks_exact_mut(TILE_ROWS * width).enumerate() {
                self.copy_tile(&task.rows, tile, &terms, x);
                let num_rows = task.rows.len() - tile * TILE_ROWS;
                for (panel, w) in w.chunks_exact(panel_len(terms.len())).enumerate() {
                    let w = &w[..PANEL * terms.len()];
                    let start = sums[panel * PANEL..].as_mut_ptr();
                    let tile = Tile { start, stride: width };
                    // SAFETY: the tile is inside `sums`, whose rows have `width` elements.
                    unsafe { add_product((x, Left::Rows), num_rows, w, tile) };
                }
            }
        }
    }
}

/// Rows of weights.
struct Weights<'a> {
    all: &'a [f32],
    stride: usize,
}

impl Weights<'_> {
    fn row(&self, at: usize, len: usize) -> &[f32] {
        &self.all[at * self.stride..at * self.stride + len]
    }
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
    let product = GroupedProduct { x, w, stored, n, k };
    let len = x.len() / k.max(1) * n;
    let tasks: Vec<Task> = experts(offsets)
        .flat_map(|(expert, of_expert)| {
            let columns = parts(0..n, MAX_COLUMNS, PANEL);
            let blocks = parts(of_expert, MAX_ROWS, TILE_ROWS);
            blocks.flat_map(move |rows| {
                let task = move |columns| Task { expert, rows: rows.clone(), columns };
                columns.clone().map(task)
            })
        })
        .collect();
    let run = |store: &(dyn Fn(usize, &[f32]) + Sync)| {
        for_each_task(
            tasks.len(),
            || (),
            |(), index| {
                let task = &tasks[index];
                let width = task.columns.len().next_multiple_of(PANEL);
                let mut sums = Scratch::of(task.rows.len().next_multiple_of(TILE_ROWS) * width);
                sums.all().fill(0.0);
                product.compute(task, sums.all(), width);
                for (row, sums) in task.rows.clone().zip(sums.all().chunks_exact(width)) {
                    store(row * n + task.columns.start, &sums[..task.columns.len()]);
                }
            },
        );
    };
    if dtype == DType::BF16 {
        let mut y = vec![bf16::ZERO; len];
        let shared = Shared::of(&mut y);
        // SAFETY: the span is inside `y`, and each element belongs to one task.
        run(&|at, sums| to_bf16_block(sums, unsafe { shared.slice(at..at + sums.len()) }));
        return Filled::Bf16(y);
    }
    let mut y = vec![0f32; len];
    let shared = Shared::of(&mut y);
    // SAFETY: as above.
    run(&|at, sums| unsafe { shared.slice(at..at + sums.len()) }.copy_from_slice(sums));
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
        .flat_map(|(expert, of_expert)| {
            let few = of_expert.len() <= FEW_ROWS;
            let most = if few { MAX_COLUMNS_OF_FEW } else { MAX_COLUMNS };
            let columns = parts(0..n, most, PANEL);
            parts(0..m, MAX_ROWS, TILE_ROWS).flat_map(move |rows| {
                let of_expert = of_expert.clone();
                let task = move |columns| {
                    (Task { expert, rows: rows.clone(), columns }, of_expert.clone())
                };
                columns.clone().map(task)
            })
        })
        .collect();
    let shared = Shared::of(dw);
    for_each_task(
        tasks.len(),
        || (),
        |(), index| {
            let (task, of_expert) = &tasks[index];
            let first = (task.expert * m + task.rows.start) * n + task.columns.start;
            // SAFETY: the block is inside `dw`, and each element belongs to one task.
            unsafe { add_block((m, n), task, of_expert, (a, b), shared.at(first)) };
        },
    );
}

/// Adds the sum over rows `of_expert` of the outer products of `a` and `b` to a block of `dw`.
///
/// # Safety
/// `dw` is the first element of the block, whose rows are `n` elements apart. No other thread
/// accesses the block.
unsafe fn add_block(
    (m, n): (usize, usize),
    task: &Task,
    of_expert: &Range<usize>,
    (a, b): (Values<'_>, Values<'_>),
    dw: *mut f32,
) {
    let (columns, num_rows) = (task.columns.len(), task.rows.len());
    let width = columns.next_multiple_of(PANEL);
    let most = ROW_TERMS.min(of_expert.len());
    let (mut left, mut right) =
        (Scratch::of(TILE_ROWS * most), Scratch::of(width / PANEL * panel_len(most)));
    for first in of_expert.clone().step_by(ROW_TERMS) {
        let terms = ROW_TERMS.min(of_expert.end - first);
        let start = first * n + task.columns.start;
        let end = start + (terms - 1) * n + columns;
        let b_panels = &mut right.all()[..width / PANEL * panel_len(terms)];
        by_type!(b, start..end, panels_f32, panels_bf16, n, terms, columns, b_panels);
        for tile in (0..num_rows).step_by(TILE_ROWS) {
            let tile_rows = TILE_ROWS.min(num_rows - tile);
            let start = first * m + task.rows.start + tile;
            let end = start + (terms - 1) * m + tile_rows;
            let x = &mut left.all()[..TILE_ROWS * terms];
            by_type!(a, start..end, columns_f32, columns_bf16, m, tile_rows, x);
            for (panel, w) in b_panels.chunks_exact(panel_len(terms)).enumerate() {
                let w = &w[..PANEL * terms];
                let column = panel * PANEL;
                let tile_columns = PANEL.min(columns - column);
                // SAFETY: inside the block, as the caller guarantees.
                let at = unsafe { dw.add(tile * n + column) };
                if (tile_rows, tile_columns) == (TILE_ROWS, PANEL) {
                    let y = Tile { start: at, stride: n };
                    // SAFETY: the whole tile is inside the block.
                    unsafe { add_product((x, Left::Columns), TILE_ROWS, w, y) };
                    continue;
                }
                let mut sums = [[0f32; PANEL]; TILE_ROWS];
                let whole = Tile { start: sums.as_mut_ptr().cast(), stride: PANEL };
                // SAFETY: the tile is `sums`.
                unsafe { add_product((x, Left::Columns), tile_rows, w, whole) };
                for (row, sums) in sums.iter().take(tile_rows).enumerate() {
                    // SAFETY: this part of the row is inside the block.
                    let y =
                        unsafe { std::slice::from_raw_parts_mut(at.add(row * n), tile_columns) };
                    super::add(&sums[..tile_columns], y);
                }
            }
        }
    }
}
