//! Attention over token streams of which each rank has a part (Ulysses).
//!
//! Shapes: `T` tokens of a micro-batch, `P` of them on this rank, `N` ranks in a sequence group,
//! `H` heads of a tensor, `Dh` head dim. Around the attention of one process, the ranks exchange
//! tokens for heads: `[P, H, Dh]` becomes `[T, H / N, Dh]`, and back.

use super::{Collective, Exchange, SequencePlace, in_op};
use candle_core::{DType, Device, Result, Tensor, bail};
use kernels::{AttentionBackend, HeadExchange, Masking, Qkv, QkvGrad, Segments};
use std::ops::Range;
use std::sync::Arc;

/// Attention of `N` neighbouring ranks, each with a contiguous part of the tokens and, while it
/// attends, with `H / N` heads of all tokens.
///
/// A call with all tokens of the segments, such as that of the vision encoder, is computed by this
/// rank alone. All ranks of a group make the same other calls, each with at least one token.
pub struct SequenceAttention {
    inner: Arc<dyn AttentionBackend>,
    collective: Arc<dyn Collective>,
    sequence: SequencePlace,
}

impl SequenceAttention {
    /// `inner` computes the attention of the own heads.
    pub fn new(
        inner: Arc<dyn AttentionBackend>,
        collective: Arc<dyn Collective>,
        sequence: SequencePlace,
    ) -> Self {
        Self { inner, collective, sequence }
    }

    /// Whether this rank has only a part, `own`, of `all` tokens.
    fn is_split(&self, own: usize, all: usize) -> Result<bool> {
        let expected = self.sequence.part(all).len();
        if own != all && own != expected {
            bail!("attention: found {own} of {all} tokens, expected {expected} on this rank");
        }
        Ok(own != all)
    }

    /// As [`HeadExchange::to_heads`].
    fn heads_of<const K: usize>(&self, xs: [&Tensor; K], num_tokens: usize) -> Result<[Tensor; K]> {
        Ok(self.to_heads(&xs, num_tokens)?.try_into().expect("one result for each tensor"))
    }
}

impl HeadExchange for SequenceAttention {
    fn own_heads(&self, heads: usize) -> Result<Range<usize>> {
        let SequencePlace { place, size } = self.sequence;
        if !heads.is_multiple_of(size) {
            bail!("attention: {size} ranks cannot share {heads} heads evenly");
        }
        Ok(self.sequence.part_of(place, heads))
    }

    fn to_heads(&self, xs: &[&Tensor], num_tokens: usize) -> Result<Vec<Tensor>> {
        let size = self.sequence.size;
        let mut results = Vec::with_capacity(xs.len());
        for x in xs {
            let (_, heads, head_dim) = x.dims3()?;
            let own = self.own_heads(heads)?.len();
            let all = Tensor::zeros((num_tokens, own, head_dim), x.dtype(), x.device())?;
            let send = (0..size).map(|to| x.narrow(1, to * own, own)?.contiguous()); // [P, H / N, Dh]
            let receive = (0..size).map(|from| {
                let part = self.sequence.part_of(from, num_tokens);
                all.narrow(0, part.start, part.len())
            });
            let exchange = Exchange {
                send: send.collect::<Result<_>>()?,
                receive: receive.collect::<Result<_>>()?,
            };
            results.push((all, self.collective.start_exchange(exchange).map_err(in_op)?));
        }
        if let Some((_, ticket)) = results.last() {
            self.collective.wait_for(*ticket).map_err(in_op)?;
        }
        Ok(results.into_iter().map(|(all, _)| all).collect())
    }

    fn to_tokens(&self, x: &Tensor) -> Result<Tensor> {
        let (num_tokens, own, head_dim) = x.dims3()?;
        let x = x.contiguous()?;
        let num_rows = self.sequence.part(num_tokens).len();
        let size = self.sequence.size;
        let receive = (0..size)
            .map(|_| Tensor::zeros((num_rows, own, head_dim), x.dtype(), x.device()))
            .collect::<Result<Vec<_>>>()?;
        let send = (0..size).map(|to| {
            let part = self.sequence.part_of(to, num_tokens);
            x.narrow(0, part.start, part.len())
        });
        let exchange = Exchange { send: send.collect::<Result<_>>()?, receive: receive.clone() };
        let ticket = self.collective.start_exchange(exchange).map_err(in_op)?;
        self.collective.wait_for(ticket).map_err(in_op)?;
        Tensor::cat(&receive, 1)?.contiguous() // [P, H, Dh]
    }
}

impl AttentionBackend for SequenceAttention {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn kernel(&self, device: &Device, dtype: DType, head_dim: usize) -> &'static str {
        self.inner.kernel(device, dtype, head_dim)
    }

    /// `lse` is that of the own heads of all tokens, `[H / N, T]`.
    fn forward(
        &self,
        qkv: Qkv<'_>,
        segments: &Segments,
        masking: Masking,
    ) -> Result<(Tensor, Tensor)> {
        let num_tokens = segments.cu_seqlens().num_tokens();
        if !self.is_split(qkv.q.dim(0)?, num_tokens)? {
            return self.inner.forward(qkv, segments, masking);
        }
        let [q, k, v] = self.heads_of([qkv.q, qkv.k, qkv.v], num_tokens)?;
        let (o, lse) = self.inner.forward(Qkv { q: &q, k: &k, v: &v }, segments, masking)?;
        drop((q, k, v));
        Ok((self.to_tokens(&o)?, lse))
    }

    fn backward(
        &self,
        qkv: Qkv<'_>,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        segments: &Segments,
        masking: Masking,
    ) -> Result<QkvGrad> {
        let num_tokens = segments.cu_seqlens().num_tokens();
        if !self.is_split(qkv.q.dim(0)?, num_tokens)? {
            return self.inner.backward(qkv, o, lse, d_o, segments, masking);
        }
        let [q, k, v, o, d_o] = self.heads_of([qkv.q, qkv.k, qkv.v, o, d_o], num_tokens)?;
        let heads = Qkv { q: &q, k: &k, v: &v };
        let QkvGrad { dq, dk, dv } =
            self.inner.backward(heads, &o, lse, &d_o, segments, masking)?;
        drop((q, k, v, o, d_o));
        Ok(QkvGrad { dq: self.to_tokens(&dq)?, dk: self.to_tokens(&dk)?, dv: self.to_tokens(&dv)? })
    }
    fn head_exchange(&self, own: usize, all: usize) -> Result<Option<&dyn HeadExchange>> {
        Ok(if self.is_split(own, all)? { Some(self) } else { None })
    }
}
