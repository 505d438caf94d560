//! Tiles of matrix products whose sums are held in registers, at each SIMD level.
//!
//! All levels do the same operations in the same order with fused multiply-adds, on [`LANES`]
//! elements at a time, so results do not depend on the CPU. They use intrinsics, because the
//! compiler keeps arrays of this size in memory.

#![expect(unsafe_code, reason = "intrinsics, and pointers into tiles")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

mod sums;
#[cfg(target_arch = "x86_64")]
mod x86;

use ::simd::{SimdLevel, level};
pub(crate) use sums::{DOTS, Dots, LANES, PANEL, TILE_ROWS, Tile};
use sums::{Plain, dots_of, products_of};

/// Returns the dot products of the first `num_rows` rows of `x [TILE_ROWS, len]` and `w`. All rows
/// of `w` have the length `len`, a multiple of [`LANES`].
pub(crate) fn dots(x: &[f32], num_rows: usize, w: [&[f32]; DOTS]) -> Dots {
    let len = w[0].len();
    let whole = len.is_multiple_of(LANES) && x.len() == TILE_ROWS * len;
    assert!(whole && w.iter().all(|w| w.len() == len), "tiles are padded");
    let (x, w, mut sums) = (x.as_ptr(), w.map(<[f32]>::as_ptr), Dots::default());
    match level() {
        // SAFETY: the CPU has the features of its level, and the lengths were checked.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { x86::dots_avx512(len, (x, num_rows), w, &mut sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { x86::dots_avx2(len, (x, num_rows), w, &mut sums) },
        // SAFETY: the lengths were checked.
        _ => unsafe { dots_of::<Plain, 2, 1>(len, (x, num_rows), w, &mut sums) },
    }
    sums
}

/// How a left operand `[TILE_ROWS, terms]` is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// Row by row.
    Rows,
    /// Column by column.
    Columns,
}

/// Adds the product of the first `num_rows` rows of `x [TILE_ROWS, terms]` and `w [terms, PANEL]`
/// to `y`, and may add to the other rows.
///
/// # Safety
/// All elements of `y` are valid, and no other thread accesses them.
pub(crate) unsafe fn add_product((x, left): (&[f32], Left), num_rows: usize, w: &[f32], y: Tile) {
    let terms = w.len() / PANEL;
    assert!(x.len() == TILE_ROWS * terms && w.len() == PANEL * terms, "tiles are padded");
    let strides = match left {
        Left::Rows => (terms, 1),
        Left::Columns => (1, TILE_ROWS),
    };
    let (x, w) = (x.as_ptr(), w.as_ptr());
    match level() {
        // SAFETY: the CPU has the features of its level, the lengths were checked, and the caller
        // guarantees `y`.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { x86::products_avx512(terms, (x, num_rows), strides, w, y) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { x86::products_avx2(terms, (x, num_rows), strides, w, y) },
        // SAFETY: as above.
        _ => unsafe { products_of::<Plain, 2, 1>(terms, (x, num_rows), strides, w, y) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::simd::at_each_level;

    fn wave(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    #[test]
    fn tiles_are_products_and_every_simd_level_computes_the_same_bits() {
        for len in [16, 48, 512] {
            let (x, w) = (wave(TILE_ROWS * len, 0.37), wave(PANEL * len, 0.73));
            let results = at_each_level(|| {
                let rows = std::array::from_fn(|c| &w[c * len..(c + 1) * len]);
                let products = [Left::Rows, Left::Columns].map(|left| {
                    let mut sums = [[0.5f32; PANEL]; TILE_ROWS];
                    let y = Tile { start: sums.as_mut_ptr().cast(), stride: PANEL };
                    // SAFETY: the tile is `sums`.
                    unsafe { add_product((&x, left), TILE_ROWS, &w, y) };
                    sums
                });
                (dots(&x, TILE_ROWS, rows), products)
            });
            for (level, result) in &results {
                assert_eq!(*result, results[0].1, "{level}, {len} terms");
            }
            let (sums, products) = results[0].1;
            let exact = |product: &dyn Fn(usize) -> (f32, f32)| {
                let products = (0..len).map(product);
                products.map(|(x, w)| f64::from(x) * f64::from(w)).sum::<f64>()
            };
            let close = |got: f32, want: f64| assert!((f64::from(got) - want).abs() < 1e-4);
            for row in 0..TILE_ROWS {
                for c in 0..DOTS {
                    let want = exact(&|i| (x[row * len + i], w[c * len + i]));
                    close(sums[row][c], want);
                }
                for c in 0..PANEL {
                    let rows = exact(&|i| (x[row * len + i], w[i * PANEL + c]));
                    close(products[0][row][c], 0.5 + rows);
                    let columns = exact(&|i| (x[i * TILE_ROWS + row], w[i * PANEL + c]));
                    close(products[1][row][c], 0.5 + columns);
                }
            }
        }
    }
}
