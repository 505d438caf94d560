//! Matrix products of operands that may be `bf16`, which `gemm` has no kernels for.
//!
//! They are widened a panel of rows at a time, so that no product holds a second copy of a weight or of the activations.
//! `f32` operands go to `gemm` as they are. Why not otherwise: `docs/decisions/0009-bf16-in-panels.md`.

#![expect(unsafe_code, reason = "`gemm` takes pointers and strides")]

use super::blocks::{Filled, Values, narrow_onto, span, widen};
use super::gemm::{Into, Raw, product};
use candle_core::{DType, Result, Shape, Tensor};
use gemm::Parallelism;
use std::borrow::Cow;
use std::ops::Range;

/// Elements that are widened at a time, 4 MiB in `f32`: enough rows for a product to run at full speed.
const PANEL: usize = 1 << 20;

/// Panels of a matrix with `width` columns; fixed by the shape, so that no result depends on the machine.
fn panels(num_rows: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (PANEL / width.max(1)).max(64);
    (0..num_rows).step_by(step).map(move |start| start..(start + step).min(num_rows))
}

/// Elements `span` in `f32`, widened on all threads if need be.
pub(in crate::ops) fn widened(values: Values<'_>, span: Range<usize>) -> Cow<'_, [f32]> {
    match values {
        Values::F32(all) => Cow::Borrowed(&all[span]),
        Values::Bf16(all) => Cow::Owned(widen(&all[span])),
    }
}

/// Calls `f` with ranges of rows of `values [num_rows, width]` and their elements: all at once in `f32`.
fn for_each_panel(
    values: Values<'_>,
    (num_rows, width): (usize, usize),
    mut f: impl FnMut(Range<usize>, &[f32]),
) {
    match values {
        Values::F32(all) => f(0..num_rows, all),
        Values::Bf16(_) => {
            for rows in panels(num_rows, width) {
                f(rows.clone(), &widened(values, span(&rows, width)));
            }
        }
    }
}

/// A tensor `[num_rows, width]` of `dtype` out of rows that `f` computes in `f32`: all at once in `f32`, and in `bf16` as
/// many as are widened at a time where a row has `widest` elements.
pub(in crate::ops) fn by_rows(
    (num_rows, width, widest): (usize, usize, usize),
    shape: impl std::convert::Into<Shape>,
    dtype: DType,
    f: impl Fn(Range<usize>) -> Vec<f32>,
) -> Result<Tensor> {
    if dtype != DType::BF16 {
        return Filled::F32(f(0..num_rows)).tensor(shape);
    }
    let mut y = Vec::with_capacity(num_rows * width);
    for rows in panels(num_rows, widest) {
        narrow_onto(&f(rows), &mut y);
    }
    Filled::Bf16(y).tensor(shape)
}

/// `a b^T [m, n]` from `a [m, k]` and `b [n, k]`, on all threads.
pub(in crate::ops) fn new_nt(
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: Values<'_>,
) -> Vec<f32> {
    if k == 0 {
        return vec![0.0; m * n];
    }
    let mut y = Vec::with_capacity(m * n);
    // SAFETY: there is room for the product, which overwrites all of it.
    unsafe {
        raw_nt((m, n, k), y.as_mut_ptr(), Into::Overwrite, a, b);
        y.set_len(m * n);
    }
    y
}

/// `a b [m, n]` from `a [m, k]` and `b [k, n]`, on all threads.
pub(in crate::ops) fn new_nn(
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: Values<'_>,
) -> Vec<f32> {
    if k == 0 {
        return vec![0.0; m * n];
    }
    let mut y = Vec::with_capacity(m * n);
    // SAFETY: there is room for the product, whose first panel overwrites all of it.
    unsafe {
        raw_nn((m, n, k), y.as_mut_ptr(), Into::Overwrite, a, b);
        y.set_len(m * n);
    }
    y
}

/// `dst [m, n]` from `a [m, k]` and `b [n, k]`, `k > 0`: `a b^T`, on all threads.
pub(in crate::ops) fn nt(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(dst.len() == m * n, "shapes were checked");
    // SAFETY: `dst` is borrowed for writing and as long as the product.
    unsafe { raw_nt((m, n, k), dst.as_mut_ptr(), into, a, b) }
}

/// `dst [m, n]` from `a [m, k]` and `b [k, n]`, `k > 0`: `a b`, on all threads.
pub(in crate::ops) fn nn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(dst.len() == m * n, "shapes were checked");
    // SAFETY: `dst` is borrowed for writing and as long as the product.
    unsafe { raw_nn((m, n, k), dst.as_mut_ptr(), into, a, b) }
}

/// `dst [m, n]` from `a [k, m]` and `b [k, n]`: adds `a^T b`, on all threads.
pub(in crate::ops) fn add_tn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    a: Values<'_>,
    b: Values<'_>,
) {
    assert!(dst.len() == m * n && a.len() == k * m && b.len() == k * n, "shapes were checked");
    let mut add =
        |a: &[f32], b: &[f32]| super::gemm::tn((m, n, a.len() / m.max(1)), dst, Into::Add, a, b);
    match (a, b) {
        (Values::F32(a), Values::F32(b)) => add(a, b),
        _ => {
            for rows in panels(k, m.max(n)) {
                add(&widened(a, span(&rows, m)), &widened(b, span(&rows, n)));
            }
        }
    }
}

/// # Safety
/// `dst` has `m * n` elements that nobody else uses, written already if they are added to.
unsafe fn raw_nt(
    (m, n, k): (usize, usize, usize),
    dst: *mut f32,
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(a.len() == m * k && b.len() == n * k, "shapes were checked");
    for_each_panel(b, (n, k), |columns, b| {
        let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), k).t());
        // SAFETY: the lengths are those of the shapes; `dst` by the caller's promise.
        unsafe {
            let dst = Raw::rows(dst.add(columns.start), n);
            product((m, columns.len(), k), dst, into, lhs, rhs, Parallelism::Rayon(0));
        }
    });
}

/// # Safety
/// `dst` has `m * n` elements that nobody else uses, written already if they are added to.
unsafe fn raw_nn(
    (m, n, k): (usize, usize, usize),
    dst: *mut f32,
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(a.len() == m * k && b.len() == k * n, "shapes were checked");
    for_each_panel(b, (k, n), |inner, b| {
        let into = if inner.start == 0 { into } else { Into::Add };
        // SAFETY: the lengths are those of the shapes; `dst` by the caller's promise, and written by the first panel.
        unsafe {
            let lhs = Raw::rows(a.as_ptr().add(inner.start), k);
            let (dst, rhs) = (Raw::rows(dst, n), Raw::rows(b.as_ptr(), n));
            product((m, n, inner.len()), dst, into, lhs, rhs, Parallelism::Rayon(0));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Tolerance, assert_close, random};
    use crate::ops::{linear, linear_backward_input, linear_backward_weight};
    use candle_core::Device;

    #[test]
    fn panels_tile_the_rows() {
        for (num_rows, width) in [(0, 8), (1, 0), (64, PANEL), (65, PANEL), (5000, 700)] {
            let rows: Vec<usize> = panels(num_rows, width).flatten().collect();
            assert_eq!(rows, (0..num_rows).collect::<Vec<_>>(), "{num_rows} x {width}");
        }
    }

    /// Every operand is larger than a panel, and none a multiple of it.
    #[test]
    fn products_of_several_panels_are_those_of_widened_operands() {
        let (n, k, m) = (400, 6000, 400);
        let narrow = |seed, dims: &[usize]| random(seed, dims).to_dtype(DType::BF16).unwrap();
        let (x, w, dy) = (narrow(1, &[n, k]), narrow(2, &[m, k]), narrow(3, &[n, m]));
        let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let (wide_x, wide_w, wide_dy) = (wide(&x), wide(&w), wide(&dy));
        let close = |what: &str, got: &Tensor, want: &Tensor| {
            assert_close(what, got, want, Tolerance::BF16);
        };
        close("y", &linear(&x, &w, None).unwrap(), &linear(&wide_x, &wide_w, None).unwrap());
        let want = linear_backward_input(&wide_dy, &wide_w).unwrap();
        close("dx", &linear_backward_input(&dy, &w).unwrap(), &want);
        let zeros = || Tensor::zeros((m, k), DType::F32, &Device::Cpu).unwrap();
        let (got, want) = (zeros(), zeros());
        linear_backward_weight(&x, &dy, &got).unwrap();
        linear_backward_weight(&wide_x, &wide_dy, &want).unwrap();
        assert_close("dw", &got, &want, Tolerance::F32);
    }
}
