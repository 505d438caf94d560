//! A product on one thread, in blocks that fit in the caches.

#![expect(unsafe_code, reason = "operands and destinations are given by address")]

use super::super::blocks::Scratch;
use super::few_rows::{self, FewRows};
use super::levels::Kernels;
use super::operands::{Elements, Raw};
use super::packs::Lanes;
use super::tiles::{Panels, TileBlock};

/// Maximum number of terms of a block.
const TERMS: usize = 512;
/// Maximum number of terms of a block with so few rows that a copy of the right operand, which is
/// stored by columns, is used once.
const TERMS_OF_ONE_PANEL: usize = 128;
/// Maximum numbers of terms and of columns of a block with so few rows that a copy of the right
/// operand, which is stored by rows, is used once.
const TERMS_OF_FEW_ROWS: usize = 64;
const COLUMNS_OF_FEW_ROWS: usize = 480;
/// The same where the right operand is read in place and its rows are long.
const TERMS_IN_PLACE: usize = 32;
/// Maximum number of rows of a block. A copy of those of the left operand stays in the L2 cache.
const ROWS: usize = 96;
/// Maximum number of columns of a block. A copy of those of the right operand stays in the L3
/// cache.
const COLUMNS: usize = 2016;
/// Maximum number of elements of a left operand that is read in place although its terms are not
/// adjacent.
const SMALL: usize = 1 << 14;
/// Number of elements to which the copies are aligned.
const ALIGNMENT: usize = 16;

/// The product of `a [m, k]` and `b [k, n]`.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) dst: Raw<*mut f32>,
    /// Whether sums start with 0, and not with the elements of the destination.
    pub(super) from_zero: bool,
    pub(super) a: Raw<Elements>,
    pub(super) b: Raw<Elements>,
}

// SAFETY: these are addresses; `Product::compute` states who accesses the elements.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

/// How tiles read an operand.
#[derive(Clone, Copy)]
enum Reading {
    InPlace(*const f32),
    FromCopy,
}

impl Product {
    /// The same product as that of the transposed operands.
    pub(super) fn t(self) -> Self {
        let (a, b, dst) = (self.b.t(), self.a.t(), self.dst.t());
        Self { m: self.n, n: self.m, dst, a, b, ..self }
    }

    /// The elements of the product from row `row` and column `column`, in the shape `[m, n]`.
    pub(super) fn part(self, (row, column): (usize, usize), (m, n): (usize, usize)) -> Self {
        let (a, b) = (self.a.at(row, 0), self.b.at(0, column));
        Self { m, n, dst: self.dst.at(row, column), a, b, ..self }
    }

    /// A copy of the left operand is not worth its time if few columns use it.
    fn reads_left(&self, kernels: &Kernels) -> Reading {
        let few = self.n <= 2 * kernels.widest();
        match self.a.start {
            Elements::F32(a) if few && (self.a.column_stride == 1 || self.m * self.k <= SMALL) => {
                Reading::InPlace(a)
            }
            _ => Reading::FromCopy,
        }
    }

    /// A copy of the right operand is not worth its time if few rows use it.
    fn reads_right(&self, kernels: &Kernels) -> Reading {
        let few = self.m <= 2 * kernels.tile_rows(self.n);
        match self.b.start {
            Elements::F32(b) if few && self.b.column_stride == 1 => Reading::InPlace(b),
            _ => Reading::FromCopy,
        }
    }

    /// Computes the product.
    ///
    /// # Safety
    /// All elements are valid, and no other thread accesses those of the destination.
    pub(super) unsafe fn compute(self, kernels: &Kernels) {
        if self.m == 0 || self.n == 0 {
            return;
        }
        if self.m <= few_rows::MAX_ROWS
            && self.n >= few_rows::COLUMNS
            && self.k >= few_rows::TERMS
            && self.b.row_stride == 1
        {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.compute_few_rows(kernels) };
        }
        let (whole, last) = (self.n / kernels.widest() * kernels.widest(), self.n);
        let right = self.reads_right(kernels);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if matches!(right, Reading::FromCopy) || whole == last {
                return Blocks::new(self, kernels, right).compute();
            }
            // The last tile of a row may be wider than the operand, so it reads a copy.
            if whole > 0 {
                Blocks::new(self.part((0, 0), (self.m, whole)), kernels, right).compute();
            }
            let rest = self.part((0, whole), (self.m, last - whole));
            Blocks::new(rest, kernels, Reading::FromCopy).compute();
        }
    }

    /// Computes a product of a few rows, of which the right operand is stored by columns.
    ///
    /// # Safety
    /// As for [`Self::compute`].
    unsafe fn compute_few_rows(self, kernels: &Kernels) {
        let Self { m, k, a, b, .. } = self;
        let mut copy;
        let left = match a.start {
            Elements::F32(start) if a.column_stride == 1 => (start, a.row_stride),
            _ => {
                copy = Scratch::of(m * k);
                for (at, copy) in copy.all().iter_mut().enumerate() {
                    // SAFETY: guaranteed by the caller.
                    *copy = unsafe {
                        match a.at(at / k, at % k).start {
                            Elements::F32(from) => *from,
                            Elements::Bf16(from) => (*from).to_f32(),
                        }
                    };
                }
                (copy.all().as_ptr(), k)
            }
        };
        // SAFETY: guaranteed by the caller; the functions are those of the level of this CPU.
        unsafe {
            match b.start {
                Elements::F32(start) => (kernels.few_rows_f32)(&self.few_rows(left, start)),
                Elements::Bf16(start) => (kernels.few_rows_bf16)(&self.few_rows(left, start)),
            }
        }
    }

    /// The operands of the kernel: `left` is the address of the left one in `f32` and the distance
    /// between its rows, `start` the address of the right one.
    fn few_rows<E>(self, (left, left_stride): (*const f32, usize), start: *const E) -> FewRows<E> {
        let Self { m, n, k, dst, from_zero, b, .. } = self;
        let right =
            Lanes { start, lane_stride: b.column_stride, term_stride: 1, count: n, terms: k };
        FewRows { rows: m, left, left_stride, right, dst, from_zero }
    }
}

/// A product in blocks.
struct Blocks<'a> {
    product: Product,
    kernels: &'a Kernels,
    left: Reading,
    right: Reading,
    tile_rows: usize,
    /// Maximum numbers of rows, of columns and of terms of a block.
    rows: usize,
    columns: usize,
    terms: usize,
}

impl<'a> Blocks<'a> {
    fn new(product: Product, kernels: &'a Kernels, right: Reading) -> Self {
        let Product { m, n, k, .. } = product;
        let (tile_rows, widest) = (kernels.tile_rows(n), kernels.widest());
        let few_rows = m <= tile_rows;
        let left = product.reads_left(kernels);
        let (terms, columns) = match right {
            Reading::InPlace(_) if n > 4 * widest => (TERMS_IN_PLACE, n),
            Reading::InPlace(_) => (TERMS, n),
            Reading::FromCopy if few_rows && product.b.column_stride == 1 => {
                (TERMS_OF_FEW_ROWS, COLUMNS_OF_FEW_ROWS / widest * widest)
            }
            Reading::FromCopy if few_rows => (TERMS_OF_ONE_PANEL, widest),
            Reading::FromCopy => (TERMS, COLUMNS / widest * widest),
        };
        let terms = k.div_ceil(k.div_ceil(terms).max(1)).next_multiple_of(ALIGNMENT).min(k);
        let rows = match left {
            Reading::InPlace(_) => m,
            Reading::FromCopy => ROWS / tile_rows * tile_rows,
        };
        Self { product, kernels, left, right, tile_rows, rows, columns, terms }
    }

    /// First term and number of terms of each block, in order. Without terms there is an empty one.
    fn terms(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (k, terms) = (self.product.k, self.terms);
        (0..k.max(1)).step_by(terms.max(1)).map(move |first| (first, terms.min(k - first)))
    }

    /// Computes the product.
    ///
    /// # Safety
    /// As for [`Product::compute`]. If the right operand is read in place, tiles end where rows do.
    unsafe fn compute(&self) {
        let Product { m, n, k, .. } = self.product;
        // Column blocks of few rows are narrow, so all terms of these rows are copied once.
        let once = m <= self.tile_rows;
        let copied_rows = self.rows.min(m.next_multiple_of(self.tile_rows));
        let left_len = match self.left {
            Reading::InPlace(_) => 0,
            Reading::FromCopy => copied_rows * if once { k } else { self.terms },
        };
        let right_len = match self.right {
            Reading::InPlace(_) => 0,
            Reading::FromCopy => {
                self.columns.min(n.next_multiple_of(self.kernels.widest())) * self.terms
            }
        };
        let left_len = left_len.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let mut scratch = Scratch::of(ALIGNMENT + left_len + right_len + ALIGNMENT);
        let start = scratch.all().as_mut_ptr();
        // SAFETY: the copies are inside the scratch buffer, with room for the elements that a copy
        // may write after its last one; the caller guarantees the rest.
        unsafe {
            let left_copy = start.add(start.align_offset(4 * ALIGNMENT));
            let right_copy = left_copy.add(left_len);
            if once && matches!(self.left, Reading::FromCopy) {
                for (first, terms) in self.terms() {
                    self.copy_left((0, m), (first, terms), left_copy.add(copied_rows * first));
                }
            }
            for column in (0..n).step_by(self.columns) {
                let columns = self.columns.min(n - column);
                for (first, terms) in self.terms() {
                    let right = self.right((column, columns), (first, terms), right_copy);
                    for row in (0..m).step_by(self.rows) {
                        let rows = self.rows.min(m - row);
                        let copy = left_copy.add(if once { copied_rows * first } else { 0 });
                        if !once && matches!(self.left, Reading::FromCopy) {
                            self.copy_left((row, rows), (first, terms), copy);
                        }
                        let left = self.left(row, (first, terms), copy);
                        self.block((row, rows), (column, columns), (first, terms), left, right);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As for [`Self::compute`]; `left` and `right` have the rows, the columns and the terms.
    unsafe fn block(
        &self,
        (row, rows): (usize, usize),
        (column, columns): (usize, usize),
        (first, terms): (usize, usize),
        left: Panels,
        (right, last_stride): (Panels, usize),
    ) {
        let dst = self.product.dst.at(row, column);
        let block = TileBlock {
            rows,
            columns,
            terms,
            tile_rows: self.tile_rows,
            left,
            right,
            last_stride,
            ahead: match self.right {
                Reading::InPlace(_) => self.kernels.widest(),
                Reading::FromCopy => 8 * right.term_stride,
            },
            dst,
            from_zero: self.product.from_zero && first == 0,
        };
        // SAFETY: guaranteed by the caller.
        unsafe { (self.kernels.block)(&block) }
    }

    /// The terms of the left operand from row `row`.
    fn left(&self, row: usize, (first, terms): (usize, usize), copy: *mut f32) -> Panels {
        let a = self.product.a;
        match self.left {
            Reading::InPlace(start) => Panels {
                start: start.wrapping_add(row * a.row_stride + first * a.column_stride),
                panel_stride: self.tile_rows * a.row_stride,
                lane_stride: a.row_stride,
                term_stride: a.column_stride,
            },
            Reading::FromCopy => Panels {
                start: copy,
                panel_stride: self.tile_rows * terms,
                lane_stride: 1,
                term_stride: self.tile_rows,
            },
        }
    }

    /// The terms of some columns of the right operand, and the distance between those of the last
    /// panel.
    ///
    /// # Safety
    /// As for [`Self::compute`]; `copy` has room for the panels.
    unsafe fn right(
        &self,
        (column, columns): (usize, usize),
        (first, terms): (usize, usize),
        copy: *mut f32,
    ) -> (Panels, usize) {
        let (b, widest) = (self.product.b, self.kernels.widest());
        match self.right {
            Reading::InPlace(start) => {
                let start = start.wrapping_add(first * b.row_stride + column);
                let term_stride = b.row_stride;
                let panels = Panels { start, panel_stride: widest, lane_stride: 1, term_stride };
                (panels, term_stride)
            }
            Reading::FromCopy => {
                let last = self.kernels.last_width(columns);
                let lanes = b.at(first, column).t();
                // SAFETY: guaranteed by the caller.
                unsafe { self.copy(lanes, (columns, terms), (widest, last), copy) };
                let panels = Panels {
                    start: copy,
                    panel_stride: widest * terms,
                    lane_stride: 1,
                    term_stride: widest,
                };
                (panels, last)
            }
        }
    }

    /// # Safety
    /// As for [`Self::compute`]; `copy` has room for the panels.
    unsafe fn copy_left(
        &self,
        (row, rows): (usize, usize),
        (first, terms): (usize, usize),
        copy: *mut f32,
    ) {
        let (lanes, width) = (self.product.a.at(row, first), self.tile_rows);
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy(lanes, (rows, terms), (width, width), copy) }
    }

    /// Copies a matrix of `lanes` rows and `terms` columns to panels.
    ///
    /// # Safety
    /// All elements are valid, and `y` has room for the panels.
    unsafe fn copy(
        &self,
        x: Raw<Elements>,
        (lanes, terms): (usize, usize),
        widths: (usize, usize),
        y: *mut f32,
    ) {
        let (lane_stride, term_stride) = (x.row_stride, x.column_stride);
        // SAFETY: guaranteed by the caller; the functions are those of the level of this CPU.
        unsafe {
            match x.start {
                Elements::F32(start) => {
                    let x = Lanes { start, lane_stride, term_stride, count: lanes, terms };
                    (self.kernels.panels_f32)(&x, widths, y);
                }
                Elements::Bf16(start) => {
                    let x = Lanes { start, lane_stride, term_stride, count: lanes, terms };
                    (self.kernels.panels_bf16)(&x, widths, y);
                }
            }
        }
    }
}
