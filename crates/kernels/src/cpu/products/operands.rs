//! Matrices that a product reads and writes.

use super::super::blocks::Values;
use half::bf16;

/// Address of the first element of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Elements {
    F32(*const f32),
    Bf16(*const bf16),
}

impl From<*const f32> for Elements {
    fn from(start: *const f32) -> Self {
        Self::F32(start)
    }
}

impl From<Values<'_>> for Elements {
    fn from(values: Values<'_>) -> Self {
        match values {
            Values::F32(all) => Self::F32(all.as_ptr()),
            Values::Bf16(all) => Self::Bf16(all.as_ptr()),
        }
    }
}

/// Pointer to a `[rows, columns]` matrix; element `(r, c)` is at offset
/// `r * row_stride + c * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Raw<P> {
    /// Pointer to element (0, 0).
    pub(super) start: P,
    /// Distance between rows, in elements.
    pub(super) row_stride: usize,
    /// Distance between columns, in elements.
    pub(super) column_stride: usize,
}

impl<P> Raw<P> {
    /// A row-major matrix whose rows are `row_stride` elements apart.
    pub(crate) fn rows(start: P, row_stride: usize) -> Self {
        Self { start, row_stride, column_stride: 1 }
    }

    /// Returns the transposed matrix, without moving data.
    pub(crate) fn t(self) -> Self {
        Self { start: self.start, row_stride: self.column_stride, column_stride: self.row_stride }
    }

    pub(super) fn offset(&self, row: usize, column: usize) -> usize {
        row * self.row_stride + column * self.column_stride
    }
}

impl Raw<*mut f32> {
    /// The matrix from row `row` and column `column`.
    pub(crate) fn at(self, row: usize, column: usize) -> Self {
        Self { start: self.start.wrapping_add(self.offset(row, column)), ..self }
    }
}

impl Raw<Elements> {
    /// The matrix from row `row` and column `column`.
    pub(crate) fn at(self, row: usize, column: usize) -> Self {
        let offset = self.offset(row, column);
        let start = match self.start {
            Elements::F32(start) => Elements::F32(start.wrapping_add(offset)),
            Elements::Bf16(start) => Elements::Bf16(start.wrapping_add(offset)),
        };
        Self { start, ..self }
    }
}

/// A row-major matrix inside a slice, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: Values<'a>,
    stride: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// The matrix at the start of `values` whose rows are `stride` elements apart.
    pub(crate) fn rows(values: impl std::convert::Into<Values<'a>>, stride: usize) -> Self {
        Self { values: values.into(), stride, transposed: false }
    }

    /// Returns the transposed matrix, without moving data.
    pub(crate) fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Address of the matrix `[rows, columns]`, which must be inside the slice.
    pub(crate) fn raw(self, rows: usize, columns: usize) -> Raw<Elements> {
        let (stored, across) = if self.transposed { (columns, rows) } else { (rows, columns) };
        assert!(self.values.len() >= extent(stored, across, self.stride), "shapes were checked");
        let raw = Raw::rows(Elements::from(self.values), self.stride);
        if self.transposed { raw.t() } else { raw }
    }
}

/// Number of elements from the first to the last one of a matrix.
pub(super) fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
}
