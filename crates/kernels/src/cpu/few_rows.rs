//! Products of a few rows with a `bf16` weight, as in generation: they are limited by the time to
//! read the weight, so it is read once, in `bf16`, and not converted in panels first.

use super::blocks::{Scratch, to_f32_block};
use super::simd::{dot, kernels};
use half::bf16;
use rayon::prelude::*;

/// Maximum number of rows of the left operand.
pub(crate) const MAX_ROWS: usize = 8;
/// Number of elements of the weight that a task reads.
const TASK: usize = 1 << 16;

kernels! {
    /// The products of each row of `w [_, k]` with one row.
    fn products_of_one(a: &[f32], w: &[bf16], y: &mut [f32]) {
        for (w, y) in w.chunks_exact(a.len()).zip(y) {
            *y = dot(a, w);
        }
    }

    /// The products of one row with the rows of `a [_, k]`.
    fn products_with_one(a: &[f32], w: &[f32], y: &mut [f32]) {
        for (a, y) in a.chunks_exact(w.len()).zip(y) {
            *y = dot(a, w);
        }
    }
}

/// The products of the rows of `w [_, k]` with those of `a [m, k]`, in `y [_, m]`. All are sums in
/// the same order, for every `m`.
fn products(m: usize, a: &[f32], w: &[bf16], y: &mut [f32]) {
    if m == 1 {
        return products_of_one(a, w, y);
    }
    let k = a.len() / m;
    let mut wide = Scratch::of(k); // stays in the cache for all rows of `a`
    for (w, y) in w.chunks_exact(k).zip(y.chunks_exact_mut(m)) {
        to_f32_block(w, wide.all());
        products_with_one(a, wide.all(), y);
    }
}

/// Computes `a b^T [m, n]` of `a [m, k]` and `b [n, k]` with `1 <= m <= MAX_ROWS` and `k > 0`, on
/// all threads, and then calls `store` with the index and the value of each element.
pub(crate) fn nt(
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: &[bf16],
    mut store: impl FnMut(usize, f32),
) {
    assert!((1..=MAX_ROWS).contains(&m), "the caller chooses this product for a few rows");
    assert!(k > 0 && a.len() == m * k && b.len() == n * k, "shapes were checked");
    let rows = (TASK / k).max(1); // of the weight
    let mut y = vec![0f32; n * m]; // transposed
    y.par_chunks_mut(rows * m).zip(b.par_chunks(rows * k)).for_each(|(y, b)| products(m, a, b, y));
    for (column, y) in y.chunks_exact(m).enumerate() {
        y.iter().enumerate().for_each(|(row, y)| store(row * n + column, *y));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::simd::at_each_level;

    fn wave(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    fn product((m, n, k): (usize, usize, usize), a: &[f32], b: &[bf16]) -> Vec<f32> {
        let mut y = vec![0f32; m * n];
        nt((m, n, k), a, b, |at, value| y[at] = value);
        y
    }

    #[test]
    fn products_of_one_to_eight_rows_match_sums_in_f64_and_do_not_depend_on_the_other_rows() {
        for (n, k) in [(1, 1), (5, 63), (7, 64), (3, 129), (70, 1_100)] {
            let a = wave(8 * k, 0.37);
            let b: Vec<bf16> = wave(n * k, 0.73).into_iter().map(bf16::from_f32).collect();
            let eight = product((8, n, k), &a, &b);
            for m in 1..=8 {
                let y = product((m, n, k), &a[..m * k], &b);
                assert_eq!(y, eight[..m * n], "{m} rows of {n} x {k}");
            }
            for (at, y) in eight.iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let pairs = a[row * k..(row + 1) * k].iter().zip(&b[column * k..]);
                let exact: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(b.to_f32())).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-4, "{at} of {n} x {k}: {y}, {exact}");
            }
        }
    }

    #[test]
    fn every_simd_level_computes_the_same_bits() {
        let (k, n) = (100, 6);
        let a = wave(8 * k, 0.37);
        let b: Vec<bf16> = wave(n * k, 0.73).into_iter().map(bf16::from_f32).collect();
        for m in 1..=8 {
            let results = at_each_level(|| {
                let mut y = vec![0f32; n * m];
                products(m, &a[..m * k], &b, &mut y);
                y
            });
            for (level, y) in &results {
                assert_eq!(y, &results[0].1, "{level}, {m} rows");
            }
        }
    }
}
