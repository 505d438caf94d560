//! Softmax attention inside each segment of a packed token sequence, and its gradient.
//!
//! Shapes: `T` tokens, `H` query heads, `Hkv` key-value heads (`H % Hkv == 0`), `Dh` head dim; `q`,
//! `o`, `d_o`: `[T, H, Dh]`; `k`, `v`: `[T, Hkv, Dh]`; `lse: [H, T]` (`f32`), the log-sum-exp of
//! the scaled scores of each query.
//!
//! A token attends only to tokens of its own segment. [`Scores`] says to which of them, and has the
//! scale.

mod decode;
mod flash;
#[cfg(feature = "flash-attn")]
mod flash_attn;
pub(crate) mod gpu;
mod masked;
#[cfg(test)]
mod tests;

pub use decode::decode_attention;
pub use flash::Flash;
#[cfg(feature = "flash-attn")]
pub use flash_attn::FlashAttn;

pub use masked::Masked;

use super::cpu::{compute_dtype, expect_f32, expect_shape};
use batch::CuSeqlens;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::num::NonZeroUsize;
use std::ops::Range;

/// Selects which tokens of its segment a token attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masking {
    /// Itself and earlier tokens.
    Causal,
    /// This number of tokens: itself and those directly before it, as `sliding_window` in
    /// transformers. A window as long as the segment gives the results of [`Self::Causal`].
    Window(NonZeroUsize),
    /// All tokens of the segment.
    Full,
}

impl Masking {
    /// The keys that the query at position `query` among `num_keys` keys attends to.
    pub(crate) fn visible_keys(self, query: usize, num_keys: usize) -> Range<usize> {
        match self {
            Self::Causal => 0..query + 1,
            Self::Window(window) => (query + 1).saturating_sub(window.get())..query + 1,
            Self::Full => 0..num_keys,
        }
    }

    /// Number of scores of a segment of `length` tokens, for counts of operations. A causal segment
    /// has half of all, which leaves out half a score of each token.
    pub fn num_scores(self, length: usize) -> f64 {
        let all = (length as f64).powi(2);
        match self {
            Self::Causal => all / 2.0,
            Self::Window(window) => {
                (all - (length.saturating_sub(window.get()) as f64).powi(2)) / 2.0
            }
            Self::Full => all,
        }
    }
}

/// The scores that attention computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// The keys that a query has a score with.
    pub masking: Masking,
    /// Factor of the product of a query and a key, positive.
    pub scale: f32,
}

impl Scores {
    /// Scores with the usual scale, `1 / sqrt(head_dim)`.
    pub fn new(masking: Masking, head_dim: usize) -> Self {
        Self { masking, scale: 1.0 / (head_dim as f32).sqrt() }
    }
}

/// Boundaries in a packed sequence, checked once when a micro-batch is uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    cu_seqlens: CuSeqlens,
    mask_boundaries: CuSeqlens,
}

impl Segments {
    /// `cu_seqlens` holds the boundaries of samples (or frames); no token attends across them.
    /// `mask_boundaries` holds the rows for which [`Masked`] builds one dense mask each.
    ///
    /// Returns an error if the two end at different tokens, or if a segment crosses a row boundary.
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

    /// Boundaries of samples (or frames). No token attends across them.
    pub fn cu_seqlens(&self) -> &CuSeqlens {
        &self.cu_seqlens
    }

    /// Boundaries of the rows for which [`Masked`] builds one dense mask each.
    pub fn mask_boundaries(&self) -> &CuSeqlens {
        &self.mask_boundaries
    }
}

/// Queries, keys and values, of the same dtype.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    /// Queries, `[T, H, Dh]`.
    pub q: &'a Tensor,
    /// Keys, `[T, Hkv, Dh]`.
    pub k: &'a Tensor,
    /// Values, `[T, Hkv, Dh]`.
    pub v: &'a Tensor,
}

/// Gradients of the operands of attention, in their shapes and dtype.
#[derive(Debug)]
pub struct QkvGrad {
    /// Gradient of the queries, `[T, H, Dh]`.
    pub dq: Tensor,
    /// Gradient of the keys, `[T, Hkv, Dh]`.
    pub dk: Tensor,
    /// Gradient of the values, `[T, Hkv, Dh]`.
    pub dv: Tensor,
}

/// An implementation of attention. All implementations compute the same function up to rounding.
pub trait AttentionBackend: Send + Sync {
    /// Name of the backend in the config.
    fn name(&self) -> &'static str;

    /// Name of the kernel for heads of `head_dim` in `dtype` on `device`, for logs.
    fn kernel(&self, device: &Device, dtype: DType, head_dim: usize) -> &'static str;

    /// Returns `o: [T, H, Dh]` and `lse: [H, T]`, both of which the backward needs. Fails if
    /// shapes, dtypes or boundaries are inconsistent.
    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        scores: Scores,
    ) -> Result<(Tensor, Tensor)>;

    /// Returns the gradients of `q`, `k` and `v` from `o` and `lse` of the forward and the output
    /// gradient `d_o`. Repeated calls give the same bits.
    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        scores: Scores,
    ) -> Result<QkvGrad>;
}

/// `N` ranks, each of which has a part of the tokens of a stream with all heads, exchange them for
/// all tokens of `1 / N` of the heads. All ranks make the same calls in the same order.
pub trait HeadExchange {
    /// Whether this rank has only a part, `own`, of `all` tokens of the segments. Fails if `own` is
    /// neither all tokens nor the part of this rank.
    fn is_split(&self, own: usize, all: usize) -> Result<bool>;

    /// The own ones of `heads` heads. Fails if the ranks cannot share them evenly.
    fn own_heads(&self, heads: usize) -> Result<Range<usize>>;

    /// `[P, H, Dh]` to `[T, H / N, Dh]` for each tensor, where this rank has `P` of `T` tokens.
    fn to_heads(&self, xs: &[&Tensor], num_tokens: usize) -> Result<Vec<Tensor>>;

    /// `[T, H / N, Dh]` to `[P, H, Dh]`.
    fn to_tokens(&self, x: &Tensor) -> Result<Tensor>;
}

/// Returns an error if the scale is not positive: with it, masked scores would not be the smallest.
fn check_scale(op: &str, scores: Scores) -> Result<()> {
    if scores.scale > 0.0 && scores.scale.is_finite() {
        return Ok(());
    }
    bail!("{op}: the scale of scores is {}, expected a positive number", scores.scale)
}

/// Sizes of a call, after validation.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    t: usize,
    h: usize,
    hkv: usize,
    dh: usize,
    dtype: DType,
}

impl Sizes {
    /// Index of the key-value head of a query head.
    fn kv_head(self, head: usize) -> usize {
        head / (self.h / self.hkv)
    }

    fn check(op: &str, qkv: Qkv<'_>, segments: &Segments, scores: Scores) -> Result<Self> {
        let (t, h, dh) = qkv.q.dims3()?;
        let (_, hkv, _) = qkv.k.dims3()?;
        let dtype = compute_dtype(op, &[("q", qkv.q), ("k", qkv.k), ("v", qkv.v)])?;
        expect_shape(op, "k", qkv.k, &[t, hkv, dh])?;
        expect_shape(op, "v", qkv.v, &[t, hkv, dh])?;
        if hkv == 0 || dh == 0 || h % hkv != 0 {
            bail!(
                "{op}: found {h} query heads and {hkv} key-value heads of dim {dh}, expected `H` to be a multiple of `Hkv`"
            );
        }
        check_scale(op, scores)?;
        let num_tokens = segments.cu_seqlens.num_tokens();
        if num_tokens != t {
            bail!("{op}: `cu_seqlens` ends at {num_tokens}, but `q` has {t} tokens");
        }
        Ok(Self { t, h, hkv, dh, dtype })
    }

    /// Validates the operands that only the backward takes.
    fn check_backward(self, op: &str, o: &Tensor, lse: &Tensor, d_o: &Tensor) -> Result<()> {
        compute_dtype(op, &[("o", o), ("d_o", d_o)])?;
        expect_shape(op, "o", o, &[self.t, self.h, self.dh])?;
        expect_shape(op, "d_o", d_o, &[self.t, self.h, self.dh])?;
        expect_f32(op, "lse", lse, &[self.h, self.t])
    }
}
