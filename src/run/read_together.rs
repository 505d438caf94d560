//! Reads tensors that every rank needs whole. Each rank of a shard group reads a part of them and
//! sends it to the others, so that together they read each byte once.

use super::error::RunError;
use super::load_shares::RankPlace;
use crate::dist::Gather;
use crate::ops::copy_to_host;
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Number of elements that all ranks together read at once.
const CHUNK: usize = if cfg!(test) { 1 << 14 } else { 1 << 22 };
/// Number of elements that one task reads.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 18 };

impl RankPlace {
    /// Fills `into`, a flat tensor on any device. `read` returns elements on `device`, in the dtype
    /// of `into`. The ranks exchange tensors on `device`. All ranks make the same calls.
    pub(super) fn read_together(
        &self,
        into: &Tensor,
        device: &Device,
        read: impl Fn(Range<usize>) -> Result<Tensor, RunError> + Sync,
    ) -> Result<(), RunError> {
        let (len, num_shares) = (into.elem_count(), self.layout.num_shares());
        let share = len.min(CHUNK).div_ceil(num_shares);
        let all = Tensor::zeros(num_shares * share, into.dtype(), device)?;
        for start in (0..len).step_by(all.elem_count().max(1)) {
            let own = (start + self.member * share).min(len);
            let parts = (own..(own + share).min(len)).into_par_iter().step_by(PART);
            parts.try_for_each(|first| -> Result<(), RunError> {
                let values = read(first..(first + PART).min(own + share).min(len))?;
                Ok(all.slice_set(&values, 0, first - start)?)
            })?;
            let ticket = self.collective.start_gather(Gather { own: None, all: all.clone() })?;
            self.collective.wait_for(ticket)?;
            let arrived = all.narrow(0, 0, (len - start).min(all.elem_count()))?;
            let is_elsewhere = into.device().is_cpu() && !device.is_cpu();
            let arrived = if is_elsewhere { copy_to_host(&arrived)? } else { arrived };
            into.slice_set(&arrived, 0, start)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
