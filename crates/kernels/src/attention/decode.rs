//! Attention of new tokens over a key-value cache, for generation. Forward only.

use super::gpu::attend;
use super::{Qkv, Scores, check_scale};
use crate::cpu::{self, Heads, Span, attention_forward, compute_dtype, expect_shape, read};
use crate::cuda::select::Gpu;
use crate::launch::on_gpu;
use batch::CuSeqlens;
use candle_core::{Error, Result, Tensor, bail};

/// Returns `o [N, H, Dh]` for `N` new tokens with `q [N, H, Dh]` over `k` and `v`, both
/// `[S, Hkv, Dh]` with `S = num_past + N`. New token `i` is at position `num_past + i` of the keys.
pub fn decode_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    num_past: usize,
    scores: Scores,
) -> Result<Tensor> {
    let op = "decode_attention";
    let ((n, h, dh), (s, hkv, _)) = (q.dims3()?, k.dims3()?);
    let dtype = compute_dtype(op, &[("q", q), ("k", k), ("v", v)])?;
    expect_shape(op, "k", k, &[num_past + n, hkv, dh])?;
    expect_shape(op, "v", v, &[s, hkv, dh])?;
    if hkv == 0 || dh == 0 || h % hkv != 0 {
        bail!(
            "{op}: found {h} query heads and {hkv} key-value heads of dim {dh}, expected `H` to be a multiple of `Hkv`"
        );
    }
    check_scale(op, scores)?;
    if on_gpu(q) {
        let one = CuSeqlens::from_lengths(&[n as u32]).map_err(Error::wrap)?;
        let (gpu, qkv) = (Gpu::of(q.device())?, Qkv { q, k, v });
        return attend(op, gpu, qkv, one, num_past, scores).map(|(o, _)| o);
    }
    let (q, k, v) = (read(op, "q", q)?, read(op, "k", k)?, read(op, "v", v)?);
    let heads = Heads { h, hkv, dh, scores };
    let spans = [Span { queries: 0..n, keys: 0..s }];
    let (o, _) = attention_forward(&heads, (&q.f32()?, &k.f32()?, &v.f32()?), &spans);
    cpu::tensor(o, (n, h, dh), dtype)
}
