//! Flash attention: scratch memory has the size of a tile, on the CPU and on GPUs.

use super::gpu::{attend, attend_backward};
use super::{AttentionBackend, Qkv, QkvGrad, Scores, Segments, Sizes};
use crate::cpu::{self, BackwardInputs, Heads, Span, attention_backward, attention_forward, read};
use crate::cuda::select::{Gpu, attention_kernel};
use crate::launch::{on_gpu, supports_device};
use candle_core::{DType, Device, Result, Tensor};

/// Attention in tiles. Scratch memory has the size of a tile, not of the score matrix.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flash;

/// Name of the CPU kernel in logs.
const ON_CPU: &str = "flash, cpu";

fn spans(segments: &Segments) -> Vec<Span> {
    let ranges = segments.cu_seqlens().segments();
    ranges.map(|range| Span { queries: range.clone(), keys: range }).collect()
}

impl AttentionBackend for Flash {
    fn name(&self) -> &'static str {
        "flash"
    }

    fn kernel(&self, device: &Device, dtype: DType, head_dim: usize) -> &'static str {
        if supports_device(device) { attention_kernel(device, dtype, head_dim) } else { ON_CPU }
    }

    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        scores: Scores,
    ) -> Result<(Tensor, Tensor)> {
        let op = "flash_attention";
        let sizes = Sizes::check(op, qkv, segments, scores)?;
        if on_gpu(qkv.q) {
            let gpu = Gpu::of(qkv.q.device())?;
            return attend(op, gpu, qkv, segments.cu_seqlens().clone(), 0, scores);
        }
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let heads = Heads { h, hkv, dh, scores };
        let spans = spans(segments);
        let (o, lse) = attention_forward(&heads, (&q.f32()?, &k.f32()?, &v.f32()?), &spans);
        Ok((cpu::tensor(o, (t, h, dh), dtype)?, cpu::tensor(lse, (h, t), DType::F32)?))
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        scores: Scores,
    ) -> Result<QkvGrad> {
        let op = "flash_attention_backward";
        let sizes = Sizes::check(op, qkv, segments, scores)?;
        sizes.check_backward(op, o, lse, d_o)?;
        if on_gpu(qkv.q) {
            let gpu = Gpu::of(qkv.q.device())?;
            return attend_backward(op, gpu, qkv, o, lse, d_o, segments.cu_seqlens(), scores);
        }
        let Sizes { t, h, hkv, dh, dtype } = sizes;
        let heads = Heads { h, hkv, dh, scores };
        let (q, k, v) = (read(op, "q", qkv.q)?, read(op, "k", qkv.k)?, read(op, "v", qkv.v)?);
        let (o, lse, d_o) = (read(op, "o", o)?, read(op, "lse", lse)?, read(op, "d_o", d_o)?);
        let (q, k, v) = (q.f32()?, k.f32()?, v.f32()?);
        let (o, lse, d_o) = (o.f32()?, lse.f32()?, d_o.f32()?);
        let inputs = BackwardInputs { q: &q, k: &k, v: &v, o: &o, lse: &lse, d_o: &d_o };
        let (dq, dk, dv) = attention_backward(&heads, &inputs, &spans(segments));
        Ok(QkvGrad {
            dq: cpu::tensor(dq, (t, h, dh), dtype)?,
            dk: cpu::tensor(dk, (t, hkv, dh), dtype)?,
            dv: cpu::tensor(dv, (t, hkv, dh), dtype)?,
        })
    }
}
