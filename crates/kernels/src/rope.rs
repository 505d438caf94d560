//! Per-head RMS norm and rotary embedding of queries and keys, in one pass.
//!
//! Shapes: `T` tokens, `H` heads, `Dh` head dim, `R <= Dh` rotated dims; `x`, `dx`: `[T, H*Dh]`,
//! the output of the projection; `y`, `dy`: `[T, H, Dh]`; `w: [Dh]`; `rstd: [T, H]` (`f32`). Dims
//! `i` and `i + R/2` of a head are rotated by angle `i < R/2` of the token (the `rotate_half`
//! convention of transformers); dims from `R` on are only normalised.

use super::column_shares::ColumnShares;
use super::cpu::blocks::{Scratch, Values, filled, span};
use super::cpu::simd::kernels;
use super::cpu::{self, ROWS, compute_dtype, expect_f32, expect_shape, read};
use super::launch::{Launch, THREADS, empty, launch, on_gpu, vectors};
use super::norm_geometry::{MULTIPROCESSORS, WARP};
use super::rms_norm::{NormScale, add_input_grad, add_weight_grad, norm_row, row_rstd};
use candle_core::{DType, Result, Tensor, bail};

/// Cosines and sines of the rotary angles of each token.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Cosines, `[T, R/2]`, `f32`.
    pub cos: Tensor,
    /// Sines, `[T, R/2]`, `f32`.
    pub sin: Tensor,
}

impl RopeTable {
    /// Returns `(T, R/2)`. Fails unless both tables are `f32` and have the same shape.
    pub(super) fn shape(&self, op: &str) -> Result<(usize, usize)> {
        let (t, half) = self.cos.dims2()?;
        expect_f32(op, "cos", &self.cos, &[t, half])?;
        expect_f32(op, "sin", &self.sin, &[t, half])?;
        Ok((t, half))
    }
}

kernels! {
    fn rotate_head(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let (a, b) = x.split_at_mut(half);
        let (b, sin) = (&mut b[..half], &sin[..half]); // the rest is not rotated
        for i in 0..half {
            let (p, q) = (a[i], b[i]);
            a[i] = p * cos[i] - q * sin[i];
            b[i] = q * cos[i] + p * sin[i];
        }
    }

    fn rotate_head_back(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let (a, b) = x.split_at_mut(half);
        let (b, sin) = (&mut b[..half], &sin[..half]); // the rest is not rotated
        for i in 0..half {
            let (p, q) = (a[i], b[i]);
            a[i] = p * cos[i] + q * sin[i];
            b[i] = q * cos[i] - p * sin[i];
        }
    }
}

/// Rotates one head in place.
pub(super) fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    rotate_head(x, cos, sin);
}

/// Rotates one head by the negative angles: the transpose of [`rotate`], and therefore its
/// backward.
pub(super) fn rotate_back(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    rotate_head_back(x, cos, sin);
}

/// Validates the operands and returns `(T, H, Dh)` and `R/2`.
fn shape_of(
    op: &str,
    x: &Tensor,
    w: &Tensor,
    table: &RopeTable,
) -> Result<((usize, usize, usize), usize)> {
    let ((t, width), dh) = (x.dims2()?, w.dims1()?);
    let (table_t, half) = table.shape(op)?;
    if dh == 0 || dh % 2 != 0 || dh < 2 * half || table_t != t || width % dh != 0 {
        bail!(
            "{op}: `x` is {:?}, `w` is {:?} and the table {:?}, expected [T, H*Dh], [Dh] and [T, R/2] with R <= Dh",
            x.dims(),
            w.dims(),
            table.cos.dims()
        );
    }
    Ok(((t, width / dh, dh), half))
}

/// Number of heads per thread of the forward pass on a GPU: `HEADS` of the kernels.
const HEADS: usize = 2;
/// Maximum number of elements of a half head per thread if elements are accessed one by one: `P` of
/// the kernels.
const SINGLES: usize = 4;

/// The threads of a GPU that rotate heads.
#[derive(Debug, Clone, Copy)]
struct HeadThreads {
    chunks: bool,
    /// Number of threads per head.
    lanes: usize,
}

impl HeadThreads {
    /// `tensors` are the operands whose half heads are accessed, and the table. `rotated` of the
    /// `half` pairs of dims are rotated.
    fn new(
        op: &str,
        dtype: DType,
        [half, rotated]: [usize; 2],
        tensors: &[&Tensor],
    ) -> Result<Self> {
        let mut chunks = true;
        for elements in [half, rotated] {
            chunks &= vectors(elements, tensors)?;
        }
        let most = SINGLES * WARP;
        if half > most {
            bail!("{op}: a head has {} dims, but a warp supports at most {}", 2 * half, 2 * most);
        }
        let chunk = if chunks { 16 / dtype.size_in_bytes() } else { 1 };
        let lanes = half.div_ceil(chunk).next_power_of_two().min(WARP);
        Ok(Self { chunks, lanes })
    }

    /// Number of blocks for `items` heads, or groups of heads.
    fn blocks(self, items: usize) -> usize {
        items.div_ceil(THREADS as usize / self.lanes)
    }

    fn launch(self, kernel: &str, dtype: DType) -> Launch {
        let kernel = if self.chunks { kernel.to_owned() } else { format!("{kernel}_single") };
        Launch::new(&kernel, dtype).threads(THREADS)
    }
}

/// The norm of heads: `w [Dh]`, `rstd [T, H]`, and the number that is added to each weight.
type HeadNorm<'a> = Option<(&'a Tensor, &'a Tensor, usize)>;

/// Launches the kernel that rotates the heads of `x`, after their norm if there is one, into
/// `y [T, H, Dh]`.
pub(super) fn launch_rope(
    op: &str,
    x: &Tensor,
    norm: HeadNorm<'_>,
    eps: f32,
    table: &RopeTable,
    y: &Tensor,
) -> Result<()> {
    let ((t, h, dh), dtype) = (y.dims3()?, y.dtype());
    let (cos, sin) = (&table.cos, &table.sin);
    let (rotated, half) = (cos.dim(1)?, dh / 2);
    let mut tensors = vec![x, y, cos, sin];
    tensors.extend(norm.map(|(w, ..)| w));
    let heads = HeadThreads::new(op, dtype, [half, rotated], &tensors)?;
    let blocks = heads.blocks(t * h.div_ceil(HEADS));
    let launch = heads.launch("qk_norm_rope", dtype).grid(blocks);
    let (w, rstd, added) = (norm.map(|n| n.0), norm.map(|n| n.1), norm.map_or(1, |n| n.2));
    let lanes = heads.lanes;
    launch!(op, launch; x, w, cos, sin, y, rstd, t, h, half, rotated, lanes, added, eps)
}

/// Launches the backward of [`launch_rope`] with `dy [T, H, Dh]`, into `dx`.
pub(super) fn launch_rope_backward(
    op: &str,
    x: &Tensor,
    norm: HeadNorm<'_>,
    table: &RopeTable,
    dy: &Tensor,
    dx: &Tensor,
    dw: Option<&Tensor>,
) -> Result<()> {
    let ((t, h, dh), dtype) = (dy.dims3()?, dy.dtype());
    let (cos, sin) = (&table.cos, &table.sin);
    let (rotated, half) = (cos.dim(1)?, dh / 2);
    let mut tensors = vec![x, dy, dx, cos, sin];
    tensors.extend(norm.map(|(w, ..)| w));
    let heads = HeadThreads::new(op, dtype, [half, rotated], &tensors)?;
    let blocks = heads.blocks(t * h).min(2 * MULTIPROCESSORS);
    let shares = ColumnShares::new(dw, blocks, dh)?;
    let launch = heads.launch("qk_norm_rope_backward", dtype).grid(blocks);
    let launch = launch.shared(THREADS as usize / WARP * dh * 4);
    let (w, rstd, added) = (norm.map(|n| n.0), norm.map(|n| n.1), norm.map_or(1, |n| n.2));
    let lanes = heads.lanes;
    launch!(
        op, launch;
        x, rstd, w, cos, sin, dy, dx, shares, t, h, half, rotated, lanes, added
    )?;
    shares.add(op)
}

/// Applies RMS norm to each head, then the rotation. Returns `y [T, H, Dh]` and `rstd [T, H]`,
/// which the backward needs.
pub fn qk_norm_rope(
    x: &Tensor,
    w: &Tensor,
    scale: NormScale,
    eps: f64,
    table: &RopeTable,
) -> Result<(Tensor, Tensor)> {
    let op = "qk_norm_rope";
    let ((t, h, dh), half) = shape_of(op, x, w, table)?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w)])?;
    if on_gpu(x) {
        let (y, rstd) = (empty((t, h, dh), dtype, x)?, empty((t, h), DType::F32, x)?);
        let norm = Some((w, &rstd, scale.added()));
        launch_rope(op, x, norm, eps as f32, table, &y)?;
        return Ok((y, rstd));
    }
    let rounding = scale.rounding(dtype);
    let width = h * dh;
    let x = read(op, "x", x)?;
    let (w, cos) = (read(op, "w", w)?, read(op, "cos", &table.cos)?);
    let sin = read(op, "sin", &table.sin)?;
    let (x, w) = (x.values()?, scale.factors(w.f32()?));
    let (cos, sin) = (cos.slice::<f32>()?, sin.slice::<f32>()?);
    let outputs = [(width, dtype), (h, DType::F32)];
    let [y, rstd] = filled(t, ROWS, outputs, |tokens, [y, rstd]| {
        let x = x.view(span(&tokens, width));
        let heads = y.chunks_mut(dh).zip(x.chunks(dh)).zip(rstd);
        for (i, ((y, x), rstd)) in heads.enumerate() {
            let token = tokens.start + i / h;
            let angles = token * half..(token + 1) * half;
            *rstd = row_rstd(x, eps as f32);
            norm_row(x, *rstd, &w, rounding, y);
            rotate_head(y, &cos[angles.clone()], &sin[angles]);
        }
    });
    Ok((y.tensor((t, h, dh))?, rstd.tensor((t, h))?))
}

/// Returns `dx [T, H*Dh]` from `dy [T, H, Dh]`. Adds the weight gradient to `dw [Dh]` (`f32`)
/// unless it is `None`.
pub fn qk_norm_rope_backward(
    x: &Tensor,
    rstd: &Tensor,
    w: &Tensor,
    scale: NormScale,
    table: &RopeTable,
    dy: &Tensor,
    dw: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "qk_norm_rope_backward";
    let ((t, h, dh), half) = shape_of(op, x, w, table)?;
    let dtype = compute_dtype(op, &[("x", x), ("w", w), ("dy", dy)])?;
    expect_shape(op, "dy", dy, &[t, h, dh])?;
    expect_f32(op, "rstd", rstd, &[t, h])?;
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[dh])?;
        cpu::distinct(op, "dw", dw, &[("x", x), ("rstd", rstd), ("w", w), ("dy", dy)])?;
    }
    if on_gpu(x) {
        let dx = empty(x.shape(), dtype, x)?;
        launch_rope_backward(op, x, Some((w, rstd, scale.added())), table, dy, &dx, dw)?;
        return Ok(dx);
    }
    let width = h * dh;
    let (x, w, rstd) = (read(op, "x", x)?, read(op, "w", w)?, read(op, "rstd", rstd)?);
    let (cos, sin) = (read(op, "cos", &table.cos)?, read(op, "sin", &table.sin)?);
    let dy = read(op, "dy", dy)?;
    let (x, w) = (x.values()?, scale.factors(w.f32()?));
    let (rstd, dy) = (rstd.slice::<f32>()?, dy.values()?);
    let (cos, sin) = (cos.slice::<f32>()?, sin.slice::<f32>()?);
    // `dn` is the gradient of the normalized heads before the rotation. Only the weight gradient
    // needs all of it.
    let outputs = [(width, dtype), (dw.map_or(0, |_| width), DType::F32)];
    let [dx, dn] = filled(t, ROWS, outputs, |tokens, [dx, dn]| {
        let mut scratch = dn.is_empty().then(|| Scratch::of(dx.len()));
        let dn = scratch.as_mut().map_or(dn, Scratch::all);
        dn.copy_from_slice(&dy.view(span(&tokens, width)));
        for (head, dn) in (tokens.start * h..).zip(dn.chunks_mut(dh)) {
            let angles = head / h * half..(head / h + 1) * half;
            rotate_head_back(dn, &cos[angles.clone()], &sin[angles]);
        }
        let x = x.view(span(&tokens, width));
        let each = x.chunks(dh).zip(dn.chunks(dh)).zip(&rstd[span(&tokens, h)]);
        for (dx, ((x, dn), rstd)) in dx.chunks_mut(dh).zip(each) {
            add_input_grad(x, *rstd, &w, dn, dx);
        }
    });
    add_weight_grad(op, x, rstd, Values::from(&dn.into_f32()), dw)?;
    dx.tensor((t, width))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        added, check, gradient_buffer, message, random, rope_table, rotate_half, values,
    };
    use super::*;
    use candle_core::D;

    #[test]
    fn norm_and_rotation_and_their_gradients_match_the_reference() {
        for (t, h, dh) in [(1, 1, 4), (3, 2, 32), (31, 4, 64), (33, 1, 72), (65, 3, 128)] {
            let table = rope_table(t, dh / 2);
            let inputs = [random(1, &[t, h * dh]), random(2, &[dh])];
            let plain = |i: &[Tensor]| {
                let x = i[0].reshape((t, h, dh))?;
                let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
                rotate_half(&x.broadcast_div(&rms)?.broadcast_mul(&i[1])?, &table)
            };
            check(&format!("qk_norm_rope {t} {h} {dh}"), &inputs, plain, |i, dy| {
                let (y, rstd) = qk_norm_rope(&i[0], &i[1], NormScale::Weight, 1e-6, &table)?;
                let dw = gradient_buffer(&[dh]);
                let dx = qk_norm_rope_backward(
                    &i[0],
                    &rstd,
                    &i[1],
                    NormScale::Weight,
                    &table,
                    dy,
                    Some(&dw),
                )?;
                Ok((y, vec![dx, added(&dw)]))
            });
        }
    }

    #[test]
    fn the_first_dims_of_a_head_are_rotated_and_the_others_normalised() {
        let (t, h, dh) = (9, 3, 40);
        for rotated in [8, 16, 40] {
            let table = rope_table(t, rotated / 2);
            let inputs = [random(1, &[t, h * dh]), random(2, &[dh])];
            let scale = NormScale::OnePlusWeight;
            let plain = |i: &[Tensor]| {
                let x = i[0].reshape((t, h, dh))?;
                let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
                let x = x.broadcast_div(&rms)?.broadcast_mul(&(&i[1] + 1.0)?)?;
                let first = x.narrow(2, 0, rotated)?.contiguous()?;
                Tensor::cat(&[rotate_half(&first, &table)?, x.narrow(2, rotated, dh - rotated)?], 2)
            };
            check(&format!("qk_norm_rope of {rotated} dims"), &inputs, plain, |i, dy| {
                let (y, rstd) = qk_norm_rope(&i[0], &i[1], scale, 1e-6, &table)?;
                let dw = gradient_buffer(&[dh]);
                let dx = qk_norm_rope_backward(&i[0], &rstd, &i[1], scale, &table, dy, Some(&dw))?;
                Ok((y, vec![dx, added(&dw)]))
            });
        }
    }

    #[test]
    fn scores_depend_only_on_the_distance_between_positions() {
        let (half, w) = (8, random(3, &[16]));
        let angle = |position: f64| {
            let angles: Vec<f32> =
                (0..half).map(|i| (position / 10f64.powf(i as f64 / 4.0)) as f32).collect();
            let angles = Tensor::from_vec(angles, (1, half), w.device()).unwrap();
            RopeTable { cos: angles.cos().unwrap(), sin: angles.sin().unwrap() }
        };
        let score = |q_at: f64, k_at: f64| {
            let q = qk_norm_rope(&random(1, &[1, 16]), &w, NormScale::Weight, 1e-6, &angle(q_at))
                .unwrap()
                .0;
            let k = qk_norm_rope(&random(2, &[1, 16]), &w, NormScale::Weight, 1e-6, &angle(k_at))
                .unwrap()
                .0;
            values(&(q * k).unwrap().sum_all().unwrap())[0]
        };
        assert!((score(9.0, 4.0) - score(25.0, 20.0)).abs() < 1e-4);
        assert!((score(9.0, 4.0) - score(9.0, 5.0)).abs() > 1e-3);
    }

    #[test]
    fn a_table_of_another_length_is_rejected() {
        let error = message(qk_norm_rope(
            &random(1, &[3, 8]),
            &random(2, &[4]),
            NormScale::Weight,
            1e-6,
            &rope_table(2, 2),
        ));
        assert!(error.contains("[T, R/2]"), "{error}");
    }
}
