//! Matrix products on the CPU.
//!
//! Every element of a product is one chain of fused multiply-adds over `k`, in order. It starts
//! with 0 or with the element of the destination, and ends there. So its bits depend on a row of
//! the left operand, a column of the right one and the destination only: not on the SIMD level, the
//! number of threads, the other rows and columns, or the products in which a sum is computed if
//! each product continues the previous one. Operands are `f32` or `bf16`, which is converted
//! exactly; sums are `f32`.
//!
//! Operands are copied in the order in which tiles read them ([`packs`]), unless few tiles would
//! read the copy. Tiles hold their sums in registers ([`tiles`]). Products of few rows with a weight
//! that is stored by columns have their own kernel ([`few_rows`]). A product on all threads is
//! divided by rows and columns. Alternatives: `docs/dev/decisions/0027-one-product.md`.

#![expect(unsafe_code, reason = "tasks write disjoint parts of one matrix")]

mod few_rows;
mod levels;
mod operands;
mod packs;
mod serial;
#[cfg(test)]
mod tests;
mod tiles;
mod vectors;

use super::blocks::Values;
use super::for_each_task;
use levels::Kernels;
use operands::extent;
pub(crate) use operands::{Elements, Matrix, Raw};
use serial::Product;

/// What a product does with the contents of its destination, such as a gradient buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Overwrites them, whatever they are; the destination may be uninitialized. The result has the
    /// bits of an addition to zeros.
    Overwrite,
    /// Adds to them.
    Add,
}

/// The threads that compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// Only the current one.
    One,
    /// All of the pool, if the product is large enough.
    All,
}

/// Minimum number of multiplications of a product on all threads.
const MIN_WORK: usize = 48 * 48 * 256;

/// Computes `dst [m, n] = lhs [m, k] * rhs [k, n]`, or `+=` with [`Store::Add`].
///
/// # Safety
/// All elements within the three shapes are valid, those of `dst` are not in `lhs` or `rhs`, and no
/// other thread accesses them.
pub(crate) unsafe fn product<A, B>(
    (m, n, k): (usize, usize, usize),
    dst: Raw<*mut f32>,
    into: Store,
    lhs: Raw<A>,
    rhs: Raw<B>,
    threads: Threads,
) where
    Elements: From<A> + From<B>,
{
    let (row_stride, column_stride) = (lhs.row_stride, lhs.column_stride);
    let a = Raw { start: lhs.start.into(), row_stride, column_stride };
    let (row_stride, column_stride) = (rhs.row_stride, rhs.column_stride);
    let b = Raw { start: rhs.start.into(), row_stride, column_stride };
    let whole = Product { m, n, k, dst, from_zero: into == Store::Overwrite, a, b };
    // Vectors hold adjacent columns of a row, so a narrow product is computed transposed if its
    // left operand is stored by columns, or if a vector would have many columns that do not exist.
    let is_narrow = m > n && (n < 4 || (a.row_stride == 1 && n <= 16));
    let whole = if is_narrow { whole.t() } else { whole };
    let kernels = Kernels::of_thread();
    if threads == Threads::One || m.saturating_mul(n).saturating_mul(k) < MIN_WORK {
        // SAFETY: guaranteed by the caller.
        return unsafe { whole.compute(kernels) };
    }
    let Product { m, n, .. } = whole;
    let (rows, columns) = task_size(m, n, kernels);
    let tasks_of_a_row = n.div_ceil(columns);
    for_each_task(
        m.div_ceil(rows) * tasks_of_a_row,
        || (),
        |(), index| {
            let row = index / tasks_of_a_row * rows;
            let column = index % tasks_of_a_row * columns;
            let part = whole.part((row, column), (rows.min(m - row), columns.min(n - column)));
            // SAFETY: guaranteed by the caller, and parts have different elements.
            unsafe { part.compute(kernels) };
        },
    );
}

/// Numbers of rows and of columns of a task, with the least estimated time of `m` rows and `n`
/// columns on all threads.
fn task_size(m: usize, n: usize, kernels: &Kernels) -> (usize, usize) {
    /// Maximum number of tasks of a thread. More than one, because threads may be interrupted.
    const MAX_TASKS: usize = 4;
    /// Time to copy an element, in cycles. A cycle has 16 multiplications.
    const COPY: f64 = 0.6;
    let threads = rayon::current_num_threads();
    let (tile_rows, widest) = (kernels.tile_rows(n), kernels.widest());
    let mut best = (m, n);
    let mut least = f64::INFINITY;
    for tasks in (1..=MAX_TASKS).map(|tasks| tasks * threads) {
        for of_rows in 1..=tasks.min(m.div_ceil(tile_rows)) {
            let rows = m.div_ceil(of_rows).next_multiple_of(tile_rows);
            let columns = n.div_ceil((tasks / of_rows).max(1)).next_multiple_of(widest);
            let rounds = (m.div_ceil(rows) * n.div_ceil(columns)).div_ceil(threads);
            let (rows_, columns_) = (rows.min(m) as f64, columns.min(n) as f64);
            let time = rounds as f64 * (rows_ * columns_ / 16.0 + COPY * (rows_ + columns_));
            if time < least {
                (best, least) = ((rows, columns), time);
            }
        }
    }
    best
}

/// Computes `a b` in the matrix `[m, n]` at the start of `dst` whose rows are `stride` elements
/// apart.
pub(crate) fn multiply(
    (m, n, k): (usize, usize, usize),
    (dst, stride): (&mut [f32], usize),
    into: Store,
    a: Matrix<'_>,
    b: Matrix<'_>,
    threads: Threads,
) {
    assert!(dst.len() >= extent(m, n, stride), "shapes were checked");
    let (dst, a, b) = (Raw::rows(dst.as_mut_ptr(), stride), a.raw(m, k), b.raw(k, n));
    // SAFETY: the matrices are inside their slices, and that of `dst` is mutably borrowed.
    unsafe { product((m, n, k), dst, into, a, b, threads) };
}

/// Returns `a b`, `[m, n]`, computed on all threads.
pub(crate) fn new_product(
    (m, n, k): (usize, usize, usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
) -> Vec<f32> {
    let mut y = Vec::with_capacity(m * n);
    let (dst, a, b) = (Raw::rows(y.as_mut_ptr(), n), a.raw(m, k), b.raw(k, n));
    // SAFETY: the matrices are inside their slices, and `y` has capacity for the product, which
    // overwrites all `m * n` elements.
    unsafe {
        product((m, n, k), dst, Store::Overwrite, a, b, Threads::All);
        y.set_len(m * n);
    }
    y
}

/// Computes `a b^T` in `dst [m, n]` from `a [m, k]` and `b [n, k]`, on all threads.
pub(crate) fn nt<'a>(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Store,
    a: impl Into<Values<'a>>,
    b: impl Into<Values<'a>>,
) {
    let (a, b) = (a.into(), b.into());
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == k * n, "shapes were checked");
    multiply((m, n, k), (dst, n), into, Matrix::rows(a, k), Matrix::rows(b, k).t(), Threads::All);
}

/// Computes `a b` in `dst [m, n]` from `a [m, k]` and `b [k, n]`, on all threads.
pub(crate) fn nn<'a>(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Store,
    a: impl Into<Values<'a>>,
    b: impl Into<Values<'a>>,
) {
    let (a, b) = (a.into(), b.into());
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == k * n, "shapes were checked");
    multiply((m, n, k), (dst, n), into, Matrix::rows(a, k), Matrix::rows(b, n), Threads::All);
}

/// Computes `a^T b` in `dst [m, n]` from `a [k, m]` and `b [k, n]`, on all threads.
pub(crate) fn tn<'a>(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Store,
    a: impl Into<Values<'a>>,
    b: impl Into<Values<'a>>,
) {
    let (a, b) = (a.into(), b.into());
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == k * n, "shapes were checked");
    multiply((m, n, k), (dst, n), into, Matrix::rows(a, m).t(), Matrix::rows(b, n), Threads::All);
}
