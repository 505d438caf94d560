//! Matrix products of the rows of each expert with its own weight, on the CPU.
//!
//! Shapes: `R` rows, of which expert `e` has rows `offsets[e]..offsets[e + 1]`. The sums of a row are in
//! the same order for any number of threads and of rows of its expert.

use super::blocks::{Filled, Values, filled, span};
use super::simd::{dot, kernels};
use super::{ROWS, add_scaled};
use candle_core::DType;
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// How the matrix of an expert is stored, for a product with `N` outputs and `K` inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Stored {
    /// `[N, K]`: a row has the weights of an output.
    OfOutputs,
    /// `[K, N]`: a row has the weights of an input.
    OfInputs,
}

kernels! {
    fn dots(x: &[f32], w: &[f32], y: &mut [f32]) {
        for (w, y) in w.chunks_exact(x.len()).zip(y) {
            *y = dot(x, w);
        }
    }

    fn dots_bf16(x: &[f32], w: &[bf16], y: &mut [f32]) {
        for (w, y) in w.chunks_exact(x.len()).zip(y) {
            *y = dot(x, w);
        }
    }
}

/// The expert of each row.
fn experts(offsets: &[u32]) -> Vec<u32> {
    let of = |(e, ends): (usize, &[u32])| (ends[0]..ends[1]).map(move |_| e as u32);
    offsets.windows(2).enumerate().flat_map(of).collect()
}

/// Returns the products of the rows of `x [R, k]` with the matrices `w [E, n, k]` or `[E, k, n]` of their
/// experts, `[R, n]`.
pub(in crate::ops) fn products(
    (n, k): (usize, usize),
    offsets: &[u32],
    x: Values<'_>,
    (w, stored): (Values<'_>, Stored),
    dtype: DType,
) -> Filled {
    let experts = experts(offsets);
    let [y] = filled(experts.len(), ROWS, [(n, dtype)], |rows, [y]| {
        for (row, y) in rows.zip(y.chunks_mut(n)) {
            let x = x.view(span(&(row..row + 1), k));
            let first = experts[row] as usize * n * k;
            match (stored, w) {
                _ if k == 0 => {}
                (Stored::OfOutputs, Values::F32(w)) => dots(&x, &w[first..first + n * k], y),
                (Stored::OfOutputs, Values::Bf16(w)) => dots_bf16(&x, &w[first..first + n * k], y),
                (Stored::OfInputs, w) => {
                    for (i, x) in x.iter().enumerate() {
                        add_scaled(*x, &w.view(first + i * n..first + (i + 1) * n), y);
                    }
                }
            }
        }
    });
    y
}

/// Adds `a^T b` of the rows of each expert to its matrix of `dw [E, m, n]`, for `a [R, m]` and `b [R, n]`.
pub(in crate::ops) fn add_outer_products(
    (m, n): (usize, usize),
    offsets: &[u32],
    a: Values<'_>,
    b: Values<'_>,
    dw: &mut [f32],
) {
    if m == 0 || n == 0 {
        return;
    }
    let rows: Vec<Range<usize>> =
        offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize).collect();
    dw.par_chunks_mut(n).enumerate().for_each(|(at, dw)| {
        for row in rows[at / m].clone() {
            let a = a.view(row * m + at % m..row * m + at % m + 1);
            add_scaled(a[0], &b.view(span(&(row..row + 1), n)), dw);
        }
    });
}
