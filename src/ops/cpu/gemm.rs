//! Matrix products of `f32` matrices on the CPU, computed by the `gemm` crate.

#![expect(unsafe_code, reason = "`gemm` takes pointers and strides")]

use gemm::Parallelism;

/// What a product does with the previous contents of its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Into {
    /// Overwrites them; the destination may be uninitialized.
    Overwrite,
    /// Adds to them.
    Add,
}

/// Pointer to a `[rows, columns]` matrix; element `(r, c)` is at offset
/// `r * row_stride + c * column_stride`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Raw<P> {
    /// Pointer to element (0, 0).
    pub(in crate::ops) start: P,
    /// Distance between rows, in elements.
    pub(in crate::ops) row_stride: usize,
    /// Distance between columns, in elements.
    pub(in crate::ops) column_stride: usize,
}

impl<P> Raw<P> {
    /// A row-major matrix whose rows are `row_stride` elements apart.
    pub(in crate::ops) fn rows(start: P, row_stride: usize) -> Self {
        Self { start, row_stride, column_stride: 1 }
    }

    /// Returns the transposed matrix, without moving data.
    pub(in crate::ops) fn t(self) -> Self {
        Self { start: self.start, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

/// Computes `dst [m, n] = lhs [m, k] * rhs [k, n]`, or `+=` with [`Into::Add`].
///
/// # Safety
/// All elements within the three shapes are valid, and no other thread accesses those of `dst`.
pub(in crate::ops) unsafe fn product(
    (m, n, k): (usize, usize, usize),
    dst: Raw<*mut f32>,
    into: Into,
    lhs: Raw<*const f32>,
    rhs: Raw<*const f32>,
    parallelism: Parallelism,
) {
    // SAFETY: guaranteed by the caller.
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

/// Computes `a b^T` in `dst [m, n]` from `a [m, k]` and `b [n, k]`, on all threads.
pub(in crate::ops) fn nt(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == n * k, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), k).t());
    // SAFETY: the slice lengths match the shapes, and `dst` is mutably borrowed.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}

/// Computes `a b` in `dst [m, n]` from `a [m, k]` and `b [k, n]`, on all threads.
pub(in crate::ops) fn nn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == m * k && b.len() == k * n, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), n));
    // SAFETY: the slice lengths match the shapes, and `dst` is mutably borrowed.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}

/// Computes `a^T b` in `dst [m, n]` from `a [k, m]` and `b [k, n]`, on all threads.
pub(in crate::ops) fn tn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: &[f32],
) {
    assert!(dst.len() == m * n && a.len() == k * m && b.len() == k * n, "shapes were checked");
    let (lhs, rhs) = (Raw::rows(a.as_ptr(), m).t(), Raw::rows(b.as_ptr(), n));
    // SAFETY: the slice lengths match the shapes, and `dst` is mutably borrowed.
    unsafe {
        product((m, n, k), Raw::rows(dst.as_mut_ptr(), n), into, lhs, rhs, Parallelism::Rayon(0));
    }
}
