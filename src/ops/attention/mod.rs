//! Softmax attention inside each segment of a token stream, and its gradient.
//!
//! Shapes: `T` tokens, `H` query heads, `Hkv` key-value heads (`H % Hkv == 0`), `Dh` head dim; `q`, `o`: `[T, H, Dh]`;
//! `k`, `v`: `[T, Hkv, Dh]`; `lse: [H, T]` (`f32`), the log of the sum of a row's exponentials.
//! Scores are scaled by `1 / sqrt(Dh)`. A token attends inside its own segment only.

mod decode;
mod flash;
#[cfg(feature = "flash-attn")]
mod flash_attn;

mod masked;
#[cfg(test)]
mod tests;

pub use decode::decode_attention;
pub use flash::Flash;
#[cfg(feature = "flash-attn")]
pub use flash_attn::FlashAttn;

pub use masked::Masked;

use super::cpu::{compute_dtype, expect_f32, expect_shape};
use crate::batch::CuSeqlens;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Which tokens of its segment a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masking {
    /// Itself and the earlier ones.
    Causal,
    /// All.
    Full,
}

/// Boundaries of a token stream for attention, checked once when a micro-batch is uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    cu_seqlens: CuSeqlens,
    mask_boundaries: CuSeqlens,
}

impl Segments {
    /// `cu_seqlens` holds the samples (or video frames); no token attends across its boundaries. `mask_boundaries` holds the
    /// rows that [`Masked`] covers with one dense mask each; every segment must lie inside one of these rows.
    pub fn new(cu_seqlens: CuSeqlens, mask_boundaries: CuSeqlens) -> Result<Self> {
        let (tokens, covered) = (cu_seqlens.num_tokens(), mask_boundaries.num_tokens());
        if tokens != covered {
            bail!(
                "attention: `cu_seqlens` ends at {tokens}, but `mask_boundaries` ends at {covered}"
            );
        }
        let inside = |end: &&u32| cu_seqlens.as_slice().binary_search(end).is_err();
        if let Some(end) = mask_boundaries.as_slice().iter().find(inside) {
            bail!("attention: the mask boundary {end} lies inside a segment of `cu_seqlens`");
        }
        Ok(Self { cu_seqlens, mask_boundaries })
    }

    /// Boundaries that attention does not cross.
    pub fn cu_seqlens(&self) -> &CuSeqlens {
        &self.cu_seqlens
    }

    /// Boundaries of the rows that [`Masked`] covers with one dense mask each.
    pub fn mask_boundaries(&self) -> &CuSeqlens {
        &self.mask_boundaries
    }
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
        segments: &Segments,
        masking: Masking,
    ) -> Result<(Tensor, Tensor)>;

    /// Gradients of `q`, `k` and `v`; the same bits in every run.
    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
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

    fn check(op: &str, qkv: Qkv<'_>, segments: &Segments) -> Result<Self> {
        let (t, h, dh) = qkv.q.dims3()?;
        let (_, hkv, _) = qkv.k.dims3()?;
        let dtype = compute_dtype(op, &[("q", qkv.q), ("k", qkv.k), ("v", qkv.v)])?;
        expect_shape(op, "k", qkv.k, &[t, hkv, dh])?;
        expect_shape(op, "v", qkv.v, &[t, hkv, dh])?;
        if hkv == 0 || dh == 0 || h % hkv != 0 {
            bail!("{op}: {h} query heads of {dh} dims do not divide over {hkv} key-value heads");
        }
        let num_tokens = segments.cu_seqlens.num_tokens();
        if num_tokens != t {
            bail!("{op}: `cu_seqlens` ends at {num_tokens}, but `q` has {t} tokens");
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
