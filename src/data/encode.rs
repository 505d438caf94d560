//! `Sample` -> `EncodedSample`, a pure function of one sample.
//!
//! The whole conversation is rendered once, each media placeholder becomes as many tokens as the
//! image has merged patches, and the text is tokenised in one call: so tokens are those of
//! inference. Offsets then say which tokens lie inside a target.

mod folder;
mod measure;
mod plain;

use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;

pub use folder::EncoderError;
use folder::TextFolder;
pub use measure::Measured;

use super::chat::{GenerationPrompt, RenderedPrompt, TemplateError};
use super::image::{ImageConfig, ImageError, ImageProcessor};
use super::rope_index::position_ids;
use super::row::Length;
use super::source::SampleError;
use super::tokenizer::{TokenizerError, Tokens};
use super::truncate::{Cut, Outline, kept_tokens};
use crate::batch::{
    Content, EncodedSample, IGNORE_INDEX, MediaRef, Message, Part, Patches, Sample, SampleId,
};

/// Tokenizer, chat template and image processor of one model folder.
pub struct Encoder {
    text: TextFolder,
    images: ImageProcessor,
}

impl Encoder {
    /// Reads `config.json`, `tokenizer.json`, `tokenizer_config.json`, `preprocessor_config.json`,
    /// `generation_config.json` if there, and the chat template from `chat_template.jinja`, else
    /// `chat_template.json`, else `tokenizer_config.json`.
    pub fn from_folder(folder: &Path, image: &ImageConfig) -> Result<Self, EncoderError> {
        let text = TextFolder::read(folder)?;
        Ok(Self { text, images: ImageProcessor::from_folder(folder, image)? })
    }

    /// Everything the model will see of `sample`.
    pub fn encode(&self, sample: &Sample) -> Result<EncodedSample, SampleError> {
        self.encode_cut(sample, None, |_| Ok(()))
    }

    /// What is left of the sample under `cut`. `admit` sees its size before a picture is decoded, and may
    /// refuse it.
    pub fn encode_cut<E: From<SampleError>>(
        &self,
        sample: &Sample,
        cut: Option<Cut>,
        admit: impl FnOnce(Length) -> Result<(), E>,
    ) -> Result<EncodedSample, E> {
        let id = &sample.id;
        let (text, targets) = self.render_targets(sample)?;
        let grids = per_image(id, &sample.media, |media| self.images.grid(media))?;
        let counts = self.counts(&grids);
        let tokens = self.tokenise(id, &text, targets, &counts)?.cut(id, cut)?;
        admit(self.length_of(tokens.input_ids.len(), grids.iter().copied()))?;
        let media = self.load(id, &sample.media, &grids)?;
        Ok(self.with_media(id, tokens, media))
    }

    /// The conversation before its last assistant turn, with that turn's header and no labels, and
    /// the text of that turn. Later turns are left out.
    pub fn encode_prompt(&self, sample: &Sample) -> Result<(EncodedSample, String), SampleError> {
        let id = &sample.id;
        self.check_texts(sample)?;
        let turn = sample.messages.iter().rposition(|message| message.role == "assistant");
        let turn = turn.ok_or_else(|| SampleError::NoAssistantTurn { id: id.clone() })?;
        let RenderedPrompt { text, answer } = self
            .text
            .template
            .render_prompt(&sample.messages[..=turn], sample.tools.as_ref())
            .map_err(|cause| template_error(id, cause))?
            .ok_or_else(|| SampleError::NoAssistantTurn { id: id.clone() })?;
        let media = &sample.media[..num_images(&sample.messages[..turn])];
        self.check_placeholders(id, &text, media.len())?;
        let grids = per_image(id, media, |media| self.images.grid(media))?;
        let tokens = self.tokenise(id, &text, Vec::new(), &self.counts(&grids))?;
        let media = self.load(id, media, &grids)?;
        Ok((self.with_media(id, tokens, media), answer))
    }

    /// The rendered chat, each image still one placeholder.
    pub fn render(&self, sample: &Sample) -> Result<String, SampleError> {
        self.text
            .template
            .render(&sample.messages, sample.tools.as_ref(), GenerationPrompt::Omit)
            .map_err(|cause| template_error(&sample.id, cause))
    }

    /// Text of `ids` without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.text.tokenizer.decode(ids)
    }

    /// Text of `ids` with special tokens.
    pub fn decode_with_specials(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.text.tokenizer.decode_with_specials(ids)
    }

    /// Tokens that end a generated text; at least one.
    pub fn stop_ids(&self) -> &[u32] {
        &self.text.stop_ids
    }

    /// Token that fills padding.
    pub fn pad_id(&self) -> u32 {
        self.text.pad_id
    }

    /// Rows of the embedding; every id is smaller.
    pub fn vocab_size(&self) -> usize {
        self.text.vocab_size
    }

    /// Edge, in patches, of the square that becomes one vision token.
    pub fn merge_size(&self) -> NonZeroU32 {
        NonZeroU32::new(self.images.merge_size()).unwrap_or(NonZeroU32::MIN)
    }

    /// The image side.
    pub fn image_processor(&self) -> &ImageProcessor {
        &self.images
    }

    /// Rendered chat and its targets, after every check that needs no picture.
    fn render_targets(&self, sample: &Sample) -> Result<(String, Vec<Range<usize>>), SampleError> {
        self.check_texts(sample)?;
        let chat = self
            .text
            .template
            .render_with_targets(&sample.messages, sample.tools.as_ref())
            .map_err(|cause| template_error(&sample.id, cause))?;
        self.check_placeholders(&sample.id, &chat.text, sample.media.len())?;
        Ok((chat.text, chat.targets))
    }

    /// Media and their places agree, and no text pretends to be a medium.
    fn check_texts(&self, sample: &Sample) -> Result<(), SampleError> {
        let id = &sample.id;
        for (turn, message) in sample.messages.iter().enumerate() {
            let mut tokens = self.text.media_tokens.iter();
            if let Some(token) = tokens.find(|token| has_text(message, token)) {
                let token = token.clone();
                return Err(SampleError::ReservedToken { id: id.clone(), turn, token });
            }
        }
        let placeholders = num_images(&sample.messages);
        let images = sample.media.len();
        if placeholders != images {
            return Err(SampleError::ImageCount { id: id.clone(), placeholders, images });
        }
        Ok(())
    }

    fn check_placeholders(
        &self,
        id: &SampleId,
        text: &str,
        images: usize,
    ) -> Result<(), SampleError> {
        let rendered = text.matches(self.image_token()).count();
        if rendered != images {
            return Err(SampleError::RenderedPlaceholders { id: id.clone(), rendered, images });
        }
        Ok(())
    }

    /// `targets` are bytes of `text`, which has one placeholder for each of `counts`; that becomes so many
    /// visual tokens.
    fn tokenise(
        &self,
        id: &SampleId,
        text: &str,
        mut targets: Vec<Range<usize>>,
        counts: &[usize],
    ) -> Result<EncodedText, SampleError> {
        let text = expand(text, self.image_token(), counts, &mut targets);
        let Tokens { ids, offsets } = self.text.tokenizer.encode(&text).map_err(|error| {
            SampleError::Tokenizer { id: id.clone(), problem: error.to_string() }
        })?;
        let image_token_id = self.text.image_token_id;
        let vision_rows: Vec<u32> = (0..ids.len() as u32) // [M]
            .filter(|row| ids[*row as usize] == image_token_id)
            .collect();
        let expected = counts.iter().sum();
        if vision_rows.len() != expected {
            let tokens = vision_rows.len();
            return Err(SampleError::ImageTokens { id: id.clone(), tokens, expected });
        }
        Ok(EncodedText {
            labels: labels(&ids, &offsets, &targets),
            spans: spans(&ids, &vision_rows, counts, self.text.vision_marks),
            input_ids: ids,
            vision_rows,
        })
    }

    /// Visual tokens of each grid.
    fn counts(&self, grids: &[[u32; 3]]) -> Vec<usize> {
        grids.iter().map(|grid| self.images.num_tokens(*grid)).collect()
    }

    /// The size of a sample of `tokens` tokens and these pictures.
    fn length_of(&self, tokens: usize, grids: impl Iterator<Item = [u32; 3]>) -> Length {
        let patches = grids.map(|grid| grid.map(u64::from).iter().product::<u64>());
        let patch_bytes = self.images.patch_values() * size_of::<f32>();
        Length { tokens, pixel_bytes: patches.sum::<u64>() * patch_bytes as u64 }
    }

    fn with_media(&self, id: &SampleId, text: EncodedText, media: Vec<Patches>) -> EncodedSample {
        let EncodedText { input_ids, labels, vision_rows, spans: _ } = text;
        let merge_size = self.images.merge_size();
        let position_ids = position_ids(input_ids.len(), &vision_rows, &grids(&media), merge_size);
        EncodedSample { id: id.clone(), input_ids, labels, position_ids, vision_rows, media }
    }

    fn load(
        &self,
        id: &SampleId,
        media: &[MediaRef],
        grids: &[[u32; 3]],
    ) -> Result<Vec<Patches>, SampleError> {
        let mut grids = grids.iter();
        per_image(id, media, |media| self.images.load_as(media, *grids.next().expect("one each")))
    }

    fn image_token(&self) -> &str {
        &self.text.media_tokens[0]
    }
}

/// An [`EncodedSample`] that lacks its pictures.
struct EncodedText {
    input_ids: Vec<u32>,      // [T]
    labels: Vec<i64>,         // [T]
    vision_rows: Vec<u32>,    // [M]
    spans: Vec<Range<usize>>, // one a medium, ascending: its visual tokens and their marks
}

impl EncodedText {
    /// What is left of a sample that has something to learn from.
    fn cut(self, id: &SampleId, cut: Option<Cut>) -> Result<Self, SampleError> {
        let outline = Outline::of(&self.labels, &self.spans);
        let kept = measure::kept_text(id, &outline, cut)?;
        if kept.len() == outline.text_tokens {
            return Ok(self);
        }
        let Self { input_ids, labels, vision_rows, spans } = self;
        let ranges = kept_tokens(input_ids.len(), &spans, &kept);
        let mut moved = Vec::with_capacity(vision_rows.len()); // all of them, as spans stay
        let mut num_kept = 0;
        for range in &ranges {
            let inside = |row: &&u32| range.contains(&(**row as usize));
            let shift = (range.start - num_kept) as u32;
            moved.extend(vision_rows.iter().filter(inside).map(|row| row - shift));
            num_kept += range.len();
        }
        Ok(Self {
            input_ids: ranges.iter().flat_map(|range| &input_ids[range.clone()]).copied().collect(),
            labels: ranges.iter().flat_map(|range| &labels[range.clone()]).copied().collect(),
            vision_rows: moved,
            spans: Vec::new(), // nobody asks any more
        })
    }
}

/// The tokens of each medium: `counts[k]` of `vision_rows`, and the marks right beside them.
fn spans(
    ids: &[u32],
    vision_rows: &[u32],
    counts: &[usize],
    [start_mark, end_mark]: [Option<u32>; 2],
) -> Vec<Range<usize>> {
    let mut rest = vision_rows;
    let mut span = |count: &usize| {
        let (rows, later) = rest.split_at(*count);
        rest = later;
        let (first, last) = (rows[0] as usize, rows[count - 1] as usize);
        let marked =
            |token: usize, mark: Option<u32>| mark.is_some() && ids.get(token).copied() == mark;
        let before = usize::from(first > 0 && marked(first - 1, start_mark));
        first - before..last + 1 + usize::from(marked(last + 1, end_mark))
    };
    counts.iter().map(&mut span).collect()
}

/// Repeats the `k`-th `placeholder` of `text` `counts[k]` times and moves `targets` along.
fn expand(text: &str, placeholder: &str, counts: &[usize], targets: &mut [Range<usize>]) -> String {
    let mut out =
        String::with_capacity(text.len() + counts.iter().sum::<usize>() * placeholder.len());
    let mut grown = vec![(0, 0)]; // (byte of text, bytes by which what follows has moved)
    let mut last = 0;
    for ((at, _), count) in text.match_indices(placeholder).zip(counts) {
        out.push_str(&text[last..at]);
        out.extend(std::iter::repeat_n(placeholder, *count));
        last = at + placeholder.len();
        grown.push((last, out.len() - last));
    }
    out.push_str(&text[last..]);
    let moved = |byte: usize| {
        let after = grown.partition_point(|(from, _)| *from <= byte);
        byte + grown[after - 1].1
    };
    for target in targets {
        *target = moved(target.start)..moved(target.end);
    }
    out
}

/// The id of each token that lies inside one of `targets` (ascending bytes), else `IGNORE_INDEX`;
/// `[T]`. A token that only reaches into a target, such as newlines merged with those of the
/// header, is part of the prompt.
fn labels(ids: &[u32], offsets: &[(usize, usize)], targets: &[Range<usize>]) -> Vec<i64> {
    let is_target = |start: usize, end: usize| {
        let candidate = targets.partition_point(|target| target.end < end);
        end > start && targets.get(candidate).is_some_and(|target| target.start <= start)
    };
    let tokens = ids.iter().zip(offsets);
    tokens
        .map(
            |(id, (start, end))| {
                if is_target(*start, *end) { i64::from(*id) } else { IGNORE_INDEX }
            },
        )
        .collect()
}

fn per_image<T>(
    id: &SampleId,
    media: &[MediaRef],
    mut read: impl FnMut(&MediaRef) -> Result<T, ImageError>,
) -> Result<Vec<T>, SampleError> {
    let numbered = media.iter().zip(1..);
    numbered
        .map(|(media, index)| {
            read(media).map_err(|cause| SampleError::Image { id: id.clone(), index, cause })
        })
        .collect()
}

fn grids(media: &[Patches]) -> Vec<[u32; 3]> {
    media.iter().map(|patches| patches.grid_thw).collect()
}

fn num_images(messages: &[Message]) -> usize {
    let parts = messages.iter().map(|message| match &message.content {
        Content::Text(_) => 0,
        Content::Parts(parts) => parts.iter().filter(|part| **part == Part::Image).count(),
    });
    parts.sum()
}

fn has_text(message: &Message, token: &str) -> bool {
    match &message.content {
        Content::Text(text) => text.contains(token),
        Content::Parts(parts) => {
            parts.iter().any(|part| matches!(part, Part::Text(text) if text.contains(token)))
        }
    }
}

fn template_error(id: &SampleId, cause: TemplateError) -> SampleError {
    SampleError::Template { id: id.clone(), cause }
}
