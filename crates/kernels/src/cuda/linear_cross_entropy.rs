//! The language-model head and its cross-entropy: matrix products, and launches of
//! `cross_entropy.cu`, on a chunk of rows at a time.
//!
//! Logits are `f32` for all operand dtypes: with 8 bits of precision, the likelihoods of large
//! logits would be off by several percent. The gradient overwrites the logits. In `bf16` it fills
//! the second half of each row, where the next products read it.

use super::gemm::{Addend, Gemm, GemmOperand, Transpose};
use super::launch::{Launch, address, empty, vectors};
use crate::{GPU_LOGITS_BYTES, LossScale};
use candle_core::{DType, Result, Tensor};

/// Number of rows in a tile of the products. Chunks consist of whole tiles.
const TILE_ROWS: usize = 128;
const THREADS: u32 = 512;

/// Number of rows in a chunk.
pub(crate) fn linear_cross_entropy_rows(vocabulary: usize) -> usize {
    let rows = GPU_LOGITS_BYTES / (4 * vocabulary.max(1));
    (rows / TILE_ROWS * TILE_ROWS).max(1)
}

/// Operands of the forward and the backward pass.
struct Head<'a> {
    op: &'static str,
    h: &'a Tensor,
    w: &'a Tensor,
    targets: &'a Tensor,
    nll: Tensor,
    /// Number of rows in a chunk.
    chunk: usize,
}

impl<'a> Head<'a> {
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
            let gemm = Gemm {
                transpose: Transpose::Nt,
                shape: (rows, v, d),
                a: GemmOperand::Whole("h", &self.h.narrow(0, start, rows)?),
                b: GemmOperand::Whole("w", self.w),
                addend: Addend::Nothing,
                bias: None,
            };
            gemm.into(op, "logits", &logits)?;
            let argmax = argmax.map(|argmax| argmax.narrow(0, start, rows)).transpose()?;
            let weights = scale.and_then(|scale| scale.weights);
            let weights = weights.map(|weights| weights.narrow(0, start, rows)).transpose()?;
            Launch::new("cross_entropy", self.h.dtype())
                .grid(rows)
                .threads(THREADS)
                .address(address(op, "logits", &logits)?)
                .address(address(op, "targets", &self.targets.narrow(0, start, rows)?)?)
                .address(address(op, "nll", &self.nll.narrow(0, start, rows)?)?)
                .optional(op, "argmax", argmax.as_ref())?
                .optional(op, "weights", weights.as_ref())?
                .float(scale.map_or(0.0, |scale| scale.factor))
                .int(v)
                .flag(scale.is_some())
                .flag(vectors(v, &[&logits])?)
                .run(self.h)?;
            f(start, &logits)?;
        }
        Ok(())
    }
}

pub(crate) fn linear_cross_entropy(
    op: &'static str,
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    chunk: usize,
) -> Result<(Tensor, Tensor)> {
    let head = Head::new(op, h, w, targets, chunk)?;
    let argmax = empty(h.dim(0)?, DType::U32, h)?;
    head.for_chunks(None, Some(&argmax), |_, _| Ok(()))?;
    Ok((head.nll, argmax))
}

pub(crate) fn linear_cross_entropy_backward(
    op: &'static str,
    h: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: LossScale<'_>,
    dw: Option<&Tensor>,
    need_dh: bool,
    chunk: usize,
) -> Result<(Tensor, Option<Tensor>)> {
    let head = Head::new(op, h, w, targets, chunk)?;
    let ((s, d), v) = (h.dims2()?, w.dim(0)?);
    let dh = if need_dh { Some(empty((s, d), h.dtype(), h)?) } else { None };
    let gradient = if need_dh || dw.is_some() { Some(scale) } else { None };
    head.for_chunks(gradient, None, |start, logits| {
        let rows = logits.dim(0)?;
        let d_logits = match h.dtype() {
            DType::BF16 => GemmOperand::SecondHalves("logits", logits),
            _ => GemmOperand::Whole("logits", logits),
        };
        if let Some(dh) = &dh {
            let gemm = Gemm {
                transpose: Transpose::Nn,
                shape: (rows, d, v),
                a: d_logits,
                b: GemmOperand::Whole("w", w),
                addend: Addend::Nothing,
                bias: None,
            };
            gemm.into(op, "dh", &dh.narrow(0, start, rows)?)?;
        }
        if let Some(dw) = dw {
            let gemm = Gemm {
                transpose: Transpose::Tn,
                shape: (v, d, rows),
                a: d_logits,
                b: GemmOperand::Whole("h", &h.narrow(0, start, rows)?),
                addend: Addend::Destination,
                bias: None,
            };
            gemm.into(op, "dw", dw)?;
        }
        Ok(())
    })?;
    Ok((head.nll, dh))
}
