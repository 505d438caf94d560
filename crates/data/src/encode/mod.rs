//! `Sample` -> `EncodedSample`, a pure function of one sample.
//!
//! The whole conversation is rendered once. Each media placeholder becomes as many tokens as the
//! medium has merged patches; a video may have timestamps and start and end tokens too. The text is
//! tokenised in one call, so the tokens are those of inference. Byte offsets decide which tokens
//! lie inside a target.
//!
//! Plain text is encoded without template and images.

mod canvas;
mod encoded_text;
mod folder;
mod grounding;
pub(crate) mod measure;
mod media;
mod targets;
mod text_boxes;
pub(crate) mod truncate;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, Once};

use sha2::digest::generic_array::GenericArray;
use sha2::{Digest, Sha256};

use crate::media::Positions;
use crate::media::image::{ImageConfig, ImageProcessor};
use crate::media::video::{VideoConfig, VideoError, VideoProcessor};
use crate::model_folder::ModelFolderError;
use crate::row::Length;
use crate::source::{AtRow, SampleError, SampleFault};
use crate::template::{GenerationPrompt, RenderedPrompt};
use batch::{Content, EncodedSample, Medium, MediumKind, Message, Part, Patches, Sample, SampleId};
use encoded_text::{EncodedText, expand, spans};
use folder::{TextFolder, image_processor};
pub use folder::{Vocabulary, chat_template_source};
use grounding::grounded;
pub use grounding::{ImageBox, image_boxes};
use media::{MediaReader, MediumGrid, VisualRun, kinds, position_ids};
use net::UrlImages;
pub use targets::LossScale;
use targets::{Supervision, check_tools, check_turns, thoughts};
pub use text_boxes::{BoxFault, marked_boxes};
use tokenizer::{TokenizerError, Tokens};
use truncate::{MAX_TOKENS, TruncationRule, check_tokens};

/// Tokenizer, chat template, image and video processor of one model folder.
pub struct Encoder {
    text: TextFolder,
    media: MediaReader,
    loss_scale: LossScale,
    train_empty_think: bool,
    /// Done when it has been reported that the template renders no thoughts.
    no_thoughts: Once,
}

impl Encoder {
    /// Reads `config.json`, `tokenizer.json`, `tokenizer_config.json`, `preprocessor_config.json`
    /// (not for a text-only model, whose `config.json` has no `vision_config`),
    /// `generation_config.json` if it exists, and the chat template from `chat_template.jinja`,
    /// `chat_template.json` or `tokenizer_config.json`, in this order. Videos use the settings of
    /// the folder.
    pub fn from_folder(folder: &Path, image: &ImageConfig) -> Result<Self, ModelFolderError> {
        Self::with_video(folder, image, &VideoConfig::default())
    }

    /// [`Encoder::from_folder`] with settings for videos, which override
    /// `video_preprocessor_config.json`.
    pub fn with_video(
        folder: &Path,
        image: &ImageConfig,
        video: &VideoConfig,
    ) -> Result<Self, ModelFolderError> {
        Self::with_vocabulary(folder, image, video, None)
    }

    /// [`Encoder::with_video`] with `vocabulary` in place of that of the folder.
    pub fn with_vocabulary(
        folder: &Path,
        image: &ImageConfig,
        video: &VideoConfig,
        vocabulary: Option<Vocabulary<'_>>,
    ) -> Result<Self, ModelFolderError> {
        let text = TextFolder::read(folder, vocabulary)?;
        let images = match text.media.image {
            Some(_) => image_processor(folder, image)?,
            None => ImageProcessor::unused(),
        };
        let videos = VideoProcessor::from_folder(folder, video, &images)?;
        let media = MediaReader { images, videos };
        Ok(Self {
            text,
            media,
            loss_scale: LossScale::default(),
            train_empty_think: false,
            no_thoughts: Once::new(),
        })
    }

    /// Sets which tokens of chats are supervised.
    #[must_use]
    pub fn with_loss_scale(self, loss_scale: LossScale) -> Self {
        Self { loss_scale, ..self }
    }

    /// Sets whether an empty `<think>` block that the template writes before an answer is
    /// supervised with it.
    #[must_use]
    pub fn with_empty_thoughts(self, train_empty_think: bool) -> Self {
        Self { train_empty_think, ..self }
    }

    /// Digests of what this encoder reads from the model folder and from the settings of images and
    /// videos, each with a name for messages. If they are equal, rows are encoded alike.
    pub fn digests(&self) -> BTreeMap<String, String> {
        let hex = |bytes: [u8; 32]| format!("{:x}", GenericArray::from(bytes));
        let of = |text: String| hex(Sha256::digest(text.as_bytes()).into());
        let MediaReader { images, videos } = &self.media;
        let digests = [
            ("tokenizer", hex(self.text.tokenizer_fingerprint)),
            ("chat template or special tokens", hex(self.text.undated_key)),
            ("image settings of the processor", of(images.key())),
            ("video settings of the processor", of(videos.key())),
        ];
        digests.into_iter().map(|(name, digest)| (name.to_owned(), digest)).collect()
    }

    /// Downloads images by URL, and keeps them. Without this, such images are refused.
    #[must_use]
    pub fn with_urls(mut self, images: Arc<UrlImages>) -> Self {
        self.media.images.set_urls(images.clone());
        self.media.videos.set_urls(images);
        self
    }

    /// Encodes a whole sample.
    pub fn encode(&self, sample: &Sample) -> Result<EncodedSample, SampleError> {
        self.encode_truncated(sample, None)
    }

    /// Encodes a sample and truncates it by `cut`.
    pub fn encode_truncated(
        &self,
        sample: &Sample,
        cut: Option<TruncationRule>,
    ) -> Result<EncodedSample, SampleError> {
        self.encode_if(sample, cut, |_| Ok(()))
    }

    /// [`Encoder::encode_truncated`]. `accept` receives the length of the sample before its media are
    /// decoded, and its error is returned.
    pub fn encode_if<E: From<SampleError>>(
        &self,
        sample: &Sample,
        cut: Option<TruncationRule>,
        accept: impl FnOnce(Length) -> Result<(), E>,
    ) -> Result<EncodedSample, E> {
        let id = &sample.id;
        let (text, supervision) = self.render_targets(sample).at(id)?;
        let grids = self.media.grids(&sample.media).at(id)?;
        let tokens = self.tokenise(&text, supervision, &grids);
        let tokens = tokens.and_then(|tokens| tokens.cut(cut)).at(id)?;
        let patches = grids.iter().map(MediumGrid::num_patches).sum();
        accept(self.length_of(tokens.input_ids.len(), patches))?;
        let (loaded, patches) = self.media.load(&sample.media).at(id)?;
        if loaded != grids {
            return Err(SampleFault::MediaChanged.at(id).into());
        }
        Ok(self.with_media(id, tokens, &grids, patches))
    }

    /// Encodes the conversation before its last assistant turn, with the header of that turn and
    /// without labels. Also returns the text of that turn. Later turns are left out.
    pub fn encode_prompt(&self, sample: &Sample) -> Result<(EncodedSample, String), SampleError> {
        self.prompt(sample).at(&sample.id)
    }

    fn prompt(&self, sample: &Sample) -> Result<(EncodedSample, String), SampleFault> {
        let sample = grounded(&self.media, sample)?;
        let sample = sample.as_ref();
        self.check_texts(sample)?;
        let turn = sample.messages.iter().rposition(|message| message.role == "assistant");
        let turn = turn.ok_or(SampleFault::NoAssistantTurn)?;
        let RenderedPrompt { text, answer } = self
            .text
            .template
            .render_prompt(&sample.messages[..=turn], sample.tools.as_ref())?
            .ok_or(SampleFault::NoAssistantTurn)?;
        self.check_bytes(&text)?;
        let media = &sample.media[..kinds(&sample.messages[..turn]).len()];
        self.check_placeholders(&text, media)?;
        self.media.headers(media)?; // counts the pixels
        let (grids, media) = self.media.load(media)?;
        let tokens = self.tokenise(&text, Supervision::default(), &grids)?;
        Ok((self.with_media(&sample.id, tokens, &grids, media), answer))
    }

    /// Renders the chat. Each medium is one placeholder.
    pub fn render(&self, sample: &Sample) -> Result<String, SampleError> {
        let sample = grounded(&self.media, sample).at(&sample.id)?;
        let Sample { id, messages, tools, .. } = sample.as_ref();
        self.text.template.render(messages, tools.as_ref(), GenerationPrompt::Omit).at(id)
    }

    /// Indices of the turns with thoughts that are not in the rendered chat, and so are not trained
    /// on. Many templates render the thoughts of the last answer only.
    pub fn hidden_thoughts(&self, sample: &Sample) -> Result<Vec<usize>, SampleError> {
        let sample = grounded(&self.media, sample).at(&sample.id)?;
        let Sample { id, messages, tools, .. } = sample.as_ref();
        let has_thoughts = |turn: usize| thoughts(&messages[turn]).is_some();
        if !(0..messages.len()).any(has_thoughts) {
            return Ok(Vec::new());
        }
        let chat = self.text.template.render_with_answers(messages, tools.as_ref(), has_thoughts);
        let chat = chat.at(id)?;
        let is_hidden = |turn: &usize| {
            let text = thoughts(&messages[*turn]).unwrap_or_default();
            let mut answers = chat.answers.iter().filter(|answer| answer.turn == *turn);
            !answers.any(|answer| chat.text[answer.range.clone()].contains(text))
        };
        let assistant = |turn: &usize| messages[*turn].role == "assistant" && has_thoughts(*turn);
        Ok((0..messages.len()).filter(assistant).filter(is_hidden).collect())
    }

    /// Decodes `ids` without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.text.tokenizer.decode(ids)
    }

    /// Decodes `ids` with special tokens.
    pub fn decode_with_specials(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.text.tokenizer.decode_with_specials(ids)
    }

    /// Ids of the tokens that end a generated text; at least one.
    pub fn stop_ids(&self) -> &[u32] {
        &self.text.stop_ids
    }

    /// Id of the padding token.
    pub fn pad_id(&self) -> u32 {
        self.text.pad_id
    }

    /// Number of rows of the embedding. Every id is smaller.
    pub fn vocab_size(&self) -> usize {
        self.text.vocab_size
    }

    /// Side, in patches, of the square that is merged into one vision token.
    pub fn merge_size(&self) -> NonZeroU32 {
        NonZeroU32::new(self.media.images.merge_size()).unwrap_or(NonZeroU32::MIN)
    }

    /// The processor of images.
    pub fn image_processor(&self) -> &ImageProcessor {
        &self.media.images
    }

    /// The processor of videos.
    pub fn video_processor(&self) -> &VideoProcessor {
        &self.media.videos
    }

    /// The rendered chat and its supervised parts. Runs every check that needs no image.
    fn render_targets(&self, sample: &Sample) -> Result<(String, Supervision), SampleFault> {
        let sample = grounded(&self.media, sample)?;
        let sample = sample.as_ref();
        self.check_texts(sample)?;
        let Sample { id, messages, tools, media, .. } = sample;
        let needs_answer = |turn| self.loss_scale.needs_answer(messages, turn);
        let chat =
            self.text.template.render_with_answers(messages, tools.as_ref(), needs_answer)?;
        check_turns(messages, &chat, |role| self.text.template.lists(role))?;
        check_tools(messages, tools.as_ref(), &chat.text)?;
        self.check_bytes(&chat.text)?;
        self.check_placeholders(&chat.text, media)?;
        let has_thoughts = |message: &Message| message.reasoning_content.is_some();
        if !self.text.template.renders_thoughts() && messages.iter().any(has_thoughts) {
            self.no_thoughts.call_once(|| {
                tracing::warn!(row = %id, "the chat template does not render `reasoning_content`: it is not trained on");
            });
        }
        if let Some(turn) = self.loss_scale.unequal_turn(messages) {
            let at = format!("turn {}", turn + 1);
            let what = "with `loss_scale: all`, a weight of a single turn of the user, the system or a tool is";
            return Err(SampleFault::NotSupported { at, what });
        }
        let supervision = self.loss_scale.supervision(messages, &chat, self.train_empty_think);
        Ok((chat.text, supervision))
    }

    /// Fails if a text, of which `has` says whether it contains a token, has one that only the encoder
    /// writes around media.
    fn refuse_marks(&self, has: impl Fn(&str) -> bool) -> Result<(), SampleFault> {
        match self.media.videos.family().reserved().iter().find(|mark| has(mark)) {
            Some(mark) => Err(SampleFault::ReservedInText { token: (*mark).to_owned() }),
            None => Ok(()),
        }
    }

    /// Checks that there is one placeholder per medium, and that no text contains a media token.
    fn check_texts(&self, sample: &Sample) -> Result<(), SampleFault> {
        if self.text.media.image.is_none() && !sample.media.is_empty() {
            let num_media = sample.media.len();
            return Err(SampleFault::TextOnlyModel { num_media });
        }
        let is_video = |medium: &Medium| medium.kind() == MediumKind::Video;
        if self.text.media.video.is_none() && sample.media.iter().any(is_video) {
            return Err(SampleFault::Video { index: 1, cause: VideoError::NoToken });
        }
        for (turn, message) in sample.messages.iter().enumerate() {
            self.refuse_marks(|mark| has_text(message, mark))?;
            if let Some(token) = self.text.media.pads().find(|token| has_text(message, token)) {
                let token = token.to_owned();
                return Err(SampleFault::ReservedToken { turn, token });
            }
        }
        let (placeholders, media) = (kinds(&sample.messages), kinds_of(&sample.media));
        let of = |kind, kinds: &[MediumKind]| kinds.iter().filter(|other| **other == kind).count();
        let [images, videos] = [MediumKind::Image, MediumKind::Video]
            .map(|kind| [of(kind, &placeholders), of(kind, &media)]);
        if let [placeholders, videos] = videos
            && placeholders != videos
        {
            return Err(SampleFault::VideoCount { placeholders, videos });
        }
        if placeholders != media {
            let [placeholders, images] = images;
            return Err(SampleFault::ImageCount { placeholders, images });
        }
        Ok(())
    }

    fn check_placeholders(&self, text: &str, media: &[Medium]) -> Result<(), SampleFault> {
        let rendered = self.media.placeholders(text, &self.text.media);
        if rendered.iter().map(|(kind, _)| *kind).ne(kinds_of(media)) {
            let (rendered, media) = (rendered.len(), media.len());
            return Err(SampleFault::RenderedPlaceholders { rendered, media });
        }
        // Tool calls, tools and thoughts are texts too. Placeholders in them are too many.
        self.refuse_marks(|mark| text.contains(mark))
    }

    /// `supervision` is that of `text`, which has one placeholder for each of `grids`.
    fn tokenise(
        &self,
        text: &str,
        mut supervision: Supervision,
        grids: &[MediumGrid],
    ) -> Result<EncodedText, SampleFault> {
        let expected = grids.iter().map(|medium| self.media.num_tokens(medium)).sum();
        check_tokens(expected)?; // before their text is written
        let places = self.media.placeholders(text, &self.text.media).into_iter();
        let texts = self.media.texts(grids, &self.text.media);
        let places: Vec<_> = places.map(|(_, place)| place).zip(texts).collect();
        let targets = supervision.targets.iter_mut().map(|target| &mut target.range);
        let (text, media) = expand(text, &places, targets);
        let Tokens { ids, offsets } = self.tokens(&text)?;
        let vision_rows: Vec<u32> =
            (0..ids.len() as u32) // [M]
                .filter(|row| self.text.media.is_pad(ids[*row as usize]))
                .collect();
        if vision_rows.len() != expected {
            let tokens = vision_rows.len();
            return Err(SampleFault::ImageTokens { tokens, expected });
        }
        let spans = spans(&ids, &offsets, &media, self.text.media.marks);
        let (labels, weights) = supervision.labels(&ids, &offsets, &spans);
        Ok(EncodedText { input_ids: ids, labels, weights, vision_rows, spans })
    }

    /// The size of a sample with this many tokens, and patches of media.
    fn length_of(&self, tokens: usize, patches: usize) -> Length {
        let patch_bytes = self.media.images.patch_values() * size_of::<f32>();
        Length { tokens, pixel_bytes: (patches * patch_bytes) as u64 }
    }

    /// `media` are the patches of `grids`.
    fn with_media(
        &self,
        id: &SampleId,
        text: EncodedText,
        grids: &[MediumGrid],
        media: Vec<Patches>,
    ) -> EncodedSample {
        let EncodedText { input_ids, labels, weights, vision_rows, spans: _ } = text;
        let merge_size = self.media.images.merge_size();
        let position_ids = match self.media.videos.family().positions {
            Positions::Grid => {
                let runs: Vec<VisualRun> = grids.iter().flat_map(MediumGrid::runs).collect();
                position_ids(input_ids.len(), &vision_rows, &runs, merge_size)
            }
            Positions::Index => (0..input_ids.len() as u32).map(|index| [index; 3]).collect(),
            Positions::Canvas(tokens) => {
                let images = grids.iter().flat_map(MediumGrid::frames);
                canvas::position_ids(&input_ids, &vision_rows, images, merge_size, tokens)
            }
        };
        EncodedSample {
            id: id.clone(),
            input_ids,
            labels,
            weights,
            position_ids,
            segment_starts: Vec::new(),
            vision_rows,
            media,
        }
    }
}

fn kinds_of(media: &[Medium]) -> Vec<MediumKind> {
    media.iter().map(Medium::kind).collect()
}

fn has_text(message: &Message, token: &str) -> bool {
    match &message.content {
        Content::Text(text) => text.contains(token),
        Content::Parts(parts) => {
            parts.iter().any(|part| matches!(part, Part::Text(text) if text.contains(token)))
        }
    }
}

/// The end-of-document token of most byte-level tokenizers.
const END_OF_TEXT: &str = "<|endoftext|>";

impl Encoder {
    pub(crate) fn encode_text(&self, text: &str) -> Result<Tokens, SampleFault> {
        if let Some(token) = self.text.media.pads().find(|token| text.contains(token)) {
            let token = token.to_owned();
            return Err(SampleFault::ReservedInText { token });
        }
        self.refuse_marks(|mark| text.contains(mark))?;
        self.check_bytes(text)?;
        self.tokens(text)
    }

    /// Checks that a text is short enough for the tokenizer.
    fn check_bytes(&self, text: &str) -> Result<(), SampleFault> {
        let (found, most) = (text.len(), self.text.tokenizer.max_bytes());
        if found > most {
            let what = "bytes of text for the tokenizer";
            return Err(SampleFault::TooLarge { what, found, most });
        }
        Ok(())
    }

    /// The tokens of a text; an error if they are more than one row may have.
    fn tokens(&self, text: &str) -> Result<Tokens, SampleFault> {
        let tokens = self.text.tokenizer.encode_up_to(text, MAX_TOKENS);
        let tokens =
            tokens.map_err(|error| SampleFault::Tokenizer { problem: error.to_string() })?;
        check_tokens(tokens.ids.len())?;
        Ok(tokens)
    }

    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.text.tokenizer.id(token)
    }

    /// The default token at the end of a document: `<|endoftext|>` if the tokenizer has it, else
    /// the first stop token.
    pub(crate) fn end_of_document(&self) -> u32 {
        self.token_id(END_OF_TEXT).unwrap_or(self.text.stop_ids[0])
    }

    /// Hash of the tokenizer's file. If it is equal, equal texts have equal ids.
    pub(crate) fn tokenizer_fingerprint(&self) -> [u8; 32] {
        self.text.tokenizer_fingerprint
    }
}

#[cfg(test)]
mod canvas_tests;
#[cfg(test)]
mod slice_tests;
#[cfg(test)]
mod sliced_video_tests;
#[cfg(test)]
mod tests;
