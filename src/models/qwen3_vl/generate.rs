//! Hidden states one token at a time, with the keys and values of the past kept.

use super::input::{ModelInput, TextContext};
use super::stages::Model;
use crate::batch::{CuSeqlens, VarlenBatch};
use crate::ops;
use candle_core::{Device, Result, Tensor};

/// Keys and values of one sample's tokens so far.
pub struct Cache {
    layers: Vec<(Tensor, Tensor)>, // k, v: [S, Hkv, Dh] each
    next_position: u32,
    num_past: usize,
}

impl Model {
    /// Hidden state of the last token of a prompt, `[1, D]`, and the cache to go on from.
    /// `prompt` is one sample, its positions included.
    pub fn prefill(&self, prompt: VarlenBatch, device: &Device) -> Result<(Tensor, Cache)> {
        let next_position =
            prompt.position_ids.iter().flatten().max().map_or(0, |position| position + 1);
        let num_past = prompt.input_ids.len();
        let dtype = self.lm_head().tensor().dtype();
        let input = ModelInput::upload(prompt, self.config(), dtype, device)?;
        let mut cache = Cache { layers: Vec::new(), next_position, num_past: 0 };
        let hidden = self.run_with_cache(&input, &mut cache)?;
        cache.num_past = num_past;
        Ok((hidden.narrow(0, num_past - 1, 1)?, cache))
    }

    /// Hidden state of one more token, `[1, D]`.
    pub fn extend(&self, id: u32, cache: &mut Cache, device: &Device) -> Result<Tensor> {
        let position = cache.next_position;
        let one = CuSeqlens::from_lengths(&[1]).map_err(candle_core::Error::wrap)?;
        let batch = VarlenBatch {
            input_ids: vec![id],
            labels: vec![crate::batch::IGNORE_INDEX],
            position_ids: vec![[position; 3]],
            mask_boundaries: one.clone(),
            cu_seqlens: one,
            vision_rows: vec![],
            media: vec![],
            num_tokens: 1,
            num_samples: 1,
        };
        let dtype = self.lm_head().tensor().dtype();
        let input = ModelInput::upload(batch, self.config(), dtype, device)?;
        let hidden = self.run_with_cache(&input, cache)?;
        cache.next_position += 1;
        cache.num_past += 1;
        Ok(hidden)
    }

    fn run_with_cache(&self, input: &ModelInput, cache: &mut Cache) -> Result<Tensor> {
        let features = self.features(input)?;
        let mut h = self.embed(input, features.as_ref())?; // [N, D]
        for (k, layer) in self.layers().iter().enumerate() {
            let (q, new_keys, new_values) = layer.project(&h, &input.text)?;
            let (keys, values) = match cache.layers.get(k) {
                Some((keys, values)) => {
                    (Tensor::cat(&[keys, &new_keys], 0)?, Tensor::cat(&[values, &new_values], 0)?)
                }
                None => (new_keys, new_values),
            };
            let o = ops::decode_attention(&q, &keys, &values, cache.num_past)?; // [N, H, Dh]
            h = layer.finish(&h, &o)?;
            Self::inject(&h, input, features.as_ref(), k)?;
            if k < cache.layers.len() {
                cache.layers[k] = (keys, values);
            } else {
                cache.layers.push((keys, values));
            }
        }
        self.final_norm(&h, &input.text)
    }

    fn final_norm(&self, h: &Tensor, context: &TextContext) -> Result<Tensor> {
        Ok(crate::tape::Stage::forward(self.norm(), h, context)?.0)
    }
}
