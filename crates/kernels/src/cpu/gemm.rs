//! Matrix products of `f32` matrices on the CPU, computed by the `gemm` crate.

#![expect(unsafe_code, reason = "`gemm` takes pointers and strides")]

use gemm::Parallelism;

/// What a product does with the previous contents of its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Into {
    /// Overwrites them; the destination may be uninitialized.
    Overwrite,
    /// Adds to them.
    Add,
}

/// Pointer to a `[rows, columns]` matrix; element `(r, c)` is at offset
/// `r * row_stride + c * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Raw<P> {
    /// Pointer to element (0, 0).
    pub(crate) start: P,
    /// Distance between rows, in elements.
    pub(crate) row_stride: usize,
    /// Distance between columns, in elements.
    pub(crate) column_stride: usize,
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
}

/// Computes `dst [m, n] = lhs [m, k] * rhs [k, n]`, or `+=` with [`Into::Add`].
///
/// # Safety
/// All elements within the three shapes are valid, and no other thread accesses those of `dst`.
pub(crate) unsafe fn product(
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

/// A row-major matrix inside a slice, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    stride: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// The matrix at the start of `data` whose rows are `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride, transposed: false }
    }

    /// Returns the transposed matrix, without moving data.
    pub(crate) fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Address of the matrix `[rows, columns]`, which must be inside the slice.
    fn raw(self, rows: usize, columns: usize) -> Raw<*const f32> {
        let (stored, across) = if self.transposed { (columns, rows) } else { (rows, columns) };
        assert!(self.data.len() >= extent(stored, across, self.stride), "shapes were checked");
        let raw = Raw::rows(self.data.as_ptr(), self.stride);
        if self.transposed { raw.t() } else { raw }
    }
}

/// Number of elements from the first to the last one of a matrix.
fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * stride + columns }
}

/// Computes `a b` on this thread, in the matrix `[m, n]` at the start of `dst` whose rows are
/// `stride` elements apart.
pub(crate) fn multiply(
    (m, n, k): (usize, usize, usize),
    (dst, stride): (&mut [f32], usize),
    into: Into,
    a: Matrix<'_>,
    b: Matrix<'_>,
) {
    assert!(dst.len() >= extent(m, n, stride), "shapes were checked");
    let (dst, a, b) = (Raw::rows(dst.as_mut_ptr(), stride), a.raw(m, k), b.raw(k, n));
    // SAFETY: the matrices are inside their slices, and that of `dst` is mutably borrowed.
    unsafe { product((m, n, k), dst, into, a, b, Parallelism::None) };
}

/// Computes `a b^T` in `dst [m, n]` from `a [m, k]` and `b [n, k]`, on all threads.
pub(crate) fn nt(
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
pub(crate) fn nn(
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
pub(crate) fn tn(
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

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    /// Answers that are generated at the same time rely on this.
    #[test]
    fn a_row_of_a_product_of_few_rows_does_not_depend_on_its_place_and_on_the_others() {
        for (m, n, k) in [(2, 33, 7), (3, 129, 700), (8, 70, 1100), (17, 257, 513), (64, 90, 300)] {
            let (row, b) = (wave(k, 0.37), wave(n * k, 0.73));
            let at = |place: usize, others: f32| {
                let mut a = wave(m * k, others);
                a[place * k..(place + 1) * k].copy_from_slice(&row);
                let mut y = wave(m * n, 0.11);
                let added = y[..n].to_vec();
                y[place * n..(place + 1) * n].copy_from_slice(&added);
                nt((m, n, k), &mut y, Into::Add, &a, &b);
                y[place * n..(place + 1) * n].to_vec()
            };
            let expected = at(0, 0.0);
            for place in 0..m {
                assert!(at(place, 1.7) == expected, "row {place} of {m} x {n} x {k}");
            }
        }
    }
}
