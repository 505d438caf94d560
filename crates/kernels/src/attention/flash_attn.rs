//! Attention with the forward pass of candle-flash-attn and the backward pass of this crate.
//!
//! The kernels of candle-flash-attn have no backward and do not return `lse`. So `forward` returns
//! an empty `lse`, and `backward` first runs the forward pass of [`Flash`] to compute it, which
//! costs one more pass over the scores. Use this backend to compare kernels.

use super::{AttentionBackend, Flash, Masking, Qkv, QkvGrad, Scores, Segments, Sizes};
use crate::upload;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Attention on NVIDIA GPUs in `bf16` by candle-flash-attn. Fails on other devices and dtypes.
#[derive(Debug, Clone, Copy)]
pub struct FlashAttn;

impl AttentionBackend for FlashAttn {
    fn name(&self) -> &'static str {
        "flash_attn"
    }

    fn kernel(&self, _: &Device, _: DType, _: usize) -> &'static str {
        "flash_attn, candle-flash-attn forward in bf16, own backward"
    }

    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        scores: Scores,
    ) -> Result<(Tensor, Tensor)> {
        let op = "flash_attn";
        let sizes = Sizes::check(op, qkv, segments, scores)?;
        let device = qkv.q.device();
        if !matches!(device, Device::Cuda(_)) || sizes.dtype != DType::BF16 {
            bail!("{op}: `q` is {:?} on {device:?}, expected BF16 on a GPU", sizes.dtype);
        }
        let lse = Tensor::zeros((sizes.h, 0), DType::F32, device)?;
        if sizes.t == 0 {
            return Ok((qkv.q.copy()?, lse));
        }
        let cu_seqlens = segments.cu_seqlens();
        let ends = upload(cu_seqlens.as_slice().to_vec(), cu_seqlens.num_segments() + 1, device)?;
        let longest = cu_seqlens.max_seqlen();
        let (before, after) = match scores.masking {
            Masking::Causal => (None, Some(0)),
            Masking::Window(window) => (Some(window.get() - 1), Some(0)),
            Masking::Full => (None, None),
        };
        let o = candle_flash_attn::flash_attn_varlen_windowed(
            qkv.q,
            qkv.k,
            qkv.v,
            &ends,
            &ends,
            longest,
            longest,
            scores.scale,
            before,
            after,
        )?;
        Ok((o, lse))
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        _lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        scores: Scores,
    ) -> Result<QkvGrad> {
        let (_, lse) = Flash.forward(qkv, segments, scores)?;
        Flash.backward(qkv, o, &lse, d_o, segments, scores)
    }
}
