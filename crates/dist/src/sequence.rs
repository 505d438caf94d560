//! Exchanges of ranks for attention over token streams of which each has a part (Ulysses).
//!
//! Shapes: `T` tokens of a micro-batch, `P` of them on this rank, `N` ranks in a sequence group,
//! `H` heads of a tensor, `Dh` head dim. Around the attention of one process, the ranks exchange
//! tokens for heads: `[P, H, Dh]` becomes `[T, H / N, Dh]`, and back.

use super::{Collective, Exchange, SequencePlace, into_op_error};
use candle_core::{Result, Tensor, bail};
use kernels::HeadExchange;
use std::ops::Range;
use std::sync::Arc;

/// `N` neighbouring ranks, each with a contiguous part of the tokens, at least one, and, while it
/// attends, with `H / N` heads of all tokens.
pub struct SequenceExchange {
    collective: Arc<dyn Collective>,
    sequence: SequencePlace,
}

impl SequenceExchange {
    pub fn new(collective: Arc<dyn Collective>, sequence: SequencePlace) -> Self {
        Self { collective, sequence }
    }
}

impl HeadExchange for SequenceExchange {
    fn is_split(&self, own: usize, all: usize) -> Result<bool> {
        let expected = self.sequence.part(all).len();
        if own != all && own != expected {
            bail!("attention: found {own} of {all} tokens, expected {expected} on this rank");
        }
        Ok(own != all)
    }

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
            results.push((all, self.collective.start_exchange(exchange).map_err(into_op_error)?));
        }
        if let Some((_, ticket)) = results.last() {
            self.collective.wait_for(*ticket).map_err(into_op_error)?;
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
        let ticket = self.collective.start_exchange(exchange).map_err(into_op_error)?;
        self.collective.wait_for(ticket).map_err(into_op_error)?;
        Tensor::cat(&receive, 1)?.contiguous() // [P, H, Dh]
    }
}
