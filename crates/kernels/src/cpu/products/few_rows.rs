//! Products of a few rows, as in generation. The time to read the right operand limits them, so it
//! is transposed in registers and multiplied at once, without a copy.

#![expect(unsafe_code, reason = "operands and destinations are given by address")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]
#![expect(clippy::needless_range_loop, reason = "loops over registers have constant lengths")]

use super::operands::Raw;
use super::packs::{LINE, Lanes, Source, prefetch};
use super::vectors::Square;

/// Maximum number of rows.
pub(super) const MAX_ROWS: usize = 4;
/// Minimum number of columns: the lanes of a vector.
pub(super) const COLUMNS: usize = 16;
/// Minimum number of terms: those of a square of `bf16`.
pub(super) const TERMS: usize = 32;
/// Number of squares that one group is ahead of the other. Columns are often a power of two apart,
/// and then their terms of the same index are in the same set of a cache.
const DELAY: usize = 8;
/// Distance between the terms that are read and those that are fetched into the cache, in bytes.
const AHEAD: usize = 8 * LINE;

/// A product of up to [`MAX_ROWS`] rows and at least [`COLUMNS`] columns.
pub(super) struct FewRows<E> {
    pub(super) rows: usize,
    /// Row `r` of the left operand starts at `left + r * left_stride`.
    pub(super) left: *const f32,
    pub(super) left_stride: usize,
    /// The columns of the right operand, whose terms are adjacent.
    pub(super) right: Lanes<E>,
    pub(super) dst: Raw<*mut f32>,
    /// Whether sums start with 0, and not with the elements of the destination.
    pub(super) from_zero: bool,
}

/// Computes a product with squares of `SIDE` columns.
///
/// # Safety
/// All elements are valid, no other thread accesses those of the destination, and the CPU has the
/// features of `V`.
#[inline(always)]
pub(super) unsafe fn few_rows<V: Square<SIDE>, E: Source, const SIDE: usize>(x: &FewRows<E>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match x.rows {
            1 => of_rows::<V, E, SIDE, 1>(x),
            2 => of_rows::<V, E, SIDE, 2>(x),
            3 => of_rows::<V, E, SIDE, 3>(x),
            _ => of_rows::<V, E, SIDE, MAX_ROWS>(x),
        }
    }
}

/// [`few_rows`] with a number of rows that is known at compile time. Two groups of columns are
/// computed at the same time, so that one multiplies while the other waits for its chain.
///
/// # Safety
/// As for [`few_rows`].
#[inline(always)]
unsafe fn of_rows<V: Square<SIDE>, E: Source, const SIDE: usize, const ROWS: usize>(
    x: &FewRows<E>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut a = Group::<V, E, ROWS>::new::<SIDE>(x, 0, 0);
        let mut b = Group::<V, E, ROWS>::new::<SIDE>(x, SIDE, DELAY);
        while a.column < x.right.count || b.column < x.right.count {
            for _ in 0..a.steps::<SIDE>(x).min(b.steps::<SIDE>(x)) {
                let (of_a, of_b) = (a.square::<SIDE>(x), b.square::<SIDE>(x));
                for i in 0..SIDE {
                    a.multiply(x, of_a[i], i * E::PACKED, (0, SIDE * E::PACKED));
                    b.multiply(x, of_b[i], i * E::PACKED, (0, SIDE * E::PACKED));
                }
                a.skip(SIDE * E::PACKED);
                b.skip(SIDE * E::PACKED);
            }
            a.advance::<SIDE>(x);
            b.advance::<SIDE>(x);
        }
    }
}

/// Adjacent columns whose sums are computed at the same time.
struct Group<V, E, const ROWS: usize> {
    /// The first column.
    column: usize,
    /// Number of steps until it starts.
    delay: usize,
    /// Address of the next terms of the columns.
    lanes: *const E,
    /// Number of terms that were added.
    term: usize,
    sums: [V; ROWS],
}

impl<V, E: Source, const ROWS: usize> Group<V, E, ROWS> {
    /// The group from `column`. The last group begins before `column` if fewer columns are left.
    ///
    /// # Safety
    /// As for [`few_rows`].
    #[inline(always)]
    unsafe fn new<const SIDE: usize>(x: &FewRows<E>, column: usize, delay: usize) -> Self
    where
        V: Square<SIDE>,
    {
        let first = column.min(x.right.count - SIDE);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sums = [V::zero(); ROWS];
            if !x.from_zero && column < x.right.count {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let mut lanes = [0f32; SIDE];
                    for (lane, sum) in lanes.iter_mut().enumerate().skip(column - first) {
                        *sum = *x.dst.at(r, first + lane).start;
                    }
                    *sums = V::load(lanes.as_ptr());
                }
            }
            let lanes = x.right.start.wrapping_add(first * x.right.lane_stride);
            Self { column, delay, lanes, term: 0, sums }
        }
    }

    /// Number of terms until a square starts with a cache line, or with half of one. A load that
    /// crosses lines would read both, and later one of them again.
    #[inline(always)]
    fn to_line<const SIDE: usize>(&self) -> usize {
        let lanes = self.lanes.addr() / size_of::<E>();
        lanes.next_multiple_of(SIDE * E::PACKED) - lanes
    }

    /// Number of whole squares from the next term, without the last one.
    #[inline(always)]
    fn steps<const SIDE: usize>(&self, x: &FewRows<E>) -> usize {
        if self.delay > 0 || self.column >= x.right.count || self.to_line::<SIDE>() > 0 {
            return 0;
        }
        (x.right.terms - self.term - 1) / (SIDE * E::PACKED)
    }

    /// Loads the next square and transposes it: vector `i` has the terms `i` of all columns.
    ///
    /// # Safety
    /// As for [`few_rows`], and the columns have the terms.
    #[inline(always)]
    unsafe fn square<const SIDE: usize>(&self, x: &FewRows<E>) -> [V; SIDE]
    where
        V: Square<SIDE>,
    {
        let Lanes { lane_stride, terms, .. } = x.right;
        // Without the black box, the addresses of all columns are computed before the loop over
        // squares. They do not fit in registers, and half of the speed is lost.
        let lane_stride = std::hint::black_box(lane_stride);
        // After the last terms of these columns come the first ones of the next columns.
        let near = AHEAD / size_of::<E>() < terms - self.term;
        let next = (2 * SIDE * lane_stride).saturating_sub(terms) * size_of::<E>();
        // A square of half lines fetches whole lines, of half of the columns.
        let fetched = SIDE * size_of::<[f32; SIDE]>() / LINE;
        let part = self.lanes.addr() / size_of::<[f32; SIDE]>() % (SIDE / fetched);
        let ahead =
            AHEAD + if near { 0 } else { next } + part * fetched * lane_stride * size_of::<E>();
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut square = [V::zero(); SIDE];
            let mut column = self.lanes;
            for i in 0..SIDE {
                if i < fetched {
                    prefetch(column.wrapping_byte_add(ahead));
                }
                square[i] = V::load(column.cast());
                column = column.wrapping_add(lane_stride);
            }
            V::transpose(square)
        }
    }

    /// Adds the terms up to the next line, or those of a square. After the last one, stores the
    /// sums and continues with other columns.
    ///
    /// # Safety
    /// As for [`few_rows`].
    #[inline(always)]
    unsafe fn advance<const SIDE: usize>(&mut self, x: &FewRows<E>)
    where
        V: Square<SIDE>,
    {
        let Lanes { terms, count, .. } = x.right;
        if self.delay > 0 || self.column >= count {
            self.delay = self.delay.saturating_sub(1);
            return;
        }
        let step = SIDE * E::PACKED;
        let to_line = self.to_line::<SIDE>();
        let new = if to_line == 0 { step } else { to_line }.min(terms - self.term);
        // SAFETY: guaranteed by the caller.
        unsafe {
            // The square has terms that were added before, rather than some that do not exist.
            let before = (self.term + step).saturating_sub(terms);
            self.skip(before.wrapping_neg());
            for (i, lanes) in self.square(x).into_iter().enumerate() {
                self.multiply(x, lanes, i * E::PACKED, (before, before + new));
            }
            self.skip(before + new);
            if self.term == terms {
                let first = self.column.min(count - SIDE);
                for (r, sums) in self.sums.iter().enumerate() {
                    let mut lanes = [0f32; SIDE];
                    sums.store(lanes.as_mut_ptr());
                    for (lane, sum) in lanes.iter().enumerate().skip(self.column - first) {
                        *x.dst.at(r, first + lane).start = *sum;
                    }
                }
                *self = Self::new::<SIDE>(x, self.column + 2 * SIDE, 0);
            }
        }
    }

    /// Adds the products of those terms in `lanes` that are in `from..to`. The first of them is
    /// `first`, counted from the next term.
    ///
    /// # Safety
    /// As for [`few_rows`].
    #[inline(always)]
    unsafe fn multiply<const SIDE: usize>(
        &mut self,
        x: &FewRows<E>,
        lanes: V,
        first: usize,
        (from, to): (usize, usize),
    ) where
        V: Square<SIDE>,
    {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (part, columns) in E::terms::<V, SIDE>(lanes).into_iter().enumerate() {
                let term = first + part;
                if (from..to).contains(&term) {
                    for r in 0..ROWS {
                        let row = V::splat(*x.left.add(r * x.left_stride + self.term + term));
                        self.sums[r] = self.sums[r].add_product(row, columns);
                    }
                }
            }
        }
    }

    /// Continues `terms` terms further.
    #[inline(always)]
    fn skip(&mut self, terms: usize) {
        self.term = self.term.wrapping_add(terms);
        self.lanes = self.lanes.wrapping_add(terms);
    }
}
