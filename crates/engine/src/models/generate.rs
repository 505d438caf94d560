//! Hidden states one token at a time, with cached keys and values.

use super::model::Model;
use crate::nn::KvCache;
use crate::tape::Pass;
use batch::{CuSeqlens, IGNORE_INDEX, VarlenBatch};
use candle_core::{Device, Error, Result, Tensor, bail};

/// Keys and values of one sample's tokens so far.
#[derive(Default)]
pub struct Cache {
    kv: KvCache,
    /// Positions of the tokens, one each.
    positions: Vec<[u32; 3]>,
    next_position: u32,
}

impl Cache {
    pub fn num_tokens(&self) -> usize {
        self.kv.len()
    }

    /// Removes all tokens after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.kv.truncate(len);
        self.positions.truncate(self.kv.len());
    }

    /// Number of tokens at the start that have these positions. The same tokens may have others:
    /// positions of an image may depend on tokens after it, and those of a video on its times.
    pub fn num_placed(&self, position_ids: &[[u32; 3]]) -> usize {
        self.positions.iter().zip(position_ids).take_while(|(of, other)| of == other).count()
    }
}

impl Model {
    /// Hidden state of the last token of a prompt, `[1, D]`, and the cache to continue from.
    /// `prompt` is one sample.
    pub fn prefill(
        &self,
        prompt: VarlenBatch,
        device: &Device,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Cache)> {
        let mut cache = Cache::default();
        let hidden = self.prefill_rest(prompt, &mut cache, device, pass)?;
        Ok((hidden, cache))
    }

    /// As `prefill`, with a cache of the first tokens of `prompt`: it receives the others, of
    /// which there is at least one.
    pub fn prefill_rest(
        &self,
        prompt: VarlenBatch,
        cache: &mut Cache,
        device: &Device,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let next_position =
            prompt.position_ids.iter().flatten().max().map_or(0, |position| position + 1);
        let positions = prompt.position_ids.clone();
        let rest = prompt.tokens_from(cache.num_tokens(), self.merge_size());
        let rest = rest.map_err(Error::wrap)?;
        let num_tokens = rest.input_ids.len();
        let hidden = self.run_with_caches(rest, &mut [&mut *cache], device, pass)?;
        (cache.positions, cache.next_position) = (positions, next_position);
        hidden.narrow(0, num_tokens - 1, 1)
    }

    /// Hidden states of one more token of each sample, `[num_rows, D]`: `ids[i]` continues
    /// `caches[i]`. Products are computed with `num_rows` rows, because products with another
    /// number of rows may be rounded in another way; the last rows have no meaning if there are
    /// fewer samples.
    pub fn extend(
        &self,
        ids: &[u32],
        caches: &mut [&mut Cache],
        num_rows: usize,
        device: &Device,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        if ids.len() != caches.len() || ids.len() > num_rows {
            bail!("found {} tokens of {} samples in {num_rows} rows", ids.len(), caches.len());
        }
        let alone = CuSeqlens::from_lengths(&vec![1; num_rows]).map_err(Error::wrap)?;
        let mut batch = VarlenBatch {
            input_ids: ids.to_vec(),
            labels: vec![IGNORE_INDEX; num_rows],
            weights: None,
            position_ids: caches.iter().map(|cache| [cache.next_position; 3]).collect(),
            mask_boundaries: alone.clone(),
            cu_seqlens: alone,
            vision_rows: vec![],
            media: vec![],
            padding: vec![],
            num_tokens: num_rows,
            num_samples: num_rows,
            part: None,
        };
        batch.input_ids.resize(num_rows, 0);
        batch.position_ids.resize(num_rows, [0; 3]);
        let hidden = self.run_with_caches(batch, caches, device, pass)?;
        for cache in caches {
            cache.positions.push([cache.next_position; 3]);
            cache.next_position += 1;
        }
        Ok(hidden)
    }

    fn run_with_caches(
        &self,
        batch: VarlenBatch,
        caches: &mut [&mut Cache],
        device: &Device,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let input = self.upload(batch, self.dtype(), device)?;
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().map(|cache| &mut cache.kv).collect();
        self.decode(&input, &mut caches, pass)
    }
}
