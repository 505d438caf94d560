//! Generates answers token by token.

use crate::batch::{EncodedSample, Pack, PaddingSide, Patches, media_rows};
use crate::data::collate;
use crate::loss::{Targets, scores};
use crate::models::{Cache, Model};
use crate::train::eval::EvalError;
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use std::ops::{ControlFlow, Range};

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
    let mut generator = Generator::new(model, device);
    let answer =
        generator.answer(prompt, options, |_| Ok::<_, EvalError>(ControlFlow::Continue(())))?;
    Ok(answer.ids)
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The new ids, without a stop id.
    pub ids: Vec<u32>,
    /// Number of tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// Number of tokens at the start of the prompt whose keys and values were kept from the answer
    /// before.
    pub num_reused: usize,
}

/// Answers prompts one after the other. It keeps the keys and values of the last prompt and its
/// answer: the next prompt computes only the tokens after their common start. The images and videos
/// in it are compared by their pixels.
pub struct Generator<'a> {
    model: &'a dyn Model,
    device: &'a Device,
    past: Option<Past>,
}

/// The tokens in a cache.
struct Past {
    cache: Cache,
    ids: Vec<u32>,
    media: Vec<MediumTokens>,
}

/// An image or video of a prompt.
#[derive(Debug, Clone, PartialEq)]
struct MediumTokens {
    /// From the first to behind the last token that receives its features.
    rows: Range<usize>,
    patches: Patches,
}

impl<'a> Generator<'a> {
    /// A generator without a past.
    pub fn new(model: &'a dyn Model, device: &'a Device) -> Self {
        Self { model, device, past: None }
    }

    /// Continues `prompt` until a stop id, or `max_new_tokens`, or until `each` breaks or fails; it
    /// receives all ids of the answer so far after each of them.
    pub fn answer<E: From<EvalError>>(
        &mut self,
        prompt: EncodedSample,
        options: &GenerateOptions,
        mut each: impl FnMut(&[u32]) -> Result<ControlFlow<()>, E>,
    ) -> Result<Answer, E> {
        let (model, device) = (self.model, self.device);
        let media = media_of(&prompt, model);
        let mut ids = prompt.input_ids.clone();
        let num_prompt_tokens = ids.len();
        // After an error there is no past.
        let mut cache = Cache::default();
        if let Some(past) = self.past.take() {
            let common = past.common(&ids, &media);
            cache = past.cache;
            cache.truncate(common);
        }
        let num_reused = cache.num_tokens();
        let packs = vec![Pack { samples: vec![prompt] }];
        let batch = collate(packs, 0, PaddingSide::Right, model.merge_size());
        let batch = batch.map_err(EvalError::from)?.unpad().map_err(EvalError::from)?;
        let mut processor = LogitsProcessor::from_sampling(options.seed, options.sampling.clone());
        let hidden = model.prefill_rest(batch, &mut cache, device);
        let mut hidden = hidden.map_err(EvalError::from)?;
        while ids.len() - num_prompt_tokens < options.max_new_tokens {
            let id = next_token(model, &hidden, &mut processor, &options.sampling);
            let id = id.map_err(EvalError::from)?;
            if options.stop_ids.contains(&id) {
                break;
            }
            ids.push(id);
            let answer = &ids[num_prompt_tokens..];
            if each(answer)?.is_break() || answer.len() == options.max_new_tokens {
                break;
            }
            hidden = model.extend(id, &mut cache, device).map_err(EvalError::from)?;
        }
        let answer = ids.split_off(num_prompt_tokens);
        let num_kept = cache.num_tokens() - num_prompt_tokens;
        ids.extend(&answer[..num_kept]);
        self.past = Some(Past { cache, ids, media });
        Ok(Answer { ids: answer, num_prompt_tokens, num_reused })
    }
}

impl Past {
    /// Number of tokens at the start of a prompt that are taken from the cache: at most all but the
    /// last one, whose hidden state continues the prompt. All tokens of a medium, or none.
    fn common(&self, ids: &[u32], media: &[MediumTokens]) -> usize {
        let equal = self.ids.iter().zip(ids).take_while(|(past, id)| past == id).count();
        let common = equal.min(ids.len().saturating_sub(1));
        let same = self.media.iter().zip(media).take_while(|(past, medium)| past == medium).count();
        let is_within = |medium: &&MediumTokens| medium.rows.end <= common;
        let kept = media[..same].iter().take_while(is_within).count();
        let others = self.media[kept..].iter().chain(&media[kept..]);
        others.map(|medium| medium.rows.start).fold(common, usize::min)
    }
}

fn media_of(prompt: &EncodedSample, model: &dyn Model) -> Vec<MediumTokens> {
    let rows = media_rows(&prompt.vision_rows, &prompt.media, model.merge_size());
    let media = rows.zip(&prompt.media);
    media.map(|(rows, patches)| MediumTokens { rows, patches: patches.clone() }).collect()
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
