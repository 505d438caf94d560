//! Fused language-model head and cross-entropy. Logits exist for one chunk of rows at a time.
//!
//! Shapes: `S` supervised rows, `D` hidden size, `V` vocabulary; `h`, `dh`: `[S, D]`, `w: [V, D]`,
//! `dw: [V, D]` (`f32`), `targets: [S]` (`u32`), `nll: [S]` (`f32`).
//!
//! `nll[i] = logsumexp(h[i] W^T) - h[i] . w[targets[i]]`, with logits in `f32`.

use super::cpu::products::{Store, nn, nt, tn};
use super::cpu::simd::{exp, kernels, max, sum_exp};
use super::cpu::{self, expect_f32, expect_shape, read, weighted_dtype};
use super::cuda::gemm::{Gemm, GemmOperand, Transpose};
use super::launch::{Launch, can_be_checked, empty, launch, on_gpu, vectors};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

/// Maximum size of the logits in memory, in bytes. With the vocabulary of the published models this
/// is 220 rows; smaller chunks read the weight too often.
pub const LOGITS_BYTES: usize = 128 << 20;
/// The same on a GPU. With the vocabulary of the published models this is 1664 rows: enough for the
/// gradient products to fill a GPU, and few repeated reads of the weight.
pub const GPU_LOGITS_BYTES: usize = 1 << 30;

/// Number of rows in a chunk on the device of `h`. It depends on the vocabulary only, so results do
/// not depend on the machine.
fn chunk_rows(h: &Tensor, vocabulary: usize) -> usize {
    if on_gpu(h) {
        let rows = GPU_LOGITS_BYTES / (4 * vocabulary.max(1));
        return (rows / TILE_ROWS * TILE_ROWS).max(1);
    }
    cpu_chunk_rows(vocabulary)
}

fn cpu_chunk_rows(vocabulary: usize) -> usize {
    (LOGITS_BYTES / (4 * vocabulary.max(1))).max(1)
}

/// Chunk size that splits `rows` into as few chunks of at most `most` rows as possible, of nearly
/// equal size.
fn even_chunk(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}

kernels! {
    fn log_sum_exp(logits: &[f32]) -> f32 {
        let max = max(logits);
        max + sum_exp(logits, max).ln()
    }

    // Replaces logits by the gradient of `scale * nll`, except that the caller subtracts `scale` at
    // the target.
    fn grad_row(logits: &mut [f32], lse: f32, scale: f32) {
        for logit in logits {
            *logit = exp(*logit - lse) * scale;
        }
    }
}

/// Validates the operands and returns `(S, D, V, dtype)`.
fn check(
    op: &'static str,
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
) -> Result<(usize, usize, usize, DType)> {
    let ((s, d), (v, _)) = (h.dims2()?, w.dims2()?);
    expect_shape(op, "w", w, &[v, d])?;
    expect_shape(op, "targets", targets, &[s])?;
    let dtype = weighted_dtype(op, ("h", h), ("w", w))?;
    if targets.dtype() != DType::U32 {
        bail!("{op}: `targets` is {:?}, expected U32", targets.dtype());
    }
    if !can_be_checked(targets) {
        // Reading the targets would wait for the GPU. The kernel returns a NaN loss for an invalid
        // target.
        return Ok((s, d, v, dtype));
    }
    let targets = read(op, "targets", targets)?;
    for (row, target) in targets.slice::<u32>()?.iter().enumerate() {
        if *target as usize >= v {
            bail!("{op}: target `{target}` of row {row} is out of range for a vocabulary of {v}");
        }
    }
    Ok((s, d, v, dtype))
}

/// Returns `nll [S]` and the most likely token of each row, `argmax [S]` (`u32`, the lowest id in a
/// tie). On the CPU it fails if a target is not below `V`; on a GPU the `nll` of that row is NaN.
pub fn linear_cross_entropy(h: &Tensor, w: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    let op = "linear_cross_entropy";
    let (s, d, v, _) = check(op, h, w, targets)?;
    if on_gpu(h) {
        let head = GpuHead::new(op, h, w, targets, chunk_rows(h, v))?;
        let argmax = empty(s, DType::U32, h)?;
        head.for_chunks(None, Some(&argmax), |_, _| Ok(()))?;
        return Ok((head.nll, argmax));
    }
    let (h, w) = (read(op, "h", h)?, read(op, "w", w)?);
    let targets = read(op, "targets", targets)?;
    let (h, w, targets) = (h.values()?, w.values()?, targets.slice::<u32>()?);
    let chunk = even_chunk(s, cpu_chunk_rows(v));
    let mut logits = vec![0f32; chunk * v];
    let mut nll = vec![0f32; s];
    let mut argmax = vec![0u32; s];
    for start in (0..s).step_by(chunk) {
        let rows = chunk.min(s - start);
        let logits = &mut logits[..rows * v];
        let h = h.part(start * d..(start + rows) * d);
        nt((rows, v, d), logits, Store::Overwrite, h, w);
        nll[start..start + rows]
            .par_iter_mut()
            .zip(&mut argmax[start..start + rows])
            .zip(logits.par_chunks(v))
            .zip(&targets[start..start + rows])
            .for_each(|(((nll, argmax), logits), target)| {
                *nll = log_sum_exp(logits) - logits[*target as usize];
                let largest = max(logits);
                *argmax = logits.iter().position(|logit| *logit == largest).unwrap_or(0) as u32;
            });
    }
    Ok((cpu::tensor(nll, s, DType::F32)?, Tensor::from_vec(argmax, s, &Device::Cpu)?))
}

/// Number of rows in a tile of the products of a GPU. Chunks consist of whole tiles.
const TILE_ROWS: usize = 128;

/// Operands of the forward and the backward pass on a GPU: matrix products, and launches of
/// `cross_entropy.cu`, on a chunk of rows at a time.
///
/// Logits are `f32` for all operand dtypes: with 8 bits of precision, the likelihoods of large
/// logits would be off by several percent. The gradient overwrites the logits. In `bf16` it fills
/// the second half of each row, where the next products read it.
struct GpuHead<'a> {
    op: &'static str,
    h: &'a Tensor,
    w: &'a Tensor,
    targets: &'a Tensor,
    nll: Tensor,
    /// Number of rows in a chunk.
    chunk: usize,
}

impl<'a> GpuHead<'a> {
    fn new(
        op: &'static str,
        h: &'a Tensor,
        w: &'a Tensor,
        targets: &'a Tensor,
        chunk: usize,
    ) -> Result<Self> {
        let s = h.dim(0)?;
        let nll = empty(s, DType::F32, h)?;
        Ok(Self { op, h, w, targets, nll, chunk: chunk.min(s.max(1)) })
    }

    /// Calls `f(start, logits)` for each chunk of rows, after the cross-entropy kernel has
    /// processed its logits. With `scale` the kernel has replaced them by their gradient; with
    /// `argmax` it has also filled that tensor.
    fn for_chunks(
        &self,
        scale: Option<LossScale<'_>>,
        argmax: Option<&Tensor>,
        mut f: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let op = self.op;
        let ((s, d), v) = (self.h.dims2()?, self.w.dim(0)?);
        let logits = empty((self.chunk, v), DType::F32, self.h)?;
        for start in (0..s).step_by(self.chunk) {
            let rows = self.chunk.min(s - start);
            let logits = logits.narrow(0, 0, rows)?;
            let h = self.h.narrow(0, start, rows)?;
            let gemm = Gemm::new(Transpose::Nt, (rows, v, d), [("h", &h), ("w", self.w)]);
            gemm.into(op, "logits", &logits)?;
            let argmax = argmax.map(|argmax| argmax.narrow(0, start, rows)).transpose()?;
            let weights = scale.and_then(|scale| scale.weights);
            let weights = weights.map(|weights| weights.narrow(0, start, rows)).transpose()?;
            let targets = self.targets.narrow(0, start, rows)?;
            let nll = self.nll.narrow(0, start, rows)?;
            let launch = Launch::new("cross_entropy", self.h.dtype()).grid(rows).threads(512);
            let (factor, gradient) = (scale.map_or(0.0, |scale| scale.factor), scale.is_some());
            let wide = vectors(v, &[&logits])?;
            launch!(op, launch; logits, targets, nll, argmax, weights, factor, v, gradient, wide)?;
            f(start, &logits)?;
        }
        Ok(())
    }

    /// Returns `nll`, and `dh` if `need_dh`; adds the weight gradient to `dw`.
    fn backward(
        self,
        scale: LossScale<'_>,
        dw: Option<&Tensor>,
        need_dh: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Self { op, h, w, .. } = self;
        let ((s, d), v) = (h.dims2()?, w.dim(0)?);
        let dh = if need_dh { Some(empty((s, d), h.dtype(), h)?) } else { None };
        let gradient = if need_dh || dw.is_some() { Some(scale) } else { None };
        self.for_chunks(gradient, None, |start, logits| {
            let rows = logits.dim(0)?;
            let d_logits = match h.dtype() {
                DType::BF16 => GemmOperand::SecondHalves("logits", logits),
                _ => GemmOperand::Whole("logits", logits),
            };
            if let Some(dh) = &dh {
                let gemm = Gemm::new(Transpose::Nn, (rows, d, v), [("logits", logits), ("w", w)]);
                let gemm = Gemm { a: d_logits, ..gemm };
                gemm.into(op, "dh", &dh.narrow(0, start, rows)?)?;
            }
            if let Some(dw) = dw {
                let h = h.narrow(0, start, rows)?;
                let gemm = Gemm::new(Transpose::Tn, (v, d, rows), [("logits", logits), ("h", &h)]);
                Gemm { a: d_logits, ..gemm }.adding().into(op, "dw", dw)?;
            }
            Ok(())
        })?;
        Ok((self.nll, dh))
    }
}

/// Factors of the losses in the sum whose gradient is computed.
#[derive(Clone, Copy)]
pub struct LossScale<'a> {
    /// Factor of all rows.
    pub factor: f32,
    /// Factor of each row, `[S]`, `f32`; `None`: 1.
    pub weights: Option<&'a Tensor>,
}

impl From<f32> for LossScale<'_> {
    fn from(factor: f32) -> Self {
        Self { factor, weights: None }
    }
}

/// Returns `nll [S]`, and the gradient `dh [S, D]` of `sum(scale * nll)` if `need_dh`. Adds the
/// weight gradient to `dw [V, D]` unless it is `None`. Computes all of this in one pass over the
/// logits.
pub fn linear_cross_entropy_backward(
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: LossScale<'_>,
    dw: Option<&Tensor>,
    need_dh: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let chunk = chunk_rows(h, w.dim(0)?);
    backward_in_chunks(h, w, targets, scale, dw, need_dh, chunk)
}

fn backward_in_chunks(
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: LossScale<'_>,
    dw: Option<&Tensor>,
    need_dh: bool,
    chunk: usize,
) -> Result<(Tensor, Option<Tensor>)> {
    let op = "linear_cross_entropy_backward";
    let (s, d, v, dtype) = check(op, h, w, targets)?;
    let chunk = even_chunk(s, chunk);
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[v, d])?;
        cpu::distinct(op, "dw", dw, &[("h", h), ("w", w), ("targets", targets)])?;
    }
    if let Some(weights) = scale.weights {
        expect_f32(op, "weights", weights, &[s])?;
    }
    if on_gpu(h) {
        return GpuHead::new(op, h, w, targets, chunk)?.backward(scale, dw, need_dh);
    }
    let (h, w) = (read(op, "h", h)?, read(op, "w", w)?);
    let targets = read(op, "targets", targets)?;
    let (h, w, targets) = (h.values()?, w.values()?, targets.slice::<u32>()?);
    let scales: Vec<f32> = match scale.weights {
        Some(weights) => {
            let weights = read(op, "weights", weights)?;
            weights.slice::<f32>()?.iter().map(|weight| weight * scale.factor).collect()
        }
        None => vec![scale.factor; s],
    };
    let mut logits = vec![0f32; chunk * v];
    let mut nll = vec![0f32; s];
    let mut dh = vec![0f32; if need_dh { s * d } else { 0 }];
    let mut pass = |mut dw: Option<&mut [f32]>| {
        for start in (0..s).step_by(chunk) {
            let rows = chunk.min(s - start);
            let (logits, span) = (&mut logits[..rows * v], start * d..(start + rows) * d);
            let h = h.part(span.clone());
            nt((rows, v, d), logits, Store::Overwrite, h, w);
            nll[start..start + rows]
                .par_iter_mut()
                .zip(logits.par_chunks_mut(v))
                .zip(&targets[start..start + rows])
                .zip(&scales[start..start + rows])
                .for_each(|(((nll, logits), target), scale)| {
                    let lse = log_sum_exp(logits);
                    *nll = lse - logits[*target as usize];
                    grad_row(logits, lse, *scale);
                    logits[*target as usize] -= scale;
                });
            if need_dh {
                nn((rows, d, v), &mut dh[span], Store::Overwrite, &*logits, w);
            }
            if let Some(dw) = dw.as_deref_mut() {
                tn((v, d, rows), dw, Store::Add, &*logits, h);
            }
        }
    };
    match dw {
        Some(dw) => cpu::write(op, "dw", dw, |dw| pass(Some(dw)))?,
        None => pass(None),
    }
    let dh = if need_dh { Some(cpu::tensor(dh, (s, d), dtype)?) } else { None };
    Ok((cpu::tensor(nll, s, DType::F32)?, dh))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Tolerance, added, assert_close, check, device, gradient_buffer, ids, ids_are_checked,
        message, random, values,
    };
    use super::*;
    use candle_core::D;

    fn target_ids(s: usize, v: usize) -> Vec<u32> {
        (0..s).map(|i| (i * 7919 % v) as u32).collect()
    }

    /// Unfused cross-entropy, one value per row.
    fn plain(h: &Tensor, w: &Tensor, targets: &[u32]) -> Result<Tensor> {
        let logits = h.matmul(&w.t()?)?;
        let max = logits.max_keepdim(D::Minus1)?.detach();
        let exps = logits.broadcast_sub(&max)?.exp()?;
        let lse = (exps.sum_keepdim(D::Minus1)?.log()? + max)?;
        let index = ids(targets).unsqueeze(1)?;
        (lse - logits.gather(&index, 1)?)?.squeeze(1)
    }

    #[test]
    fn the_loss_and_its_gradients_match_the_reference() {
        let scale = 0.25f32;
        for (s, d, v) in [(1, 1, 2), (3, 33, 65), (33, 16, 500), (65, 40, 129)] {
            let targets = target_ids(s, v);
            let inputs = [random(1, &[s, d]), (random(2, &[v, d]) * 0.3).unwrap()];
            // A scalar output makes `dy` a single number, which the test multiplies into `scale`.
            let sum =
                |t: &[Tensor]| plain(&t[0], &t[1], &targets)?.sum_keepdim(0)? * f64::from(scale);
            check(&format!("cross-entropy {s} {d} {v}"), &inputs, sum, |t, dy| {
                let dw = gradient_buffer(&[v, d]);
                let dy = values(dy)[0] as f32;
                let (nll, dh) = linear_cross_entropy_backward(
                    &t[0],
                    &t[1],
                    &ids(&targets),
                    (scale * dy).into(),
                    Some(&dw),
                    true,
                )?;
                let sum = (nll.sum_keepdim(0)? * f64::from(scale))?.to_dtype(t[0].dtype())?;
                Ok((sum, vec![dh.unwrap(), added(&dw)]))
            });
        }
    }

    #[test]
    fn the_gradient_of_a_weighted_row_is_its_gradient_times_its_weight() {
        let (s, d, v) = (5, 33, 4_100);
        let (h, w, targets) = (random(1, &[s, d]), random(2, &[v, d]), target_ids(s, v));
        let weights = [0.5f32, 1.0, 3.0, 0.25, 2.0];
        let on_device = Tensor::from_slice(&weights, s, &device()).unwrap();
        for (chunk, dtype) in [(5, DType::F32), (2, DType::F32), (5, DType::BF16), (2, DType::BF16)]
        {
            let (h, w) = (h.to_dtype(dtype).unwrap(), w.to_dtype(dtype).unwrap());
            let run = |h: &Tensor, targets: &[u32], scale: LossScale<'_>, dw: &Tensor| {
                let targets = ids(targets);
                backward_in_chunks(h, &w, &targets, scale, Some(dw), true, chunk).unwrap()
            };
            let (dw, each_dw) = (gradient_buffer(&[v, d]), gradient_buffer(&[v, d]));
            let scale = LossScale { factor: 0.5, weights: Some(&on_device) };
            let (nll, dh) = run(&h, &targets, scale, &dw);
            let mut each_nll = Vec::new();
            let mut each_dh = Vec::new();
            for (row, weight) in weights.iter().enumerate() {
                let h = h.narrow(0, row, 1).unwrap();
                let (nll, dh) = run(&h, &targets[row..=row], (0.5 * weight).into(), &each_dw);
                each_nll.push(nll);
                each_dh.push(dh.unwrap());
            }
            let name = |of: &str| format!("{of}, chunks of {chunk}, {dtype:?}");
            let tolerance = if dtype == DType::F32 { Tolerance::F32 } else { Tolerance::BF16 };
            let each_nll = Tensor::cat(&each_nll, 0).unwrap();
            assert_close(&name("nll"), &nll, &each_nll, Tolerance::F32);
            let each_dh = Tensor::cat(&each_dh, 0).unwrap();
            assert_close(&name("dh"), &dh.unwrap(), &each_dh, tolerance);
            assert_close(&name("dw"), &added(&dw), &added(&each_dw), tolerance);
        }
    }

    #[test]
    fn vocabularies_of_many_tiles_are_processed_completely() {
        let (s, d) = (3, 5);
        // Sizes with full and with partial tiles, with vector and with single-element accesses.
        for v in [8_188, 8_192, 8_196, 20_004, 2_047, 2_049, 5_003] {
            for (dtype, tolerance) in [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)]
            {
                let (h, w) = (random(1, &[s, d]), random(2, &[v, d]));
                let (h, w) = (h.to_dtype(dtype).unwrap(), w.to_dtype(dtype).unwrap());
                let targets = [v as u32 - 1, 0, v as u32 / 2];
                let dw = Tensor::zeros((v, d), DType::F32, &device()).unwrap();
                let (nll, dh) = linear_cross_entropy_backward(
                    &h,
                    &w,
                    &ids(&targets),
                    0.5.into(),
                    Some(&dw),
                    true,
                )
                .unwrap();
                let argmax = linear_cross_entropy(&h, &w, &ids(&targets)).unwrap().1;
                let (h, w) = (h.to_dtype(DType::F64).unwrap(), w.to_dtype(DType::F64).unwrap());
                let logits = h.matmul(&w.t().unwrap()).unwrap();
                let exps = logits.exp().unwrap();
                let p = exps.broadcast_div(&exps.sum_keepdim(1).unwrap()).unwrap();
                let hot =
                    targets.map(|t| (0..v).map(move |i| f64::from(u8::from(i == t as usize))));
                let hot = Tensor::from_iter(hot.into_iter().flatten(), &device()).unwrap();
                let d_logits = ((p - hot.reshape((s, v)).unwrap()).unwrap() * 0.5).unwrap();
                let name = |of: &str| format!("{of} of {v} in {dtype:?}");
                assert_close(&name("nll"), &nll, &plain(&h, &w, &targets).unwrap(), Tolerance::F32);
                assert_close(&name("dh"), &dh.unwrap(), &d_logits.matmul(&w).unwrap(), tolerance);
                let want = d_logits.t().unwrap().matmul(&h).unwrap();
                assert_close(&name("dw"), &dw, &want, tolerance);
                let best = logits.argmax(1).unwrap();
                assert_eq!(argmax.to_vec1::<u32>().unwrap(), best.to_vec1::<u32>().unwrap());
            }
        }
    }

    #[test]
    fn forward_and_backward_give_the_same_loss_bits_and_skip_unneeded_gradients() {
        let (h, w, targets) = (random(1, &[9, 20]), random(2, &[300, 20]), target_ids(9, 300));
        let (eval, argmax) = linear_cross_entropy(&h, &w, &ids(&targets)).unwrap();
        let (train, dh) =
            linear_cross_entropy_backward(&h, &w, &ids(&targets), 1.0.into(), None, false).unwrap();
        assert!(dh.is_none());
        let logits = h.matmul(&w.t().unwrap()).unwrap();
        let best = logits.argmax(1).unwrap();
        assert_eq!(argmax.to_vec1::<u32>().unwrap(), best.to_vec1::<u32>().unwrap());
        assert_eq!(eval.to_vec1::<f32>().unwrap(), train.to_vec1::<f32>().unwrap());
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
        let want = plain(&wide(&h), &wide(&w), &targets).unwrap();
        assert_close("nll", &eval, &want, Tolerance::F32);
    }

    #[test]
    fn the_chunk_size_does_not_change_the_result() {
        let (s, d, v) = (7, 20, 90);
        let (h, w, targets) = (random(1, &[s, d]), random(2, &[v, d]), ids(&target_ids(s, v)));
        let run = |chunk| {
            let dw = gradient_buffer(&[v, d]);
            let (nll, dh) =
                backward_in_chunks(&h, &w, &targets, 0.5.into(), Some(&dw), true, chunk).unwrap();
            [nll, dh.unwrap(), added(&dw)]
        };
        let whole = run(7);
        for chunk in [1, 2, 3, 6, 100] {
            for (whole, parts) in whole.iter().zip(run(chunk)) {
                assert_close(&format!("chunks of {chunk}"), &parts, whole, Tolerance::F32);
            }
        }
    }

    #[test]
    fn the_logits_of_a_chunk_stay_within_the_limit() {
        assert_eq!(cpu_chunk_rows(151_936), 220);
        assert_eq!(cpu_chunk_rows(usize::MAX / 8), 1);
        for (rows, most, chunk) in [(1024, 220, 205), (220, 220, 220), (221, 220, 111), (3, 1, 1)] {
            assert_eq!(even_chunk(rows, most), chunk);
        }
        assert_eq!(even_chunk(0, 220), 1);
    }

    #[test]
    fn a_target_outside_the_vocabulary_is_reported_with_its_row() {
        let (h, w) = (random(1, &[3, 4]), random(2, &[5, 4]));
        if !ids_are_checked() {
            let (nll, _) = linear_cross_entropy(&h, &w, &ids(&[4, 5, 0])).unwrap();
            let finite: Vec<bool> = values(&nll).iter().map(|nll| nll.is_finite()).collect();
            assert_eq!(finite, [true, false, true]);
            return;
        }
        let error = message(linear_cross_entropy(&h, &w, &ids(&[4, 5, 0])));
        assert!(error.contains("target `5` of row 1"), "{error}");
    }

    #[test]
    fn targets_of_another_dtype_are_rejected() {
        let (h, w) = (random(1, &[1, 4]), random(2, &[5, 4]));
        let error = message(linear_cross_entropy(&h, &w, &ids(&[4]).to_dtype(DType::I64).unwrap()));
        assert!(error.contains("`targets` is I64, expected U32"), "{error}");
    }

    #[test]
    fn zero_rows_give_an_empty_loss() {
        let (h, w) = (random(1, &[0, 4]), random(2, &[5, 4]));
        let (nll, dh) =
            linear_cross_entropy_backward(&h, &w, &ids(&[]), 1.0.into(), None, true).unwrap();
        assert_eq!((nll.dims(), dh.unwrap().dims()), (&[0][..], &[0, 4][..]));
    }
}
