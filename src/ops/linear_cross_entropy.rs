//! The language-model head and its cross-entropy, fused: logits exist for a few rows at a time only.
//!
//! Shapes: `S` supervised rows, `D` hidden, `V` vocabulary; `h: [S, D]`, `w: [V, D]`, `targets: [S]` (`u32`), `nll: [S]`.
//! `nll[i] = logsumexp(h[i] W^T) - h[i] . w[targets[i]]`, with logits in `f32`.

use super::cpu::{self, compute_dtype, expect_f32, expect_shape, read};
use super::matmul::{Into, nn, nt, tn};
use super::simd::{exp, kernels, max, sum_exp};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

/// Upper bound on the logits that exist at one time.
const LOGITS_BYTES: usize = 32 << 20;

/// Rows in a chunk: fixed by the vocabulary, so that results do not depend on the machine.
fn chunk_rows(vocabulary: usize) -> usize {
    (LOGITS_BYTES / (4 * vocabulary.max(1))).max(1)
}

kernels! {
    fn log_sum_exp(logits: &[f32]) -> f32 {
        let max = max(logits);
        max + sum_exp(logits, max).ln()
    }

    // Logits to their gradient of `scale * nll`, but for the target's `- scale`.
    fn grad_row(logits: &mut [f32], lse: f32, scale: f32) {
        for logit in logits {
            *logit = exp(*logit - lse) * scale;
        }
    }
}

/// Checks the operands and returns `(S, D, V, dtype)`.
fn check(
    op: &'static str,
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
) -> Result<(usize, usize, usize, DType)> {
    let ((s, d), (v, _)) = (h.dims2()?, w.dims2()?);
    expect_shape(op, "w", w, &[v, d])?;
    expect_shape(op, "targets", targets, &[s])?;
    let dtype = compute_dtype(op, &[("h", h), ("w", w)])?;
    let targets = read(op, "targets", targets)?;
    for (row, target) in targets.slice::<u32>()?.iter().enumerate() {
        if *target as usize >= v {
            bail!("{op}: target `{target}` of row {row} is outside of the vocabulary of {v}");
        }
    }
    Ok((s, d, v, dtype))
}

/// `nll [S]` in `f32`, and the most likely token of each row, `argmax [S]` (the lowest id of a tie).
pub fn linear_cross_entropy(
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let op = "linear_cross_entropy";
    let (s, d, v, _) = check(op, h, w, targets)?;
    let (h, w) = (read(op, "h", h)?, read(op, "w", w)?);
    let targets = read(op, "targets", targets)?;
    let (h, w, targets) = (h.f32()?, w.f32()?, targets.slice::<u32>()?);
    let chunk = chunk_rows(v).min(s.max(1));
    let mut logits = vec![0f32; chunk * v];
    let mut nll = vec![0f32; s];
    let mut argmax = vec![0u32; s];
    for start in (0..s).step_by(chunk) {
        let rows = chunk.min(s - start);
        let logits = &mut logits[..rows * v];
        nt((rows, v, d), logits, Into::Overwrite, &h[start * d..(start + rows) * d], &w);
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

/// `nll [S]` in `f32`, and in the same pass the gradients of `scale * sum(nll)`: adds to `dw [V, D]` (`f32`) if the
/// head is trained, and returns `dh [S, D]` if `need_dh`.
pub fn linear_cross_entropy_backward(
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: f32,
    dw: Option<&Tensor>,
    need_dh: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let op = "linear_cross_entropy_backward";
    let (s, d, v, dtype) = check(op, h, w, targets)?;
    if let Some(dw) = dw {
        expect_f32(op, "dw", dw, &[v, d])?;
        cpu::distinct(op, "dw", dw, &[("h", h), ("w", w), ("targets", targets)])?;
    }
    let (h, w) = (read(op, "h", h)?, read(op, "w", w)?);
    let targets = read(op, "targets", targets)?;
    let (h, w, targets) = (h.f32()?, w.f32()?, targets.slice::<u32>()?);
    let chunk = chunk_rows(v).min(s.max(1));
    let mut logits = vec![0f32; chunk * v];
    let mut nll = vec![0f32; s];
    let mut dh = vec![0f32; if need_dh { s * d } else { 0 }];
    let mut pass = |mut dw: Option<&mut [f32]>| {
        for start in (0..s).step_by(chunk) {
            let rows = chunk.min(s - start);
            let (logits, span) = (&mut logits[..rows * v], start * d..(start + rows) * d);
            nt((rows, v, d), logits, Into::Overwrite, &h[span.clone()], &w);
            nll[start..start + rows]
                .par_iter_mut()
                .zip(logits.par_chunks_mut(v))
                .zip(&targets[start..start + rows])
                .for_each(|((nll, logits), target)| {
                    let lse = log_sum_exp(logits);
                    *nll = lse - logits[*target as usize];
                    grad_row(logits, lse, scale);
                    logits[*target as usize] -= scale;
                });
            if need_dh {
                nn((rows, d, v), &mut dh[span.clone()], Into::Overwrite, logits, &w);
            }
            if let Some(dw) = dw.as_deref_mut() {
                tn((v, d, rows), dw, Into::Add, logits, &h[span]);
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
