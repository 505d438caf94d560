//! Softmax attention inside each segment of a token stream, and its gradient.
//!
//! Shapes: `T` tokens, `H` query heads, `Hkv` key-value heads (`H % Hkv == 0`), `Dh` head dim; `q`, `o`: `[T, H, Dh]`;
//! `k`, `v`: `[T, Hkv, Dh]`; `lse: [H, T]` (`f32`), the log of the sum of a row's exponentials.
//! Scores are scaled by `1 / sqrt(Dh)`. A token attends inside its own segment only.

mod decode;
#[cfg(feature = "flash-attn")]
mod flash_attn;
mod flash_cpu;
mod masked;
#[cfg(test)]
mod tests;

pub use decode::decode_attention;
#[cfg(feature = "flash-attn")]
pub use flash_attn::FlashAttn;
pub use flash_cpu::Flash;
pub use masked::Masked;

use super::cpu::{compute_dtype, expect_f32, expect_shape};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;

/// Which tokens of its segment a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masking {
    /// Itself and the earlier ones.
    Causal,
    /// All.
    Full,
}

/// Boundaries in a token stream; both lists begin with 0, do not descend and end with `T`.
#[derive(Debug, Clone, Copy)]
pub struct Segments<'a> {
    /// Samples (or frames): no token attends across these.
    pub cu_seqlens: &'a [u32],
    /// Rows that a masked backend covers with one dense mask each; every segment lies inside one of them.
    pub mask_boundaries: &'a [u32],
}

/// Operands of attention.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    /// `[T, H, Dh]`.
    pub q: &'a Tensor,
    /// `[T, Hkv, Dh]`.
    pub k: &'a Tensor,
    /// `[T, Hkv, Dh]`.
    pub v: &'a Tensor,
}

/// Gradients of the operands, in their shapes and dtype.
#[derive(Debug)]
pub struct QkvGrad {
    /// `[T, H, Dh]`.
    pub dq: Tensor,
    /// `[T, Hkv, Dh]`.
    pub dk: Tensor,
    /// `[T, Hkv, Dh]`.
    pub dv: Tensor,
}

/// One way to compute attention; all ways agree.
pub trait AttentionBackend: Send + Sync {
    /// Name in the config.
    fn name(&self) -> &'static str;

    /// What computes heads of `head_dim` in `dtype` on `device`, for the log.
    fn kernel(&self, device: &Device, dtype: DType, head_dim: usize) -> &'static str;

    /// `o: [T, H, Dh]`, and `lse: [H, T]`, which backward needs.
    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: Segments<'_>,
        masking: Masking,
    ) -> Result<(Tensor, Tensor)>;

    /// Gradients of `q`, `k` and `v`; the same bits in every run.
    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: Segments<'_>,
        masking: Masking,
    ) -> Result<QkvGrad>;
}

/// Checked sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    t: usize,
    h: usize,
    hkv: usize,
    dh: usize,
    dtype: DType,
}

impl Sizes {
    fn scale(self) -> f32 {
        1.0 / (self.dh as f32).sqrt()
    }

    /// The key-value head of a query head.
    fn kv_head(self, head: usize) -> usize {
        head / (self.h / self.hkv)
    }

    fn check(op: &str, qkv: Qkv<'_>, segments: Segments<'_>) -> Result<Self> {
        let (t, h, dh) = qkv.q.dims3()?;
        let (_, hkv, _) = qkv.k.dims3()?;
        let dtype = compute_dtype(op, &[("q", qkv.q), ("k", qkv.k), ("v", qkv.v)])?;
        expect_shape(op, "k", qkv.k, &[t, hkv, dh])?;
        expect_shape(op, "v", qkv.v, &[t, hkv, dh])?;
        if hkv == 0 || dh == 0 || h % hkv != 0 {
            bail!("{op}: {h} query heads of {dh} dims do not divide over {hkv} key-value heads");
        }
        check_ends(op, "cu_seqlens", segments.cu_seqlens, t)?;
        check_ends(op, "mask_boundaries", segments.mask_boundaries, t)?;
        for row_end in segments.mask_boundaries {
            if segments.cu_seqlens.binary_search(row_end).is_err() {
                bail!("{op}: the row end {row_end} lies inside a segment of `cu_seqlens`");
            }
        }
        Ok(Self { t, h, hkv, dh, dtype })
    }

    /// Checks what backward gets besides the operands.
    fn check_backward(self, op: &str, o: &Tensor, lse: &Tensor, d_o: &Tensor) -> Result<()> {
        compute_dtype(op, &[("o", o), ("d_o", d_o)])?;
        expect_shape(op, "o", o, &[self.t, self.h, self.dh])?;
        expect_shape(op, "d_o", d_o, &[self.t, self.h, self.dh])?;
        expect_f32(op, "lse", lse, &[self.h, self.t])
    }
}

fn check_ends(op: &str, name: &str, ends: &[u32], t: usize) -> Result<()> {
    let ascending = ends.windows(2).all(|pair| pair[0] <= pair[1]);
    if ends.first() != Some(&0) || ends.last().map(|end| *end as usize) != Some(t) || !ascending {
        bail!("{op}: `{name}` must go from 0 to {t} and never descend, found {ends:?}");
    }
    Ok(())
}

/// The token ranges between boundaries, without empty ones.
fn ranges(ends: &[u32]) -> impl Iterator<Item = Range<usize>> + '_ {
    ends.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).filter(|range| !range.is_empty())
}
