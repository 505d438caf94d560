//! Tiles in registers of AVX2 and AVX-512.

use super::sums::{DOTS, Dots, TILE_ROWS, Tile, Vector, dots_of, products_of};
use std::arch::x86_64::{
    __m256, __m512, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm512_add_ps, _mm512_castps512_ps256,
    _mm512_extractf32x8_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps,
};

/// Calls a function with the number of rows as a constant, so that the sums of all rows are in
/// registers.
macro_rules! with_rows {
    ($num_rows:expr, $name:ident => $call:expr) => {
        with_rows!(@ $num_rows, $name => $call, 1 2 3 4 5 6 7)
    };
    (@ $num_rows:expr, $name:ident => $call:expr, $($few:literal)*) => {
        match $num_rows {
            $($few => { const $name: usize = $few; $call })*
            _ => { const $name: usize = TILE_ROWS; $call }
        }
    };
}

/// # Safety
/// As for [`dots_of`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn dots_avx512(
    len: usize,
    (x, num_rows): (*const f32, usize),
    w: [*const f32; DOTS],
    sums: &mut Dots,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_rows!(num_rows, ROWS => dots_of::<One, ROWS, 3>(len, (x, ROWS), w, sums)) }
}

/// # Safety
/// As for [`dots_of`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dots_avx2(
    len: usize,
    (x, num_rows): (*const f32, usize),
    w: [*const f32; DOTS],
    sums: &mut Dots,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { dots_of::<Two, 4, 1>(len, (x, num_rows), w, sums) }
}

/// # Safety
/// As for [`products_of`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn products_avx512(
    terms: usize,
    (x, num_rows): (*const f32, usize),
    strides: (usize, usize),
    w: *const f32,
    y: Tile,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        with_rows!(num_rows, ROWS => products_of::<One, ROWS, 3>(terms, (x, ROWS), strides, w, y));
    }
}

/// # Safety
/// As for [`products_of`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn products_avx2(
    terms: usize,
    (x, num_rows): (*const f32, usize),
    strides: (usize, usize),
    w: *const f32,
    y: Tile,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { products_of::<Two, 4, 1>(terms, (x, num_rows), strides, w, y) }
}

/// One register of AVX-512.
#[derive(Clone, Copy)]
struct One(__m512);

// SAFETY: the functions need AVX-512 F and DQ.
unsafe impl Vector for One {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { _mm512_setzero_ps() })
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            Two(low, high).sum()
        }
    }
}

/// Two registers of AVX2.
#[derive(Clone, Copy)]
struct Two(__m256, __m256);

// SAFETY: the functions need AVX2 and FMA.
unsafe impl Vector for Two {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
