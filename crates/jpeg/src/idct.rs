//! The inverse DCT, equal to libjpeg-turbo's accurate integer method (`islow`).
//!
//! Sixteen blocks are transformed at once, one per vector lane, so that neither pass has to move
//! values between lanes. Coefficients are `[64, lane]`.

use simd::kernels;
use simd::{LANES, Lanes, transpose};

/// Blocks that wait for their transform.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) coefficients: [[i16; LANES]; 64],
    /// Number of blocks.
    pub(super) len: usize,
    /// Index in the plane of the first sample of each block.
    places: [usize; LANES],
    /// Whether all coefficients are among the first ten of the zigzag order.
    is_sparse: bool,
}

/// Number of coefficients, in zigzag order, that lie in the first four rows and columns.
const SPARSE: usize = 10;

impl Batch {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            coefficients: [[0; LANES]; 64],
            len: 0,
            places: [0; LANES],
            is_sparse: true,
        })
    }

    /// Adds the block in lane `len`, which has `num` coefficients in zigzag order. Transforms the
    /// batch if it is full.
    #[inline]
    pub(super) fn push(
        &mut self,
        num: usize,
        place: usize,
        quantisation: &[i32; 64],
        plane: &mut [u8],
        stride: usize,
    ) {
        if num <= 1 {
            let sample = level(
                i32::from(self.coefficients[0][self.len])
                    .wrapping_mul(quantisation[0])
                    .wrapping_add(4)
                    >> 3,
            );
            self.coefficients[0][self.len] = 0;
            for row in plane[place..].chunks_mut(stride).take(8) {
                row[..8].fill(sample);
            }
            return;
        }
        self.places[self.len] = place;
        self.is_sparse &= num <= SPARSE;
        self.len += 1;
        if self.len == LANES {
            self.finish(quantisation, plane, stride);
        }
    }

    /// Transforms the blocks and writes their samples to `plane`.
    pub(super) fn finish(&mut self, quantisation: &[i32; 64], plane: &mut [u8], stride: usize) {
        if self.len > 0 {
            let places = &self.places[..self.len];
            transform(&mut self.coefficients, quantisation, self.is_sparse, places, plane, stride);
            self.len = 0;
            self.is_sparse = true;
        }
    }
}

#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn level(value: i32) -> u8 {
    value.wrapping_add(128).clamp(0, 255) as u8
}

/// Fractional bits of the constants.
const CONST_BITS: u32 = 13;
/// Fractional bits between the passes.
const PASS_BITS: u32 = 2;

/// Transforms a row or a column. The result has [`CONST_BITS`] more fractional bits, and the caller
/// rounds it.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn transform_8([x0, x1, x2, x3, x4, x5, x6, x7]: [i32; 8]) -> [i32; 8] {
    let add = i32::wrapping_add;
    let sub = i32::wrapping_sub;
    let mul = i32::wrapping_mul;

    let z = mul(add(x2, x6), 4433);
    let (t2, t3) = (add(z, mul(x6, -15137)), add(z, mul(x2, 6270)));
    let (t0, t1) = (add(x0, x4) << CONST_BITS, sub(x0, x4) << CONST_BITS);
    let [e0, e1, e2, e3] = [add(t0, t3), add(t1, t2), sub(t1, t2), sub(t0, t3)];

    let z5 = mul(add(add(x7, x3), add(x5, x1)), 9633);
    let (z1, z2) = (mul(add(x7, x1), -7373), mul(add(x5, x3), -20995));
    let z3 = add(mul(add(x7, x3), -16069), z5);
    let z4 = add(mul(add(x5, x1), -3196), z5);
    let o0 = add(mul(x1, 12299), add(z1, z4));
    let o1 = add(mul(x3, 25172), add(z2, z3));
    let o2 = add(mul(x5, 16819), add(z2, z4));
    let o3 = add(mul(x7, 2446), add(z1, z3));

    [
        add(e0, o0),
        add(e1, o1),
        add(e2, o2),
        add(e3, o3),
        sub(e3, o3),
        sub(e2, o2),
        sub(e1, o1),
        sub(e0, o0),
    ]
}

#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn rounded(value: i32, bits: u32) -> i32 {
    value.wrapping_add(1 << (bits - 1)) >> bits
}

/// Both passes; only the first `N` rows and columns have coefficients. The first pass rounds to 16
/// bits with saturation, as the vector code of libjpeg-turbo does.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn both_passes<const N: usize>(
    coefficients: &[[i16; LANES]; 64],
    quantisation: &[i32; 64],
    samples: &mut [Lanes; 64],
) {
    let mut between = [[0_i16; LANES]; 64];
    for column in 0..N {
        for lane in 0..LANES {
            let mut x = [0; 8];
            for (row, x) in x.iter_mut().enumerate().take(N) {
                let at = row * 8 + column;
                *x = i32::from(coefficients[at][lane]).wrapping_mul(quantisation[at]);
            }
            let x = transform_8(x);
            for row in 0..8 {
                let value = rounded(x[row], CONST_BITS - PASS_BITS);
                between[row * 8 + column][lane] = value.clamp(-32768, 32767) as i16;
            }
        }
    }
    for row in 0..8 {
        for lane in 0..LANES {
            let mut x = [0; 8];
            for (column, x) in x.iter_mut().enumerate().take(N) {
                *x = i32::from(between[row * 8 + column][lane]);
            }
            let x = transform_8(x);
            for column in 0..8 {
                samples[row * 8 + column][lane] =
                    level(rounded(x[column], CONST_BITS + PASS_BITS + 3));
            }
        }
    }
}

kernels! {
/// Transforms the blocks of `coefficients` and clears them. Writes the block of each lane to its
/// place in `plane`.
fn transform(
    coefficients: &mut [[i16; LANES]; 64],
    quantisation: &[i32; 64],
    is_sparse: bool,
    places: &[usize],
    plane: &mut [u8],
    stride: usize,
) {
    let mut samples = [[0; LANES]; 64];
    if is_sparse {
        both_passes::<4>(coefficients, quantisation, &mut samples);
    } else {
        both_passes::<8>(coefficients, quantisation, &mut samples);
    }
    coefficients.as_flattened_mut().fill(0);
    for (pair, rows) in samples.as_chunks::<LANES>().0.iter().enumerate() {
        let put = |lane: usize, samples: &Lanes| {
            if let Some(place) = places.get(lane) {
                let at = place + 2 * pair * stride;
                plane[at..at + 8].copy_from_slice(&samples[..8]);
                plane[at + stride..at + stride + 8].copy_from_slice(&samples[8..]);
            }
        };
        transpose(|i| &rows[i], put);
    }
}
}
