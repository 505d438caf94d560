//! Products of a few rows with a `bf16` weight, as in generation: they are limited by the time to
//! read the weight, so it is read once, in `bf16`, and not converted in panels first.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::Element;
use super::simd::kernels;
use half::bf16;
use rayon::prelude::*;

/// Maximum number of rows of the left operand.
pub(in crate::ops) const MAX_ROWS: usize = 8;
/// Number of elements of the weight that a task reads.
const TASK: usize = 1 << 16;
/// Number of partial sums of an element of the result: two AVX-512 vectors, so that eight rows fit
/// into the registers.
const LANES: usize = 32;

/// Products of row `w` of the weight with `R` rows of `a`, which are `w.len()` elements apart. The
/// sum of a row does not depend on `R`.
#[inline(always)]
fn dots<const R: usize>(a: &[f32], w: &[bf16], y: &mut [f32]) {
    let k = w.len();
    let rows: [&[f32]; R] = std::array::from_fn(|r| &a[r * k..(r + 1) * k]);
    let mut lanes = [[0f32; LANES]; R];
    let whole = k / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let part = &w[at..at + LANES];
        let mut wide = [0f32; LANES];
        for i in 0..LANES {
            wide[i] = part[i].widen();
        }
        for r in 0..R {
            let x = &rows[r][at..at + LANES];
            for i in 0..LANES {
                lanes[r][i] = x[i].mul_add(wide[i], lanes[r][i]);
            }
        }
        at += LANES;
    }
    for r in 0..R {
        let mut sums = lanes[r];
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        let mut sum = sums[0];
        for i in whole..k {
            sum = rows[r][i].mul_add(w[i].widen(), sum);
        }
        y[r] = sum;
    }
}

/// The products of all rows of `w [_, k]` with `a [R, k]`, in `y [_, R]`.
#[inline(always)]
fn all<const R: usize>(a: &[f32], w: &[bf16], k: usize, y: &mut [f32]) {
    for (w, y) in w.chunks_exact(k).zip(y.chunks_exact_mut(R)) {
        dots::<R>(a, w, y);
    }
}

kernels! {
    fn products(num_rows: usize, a: &[f32], w: &[bf16], k: usize, y: &mut [f32]) {
        match num_rows {
            1 => all::<1>(a, w, k, y),
            2 => all::<2>(a, w, k, y),
            3 => all::<3>(a, w, k, y),
            4 => all::<4>(a, w, k, y),
            5 => all::<5>(a, w, k, y),
            6 => all::<6>(a, w, k, y),
            7 => all::<7>(a, w, k, y),
            _ => all::<8>(a, w, k, y),
        }
    }
}

/// Computes `a b^T [m, n]` of `a [m, k]` and `b [n, k]` with `1 <= m <= MAX_ROWS` and `k > 0`, on all
/// threads, and then calls `store` with the index and the value of each element.
pub(in crate::ops) fn nt(
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: &[bf16],
    mut store: impl FnMut(usize, f32),
) {
    assert!((1..=MAX_ROWS).contains(&m), "the caller chooses this product for a few rows");
    assert!(k > 0 && a.len() == m * k && b.len() == n * k, "shapes were checked");
    let rows = (TASK / k).max(1); // of the weight
    let mut y = vec![0f32; n * m]; // transposed
    y.par_chunks_mut(rows * m)
        .zip(b.par_chunks(rows * k))
        .for_each(|(y, b)| products(m, a, b, k, y));
    for (column, y) in y.chunks_exact(m).enumerate() {
        y.iter().enumerate().for_each(|(row, y)| store(row * n + column, *y));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::simd_level::at_each_level;

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
        for (n, k) in [(1, 1), (5, 31), (7, 32), (3, 65), (70, 1_100)] {
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
                products(m, &a[..m * k], &b, k, &mut y);
                y
            });
            for (level, y) in &results {
                assert_eq!(y, &results[0].1, "{level}, {m} rows");
            }
        }
    }
}
