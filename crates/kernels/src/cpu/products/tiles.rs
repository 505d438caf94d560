//! Tiles of a product, whose sums are held in registers.
//!
//! A sum starts with 0 or with the element of the destination, and its terms are added in order
//! with fused multiply-adds. Nothing else decides its bits: not the size of the tile, not the
//! vectors, and not the blocks of terms, because a sum is stored exactly between two blocks.

#![expect(unsafe_code, reason = "tiles are given by address")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]
#![expect(clippy::needless_range_loop, reason = "loops over registers have constant lengths")]

use super::operands::Raw;
use super::vectors::Vector;

/// Maximum number of rows of a tile.
pub(super) const MAX_ROWS: usize = 8;
/// Maximum number of columns of a tile.
pub(super) const MAX_COLUMNS: usize = 48;

/// An operand as the tiles read it. Panel `p` starts at `start + p * panel_stride`, and element `i`
/// of its term `t` is at offset `i * lane_stride + t * term_stride`.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) start: *const f32,
    pub(super) panel_stride: usize,
    pub(super) lane_stride: usize,
    pub(super) term_stride: usize,
}

/// A block of a product.
#[derive(Clone, Copy)]
pub(super) struct TileBlock {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Number of terms of each sum.
    pub(super) terms: usize,
    /// Number of rows of a panel of the left operand and of a tile.
    pub(super) tile_rows: usize,
    pub(super) left: Panels,
    /// The right operand. Lanes of a term are adjacent. Panels have the width of the widest tile,
    /// and the last one that of the smallest tile that has its columns.
    pub(super) right: Panels,
    /// Distance between the terms of the last panel of the right operand.
    pub(super) last_stride: usize,
    /// Distance between the elements of a term that are read and those that are fetched into the
    /// cache.
    pub(super) ahead: usize,
    pub(super) dst: Raw<*mut f32>,
    /// Whether sums start with 0, and not with the elements of the destination.
    pub(super) from_zero: bool,
}

#[inline(always)]
fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing that the program can observe, and every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
}

/// Computes a tile `[ROWS, VECTORS * LANES]` at `to`.
///
/// # Safety
/// All elements of the operands and of the tile are valid, and the CPU has the features of `V`.
#[inline(always)]
unsafe fn tile<V: Vector, const ROWS: usize, const VECTORS: usize>(
    block: &TileBlock,
    (left, right, right_stride): (*const f32, *const f32, usize),
    to: *mut f32,
    row_stride: usize,
) {
    let (lane_stride, left_stride) = (block.left.lane_stride, block.left.term_stride);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        for r in 0..ROWS {
            let row = to.add(r * row_stride);
            if block.from_zero {
                prefetch(row);
                prefetch(row.add(VECTORS * V::LANES - 1));
                continue;
            }
            for v in 0..VECTORS {
                sums[r][v] = V::load(row.add(v * V::LANES));
            }
        }
        let (mut left, mut right) = (left, right);
        for _ in 0..block.terms {
            let mut columns = [V::zero(); VECTORS];
            for v in 0..VECTORS {
                columns[v] = V::load(right.add(v * V::LANES));
            }
            for v in 0..VECTORS {
                prefetch(right.wrapping_add(block.ahead + v * V::LANES));
            }
            for r in 0..ROWS {
                let row = V::splat(*left.add(r * lane_stride));
                for v in 0..VECTORS {
                    sums[r][v] = sums[r][v].add_product(row, columns[v]);
                }
            }
            left = left.wrapping_add(left_stride);
            right = right.wrapping_add(right_stride);
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                sums[r][v].store(to.add(r * row_stride + v * V::LANES));
            }
        }
    }
}

/// [`tile`] with a number of rows that is known at run time.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn tile_of<V: Vector, const VECTORS: usize>(
    rows: usize,
    block: &TileBlock,
    operands: (*const f32, *const f32, usize),
    to: *mut f32,
    row_stride: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows {
            1 => tile::<V, 1, VECTORS>(block, operands, to, row_stride),
            2 => tile::<V, 2, VECTORS>(block, operands, to, row_stride),
            3 => tile::<V, 3, VECTORS>(block, operands, to, row_stride),
            4 => tile::<V, 4, VECTORS>(block, operands, to, row_stride),
            5 => tile::<V, 5, VECTORS>(block, operands, to, row_stride),
            6 => tile::<V, 6, VECTORS>(block, operands, to, row_stride),
            7 => tile::<V, 7, VECTORS>(block, operands, to, row_stride),
            _ => tile::<V, MAX_ROWS, VECTORS>(block, operands, to, row_stride),
        }
    }
}

/// Computes the tiles of a panel of columns, of which the first `columns` exist.
///
/// # Safety
/// As for [`block`].
#[inline(always)]
unsafe fn panel<V: Vector, const VECTORS: usize>(
    block: &TileBlock,
    (right, right_stride): (*const f32, usize),
    first: usize,
    columns: usize,
) {
    let width = VECTORS * V::LANES;
    let whole = columns >= width && block.dst.column_stride == 1;
    for (panel, row) in (0..block.rows).step_by(block.tile_rows).enumerate() {
        let rows = block.tile_rows.min(block.rows - row);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let left = block.left.start.wrapping_add(panel * block.left.panel_stride);
            let to =
                block.dst.start.add(row * block.dst.row_stride + first * block.dst.column_stride);
            if whole {
                tile_of::<V, VECTORS>(
                    rows,
                    block,
                    (left, right, right_stride),
                    to,
                    block.dst.row_stride,
                );
                continue;
            }
            let mut copy = [0f32; MAX_ROWS * MAX_COLUMNS];
            if !block.from_zero {
                for (r, copy) in copy.chunks_exact_mut(width).take(rows).enumerate() {
                    for (c, copy) in copy.iter_mut().take(columns).enumerate() {
                        *copy = *to.add(r * block.dst.row_stride + c * block.dst.column_stride);
                    }
                }
            }
            tile_of::<V, VECTORS>(
                rows,
                block,
                (left, right, right_stride),
                copy.as_mut_ptr(),
                width,
            );
            for (r, copy) in copy.chunks_exact(width).take(rows).enumerate() {
                for (c, copy) in copy.iter().take(columns).enumerate() {
                    *to.add(r * block.dst.row_stride + c * block.dst.column_stride) = *copy;
                }
            }
        }
    }
}

/// Computes a block with tiles of up to `WIDEST` vectors `W`. The last columns of a row are in a
/// tile of fewer vectors, or in one vector `N`.
///
/// # Safety
/// All elements of the operands and of the destination are valid, also those of the tiles that go
/// beyond the last column of the right operand. No other thread accesses the destination, and the
/// CPU has the features of `W` and of `N`.
#[inline(always)]
pub(super) unsafe fn block<W: Vector, N: Vector, const WIDEST: usize>(block: &TileBlock) {
    let widest = WIDEST * W::LANES;
    for (index, first) in (0..block.columns).step_by(widest).enumerate() {
        let columns = block.columns - first;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let last = columns <= widest;
            let stride = if last { block.last_stride } else { block.right.term_stride };
            let right = (block.right.start.wrapping_add(index * block.right.panel_stride), stride);
            if columns <= N::LANES {
                panel::<N, 1>(block, right, first, columns);
            } else if columns <= W::LANES {
                panel::<W, 1>(block, right, first, columns);
            } else if columns <= 2 * W::LANES || WIDEST == 2 {
                panel::<W, 2>(block, right, first, columns.min(2 * W::LANES));
            } else {
                panel::<W, WIDEST>(block, right, first, columns.min(widest));
            }
        }
    }
}
