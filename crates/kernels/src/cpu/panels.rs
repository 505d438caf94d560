//! Matrix products with `bf16` operands on the CPU, for which the `gemm` crate has no kernels.
//!
//! `bf16` operands are converted to `f32` one panel of rows at a time, so a product never holds a
//! full second copy of a weight or of the activations. `f32` operands are passed to `gemm`
//! directly. A few rows are multiplied with a weight in `bf16` by a kernel of our own
//! ([`few_rows`]). Alternatives: `docs/dev/decisions/0009-bf16-in-panels.md`.

#![expect(unsafe_code, reason = "`gemm` takes pointers and strides")]

use super::blocks::{Filled, Values, append_bf16, span, to_f32};
use super::few_rows;
use super::gemm::{Into, Raw, product};
use candle_core::{DType, Result, Shape, Tensor};
use gemm::Parallelism;
use std::borrow::Cow;
use std::ops::Range;

/// Number of elements converted at a time (4 MiB in `f32`): enough rows for full `gemm` speed.
const PANEL: usize = 1 << 20;

/// Row ranges of the panels of a matrix with `width` columns. They depend on the shape only, so
/// results do not depend on the machine.
fn panels(num_rows: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (PANEL / width.max(1)).max(64);
    (0..num_rows).step_by(step).map(move |start| start..(start + step).min(num_rows))
}

/// Elements `span` in `f32`: borrowed if stored in `f32`, otherwise converted on all threads.
pub(crate) fn f32_slice(values: Values<'_>, span: Range<usize>) -> Cow<'_, [f32]> {
    match values {
        Values::F32(all) => Cow::Borrowed(&all[span]),
        Values::Bf16(all) => Cow::Owned(to_f32(&all[span])),
    }
}

/// Calls `f` with a range of rows of `values [num_rows, width]` and their elements: once for all
/// rows if `values` is `f32`, once per panel if it is `bf16`.
fn for_each_panel(
    values: Values<'_>,
    (num_rows, width): (usize, usize),
    mut f: impl FnMut(Range<usize>, &[f32]),
) {
    match values {
        Values::F32(all) => f(0..num_rows, all),
        Values::Bf16(_) => {
            for rows in panels(num_rows, width) {
                f(rows.clone(), &f32_slice(values, span(&rows, width)));
            }
        }
    }
}

/// Builds a tensor of `num_rows * width` elements from rows that `f` computes in `f32`. For `f32`
/// results `f` is called once; for `bf16` once per panel of a matrix with `widest` columns.
pub(crate) fn by_rows(
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
        append_bf16(&f(rows), &mut y);
    }
    Filled::Bf16(y).tensor(shape)
}

/// Returns `a b^T [m, n]` of `a [m, k]` and `b [n, k]`, computed on all threads.
pub(crate) fn new_nt((m, n, k): (usize, usize, usize), a: &[f32], b: Values<'_>) -> Vec<f32> {
    if k == 0 {
        return vec![0.0; m * n];
    }
    let mut y = Vec::with_capacity(m * n);
    // SAFETY: `y` has capacity for the product, which overwrites all `m * n` elements.
    unsafe {
        raw_nt((m, n, k), y.as_mut_ptr(), Into::Overwrite, a, b);
        y.set_len(m * n);
    }
    y
}

/// Returns `a b [m, n]` of `a [m, k]` and `b [k, n]`, computed on all threads.
pub(crate) fn new_nn((m, n, k): (usize, usize, usize), a: &[f32], b: Values<'_>) -> Vec<f32> {
    if k == 0 {
        return vec![0.0; m * n];
    }
    let mut y = Vec::with_capacity(m * n);
    // SAFETY: `y` has capacity for the product; its first panel overwrites all `m * n` elements.
    unsafe {
        raw_nn((m, n, k), y.as_mut_ptr(), Into::Overwrite, a, b);
        y.set_len(m * n);
    }
    y
}

/// Stores or adds `a b^T` in `dst [m, n]` for `a [m, k]` and `b [n, k]` with `k > 0`, on all
/// threads.
pub(crate) fn nt(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(dst.len() == m * n, "shapes were checked");
    // SAFETY: `dst` is mutably borrowed and has `m * n` elements.
    unsafe { raw_nt((m, n, k), dst.as_mut_ptr(), into, a, b) }
}

/// Stores or adds `a b` in `dst [m, n]` for `a [m, k]` and `b [k, n]` with `k > 0`, on all threads.
pub(crate) fn nn(
    (m, n, k): (usize, usize, usize),
    dst: &mut [f32],
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(dst.len() == m * n, "shapes were checked");
    // SAFETY: `dst` is mutably borrowed and has `m * n` elements.
    unsafe { raw_nn((m, n, k), dst.as_mut_ptr(), into, a, b) }
}

/// Adds `a^T b` to `dst [m, n]` for `a [k, m]` and `b [k, n]`, on all threads.
pub(crate) fn add_tn(
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
                add(&f32_slice(a, span(&rows, m)), &f32_slice(b, span(&rows, n)));
            }
        }
    }
}

/// # Safety
/// `dst` has `m * n` elements that no other thread accesses. They are initialized if `into` is
/// `Add`.
unsafe fn raw_nt(
    (m, n, k): (usize, usize, usize),
    dst: *mut f32,
    into: Into,
    a: &[f32],
    b: Values<'_>,
) {
    assert!(a.len() == m * k && b.len() == n * k, "shapes were checked");
    if let Values::Bf16(b) = b
        && (1..=few_rows::MAX_ROWS).contains(&m)
    {
        few_rows::nt((m, n, k), a, b, |at, value| {
            // SAFETY: `at` is below `m * n`; the caller guarantees `dst`.
            let slot = unsafe { &mut *dst.add(at).cast::<std::mem::MaybeUninit<f32>>() };
            match into {
                Into::Overwrite => slot.write(value),
                // SAFETY: initialized, as the caller guarantees.
                Into::Add => slot.write(unsafe { slot.assume_init() } + value),
            };
        });
        return;
    }
    for_each_panel(b, (n, k), |columns, b| {
        let (lhs, rhs) = (Raw::rows(a.as_ptr(), k), Raw::rows(b.as_ptr(), k).t());
        // SAFETY: the slice lengths match the shapes; the caller guarantees `dst`.
        unsafe {
            let dst = Raw::rows(dst.add(columns.start), n);
            product((m, columns.len(), k), dst, into, lhs, rhs, Parallelism::Rayon(0));
        }
    });
}

/// # Safety
/// `dst` has `m * n` elements that no other thread accesses. They are initialized if `into` is
/// `Add`.
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
        // SAFETY: the slice lengths match the shapes; the caller guarantees `dst`, and the first
        // panel initializes it.
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
    use crate::testing::{Tolerance, assert_close, device, random};
    use crate::{linear, linear_backward_input, linear_backward_weight};

    #[test]
    fn panels_tile_the_rows() {
        for (num_rows, width) in [(0, 8), (1, 0), (64, PANEL), (65, PANEL), (5000, 700)] {
            let rows: Vec<usize> = panels(num_rows, width).flatten().collect();
            assert_eq!(rows, (0..num_rows).collect::<Vec<_>>(), "{num_rows} x {width}");
        }
    }

    /// Every operand is larger than a panel and not a multiple of it.
    #[test]
    fn products_over_several_panels_match_those_of_operands_in_f32() {
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
        let zeros = || Tensor::zeros((m, k), DType::F32, &device()).unwrap();
        let (got, want) = (zeros(), zeros());
        linear_backward_weight(&x, &dy, &got).unwrap();
        linear_backward_weight(&wide_x, &wide_dy, &want).unwrap();
        assert_close("dw", &got, &want, Tolerance::F32);
    }
}
