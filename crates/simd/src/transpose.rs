//! Transposes blocks of 16 x 16 bytes.

/// Number of rows and of columns of a block.
pub const LANES: usize = 16;
/// A row or a column of a block.
pub type Lanes = [u8; LANES];

/// Transposes a block: calls `put(i, column)` for each column `i`, in order; `row(i)` returns row
/// `i`.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    clippy::inline_always,
    reason = "SSE2 is part of every x86-64; inlined to use the caller's features"
)]
#[inline(always)]
pub fn transpose<'a>(row: impl Fn(usize) -> &'a Lanes, mut put: impl FnMut(usize, &Lanes)) {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_storeu_si128, _mm_unpackhi_epi8,
        _mm_unpacklo_epi8,
    };
    const HALF: usize = LANES / 2;

    /// Interleaves the bytes of rows `i` and `i + 8` into rows `2 i` and `2 i + 1`. Four
    /// applications transpose the block. Intrinsics keep the block in registers; the compiler
    /// stores a loop over bytes to memory.
    #[inline(always)]
    fn interleave(square: [__m128i; LANES]) -> [__m128i; LANES] {
        let mut next = square;
        for i in 0..HALF {
            let (a, b) = (square[i], square[i + HALF]);
            // SAFETY: SSE2 is part of x86-64.
            unsafe {
                next[2 * i] = _mm_unpacklo_epi8(a, b);
                next[2 * i + 1] = _mm_unpackhi_epi8(a, b);
            }
        }
        next
    }

    // SAFETY: SSE2 is part of x86-64.
    let mut square = [unsafe { _mm_setzero_si128() }; LANES];
    for (i, lanes) in square.iter_mut().enumerate() {
        // SAFETY: the reference is valid for 16 bytes, and the load needs no alignment.
        *lanes = unsafe { _mm_loadu_si128(row(i).as_ptr().cast()) };
    }
    let square = interleave(interleave(interleave(interleave(square))));
    for (i, lanes) in square.iter().enumerate() {
        let mut column = [0; LANES];
        // SAFETY: `column` is valid for 16 bytes, and the store needs no alignment.
        unsafe { _mm_storeu_si128(column.as_mut_ptr().cast(), *lanes) };
        put(i, &column);
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub use portable as transpose;

/// Transposes a block on any CPU.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn portable<'a>(row: impl Fn(usize) -> &'a Lanes, mut put: impl FnMut(usize, &Lanes)) {
    for column in 0..LANES {
        put(column, &std::array::from_fn(|i| row(i)[column]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns() {
        let square: [Lanes; LANES] =
            std::array::from_fn(|i| std::array::from_fn(|j| (i * 16 + j) as u8));
        let [mut found, mut portably] = [[[0; LANES]; LANES]; 2];
        transpose(|i| &square[i], |j, column| found[j] = *column);
        portable(|i| &square[i], |j, column| portably[j] = *column);
        assert!((0..LANES).all(|i| (0..LANES).all(|j| found[i][j] == square[j][i])));
        assert_eq!(found, portably);
    }
}
