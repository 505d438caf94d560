//! Generates answers token by token.

use crate::batch::{EncodedSample, Pack, PaddingSide};
use crate::data::collate;
use crate::loss::{Targets, scores};
use crate::models::Model;
use crate::train::eval::EvalError;
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};

/// Settings of generation.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Maximum number of tokens of an answer.
    pub max_new_tokens: usize,
    /// Greedy, or random with a temperature, top-k and top-p.
    pub sampling: Sampling,
    /// Seed of random sampling.
    pub seed: u64,
    /// Ids that end an answer. They are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Continues `prompt` until a stop id or `max_new_tokens`; returns the new ids.
pub fn generate(
    model: &dyn Model,
    prompt: EncodedSample,
    options: &GenerateOptions,
    device: &Device,
) -> Result<Vec<u32>, EvalError> {
    let merge = model.merge_size();
    let packs = vec![Pack { samples: vec![prompt] }];
    let prompt = collate(packs, 0, PaddingSide::Right, merge)?.unpad()?;
    let mut processor = LogitsProcessor::from_sampling(options.seed, options.sampling.clone());
    let (mut hidden, mut cache) = model.prefill(prompt, device)?;
    let mut answer = Vec::new();
    while answer.len() < options.max_new_tokens {
        let id = next_token(model, &hidden, &mut processor, &options.sampling)?;
        if options.stop_ids.contains(&id) {
            break;
        }
        answer.push(id);
        if answer.len() < options.max_new_tokens {
            hidden = model.extend(id, &mut cache, device)?;
        }
    }
    Ok(answer)
}

fn next_token(
    model: &dyn Model,
    hidden: &Tensor,
    processor: &mut LogitsProcessor,
    sampling: &Sampling,
) -> candle_core::Result<u32> {
    if matches!(sampling, Sampling::ArgMax) {
        // The same kernel as in evaluation, so that both resolve ties in the same way.
        let any = Targets { rows: vec![0], ids: vec![0], weights: None };
        return Ok(scores(hidden, model.lm_head(), &any)?.argmax[0]);
    }
    let logits = crate::ops::linear(hidden, &model.lm_head().tensor(), None)?; // [1, V]
    processor.sample(&logits.squeeze(0)?)
}
