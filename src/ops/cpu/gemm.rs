//! Matrix products of row-major `f32` matrices, on the `gemm` crate.

#![expect(unsafe_code, reason = "`gemm` takes pointers and strides")]

use gemm::Parallelism;

/// What becomes of the old contents of a product's destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Into {
    /// Overwritten; may be uninitialised.
    Overwrite,
    /// Added to.
    Add,
}

/// `[rows, columns]` somewhere in memory; element `(r, c)` is at `r * row_stride + c * column_stride`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Raw<P> {
    /// Element (0, 0).
    pub(in crate::ops) start: P,
    /// Distance of rows in elements.
    pub(in crate::ops) row_stride: usize,
    /// Distance of columns in elements.
    pub(in crate::ops) column_stride: usize,
}

impl<P> Raw<P> {
    /// Rows `row_stride` apart.
    pub(in crate::ops) fn rows(start: P, row_stride: usize) -> Self {
        Self { start, row_stride, column_stride: 1 }
    }

    /// The transpose.
    pub(in crate::ops) fn t(self) -> Self {
        Self { start: self.start, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

/// `dst [m, n] = lhs [m, k] * rhs [k, n]`, or `+=`.
///
/// # Safety
/// All elements that the three shapes reach are valid; those of `dst` are reached by nobody else.
pub(in crate::ops) unsafe fn product(
    (m, n, k): (usize, usize, usize),
    dst: Raw<*mut f32>,
    into: Into,
    lhs: Raw<*const f32>,
    rhs: Raw<*const f32>,
    parallelism: Parallelism,
) {
    // SAFETY: by the caller's promise; strides are the caller's.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.start,
            dst.column_stride as isize,
            dst.row_stride as isize,
            into == Into::Add,
            lhs.start,
            lhs.column_stride as isize,
            lhs.row_stride as isize,
            rhs.start,
            rhs.column_stride as isize,
            rhs.row_stride as isize,
            1f32,
            1f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// `dst [m, n]` from `a [m, k]` and `b [n, k]`: `a b^T`, on all threads.
pub(in crate::ops) fn nt(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == n * k, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), k).t());
    // SAFETY: the lengths are those of the shapes, and `dst` is borrowed for writing.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}

/// `dst [m, n]` from `a [m, k]` and `b [k, n]`: `a b`, on all threads.
pub(in crate::ops) fn nn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == k * n, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), n));
    // SAFETY: the lengths are those of the shapes, and `dst` is borrowed for writing.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}

/// `dst [m, n]` from `a [k, m]` and `b [k, n]`: `a^T b`, on all threads.
pub(in crate::ops) fn tn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == k * m && b.len() == k * n, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), m).t(), Raw::rows(b.as_ptr(), n));
    // SAFETY: the lengths are those of the shapes, and `dst` is borrowed for writing.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}
