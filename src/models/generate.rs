//! Hidden states one token at a time, with cached keys and values.

use super::model::Model;
use crate::batch::{CuSeqlens, VarlenBatch};
use crate::nn::KvCache;
use candle_core::{Device, Result, Tensor};

/// Keys and values of one sample's tokens so far.
pub struct Cache {
    kv: KvCache,
    next_position: u32,
}

impl dyn Model + '_ {
    /// Hidden state of the last token of a prompt, `[1, D]`, and the cache to continue from.
    /// `prompt` is one sample.
    pub fn prefill(&self, prompt: VarlenBatch, device: &Device) -> Result<(Tensor, Cache)> {
        let next_position =
            prompt.position_ids.iter().flatten().max().map_or(0, |position| position + 1);
        let num_tokens = prompt.input_ids.len();
        let mut cache = Cache { kv: KvCache::default(), next_position };
        let hidden = self.run_with_cache(prompt, &mut cache, device)?;
        Ok((hidden.narrow(0, num_tokens - 1, 1)?, cache))
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
        let input = self.upload(batch, self.lm_head().dtype(), device)?;
        self.decode(&input, &mut cache.kv)
    }
}
