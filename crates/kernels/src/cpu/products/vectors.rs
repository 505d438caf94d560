//! Vectors of `f32` in registers, and such types without vector instructions.

#![expect(unsafe_code, reason = "intrinsics, and pointers into tiles")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use half::bf16;

/// A vector of `f32` elements.
///
/// # Safety
/// The CPU has the features of the type, and the pointers are valid for [`Vector::LANES`] elements.
pub(super) unsafe trait Vector: Copy {
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// `self + a * b`, rounded once.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
}

/// A vector of `SIDE` elements that can be transposed. Each may also hold two elements of `bf16`.
///
/// # Safety
/// As for [`Vector`].
pub(super) unsafe trait Square<const SIDE: usize>: Vector {
    /// Transposes the square whose rows are the vectors.
    unsafe fn transpose(square: [Self; SIDE]) -> [Self; SIDE];
    /// Converts the first of the two elements of `bf16` in each lane to `f32`.
    unsafe fn first(self) -> Self;
    /// Converts the second of the two elements of `bf16` in each lane to `f32`.
    unsafe fn second(self) -> Self;
}

/// A vector of 8 elements that can be loaded from `bf16`.
///
/// # Safety
/// As for [`Vector`].
pub(super) unsafe trait Widen: Square<8> {
    unsafe fn widen(from: *const bf16) -> Self;
}

/// Elements without vector instructions.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

// SAFETY: it needs no features.
unsafe impl Vector for Plain {
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i])))
    }
}

// SAFETY: it needs no features.
unsafe impl Square<8> for Plain {
    #[inline(always)]
    unsafe fn transpose(square: [Self; 8]) -> [Self; 8] {
        std::array::from_fn(|i| Self(std::array::from_fn(|j| square[j].0[i])))
    }
    #[inline(always)]
    unsafe fn first(self) -> Self {
        Self(self.0.map(|pair| f32::from_bits(pair.to_bits() << 16)))
    }
    #[inline(always)]
    unsafe fn second(self) -> Self {
        Self(self.0.map(|pair| f32::from_bits(pair.to_bits() & 0xFFFF_0000)))
    }
}

// SAFETY: it needs no features.
unsafe impl Widen for Plain {
    #[inline(always)]
    unsafe fn widen(from: *const bf16) -> Self {
        // SAFETY: guaranteed by the caller.
        let all = unsafe { from.cast::<[bf16; 8]>().read_unaligned() };
        Self(all.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use crate::cpu::products::vectors::{Square, Vector, Widen};
    use half::bf16;
    use std::arch::x86_64::{
        __m256, __m512, _mm_loadu_si128, _mm256_and_ps, _mm256_castps_si256, _mm256_castsi256_ps,
        _mm256_cvtepu16_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_permute2f128_ps,
        _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm512_and_si512,
        _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps_si512, _mm512_castsi512_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_unpackhi_pd,
        _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
    };

    /// A register of AVX-512.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Sixteen(__m512);

    // SAFETY: the functions need AVX-512 F.
    unsafe impl Vector for Sixteen {
        const LANES: usize = 16;
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
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: guaranteed by the caller.
            Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }
    }

    // SAFETY: the functions need AVX-512 F.
    unsafe impl Square<16> for Sixteen {
        #[inline(always)]
        unsafe fn transpose(mut s: [Self; 16]) -> [Self; 16] {
            // SAFETY: guaranteed by the caller.
            unsafe {
                for i in (0..16).step_by(4) {
                    let a = _mm512_castps_pd(_mm512_unpacklo_ps(s[i].0, s[i + 1].0));
                    let b = _mm512_castps_pd(_mm512_unpackhi_ps(s[i].0, s[i + 1].0));
                    let c = _mm512_castps_pd(_mm512_unpacklo_ps(s[i + 2].0, s[i + 3].0));
                    let d = _mm512_castps_pd(_mm512_unpackhi_ps(s[i + 2].0, s[i + 3].0));
                    s[i] = Self(_mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
                    s[i + 1] = Self(_mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
                    s[i + 2] = Self(_mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
                    s[i + 3] = Self(_mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
                }
                for i in 0..4 {
                    let a = _mm512_shuffle_f32x4::<0x44>(s[i].0, s[i + 4].0);
                    let b = _mm512_shuffle_f32x4::<0xEE>(s[i].0, s[i + 4].0);
                    let c = _mm512_shuffle_f32x4::<0x44>(s[i + 8].0, s[i + 12].0);
                    let d = _mm512_shuffle_f32x4::<0xEE>(s[i + 8].0, s[i + 12].0);
                    s[i] = Self(_mm512_shuffle_f32x4::<0x88>(a, c));
                    s[i + 4] = Self(_mm512_shuffle_f32x4::<0xDD>(a, c));
                    s[i + 8] = Self(_mm512_shuffle_f32x4::<0x88>(b, d));
                    s[i + 12] = Self(_mm512_shuffle_f32x4::<0xDD>(b, d));
                }
                s
            }
        }
        #[inline(always)]
        unsafe fn first(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let pairs = _mm512_castps_si512(self.0);
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)))
            }
        }
        #[inline(always)]
        unsafe fn second(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let high = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
                Self(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), high)))
            }
        }
    }

    /// A register of AVX2.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Eight(__m256);

    // SAFETY: the functions need AVX2 and FMA.
    unsafe impl Vector for Eight {
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: guaranteed by the caller.
            Self(unsafe { _mm256_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: guaranteed by the caller.
            Self(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: guaranteed by the caller.
            Self(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: guaranteed by the caller.
            Self(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
        }
    }

    // SAFETY: the functions need AVX2.
    unsafe impl Square<8> for Eight {
        #[inline(always)]
        unsafe fn transpose(s: [Self; 8]) -> [Self; 8] {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let a = _mm256_unpacklo_ps(s[0].0, s[1].0);
                let b = _mm256_unpackhi_ps(s[0].0, s[1].0);
                let c = _mm256_unpacklo_ps(s[2].0, s[3].0);
                let d = _mm256_unpackhi_ps(s[2].0, s[3].0);
                let e = _mm256_unpacklo_ps(s[4].0, s[5].0);
                let f = _mm256_unpackhi_ps(s[4].0, s[5].0);
                let g = _mm256_unpacklo_ps(s[6].0, s[7].0);
                let h = _mm256_unpackhi_ps(s[6].0, s[7].0);
                let (a0, a1) = (_mm256_shuffle_ps::<0x44>(a, c), _mm256_shuffle_ps::<0xEE>(a, c));
                let (a2, a3) = (_mm256_shuffle_ps::<0x44>(b, d), _mm256_shuffle_ps::<0xEE>(b, d));
                let (b0, b1) = (_mm256_shuffle_ps::<0x44>(e, g), _mm256_shuffle_ps::<0xEE>(e, g));
                let (b2, b3) = (_mm256_shuffle_ps::<0x44>(f, h), _mm256_shuffle_ps::<0xEE>(f, h));
                [
                    Self(_mm256_permute2f128_ps::<0x20>(a0, b0)),
                    Self(_mm256_permute2f128_ps::<0x20>(a1, b1)),
                    Self(_mm256_permute2f128_ps::<0x20>(a2, b2)),
                    Self(_mm256_permute2f128_ps::<0x20>(a3, b3)),
                    Self(_mm256_permute2f128_ps::<0x31>(a0, b0)),
                    Self(_mm256_permute2f128_ps::<0x31>(a1, b1)),
                    Self(_mm256_permute2f128_ps::<0x31>(a2, b2)),
                    Self(_mm256_permute2f128_ps::<0x31>(a3, b3)),
                ]
            }
        }
        #[inline(always)]
        unsafe fn first(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let pairs = _mm256_castps_si256(self.0);
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)))
            }
        }
        #[inline(always)]
        unsafe fn second(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let high = _mm256_castsi256_ps(_mm256_set1_epi32(0xFFFF_0000_u32 as i32));
                Self(_mm256_and_ps(self.0, high))
            }
        }
    }

    // SAFETY: the functions need AVX2.
    unsafe impl Widen for Eight {
        #[inline(always)]
        unsafe fn widen(from: *const bf16) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let narrow = _mm_loadu_si128(from.cast());
                let wide = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow));
                Self(_mm256_castsi256_ps(wide))
            }
        }
    }
}
