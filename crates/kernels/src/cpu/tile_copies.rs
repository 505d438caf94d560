//! Copies of operands in the order in which the tiles of a product read them, in `f32`.

#![expect(unsafe_code, reason = "a prefetch takes an address")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::Element;
use super::simd::kernels;
use super::tiles::{LANES, PANEL, TILE_ROWS};
use half::bf16;

/// Number of rows between the one that is copied to panels and the one that is read into the cache.
const AHEAD: usize = 2;

/// Number of elements of a panel with its padding. Without it, the same rows of all panels would be
/// in the same sets of the L1 cache.
pub(super) const fn panel_len(terms: usize) -> usize {
    PANEL * terms + LANES
}

/// Starts to read `N` elements from `at`, which may be outside all memory.
#[inline(always)]
fn prefetch<E, const N: usize>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..N).step_by(64 / size_of::<E>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing that the program can observe, and every x86-64 CPU has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line).cast()) };
    }
}

/// Copies rows of `x`, which are `stride` elements apart, to the first `TILE_ROWS` rows of `y`,
/// whose length is a multiple of that. Zeros follow them, and their elements.
#[inline(always)]
fn copy_rows<E: Element>(x: &[E], stride: usize, num_rows: usize, len: usize, y: &mut [f32]) {
    let width = y.len() / TILE_ROWS;
    for (row, y) in y.chunks_exact_mut(width).enumerate() {
        let (y, rest) = y.split_at_mut(if row < num_rows { len } else { 0 });
        if !y.is_empty() {
            for (y, x) in y.iter_mut().zip(&x[row * stride..row * stride + len]) {
                *y = x.widen();
            }
        }
        rest.fill(0.0);
    }
}

/// Copies `[terms, columns]` of `x`, whose rows are `stride` elements apart, to panels
/// `[terms, PANEL]`. The columns of the last one are filled up with zeros.
#[inline(always)]
fn copy_panels<E: Element>(x: &[E], stride: usize, terms: usize, columns: usize, y: &mut [f32]) {
    let whole = columns / PANEL;
    for term in 0..terms {
        let x = &x[term * stride..term * stride + columns];
        let (panels, rest) = x.as_chunks::<PANEL>();
        for (panel, x) in panels.iter().enumerate() {
            let next = x.as_ptr().wrapping_add(AHEAD * stride);
            prefetch::<E, PANEL>(next);
            let at = panel * panel_len(terms) + term * PANEL;
            for (y, x) in y[at..at + PANEL].iter_mut().zip(x) {
                *y = x.widen();
            }
        }
        if !rest.is_empty() {
            let y = &mut y[whole * panel_len(terms) + term * PANEL..][..PANEL];
            for (i, y) in y.iter_mut().enumerate() {
                *y = if i < rest.len() { rest[i].widen() } else { 0.0 };
            }
        }
    }
}

/// Copies `[terms, columns]` of `x`, whose rows are `stride` elements apart, to
/// `[terms, TILE_ROWS]`. Zeros follow the columns.
#[inline(always)]
fn copy_columns<E: Element>(x: &[E], stride: usize, columns: usize, y: &mut [f32]) {
    let (y, _) = y.as_chunks_mut::<TILE_ROWS>();
    for (term, y) in y.iter_mut().enumerate() {
        let x = &x[term * stride..term * stride + columns];
        if let Some(x) = x.first_chunk::<TILE_ROWS>() {
            for i in 0..TILE_ROWS {
                y[i] = x[i].widen();
            }
        } else {
            for i in 0..TILE_ROWS {
                y[i] = if i < columns { x[i].widen() } else { 0.0 };
            }
        }
    }
}

kernels! {
    pub(super) fn rows_f32(x: &[f32], stride: usize, num_rows: usize, len: usize, y: &mut [f32]) {
        copy_rows(x, stride, num_rows, len, y);
    }
    pub(super) fn rows_bf16(x: &[bf16], stride: usize, num_rows: usize, len: usize, y: &mut [f32]) {
        copy_rows(x, stride, num_rows, len, y);
    }
    pub(super) fn panels_f32(x: &[f32], stride: usize, terms: usize, columns: usize, y: &mut [f32]) {
        copy_panels(x, stride, terms, columns, y);
    }
    pub(super) fn panels_bf16(x: &[bf16], stride: usize, terms: usize, columns: usize, y: &mut [f32]) {
        copy_panels(x, stride, terms, columns, y);
    }
    pub(super) fn columns_f32(x: &[f32], stride: usize, columns: usize, y: &mut [f32]) {
        copy_columns(x, stride, columns, y);
    }
    pub(super) fn columns_bf16(x: &[bf16], stride: usize, columns: usize, y: &mut [f32]) {
        copy_columns(x, stride, columns, y);
    }
    pub(super) fn row_bf16(x: &[bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.widen();
        }
    }
}
