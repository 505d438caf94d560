//! Attention of new tokens to a cache of keys and values, for generation. Forward only.

use super::Masking;
use crate::ops::cpu::{self, Heads, Span, attention_forward, compute_dtype, expect_shape, read};
use candle_core::{Result, Tensor, bail};

/// `o [N, H, Dh]` of `N` new tokens, `q [N, H, Dh]`, over `k`, `v`: `[S, Hkv, Dh]` with `S = num_past + N`:
/// new token `i` sees keys `0..=num_past + i`.
pub fn decode_attention(q: &Tensor, k: &Tensor, v: &Tensor, num_past: usize) -> Result<Tensor> {
    let op = "decode_attention";
    let ((n, h, dh), (s, hkv, _)) = (q.dims3()?, k.dims3()?);
    let dtype = compute_dtype(op, &[("q", q), ("k", k), ("v", v)])?;
    expect_shape(op, "k", k, &[num_past + n, hkv, dh])?;
    expect_shape(op, "v", v, &[s, hkv, dh])?;
    if hkv == 0 || dh == 0 || h % hkv != 0 {
        bail!("{op}: {h} query heads of {dh} dims do not divide over {hkv} key-value heads");
    }
    return_if_on_gpu!(q => decode_attention(q, k, v, num_past));
    let (q, k, v) = (read(op, "q", q)?, read(op, "k", k)?, read(op, "v", v)?);
    let heads = Heads { h, hkv, dh, scale: 1.0 / (dh as f32).sqrt() };
    let spans = [Span { queries: 0..n, keys: 0..s }];
    let (o, _) =
        attention_forward(&heads, (&q.f32()?, &k.f32()?, &v.f32()?), &spans, Masking::Causal);
    cpu::tensor(o, (n, h, dh), dtype)
}
