//! Why a row cannot be used: each message names the file and line, and what was found there.

use crate::batch::SampleId;
use crate::data::encode::truncate::CutError;
use crate::data::media::image::ImageError;
use crate::data::media::video::VideoError;
use crate::data::template::TemplateError;

/// Why a row of a data file is rejected. The message begins with `file:line`.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The bytes of the row could not be read.
    #[error("{id}: cannot read the row: {cause}")]
    Read {
        /// The row.
        id: SampleId,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The row is not JSON.
    #[error("{id}:{column}: invalid JSON: {problem}")]
    Json {
        /// The row.
        id: SampleId,
        /// Byte in the line, starting at 1.
        column: usize,
        /// What the parser expected.
        problem: String,
    },
    /// JSON, but no object.
    #[error("{id}: expected one JSON object a line, found {found}")]
    NotAnObject {
        /// The row.
        id: SampleId,
        /// What it is.
        found: &'static str,
    },
    /// None of the known row forms.
    #[error(
        "{id}: unknown row form: found {keys}, expected `messages`, `conversations` or `instruction` and `output`"
    )]
    UnknownForm {
        /// The row.
        id: SampleId,
        /// Keys of the row.
        keys: String,
    },
    /// A value of the wrong type.
    #[error("{id}: `{at}` is {found}, expected {expected}")]
    WrongType {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// What it is.
        found: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A value that is not there.
    #[error("{id}: `{at}` is missing, expected {expected}")]
    Missing {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A conversation without turns.
    #[error("{id}: `{at}` is empty")]
    NoMessages {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: &'static str,
    },
    /// A role that no chat template renders.
    #[error("{id}: `{at}` is `{role}`, expected {expected}")]
    UnknownRole {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// The role.
        role: String,
        /// Roles of this row form.
        expected: &'static str,
    },
    /// A system turn that chat templates would drop without a word.
    #[error("{id}: `{at}` is a system turn, expected only as the first turn")]
    SystemNotFirst {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
    },
    /// Something understood but not implemented.
    #[error("{id}: `{at}`: {what} not supported")]
    NotSupported {
        /// The row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// What, with its verb.
        what: &'static str,
    },
    /// Placeholders and images differ in number.
    #[error(
        "{id}: the turns have {placeholders} image placeholders but the row lists {images} images"
    )]
    ImageCount {
        /// The row.
        id: SampleId,
        /// `<image>` in texts and image parts without a source.
        placeholders: usize,
        /// Images listed in the row.
        images: usize,
    },
    /// Placeholders and videos differ in number.
    #[error(
        "{id}: the turns have {placeholders} video placeholders but the row lists {videos} videos"
    )]
    VideoCount {
        /// The row.
        id: SampleId,
        /// `<video>` in texts and video parts without a source.
        placeholders: usize,
        /// Videos listed in the row.
        videos: usize,
    },
    /// A video that cannot be used.
    #[error("{id}: {cause} (video {index} of the row)")]
    Video {
        /// The row.
        id: SampleId,
        /// Which video of the row, starting at 1.
        index: usize,
        /// Why.
        cause: VideoError,
    },
    /// An image that cannot be used.
    #[error("{id}: {cause} (image {index} of the row)")]
    Image {
        /// The row.
        id: SampleId,
        /// Which image of the row, starting at 1.
        index: usize,
        /// Why.
        cause: ImageError,
    },
    /// A text that contains the token which stands for visual features.
    #[error("{id}: the text of turn {turn} contains `{token}`, which is reserved for media")]
    ReservedToken {
        /// The row.
        id: SampleId,
        /// Index of the turn, starting at 0.
        turn: usize,
        /// The token.
        token: String,
    },
    /// A document that contains the token which stands for visual features.
    #[error("{id}: the text contains `{token}`, which is reserved for media")]
    ReservedInText {
        /// The row, or the line at which a piece of a text begins.
        id: SampleId,
        /// The token.
        token: String,
    },
    /// The template dropped or invented placeholders.
    #[error("{id}: the rendered chat has {rendered} media placeholders, expected {media}")]
    RenderedPlaceholders {
        /// The row.
        id: SampleId,
        /// Placeholders in the rendered chat.
        rendered: usize,
        /// Media of the sample.
        media: usize,
    },
    /// The chat template refused the turns.
    #[error("{id}: {cause}")]
    Template {
        /// The row.
        id: SampleId,
        /// Why.
        cause: TemplateError,
    },
    /// The tokenizer failed.
    #[error("{id}: cannot tokenise: {problem}")]
    Tokenizer {
        /// The row.
        id: SampleId,
        /// What the tokenizer says.
        problem: String,
    },
    /// Visual tokens and visual features differ in number.
    #[error("{id}: {tokens} media tokens after tokenising, expected {expected}")]
    ImageTokens {
        /// The row.
        id: SampleId,
        /// Found.
        tokens: usize,
        /// Sum over the media.
        expected: usize,
    },
    /// No assistant turn to answer.
    #[error("{id}: no assistant turn")]
    NoAssistantTurn {
        /// The row.
        id: SampleId,
    },
    /// Nothing to learn from.
    #[error("{id}: no supervised token in {num_tokens} tokens")]
    NoSupervisedToken {
        /// The row.
        id: SampleId,
        /// Length of the sample.
        num_tokens: usize,
    },
    /// A medium is not what its header said a moment before.
    #[error("{id}: its media changed while the row was read")]
    MediaChanged {
        /// The row.
        id: SampleId,
    },
    /// Longer than `max_length`, and it cannot be cut.
    #[error("{id}: {cause}")]
    Cut {
        /// The row.
        id: SampleId,
        /// Why not.
        cause: CutError,
    },
}

impl SampleError {
    /// Short key, for counting rejected rows by reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "unreadable",
            Self::Json { .. } | Self::NotAnObject { .. } => "json",
            Self::UnknownForm { .. } => "row_form",
            Self::WrongType { .. } => "wrong_type",
            Self::Missing { .. } => "missing_key",
            Self::NoMessages { .. } => "no_messages",
            Self::UnknownRole { .. } | Self::SystemNotFirst { .. } => "role",
            Self::NotSupported { .. } => "not_supported",
            Self::ImageCount { .. } | Self::RenderedPlaceholders { .. } => "image_count",
            Self::VideoCount { .. } => "video_count",
            Self::Image { cause, .. } => cause.reason(),
            Self::Video { cause, .. } => cause.reason(),
            Self::ReservedToken { .. } | Self::ReservedInText { .. } => "reserved_token",
            Self::Template { cause, .. } => cause.reason(),
            Self::Tokenizer { .. } => "tokenizer",
            Self::ImageTokens { .. } => "image_tokens",
            Self::NoAssistantTurn { .. } => "no_assistant_turn",
            Self::NoSupervisedToken { .. } => "no_supervised_token",
            Self::MediaChanged { .. } => "media_changed",
            Self::Cut { cause, .. } => cause.reason(),
        }
    }

    /// What to do about it, where that is not plain from the message.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotAnObject { .. } => {
                "a JSON array becomes rows with `jq -c '.[]' in.json > out.jsonl`"
            }
            Self::ImageCount { .. } => {
                "write one `<image>`, or one part of type `image`, for each image of the row"
            }
            Self::VideoCount { .. } => {
                "write one `<video>`, or one part of type `video`, for each video of the row"
            }
            Self::RenderedPlaceholders { .. } => {
                "chat templates render media of user turns only: move them there"
            }
            Self::ReservedToken { .. } => {
                "write `<image>` or `<video>` and list the medium in `images` or `videos`, or take the token out of the text"
            }
            Self::ReservedInText { .. } => "take the token out of the text",
            Self::SystemNotFirst { .. } => "make it the first turn, or a user turn",
            Self::NotSupported { .. } | Self::UnknownRole { .. } => {
                "convert or remove the row; docs/data-format.md lists what is read"
            }
            Self::NoSupervisedToken { .. } => {
                "add an assistant turn, or take `\"train\": false` off one"
            }
            Self::Template { cause, .. } => return cause.hint(),
            Self::Json { .. } => "write one complete JSON object a line, as UTF-8",
            Self::UnknownForm { .. } | Self::WrongType { .. } | Self::Missing { .. } => {
                "docs/data-format.md shows each row form"
            }
            Self::NoMessages { .. } | Self::NoAssistantTurn { .. } => {
                "a row needs at least one assistant turn to learn from"
            }
            Self::Image { cause, .. } => cause.hint(),
            Self::MediaChanged { .. } => "leave the files alone while a run reads them",
            Self::Cut { cause, .. } => cause.hint(),
            Self::Video { cause, .. } => cause.hint(),
            Self::Read { .. } | Self::Tokenizer { .. } | Self::ImageTokens { .. } => return None,
        };
        Some(hint.to_owned())
    }

    /// The row.
    pub fn id(&self) -> &SampleId {
        match self {
            Self::Read { id, .. }
            | Self::Json { id, .. }
            | Self::NotAnObject { id, .. }
            | Self::UnknownForm { id, .. }
            | Self::WrongType { id, .. }
            | Self::Missing { id, .. }
            | Self::NoMessages { id, .. }
            | Self::UnknownRole { id, .. }
            | Self::SystemNotFirst { id, .. }
            | Self::NotSupported { id, .. }
            | Self::ImageCount { id, .. }
            | Self::VideoCount { id, .. }
            | Self::Image { id, .. }
            | Self::Video { id, .. }
            | Self::ReservedToken { id, .. }
            | Self::ReservedInText { id, .. }
            | Self::RenderedPlaceholders { id, .. }
            | Self::Template { id, .. }
            | Self::Tokenizer { id, .. }
            | Self::ImageTokens { id, .. }
            | Self::NoAssistantTurn { id }
            | Self::MediaChanged { id }
            | Self::Cut { id, .. }
            | Self::NoSupervisedToken { id, .. } => id,
        }
    }
}
