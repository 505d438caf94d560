//! Generates answers token by token.

use crate::batch::{EncodedSample, Pack, PaddingSide, Patches, media_rows};
use crate::data::collate;
use crate::loss::{Targets, scores};
use crate::models::{Cache, Model};
use crate::tape::Pass;
use crate::train::TrainError;
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use std::num::NonZeroUsize;
use std::ops::{ControlFlow, Range};

#[derive(Debug, Clone)]
pub struct GenerateOptions {
    pub max_new_tokens: usize,
    /// Greedy, or random with a temperature, top-k and top-p.
    pub sampling: Sampling,
    pub seed: u64,
    /// Ids that end an answer. They are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Continues `prompt` until a stop id or `max_new_tokens`; returns the new ids.
pub fn generate(
    model: &Model,
    prompt: EncodedSample,
    options: &GenerateOptions,
    device: &Device,
) -> Result<Vec<u32>, TrainError> {
    let mut generator = Generator::new(model, device);
    let answer =
        generator.answer(prompt, options, |_| Ok::<_, TrainError>(ControlFlow::Continue(())))?;
    Ok(answer.ids)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The new ids, without a stop id.
    pub ids: Vec<u32>,
    pub num_prompt_tokens: usize,
    /// Number of tokens at the start of the prompt whose keys and values were kept from the answer
    /// before.
    pub num_reused: usize,
}

/// Answers prompts one after the other. It keeps the keys and values of the last prompt and its
/// answer: the next prompt computes only the tokens after their common start. Tokens in it have the
/// same positions, and images and videos the same pixels.
pub struct Generator<'a> {
    model: &'a Model,
    device: &'a Device,
    past: Option<Past>,
}

/// The tokens in a cache.
struct Past {
    cache: Cache,
    ids: Vec<u32>,
    media: Vec<MediumTokens>,
}

#[derive(Debug, Clone, PartialEq)]
struct MediumTokens {
    /// From the first to behind the last token that receives its features.
    rows: Range<usize>,
    patches: Patches,
}

impl<'a> Generator<'a> {
    /// A generator without a past.
    pub fn new(model: &'a Model, device: &'a Device) -> Self {
        Self { model, device, past: None }
    }

    /// Continues `prompt` until a stop id, or `max_new_tokens`, or until `each` breaks or fails; it
    /// receives all ids of the answer so far after each of them.
    pub fn answer<E: From<TrainError>>(
        &mut self,
        prompt: EncodedSample,
        options: &GenerateOptions,
        mut each: impl FnMut(&[u32]) -> Result<ControlFlow<()>, E>,
    ) -> Result<Answer, E> {
        let of = Decoding { model: self.model, device: self.device, options };
        let media = media_of(&prompt, self.model);
        // After an error there is no past.
        let mut cache = Cache::default();
        if let Some(past) = self.past.take() {
            let common = past.common(&prompt, &media);
            cache = past.cache;
            cache.truncate(common);
        }
        let num_reused = cache.num_tokens();
        let pass = Pass::default();
        let mut open = OpenAnswer::begin(of, prompt, cache, &pass)?;
        let mut num_seen = 0;
        loop {
            let answer = open.answer();
            if answer.len() > num_seen && each(answer)?.is_break() {
                break;
            }
            num_seen = answer.len();
            if open.has_ended {
                break;
            }
            of.extend(&mut [&mut open], 1, &pass).map_err(TrainError::from)?;
        }
        let OpenAnswer { cache, mut ids, num_prompt_tokens, .. } = open;
        let answer = ids[num_prompt_tokens..].to_vec();
        ids.truncate(cache.num_tokens());
        self.past = Some(Past { cache, ids, media });
        Ok(Answer { ids: answer, num_prompt_tokens, num_reused })
    }
}

/// Answers up to `num_rows` prompts at the same time. An answer does not depend on the others: all
/// products after the prompt have `num_rows` rows, and each row of a product is computed alone.
pub(super) struct Group<'a, K> {
    of: Decoding<'a>,
    num_rows: usize,
    open: Vec<(K, OpenAnswer)>,
}

impl<'a, K> Group<'a, K> {
    pub(super) fn new(
        model: &'a Model,
        device: &'a Device,
        options: &'a GenerateOptions,
        num_rows: NonZeroUsize,
    ) -> Self {
        let of = Decoding { model, device, options };
        Self { of, num_rows: num_rows.get(), open: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.open.len() < self.num_rows
    }

    /// Begins an answer, for which there must be room.
    pub(super) fn begin(
        &mut self,
        key: K,
        prompt: EncodedSample,
        pass: &Pass<'_>,
    ) -> Result<(), TrainError> {
        self.open.push((key, OpenAnswer::begin(self.of, prompt, Cache::default(), pass)?));
        Ok(())
    }

    /// Adds a token to each answer. Removes and returns the answers that have ended.
    pub(super) fn step(&mut self, pass: &Pass<'_>) -> Result<Vec<(K, Vec<u32>)>, TrainError> {
        let open = self.open.iter_mut().map(|(_, answer)| answer);
        let mut open: Vec<&mut OpenAnswer> = open.filter(|answer| !answer.has_ended).collect();
        if !open.is_empty() {
            self.of.extend(&mut open, self.num_rows, pass)?;
        }
        let ended = self.open.extract_if(.., |(_, answer)| answer.has_ended);
        Ok(ended.map(|(key, answer)| (key, answer.answer().to_vec())).collect())
    }
}

struct OpenAnswer {
    /// All tokens of `ids`, or all but the last one.
    cache: Cache,
    ids: Vec<u32>,
    num_prompt_tokens: usize,
    processor: LogitsProcessor,
    has_ended: bool,
}

impl OpenAnswer {
    /// The first token after `prompt`, of which `cache` has the start.
    fn begin(
        of: Decoding<'_>,
        prompt: EncodedSample,
        mut cache: Cache,
        pass: &Pass<'_>,
    ) -> Result<Self, TrainError> {
        let ids = prompt.input_ids.clone();
        let packs = vec![Pack { samples: vec![prompt] }];
        let batch = collate(packs, 0, PaddingSide::Right, of.model.merge_size())?.unpad()?;
        let hidden = of.model.prefill_rest(batch, &mut cache, of.device, pass)?; // [1, D]
        let sampling = of.options.sampling.clone();
        let mut open = Self {
            cache,
            num_prompt_tokens: ids.len(),
            ids,
            processor: LogitsProcessor::from_sampling(of.options.seed, sampling),
            has_ended: of.options.max_new_tokens == 0,
        };
        if !open.has_ended {
            of.add_tokens(&hidden, &mut [&mut open], pass)?;
        }
        Ok(open)
    }

    fn answer(&self) -> &[u32] {
        &self.ids[self.num_prompt_tokens..]
    }

    fn add(&mut self, id: u32, options: &GenerateOptions) {
        if options.stop_ids.contains(&id) {
            self.has_ended = true;
            return;
        }
        self.ids.push(id);
        self.has_ended = self.answer().len() == options.max_new_tokens;
    }
}

#[derive(Clone, Copy)]
struct Decoding<'a> {
    model: &'a Model,
    device: &'a Device,
    options: &'a GenerateOptions,
}

impl Decoding<'_> {
    /// Computes the last token of each answer, and adds the next one. Products have `num_rows`
    /// rows.
    fn extend(
        self,
        open: &mut [&mut OpenAnswer],
        num_rows: usize,
        pass: &Pass<'_>,
    ) -> candle_core::Result<()> {
        let last: Vec<u32> = open.iter().filter_map(|answer| answer.ids.last()).copied().collect();
        let mut caches: Vec<&mut Cache> = open.iter_mut().map(|answer| &mut answer.cache).collect();
        let hidden = self.model.extend(&last, &mut caches, num_rows, self.device, pass)?; // [R, D]
        self.add_tokens(&hidden, open, pass)
    }

    /// Adds the token after each of the first rows of `hidden: [R, D]` to its answer.
    fn add_tokens(
        self,
        hidden: &Tensor,
        open: &mut [&mut OpenAnswer],
        pass: &Pass<'_>,
    ) -> candle_core::Result<()> {
        let Self { model, options, .. } = self;
        if matches!(options.sampling, Sampling::ArgMax) {
            // The same kernel as in evaluation, so that both resolve ties in the same way.
            let rows: Vec<u32> = (0..hidden.dim(0)? as u32).collect();
            let any = Targets { ids: vec![0; rows.len()], rows, weights: None };
            let ids = scores(hidden, model.lm_head(), &any, pass)?.argmax;
            open.iter_mut().zip(ids).for_each(|(answer, id)| answer.add(id, options));
            return Ok(());
        }
        let logits = crate::ops::linear(hidden, &pass.weight(model.lm_head())?, None)?; // [R, V]
        for (row, answer) in open.iter_mut().enumerate() {
            let id = answer.processor.sample(&logits.get(row)?)?;
            answer.add(id, options);
        }
        Ok(())
    }
}

impl Past {
    /// Number of tokens at the start of a prompt that are taken from the cache: at most all but the
    /// last one, whose hidden state continues the prompt. All tokens of a medium, or none.
    fn common(&self, prompt: &EncodedSample, media: &[MediumTokens]) -> usize {
        let ids = &prompt.input_ids;
        let equal = self.ids.iter().zip(ids).take_while(|(past, id)| past == id).count();
        let placed = self.cache.num_placed(&prompt.position_ids);
        let common = equal.min(placed).min(ids.len().saturating_sub(1));
        let same = self.media.iter().zip(media).take_while(|(past, medium)| past == medium).count();
        let is_within = |medium: &&MediumTokens| medium.rows.end <= common;
        let kept = media[..same].iter().take_while(is_within).count();
        let others = self.media[kept..].iter().chain(&media[kept..]);
        others.map(|medium| medium.rows.start).fold(common, usize::min)
    }
}

fn media_of(prompt: &EncodedSample, model: &Model) -> Vec<MediumTokens> {
    let rows = media_rows(&prompt.vision_rows, &prompt.media, model.merge_size());
    let media = rows.zip(&prompt.media);
    media.map(|(rows, patches)| MediumTokens { rows, patches: patches.clone() }).collect()
}
