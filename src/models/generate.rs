//! Hidden states one token at a time, with cached keys and values.

use super::model::Model;
use crate::batch::{CuSeqlens, VarlenBatch};
use crate::nn::KvCache;
use candle_core::{Device, Result, Tensor};

/// Keys and values of one sample's tokens so far.
#[derive(Default)]
pub struct Cache {
    kv: KvCache,
    next_position: u32,
}

impl Cache {
    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.kv.len()
    }

    /// Removes all tokens after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.kv.truncate(len);
    }
}

impl dyn Model + '_ {
    /// Hidden state of the last token of a prompt, `[1, D]`, and the cache to continue from.
    /// `prompt` is one sample.
    pub fn prefill(&self, prompt: VarlenBatch, device: &Device) -> Result<(Tensor, Cache)> {
        let mut cache = Cache::default();
        let hidden = self.prefill_rest(prompt, &mut cache, device)?;
        Ok((hidden, cache))
    }

    /// As `prefill`, with a cache of the first tokens of `prompt`: it receives the others, of
    /// which there is at least one.
    pub fn prefill_rest(
        &self,
        prompt: VarlenBatch,
        cache: &mut Cache,
        device: &Device,
    ) -> Result<Tensor> {
        let next_position =
            prompt.position_ids.iter().flatten().max().map_or(0, |position| position + 1);
        let rest = prompt.tokens_from(cache.num_tokens(), self.merge_size());
        let rest = rest.map_err(candle_core::Error::wrap)?;
        let num_tokens = rest.input_ids.len();
        let hidden = self.run_with_cache(rest, cache, device)?;
        cache.next_position = next_position;
        hidden.narrow(0, num_tokens - 1, 1)
    }

    /// Hidden state of one more token, `[1, D]`.
    pub fn extend(&self, id: u32, cache: &mut Cache, device: &Device) -> Result<Tensor> {
        let position = cache.next_position;
        let one = CuSeqlens::from_lengths(&[1]).map_err(candle_core::Error::wrap)?;
        let batch = VarlenBatch {
            input_ids: vec![id],
            labels: vec![crate::batch::IGNORE_INDEX],
            weights: None,
            position_ids: vec![[position; 3]],
            mask_boundaries: one.clone(),
            cu_seqlens: one,
            vision_rows: vec![],
            media: vec![],
            num_tokens: 1,
            num_samples: 1,
            part: None,
        };
        let hidden = self.run_with_cache(batch, cache, device)?;
        cache.next_position += 1;
        Ok(hidden)
    }

    fn run_with_cache(
        &self,
        batch: VarlenBatch,
        cache: &mut Cache,
        device: &Device,
    ) -> Result<Tensor> {
        let input = self.upload(batch, self.dtype(), device)?;
        self.decode(&input, &mut cache.kv)
    }
}
