//! The heads of attention and linear attention that a rank computes, if each rank has a part of the
//! tokens.
//!
//! Shapes: `T` tokens of a micro-batch, `P` of them on this rank, `N` ranks, `C` channels of
//! queries, keys and values. Without other ranks `P` is `T` and `N` is 1.

use crate::tape::Pass;
use candle_core::{DType, Result, Tensor};
use kernels::{
    AttentionBackend, CONV_TAPS, DeltaHeads, HeadExchange, Qkv, QkvGrad, Scores, Segments,
};
use std::ops::Range;

/// The exchange of `pass`, if this rank has only a part, `own`, of the `num_tokens` tokens.
fn exchange<'a>(
    own: usize,
    num_tokens: usize,
    pass: &Pass<'a>,
) -> Result<Option<&'a dyn HeadExchange>> {
    let Some(exchange) = pass.exchange else { return Ok(None) };
    Ok(exchange.is_split(own, num_tokens)?.then_some(exchange))
}

fn to_heads<const K: usize>(
    exchange: &dyn HeadExchange,
    xs: [&Tensor; K],
    num_tokens: usize,
) -> Result<[Tensor; K]> {
    Ok(exchange.to_heads(&xs, num_tokens)?.try_into().expect("one result for each tensor"))
}

/// Attention: `o [P, H, Dh]`, and `lse [H / N, T]` of the own heads.
pub(super) fn attend(
    backend: &dyn AttentionBackend,
    qkv: Qkv<'_>,
    (segments, scores): (&Segments, Scores),
    pass: &Pass<'_>,
) -> Result<(Tensor, Tensor)> {
    let num_tokens = segments.cu_seqlens().num_tokens();
    let Some(exchange) = exchange(qkv.q.dim(0)?, num_tokens, pass)? else {
        return backend.forward(qkv, segments, scores);
    };
    let [q, k, v] = to_heads(exchange, [qkv.q, qkv.k, qkv.v], num_tokens)?;
    let heads = Qkv { q: &q, k: &k, v: &v };
    let (o, lse) = backend.forward(heads, segments, scores)?;
    drop((q, k, v));
    Ok((exchange.to_tokens(&o)?, lse))
}

/// Backward of [`attend`] for the gradient `d_o: [P, H, Dh]`.
pub(super) fn attend_backward(
    backend: &dyn AttentionBackend,
    qkv: Qkv<'_>,
    [o, lse, d_o]: [&Tensor; 3],
    (segments, scores): (&Segments, Scores),
    pass: &Pass<'_>,
) -> Result<QkvGrad> {
    let num_tokens = segments.cu_seqlens().num_tokens();
    let Some(exchange) = exchange(qkv.q.dim(0)?, num_tokens, pass)? else {
        return backend.backward(qkv, o, lse, d_o, segments, scores);
    };
    let [q, k, v, o, d_o] = to_heads(exchange, [qkv.q, qkv.k, qkv.v, o, d_o], num_tokens)?;
    let heads = Qkv { q: &q, k: &k, v: &v };
    let QkvGrad { dq, dk, dv } = backend.backward(heads, &o, lse, &d_o, segments, scores)?;
    drop((q, k, v, o, d_o));
    let [dq, dk, dv] = [dq, dk, dv].map(|d| exchange.to_tokens(&d));
    Ok(QkvGrad { dq: dq?, dk: dk?, dv: dv? })
}

/// The heads whose convolution and gated delta rule this rank computes, for all tokens.
pub(super) struct OwnHeads<'a> {
    exchange: Option<&'a dyn HeadExchange>,
    pub(super) heads: DeltaHeads,
    /// Own channels of queries, keys and values, among those of all heads.
    channels: [Range<usize>; 3],
    /// Number of channels of queries, keys and values of all heads.
    widths: [usize; 3],
    num_tokens: usize,
}

impl<'a> OwnHeads<'a> {
    /// The own ones of `all` heads, if this rank has `own_tokens` of `num_tokens` tokens.
    pub(super) fn new(
        all: DeltaHeads,
        own_tokens: usize,
        num_tokens: usize,
        pass: &Pass<'a>,
    ) -> Result<Self> {
        let exchange = exchange(own_tokens, num_tokens, pass)?;
        let own = |heads| exchange.map_or(Ok(0..heads), |exchange| exchange.own_heads(heads));
        let (key, value) = (own(all.key_heads)?, own(all.value_heads)?);
        let (keys, values) = (all.key_heads * all.key_dim, all.value_heads * all.value_dim);
        let of_keys = |start| start + key.start * all.key_dim..start + key.end * all.key_dim;
        let of_values =
            |start| start + value.start * all.value_dim..start + value.end * all.value_dim;
        Ok(Self {
            exchange,
            heads: DeltaHeads { key_heads: key.len(), value_heads: value.len(), ..all },
            channels: [of_keys(0), of_keys(keys), of_values(2 * keys)],
            widths: [keys, keys, values],
            num_tokens,
        })
    }

    /// Queries, keys and values, `[P, C]` to `[T, C / N]`.
    pub(super) fn qkv(&self, qkv: &Tensor) -> Result<Tensor> {
        if self.exchange.is_none() {
            return Ok(qkv.clone());
        }
        let [q, k, v] = split(qkv, self.widths)?;
        Tensor::cat(&self.of_own([&q, &k, &v])?, 1)
    }

    /// Tensors with a column for each channel or head, `[P, H]` to `[T, H / N]`.
    pub(super) fn of_own<const K: usize>(&self, xs: [&Tensor; K]) -> Result<[Tensor; K]> {
        let Some(exchange) = self.exchange else { return Ok(xs.map(Tensor::clone)) };
        let columns = xs.map(|x| x.unsqueeze(2));
        let columns = columns.into_iter().collect::<Result<Vec<_>>>()?;
        let own = exchange.to_heads(&columns.iter().collect::<Vec<_>>(), self.num_tokens)?;
        let own = own.iter().map(|x| x.squeeze(2)).collect::<Result<Vec<_>>>()?;
        Ok(own.try_into().expect("one result for each tensor"))
    }

    /// `[T, H / N]` to `[P, H]`.
    pub(super) fn of_tokens(&self, x: &Tensor) -> Result<Tensor> {
        let Some(exchange) = self.exchange else { return Ok(x.clone()) };
        exchange.to_tokens(&x.unsqueeze(2)?)?.squeeze(2)
    }

    /// Gradients of queries, keys and values, `[T, C / N]` to `[P, C]`.
    pub(super) fn qkv_of_tokens(&self, d_qkv: Tensor) -> Result<Tensor> {
        if self.exchange.is_none() {
            return Ok(d_qkv);
        }
        let own = self.channels.clone().map(|channels| channels.len());
        let [q, k, v] = split(&d_qkv, own)?;
        Tensor::cat(&[self.of_tokens(&q)?, self.of_tokens(&k)?, self.of_tokens(&v)?], 1)
    }

    /// The taps of own channels, `[C, 4]` to `[C / N, 4]`.
    pub(super) fn taps(&self, taps: &Tensor) -> Result<Tensor> {
        if self.exchange.is_none() {
            return Ok(taps.clone());
        }
        let own = self.channels.iter().map(|own| taps.narrow(0, own.start, own.len()));
        Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 0)
    }

    /// Calls `add` with a buffer for the gradient of the taps of own channels, `[C / N, 4]`, which
    /// is then a part of `all`, `[C, 4]`.
    pub(super) fn with_taps<R>(
        &self,
        all: Option<&Tensor>,
        add: impl FnOnce(Option<&Tensor>) -> Result<R>,
    ) -> Result<R> {
        let (Some(all), Some(_)) = (all, self.exchange) else { return add(all) };
        let rows = self.channels.iter().map(Range::len).sum::<usize>();
        let own_taps = Tensor::zeros((rows, CONV_TAPS), DType::F32, all.device())?;
        let result = add(Some(&own_taps))?;
        let mut first = 0;
        for own in &self.channels {
            let rows = all.narrow(0, own.start, own.len())?;
            kernels::add_in_place(&rows, &own_taps.narrow(0, first, own.len())?)?;
            first += own.len();
        }
        Ok(result)
    }
}

/// Columns of queries, keys and values, of these numbers.
fn split(qkv: &Tensor, [q, k, v]: [usize; 3]) -> Result<[Tensor; 3]> {
    Ok([qkv.narrow(1, 0, q)?, qkv.narrow(1, q, k)?, qkv.narrow(1, q + k, v)?])
}
