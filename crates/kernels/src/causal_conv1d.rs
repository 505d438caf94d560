//! Causal depthwise convolution with SiLU: `y_t = silu(sum_j w_j x_{t - 3 + j})` for the four taps
//! `j` of each channel. Tokens before the segment of `t` count as zero.
//!
//! Shapes: `T` tokens, `C` channels; `x`, `y`, `dy`, `dx`: `[T, C]`; `w`, `dw`: `[C, 4]`.
//! Arithmetic is in `f32`.

#![expect(unsafe_code, reason = "tasks write disjoint columns of the same buffer")]

use super::column_shares::ColumnShares;
use super::cpu::blocks::filled;
use super::cpu::simd::{kernels, sigmoid};
use super::cpu::{self, Shared, compute_dtype, expect_f32, expect_shape, read, tensor};
use super::launch::{Launch, empty, launch, on_gpu, vectors, version};
use super::uploaded::Uploaded;
use batch::CuSeqlens;
use candle_core::{DType, Result, Tensor, bail};

/// Number of tokens that a token of the output depends on, itself included.
pub const CONV_TAPS: usize = 4;

/// Number of tokens of a task of the forward pass.
const TOKENS: usize = 32;
/// Number of channels of a task of the backward pass.
const CHANNELS: usize = 512;
/// A row of tokens before a segment.
static ZEROS: [f32; CHANNELS] = [0.0; CHANNELS];

kernels! {
    // `x` holds the rows of the four tokens, oldest first.
    fn forward_row(x: [&[f32]; CONV_TAPS], w: [&[f32]; CONV_TAPS], y: &mut [f32]) {
        let n = y.len();
        let [x0, x1, x2, x3] = [&x[0][..n], &x[1][..n], &x[2][..n], &x[3][..n]];
        let [w0, w1, w2, w3] = [&w[0][..n], &w[1][..n], &w[2][..n], &w[3][..n]];
        for i in 0..n {
            let sum = w0[i].mul_add(x0[i], w1[i].mul_add(x1[i], w2[i].mul_add(x2[i], w3[i] * x3[i])));
            y[i] = sum * sigmoid(sum);
        }
    }

    // Writes the gradient of the sum of a token to `dc`.
    fn sum_grad_row(x: [&[f32]; CONV_TAPS], w: [&[f32]; CONV_TAPS], dy: &[f32], dc: &mut [f32]) {
        let n = dc.len();
        let [x0, x1, x2, x3] = [&x[0][..n], &x[1][..n], &x[2][..n], &x[3][..n]];
        let [w0, w1, w2, w3] = [&w[0][..n], &w[1][..n], &w[2][..n], &w[3][..n]];
        let dy = &dy[..n];
        for i in 0..n {
            let sum = w0[i].mul_add(x0[i], w1[i].mul_add(x1[i], w2[i].mul_add(x2[i], w3[i] * x3[i])));
            let s = sigmoid(sum);
            dc[i] = dy[i] * (s + sum * s * (1.0 - s));
        }
    }

    // `dc` holds the rows of the token and of the three after it, latest first.
    fn input_grad_row(dc: [&[f32]; CONV_TAPS], w: [&[f32]; CONV_TAPS], dx: &mut [f32]) {
        let n = dx.len();
        let [d0, d1, d2, d3] = [&dc[0][..n], &dc[1][..n], &dc[2][..n], &dc[3][..n]];
        let [w0, w1, w2, w3] = [&w[0][..n], &w[1][..n], &w[2][..n], &w[3][..n]];
        for i in 0..n {
            dx[i] = w0[i].mul_add(d0[i], w1[i].mul_add(d1[i], w2[i].mul_add(d2[i], w3[i] * d3[i])));
        }
    }

    fn weight_grad_row(x: &[f32], dc: &[f32], dw: &mut [f32]) {
        let n = dw.len();
        let (x, dc) = (&x[..n], &dc[..n]);
        for i in 0..n {
            dw[i] = x[i].mul_add(dc[i], dw[i]);
        }
    }
}

/// Validates the operands and returns `(T, C)` and the compute dtype.
fn check(op: &str, x: &Tensor, w: &Tensor, cu: &CuSeqlens) -> Result<(usize, usize, DType)> {
    let (t, c) = x.dims2()?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w)])?;
    expect_shape(op, "w", w, &[c, CONV_TAPS])?;
    let num_tokens = cu.num_tokens();
    if num_tokens != t {
        bail!("{op}: `cu_seqlens` ends at {num_tokens}, but `x` has {t} tokens");
    }
    Ok((t, c, dtype))
}

/// Returns the taps `[4, C]` of the weights `[C, 4]`.
fn taps(w: &[f32]) -> Vec<f32> {
    let c = w.len() / CONV_TAPS;
    (0..w.len()).map(|i| w[i % c * CONV_TAPS + i / c]).collect()
}

/// Number of tokens of a thread in the forward pass on a GPU.
const RANGE: usize = 32;
/// Maximum number of ranges of tokens in the backward pass on a GPU. Each has its own weight
/// gradient `[C, 4]`.
const MAX_RANGES: usize = 64;

/// First token of the segment of each token, on a GPU.
fn starts(cu_seqlens: &CuSeqlens, on: &Tensor) -> Result<Tensor> {
    static STARTS: Uploaded<CuSeqlens> = Uploaded::new();
    STARTS.get(cu_seqlens.clone(), 1, on, |cu_seqlens| {
        let each = cu_seqlens.segments();
        each.flat_map(|segment| std::iter::repeat_n(segment.start as u32, segment.len())).collect()
    })
}

/// Launch for threads that have `range` tokens each. `rows` lists the operands with channels.
fn launch_of_ranges(
    op: &str,
    (t, c): (usize, usize),
    range: usize,
    rows: &[&Tensor],
) -> Result<Launch> {
    const THREADS: usize = 128;
    let dtype = rows[0].dtype();
    let channels = if vectors(c, rows)? { 16 / dtype.size_in_bytes() } else { 1 };
    let grid = [t.div_ceil(range), c.div_ceil(channels * THREADS), 1];
    Ok(Launch::new(&version(op, c, rows)?, dtype).grid3(grid).threads(THREADS as u32))
}

/// Returns the convolution of each segment, `[T, C]`.
pub fn causal_conv1d(x: &Tensor, w: &Tensor, cu_seqlens: &CuSeqlens) -> Result<Tensor> {
    let op = "causal_conv1d";
    let (t, c, dtype) = check(op, x, w, cu_seqlens)?;
    if on_gpu(x) {
        let y = empty((t, c), dtype, x)?;
        if t > 0 {
            let starts = starts(cu_seqlens, x)?;
            let launch = launch_of_ranges(op, (t, c), RANGE, &[x, &y])?;
            launch!(op, launch; x, w, starts, y, t, c, RANGE)?;
        }
        return Ok(y);
    }
    let (x, w) = (read(op, "x", x)?, read(op, "w", w)?);
    let (x, w) = (x.values()?, taps(&w.f32()?));
    let w: [&[f32]; CONV_TAPS] = std::array::from_fn(|tap| &w[tap * c..(tap + 1) * c]);
    let starts: Vec<usize> = cu_seqlens
        .segments()
        .flat_map(|segment| segment.clone().map(move |_| segment.start))
        .collect();
    let zeros = vec![0f32; c];
    let [y] = filled(t, TOKENS, [(c, dtype)], |tokens, [y]| {
        let first = tokens.start.saturating_sub(CONV_TAPS - 1);
        let x = x.view(first * c..tokens.end * c);
        for (token, y) in tokens.zip(y.chunks_mut(c)) {
            let rows = std::array::from_fn(|tap| match (token + tap + 1).checked_sub(CONV_TAPS) {
                Some(at) if at >= starts[token] => &x[(at - first) * c..(at - first + 1) * c],
                _ => &zeros[..],
            });
            forward_row(rows, w, y);
        }
    });
    y.tensor((t, c))
}

fn backward_on_gpu(
    op: &str,
    [x, w, dy]: [&Tensor; 3],
    cu_seqlens: &CuSeqlens,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let (t, c) = x.dims2()?;
    let dx = empty((t, c), x.dtype(), x)?;
    if t > 0 {
        let starts = starts(cu_seqlens, x)?;
        let range = t.div_ceil(MAX_RANGES).max(RANGE);
        let shares = ColumnShares::new(dw, t.div_ceil(range), c * CONV_TAPS)?;
        let launch = launch_of_ranges(op, (t, c), range, &[x, dy, &dx])?;
        launch!(op, launch; x, w, dy, starts, dx, shares, t, c, range)?;
        shares.add(op)?;
    }
    Ok(dx)
}

/// Returns `dx [T, C]`. Adds the weight gradient to `dw [C, 4]` (`f32`) unless it is `None`.
pub fn causal_conv1d_backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    cu_seqlens: &CuSeqlens,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "causal_conv1d_backward";
    let (t, c, dtype) = check(op, x, w, cu_seqlens)?;
    compute_dtype(op, &[("x", x), ("dy", dy)])?;
    expect_shape(op, "dy", dy, &[t, c])?;
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[c, CONV_TAPS])?;
        cpu::distinct(op, "dw", dw, &[("x", x), ("w", w), ("dy", dy)])?;
    }
    if on_gpu(x) {
        return backward_on_gpu(op, [x, w, dy], cu_seqlens, dw);
    }
    let (x, w, dy) = (read(op, "x", x)?, read(op, "w", w)?, read(op, "dy", dy)?);
    let (x, w, dy) = (x.f32()?, taps(&w.f32()?), dy.f32()?);
    let mut dx = vec![0f32; t * c];
    // Each tap's sums continue those of `dw`.
    let sums = dw.map(|dw| dw.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let mut sums = sums.map_or_else(|| vec![0.0; CONV_TAPS * c], |dw| taps(&dw));
    let (dx_part, sums_part) = (Shared::of(&mut dx), Shared::of(&mut sums));
    // The gradients of the sums of four tokens, and the taps' own gradients.
    let scratch = || [(); 2].map(|()| vec![0f32; CONV_TAPS * CHANNELS]);
    cpu::for_each_task(c.div_ceil(CHANNELS), scratch, |[dc, dw], task| {
        let columns = task * CHANNELS..((task + 1) * CHANNELS).min(c);
        let n = columns.len();
        let row = |at: usize| at * c + columns.start..at * c + columns.end;
        let slot = |token: usize| token % CONV_TAPS * n..(token % CONV_TAPS + 1) * n;
        let w = std::array::from_fn(|tap| &w[row(tap)]);
        for (tap, dw) in dw.chunks_mut(n).take(CONV_TAPS).enumerate() {
            // SAFETY: only this task accesses these columns.
            dw.copy_from_slice(unsafe { sums_part.slice(row(tap)) });
        }
        for segment in cu_seqlens.segments() {
            // The gradient of a token depends on the three tokens after it.
            for token in segment.start..segment.end + CONV_TAPS - 1 {
                if token < segment.end {
                    let before = |tap: usize| {
                        (token + tap + 1).checked_sub(CONV_TAPS).filter(|at| *at >= segment.start)
                    };
                    let rows = std::array::from_fn(|tap| match before(tap) {
                        Some(at) => &x[row(at)],
                        None => &ZEROS[..n],
                    });
                    sum_grad_row(rows, w, &dy[row(token)], &mut dc[slot(token)]);
                    for (tap, dw) in dw.chunks_mut(n).take(CONV_TAPS).enumerate() {
                        if before(tap).is_some() {
                            weight_grad_row(rows[tap], &dc[slot(token)], dw);
                        }
                    }
                } else {
                    dc[slot(token)].fill(0.0);
                }
                if token + 1 >= segment.start + CONV_TAPS {
                    let at = token + 1 - CONV_TAPS;
                    let after = std::array::from_fn(|back| &dc[slot(token - back)]);
                    // SAFETY: only this task writes these columns.
                    input_grad_row(after, w, unsafe { dx_part.slice(row(at)) });
                }
            }
        }
        for (tap, dw) in dw.chunks(n).take(CONV_TAPS).enumerate() {
            // SAFETY: as above.
            unsafe { sums_part.slice(row(tap)) }.copy_from_slice(dw);
        }
    });
    if let Some(dw) = dw {
        cpu::write(op, "dw", dw, |dw: &mut [f32]| {
            for (i, dw) in dw.iter_mut().enumerate() {
                *dw = sums[i % CONV_TAPS * c + i / CONV_TAPS];
            }
        })?;
    }
    tensor(dx, (t, c), dtype)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, added, assert_close, bits, check, device, gradient_buffer, message, random,
    };
    use super::*;
    use candle_core::Device;

    fn boundaries(lengths: &[u32]) -> CuSeqlens {
        CuSeqlens::from_lengths(lengths).unwrap()
    }

    fn plain(x: &Tensor, w: &Tensor, lengths: &[u32]) -> Result<Tensor> {
        let mut parts = Vec::new();
        for segment in boundaries(lengths).segments() {
            let x = x.narrow(0, segment.start, segment.len())?;
            let padded = x.pad_with_zeros(0, CONV_TAPS - 1, 0)?;
            let mut sum = x.zeros_like()?;
            for tap in 0..CONV_TAPS {
                let w = w.narrow(1, tap, 1)?.t()?;
                sum = (sum + padded.narrow(0, tap, segment.len())?.broadcast_mul(&w)?)?;
            }
            let sigmoid = ((sum.neg()?.exp()? + 1.0)?).recip()?;
            parts.push((sum * sigmoid)?);
        }
        Tensor::cat(&parts, 0)
    }

    /// The output and the gradients of `x` and `w`.
    fn all(x: &Tensor, w: &Tensor, lengths: &[u32], dy: &Tensor) -> Result<[Tensor; 3]> {
        let cu_seqlens = boundaries(lengths);
        let dw = gradient_buffer(w.dims());
        let dx = causal_conv1d_backward(x, w, dy, &cu_seqlens, Some(&dw))?;
        Ok([causal_conv1d(x, w, &cu_seqlens)?, dx, added(&dw)])
    }

    #[test]
    fn the_convolution_and_its_gradients_match_the_reference() {
        for (lengths, c) in
            [(&[1u32][..], 1), (&[1, 2, 3, 4, 5, 1, 1], 9), (&[40, 33], 65), (&[3, 7], 1100)]
        {
            let t = lengths.iter().sum::<u32>() as usize;
            let inputs = [random(1, &[t, c]), random(2, &[c, CONV_TAPS])];
            let plain = |t: &[Tensor]| plain(&t[0], &t[1], lengths);
            check(&format!("causal_conv1d {lengths:?} {c}"), &inputs, plain, |t, dy| {
                let [y, dx, dw] = all(&t[0], &t[1], lengths, dy)?;
                let alone = causal_conv1d_backward(&t[0], &t[1], dy, &boundaries(lengths), None)?;
                assert_eq!(bits(&dx), bits(&alone));
                Ok((y, vec![dx, dw]))
            });
        }
    }

    #[test]
    fn outputs_and_gradients_match_the_golden_file() -> Result<()> {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/delta_rule.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu)?;
        let conv = |name: &str| golden[&format!("conv/{name}")].to_device(&device());
        let ends = golden["cu_seqlens"].to_vec1::<i32>()?;
        let lengths: Vec<u32> = ends.windows(2).map(|ends| (ends[1] - ends[0]) as u32).collect();
        let [y, dx, dw] = all(&conv("x")?, &conv("weight")?, &lengths, &conv("dy")?)?;
        assert_close("y", &y, &conv("y")?, Tolerance::F32);
        assert_close("dx", &dx, &conv("dx")?, Tolerance::F32);
        assert_close("dw", &dw, &conv("dweight")?, Tolerance::F32);
        Ok(())
    }

    #[test]
    fn a_packed_segment_has_the_bits_of_the_segment_alone() -> Result<()> {
        let lengths = [1, 2, 35, 3, 4, 64];
        let (x, dy, w) = (random(1, &[109, 70]), random(2, &[109, 70]), random(3, &[70, 4]));
        let [y, dx, _] = all(&x, &w, &lengths, &dy)?;
        for segment in boundaries(&lengths).segments() {
            let part = |t: &Tensor| t.narrow(0, segment.start, segment.len())?.force_contiguous();
            let length = [segment.len() as u32];
            let [own_y, own_dx, _] = all(&part(&x)?, &w, &length, &part(&dy)?)?;
            assert_eq!(bits(&part(&y)?), bits(&own_y));
            assert_eq!(bits(&part(&dx)?), bits(&own_dx));
        }
        // A window over the boundaries gives another result.
        let [leaked, ..] = all(&x, &w, &[109], &dy)?;
        assert_ne!(bits(&leaked.get(1)?), bits(&y.get(1)?));
        Ok(())
    }

    #[test]
    fn boundaries_of_another_batch_are_rejected() {
        let error =
            message(causal_conv1d(&random(1, &[3, 2]), &random(2, &[2, 4]), &boundaries(&[2])));
        assert!(error.contains("ends at 2, but `x` has 3 tokens"), "{error}");
    }
}
