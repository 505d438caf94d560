//! The functions of a product at each SIMD level.

#![expect(unsafe_code, reason = "functions with target features are called after detection")]

use super::few_rows::{FewRows, few_rows};
use super::packs::{Lanes, panels};
use super::tiles::{TileBlock, block};
use super::vectors::Plain;
use ::simd::{SimdLevel, level};
use half::bf16;

/// Computes the tiles of a block, with the contract of [`block`].
type ComputeBlock = unsafe fn(&TileBlock);
/// Copies lanes to panels, with the contract of [`panels`].
type CopyPanels<E> = unsafe fn(&Lanes<E>, (usize, usize), *mut f32);
/// Computes a product of a few rows, with the contract of [`few_rows`].
type ComputeFewRows<E> = unsafe fn(&FewRows<E>);

/// The functions of a SIMD level, and the sizes of its tiles.
pub(super) struct Kernels {
    /// Numbers of columns of the tiles, in ascending order.
    widths: &'static [usize],
    /// Number of rows of a tile in a product that is as narrow as the narrowest tile.
    rows_if_narrow: usize,
    /// Number of rows of a tile in other products.
    rows: usize,
    pub(super) block: ComputeBlock,
    pub(super) panels_f32: CopyPanels<f32>,
    pub(super) panels_bf16: CopyPanels<bf16>,
    pub(super) few_rows_f32: ComputeFewRows<f32>,
    pub(super) few_rows_bf16: ComputeFewRows<bf16>,
}

/// Defines the functions of a level that needs CPU features.
macro_rules! level {
    ($name:ident, $features:literal, $block:expr, $side:ident, $lanes:literal) => {
        #[cfg(target_arch = "x86_64")]
        mod $name {
            use crate::cpu::products::few_rows::{self, FewRows};
            use crate::cpu::products::packs::{self, Lanes};
            use crate::cpu::products::tiles::{self, TileBlock};
            use crate::cpu::products::vectors::x86;
            use half::bf16;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn block(block: &TileBlock) {
                // SAFETY: guaranteed by the caller.
                unsafe { $block(block) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn panels_f32(x: &Lanes<f32>, widths: (usize, usize), y: *mut f32) {
                // SAFETY: guaranteed by the caller.
                unsafe { packs::panels::<x86::Eight, f32>(x, widths, y) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn panels_bf16(x: &Lanes<bf16>, widths: (usize, usize), y: *mut f32) {
                // SAFETY: guaranteed by the caller.
                unsafe { packs::panels::<x86::Eight, bf16>(x, widths, y) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn few_rows_f32(x: &FewRows<f32>) {
                // SAFETY: guaranteed by the caller.
                unsafe { few_rows::few_rows::<x86::$side, f32, $lanes>(x) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn few_rows_bf16(x: &FewRows<bf16>) {
                // SAFETY: guaranteed by the caller.
                unsafe { few_rows::few_rows::<x86::$side, bf16, $lanes>(x) }
            }
        }
    };
}

level!(
    avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma",
    tiles::block::<x86::Sixteen, x86::Eight, 3>,
    Sixteen,
    16
);
level!(avx2, "avx2,fma", tiles::block::<x86::Eight, x86::Eight, 2>, Eight, 8);

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    widths: &[8, 16, 32, 48],
    rows_if_narrow: 8,
    rows: 8,
    block: avx512::block,
    panels_f32: avx512::panels_f32,
    panels_bf16: avx512::panels_bf16,
    few_rows_f32: avx512::few_rows_f32,
    few_rows_bf16: avx512::few_rows_bf16,
};
#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    widths: &[8, 16],
    rows_if_narrow: 8,
    rows: 6,
    block: avx2::block,
    panels_f32: avx2::panels_f32,
    panels_bf16: avx2::panels_bf16,
    few_rows_f32: avx2::few_rows_f32,
    few_rows_bf16: avx2::few_rows_bf16,
};
static BASELINE: Kernels = Kernels {
    widths: &[8, 16],
    rows_if_narrow: 8,
    rows: 6,
    block: block::<Plain, Plain, 2>,
    panels_f32: panels::<Plain, f32>,
    panels_bf16: panels::<Plain, bf16>,
    few_rows_f32: few_rows::<Plain, f32, 8>,
    few_rows_bf16: few_rows::<Plain, bf16, 8>,
};

impl Kernels {
    /// The functions of the level of this thread.
    pub(super) fn of_thread() -> &'static Self {
        match level() {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => &AVX2,
            _ => &BASELINE,
        }
    }

    /// Number of columns of the widest tile.
    pub(super) fn widest(&self) -> usize {
        self.widths[self.widths.len() - 1]
    }

    /// Number of rows of the tiles of a product with `n` columns.
    pub(super) fn tile_rows(&self, n: usize) -> usize {
        if n <= self.widths[0] { self.rows_if_narrow } else { self.rows }
    }

    /// Number of columns of the last tile of a row of `columns` columns, of which there are some.
    pub(super) fn last_width(&self, columns: usize) -> usize {
        let rest = (columns - 1) % self.widest() + 1;
        self.widths.iter().copied().find(|width| *width >= rest).unwrap_or(rest)
    }
}
