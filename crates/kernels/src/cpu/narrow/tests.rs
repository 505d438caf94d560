//! Compares products of any size with sums in f64.

use super::*;
use crate::DropoutMask;
use ::simd::at_each_level;

fn wave(len: usize, step: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * step).sin()).collect()
}

/// Sizes around those of tiles, tasks and registers.
const SIZES: [(usize, usize, usize); 6] = [
    (1, 1, 1),
    (11, 31, 3),
    (TILE_ROWS + 1, 33, LANES),
    (TASK_ROWS + 13, TILE + 47, LANES + 1),
    (2 * TASK_ROWS, 2 * TILE, 2 * LANES),
    (7, TILE - 5, 4 * LANES),
];

fn drops() -> Drops {
    DropoutMask { seed: 7, first_row: 3, probability: 0.3 }.drops()
}

/// The sums over `len` of products, in `f64`.
#[track_caller]
fn assert_sums(what: &str, found: &[f32], len: usize, product: impl Fn(usize, usize) -> f32) {
    for (at, found) in found.iter().enumerate() {
        let expected: f64 = (0..len).map(|i| f64::from(product(at, i))).sum();
        assert!((f64::from(*found) - expected).abs() < 3e-4, "{what} {at}: {found}, {expected}");
    }
}

#[test]
fn products_of_any_size_are_sums_over_the_elements_that_are_not_dropped() {
    for (n, k, r) in SIZES {
        let (x, w, d) = (wave(n * k, 0.37), wave(k * r, 0.73), wave(n * r, 0.91));
        for drops in [None, Some(drops())] {
            let kept = |row: usize, column: usize| {
                let drops = drops.is_some_and(|drops| drops.drops(drops.row_seed(row), column));
                if drops { 0.0 } else { x[row * k + column] }
            };
            let wide = Wide { x: &x, width: k, drops };
            let (w_rows, d_rows) = (Narrow::rows(&w, r), Narrow::rows(&d, r));
            let (u, dw) = wide.products(r, Some(&w_rows), Some(&d_rows));
            let what = format!("{n} x {k} x {r}, {drops:?}:");
            assert_sums(&what, &u, k, |at, i| kept(at / r, i) * w[i * r + at % r]);
            let [mut columns, mut doubled, mut alone] = [(); 3].map(|()| vec![0.0; k * r]);
            dw.add_columns(1.0, &mut columns);
            assert_sums(&what, &columns, n, |at, i| kept(i, at % k) * d[i * r + at / k]);
            dw.add_columns(2.0, &mut doubled);
            assert!(columns.iter().zip(&doubled).all(|(y, doubled)| *doubled == 2.0 * y));
            assert_eq!(wide.products(r, Some(&w_rows), None).0, u, "{what}");
            wide.products(r, None, Some(&d_rows)).1.add_columns(1.0, &mut alone);
            assert_eq!(alone, columns, "{what}");
        }
    }
}

#[test]
fn the_kept_elements_of_a_product_are_added() {
    for (n, k, r) in SIZES {
        let (u, a) = (wave(n * r, 0.37), wave(r * k, 0.73));
        let mut y = vec![0.5; n * k];
        add_kept_product(&u, &a, drops(), &mut y, r);
        for (at, y) in y.iter().enumerate() {
            let (row, column) = (at / k, at % k);
            let sum: f32 = (0..r).map(|j| u[row * r + j] * a[j * k + column]).sum();
            let drops = drops().drops(drops().row_seed(row), column);
            let expected = if drops { 0.5 } else { 0.5 + sum };
            assert!((y - expected).abs() < 1e-4, "{n} x {k} x {r}, {at}: {y}, {expected}");
        }
    }
}

#[test]
fn every_simd_level_computes_the_same_bits() {
    let (n, k, r) = (29, TILE + 47, LANES + 1);
    let (x, w, d) = (wave(n * k, 0.37), wave(k * r, 0.73), wave(n * r, 0.91));
    let (w, d) = (Narrow::rows(&w, r), Narrow::rows(&d, r));
    let wide = Wide { x: &x, width: k, drops: Some(drops()) };
    let results = at_each_level(|| {
        let (u, dw) = wide.products_of(0..n, r, Some(&w), Some(&d));
        let mut y = [[0f32; TILE]; EXPANDED];
        expand(&[[0.3; EXPANDED], [0.7; EXPANDED]], &[[0.1; SHARED]; 2], 32, y.as_flattened_mut());
        let mut sum = vec![0.1; n * k];
        keep_add(drops(), (2, 0), y.as_flattened(), &mut sum, k, TILE);
        (u, dw.groups, y, sum)
    });
    for (level, result) in &results {
        assert!(result == &results[0].1, "{level}");
    }
}
