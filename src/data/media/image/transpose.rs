//! Squares of bytes with rows and columns swapped.

/// Sides of a square.
pub(super) const LANES: usize = 16;
/// A row or a column.
pub(super) type Lanes = [u8; LANES];

/// Hands the columns of sixteen rows to `put`, in order.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    clippy::inline_always,
    reason = "instructions of every x86-64, in the caller's level"
)]
#[inline(always)]
pub(super) fn transpose<'a>(row: impl Fn(usize) -> &'a Lanes, mut put: impl FnMut(usize, &Lanes)) {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_storeu_si128, _mm_unpackhi_epi8,
        _mm_unpacklo_epi8,
    };
    const HALF: usize = LANES / 2;

    /// Interleaves the bytes of rows `i` and `i + 8` to rows `2 i` and `2 i + 1`; after four times
    /// rows are columns. Written for registers: compiled from a loop over bytes it goes through memory.
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

    // SAFETY: as above.
    let mut square = [unsafe { _mm_setzero_si128() }; LANES];
    for (i, lanes) in square.iter_mut().enumerate() {
        // SAFETY: 16 bytes may be read through a reference to 16 bytes, at any alignment.
        *lanes = unsafe { _mm_loadu_si128(row(i).as_ptr().cast()) };
    }
    let square = interleave(interleave(interleave(interleave(square))));
    for (i, lanes) in square.iter().enumerate() {
        let mut column = [0; LANES];
        // SAFETY: the same for writing.
        unsafe { _mm_storeu_si128(column.as_mut_ptr().cast(), *lanes) };
        put(i, &column);
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use portable as transpose;

/// The same on any CPU.
#[cfg(any(test, not(target_arch = "x86_64")))]
pub(super) fn portable<'a>(row: impl Fn(usize) -> &'a Lanes, mut put: impl FnMut(usize, &Lanes)) {
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
