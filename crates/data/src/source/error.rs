//! Errors of a row. Each message names the file, the line and what was found there.

use super::grounding_error::GroundingError;
use crate::encode::truncate::TruncationError;
use crate::media::image::ImageError;
use crate::media::video::VideoError;
use crate::template::TemplateError;
use batch::{MediumKind, SampleId};

/// What [`SampleError::TooLarge`] counts of images and videos.
pub(crate) const PIXELS_OF_MEDIA: &str = "pixels in its images and videos";

/// The reason why a row of a data file is rejected. The message starts with `file:line`.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The bytes of the row could not be read.
    #[error("{id}: cannot read the row: {cause}")]
    Read {
        /// File and line of the row.
        id: SampleId,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The row is not JSON.
    #[error("{id}:{column}: invalid JSON: {problem}")]
    Json {
        /// File and line of the row.
        id: SampleId,
        /// Byte in the line, starting at 1.
        column: usize,
        /// Error of the parser.
        problem: String,
    },
    /// The row is JSON, but not an object.
    #[error("{id}: expected a JSON object, found {found}")]
    NotAnObject {
        /// File and line of the row.
        id: SampleId,
        /// Found type.
        found: &'static str,
    },
    /// The keys of the row match no row form.
    #[error(
        "{id}: unknown row form: found {keys}, expected `messages`, `conversations`, `prompt` and `completion`, `query` and `response`, or `instruction` and `output`"
    )]
    UnknownForm {
        /// File and line of the row.
        id: SampleId,
        /// First keys of the row, for the message.
        keys: String,
    },
    /// A value has the wrong type.
    #[error("{id}: `{at}` is {found}, expected {expected}")]
    WrongType {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// Found type.
        found: &'static str,
        /// Expected type or value.
        expected: &'static str,
    },
    /// The row has more text or turns than one row may have.
    #[error("{id}: the row has {found} {what}, expected at most {most}")]
    TooLarge {
        /// File and line of the row.
        id: SampleId,
        /// What is counted, such as `turns` or `bytes of text`.
        what: &'static str,
        /// Found number.
        found: usize,
        /// Maximum number.
        most: usize,
    },
    /// A required value is missing.
    #[error("{id}: `{at}` is missing, expected {expected}")]
    Missing {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// Expected type or value.
        expected: &'static str,
    },
    /// The conversation has no turns.
    #[error("{id}: `{at}` is empty")]
    NoMessages {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: &'static str,
    },
    /// The role of a turn is unknown.
    #[error("{id}: `{at}` is `{role}`, expected {expected}")]
    UnknownRole {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// Found role.
        role: String,
        /// Roles that this row form supports.
        expected: &'static str,
    },
    /// A later turn has the role `system`; chat templates would drop it silently.
    #[error("{id}: `{at}` is a system turn, but only the first turn may be one")]
    SystemNotFirst {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
    },
    /// The row uses a known feature that is not supported.
    #[error("{id}: `{at}`: {what} not supported")]
    NotSupported {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// Name of the feature and `is` or `are`, such as `audio is`.
        what: &'static str,
    },
    /// The row has an unknown key, with `data.unknown_keys: error`, or one with its only images.
    #[error("{id}: unknown key `{at}`")]
    UnknownKey {
        /// File and line of the row.
        id: SampleId,
        /// JSON path inside the row.
        at: String,
        /// The key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The row has more placeholders than images or videos.
    #[error(
        "{id}: the turns have {placeholders} {0} placeholders but the row lists {media} {0}s{1}",
        kind_name(*kind), described(misnamed.as_ref())
    )]
    MediaMissing {
        /// File and line of the row.
        id: SampleId,
        /// Kind of the placeholders.
        kind: MediumKind,
        /// Number of `<image>` or `<video>` in texts and of parts without a source.
        placeholders: usize,
        /// Number of images or videos that the row lists.
        media: usize,
        /// An unknown key of the row, and the key that was probably meant.
        misnamed: Option<(String, &'static str)>,
    },
    /// The row has images or videos, but the model has no vision encoder.
    #[error("{id}: the model is text-only, but the row has {num_media} images or videos")]
    TextOnlyModel {
        /// File and line of the row.
        id: SampleId,
        /// Number of images and videos of the row.
        num_media: usize,
    },
    /// The numbers of placeholders and of images differ.
    #[error(
        "{id}: the turns have {placeholders} image placeholders but the row lists {images} images"
    )]
    ImageCount {
        /// File and line of the row.
        id: SampleId,
        /// Number of `<image>` in texts and of image parts without a source.
        placeholders: usize,
        /// Number of images that the row lists.
        images: usize,
    },
    /// The numbers of placeholders and of videos differ.
    #[error(
        "{id}: the turns have {placeholders} video placeholders but the row lists {videos} videos"
    )]
    VideoCount {
        /// File and line of the row.
        id: SampleId,
        /// Number of `<video>` in texts and of video parts without a source.
        placeholders: usize,
        /// Number of videos that the row lists.
        videos: usize,
    },
    /// A video cannot be loaded.
    #[error("{id}: {cause} (video {index} of the row)")]
    Video {
        /// File and line of the row.
        id: SampleId,
        /// Position of the video in the row, starting at 1.
        index: usize,
        /// Error of the video.
        cause: VideoError,
    },
    /// An image cannot be loaded.
    #[error("{id}: {cause} (image {index} of the row)")]
    Image {
        /// File and line of the row.
        id: SampleId,
        /// Position of the image in the row, starting at 1.
        index: usize,
        /// Error of the image.
        cause: ImageError,
    },
    /// The boxes of the row cannot be rendered.
    #[error("{id}: {cause}")]
    Grounding {
        /// File and line of the row.
        id: SampleId,
        /// Error of the boxes.
        cause: GroundingError,
    },
    /// The text of a turn contains a token that represents visual features.
    #[error("{id}: the text of turn {turn} contains `{token}`, which is reserved for media")]
    ReservedToken {
        /// File and line of the row.
        id: SampleId,
        /// Index of the turn, starting at 0.
        turn: usize,
        /// Text of the token.
        token: String,
    },
    /// A document of a corpus contains a token that represents visual features.
    #[error("{id}: the text contains `{token}`, which is reserved for media")]
    ReservedInText {
        /// File and line of the row, or the line where a piece of a text file starts.
        id: SampleId,
        /// Text of the token.
        token: String,
    },
    /// The chat template dropped or added placeholders.
    #[error("{id}: the rendered chat has {rendered} media placeholders, expected {media}")]
    RenderedPlaceholders {
        /// File and line of the row.
        id: SampleId,
        /// Number of placeholders in the rendered chat.
        rendered: usize,
        /// Number of images and videos of the sample.
        media: usize,
    },
    /// The chat template cannot render the row.
    #[error("{id}: {cause}")]
    Template {
        /// File and line of the row.
        id: SampleId,
        /// Error of the template.
        cause: TemplateError,
    },
    /// The tokenizer failed.
    #[error("{id}: {problem}")]
    Tokenizer {
        /// File and line of the row.
        id: SampleId,
        /// Error of the tokenizer.
        problem: String,
    },
    /// The numbers of visual tokens and of visual features differ.
    #[error("{id}: the tokenised text has {tokens} media tokens, expected {expected}")]
    ImageTokens {
        /// File and line of the row.
        id: SampleId,
        /// Number of media tokens in the text.
        tokens: usize,
        /// Number of tokens of all images and videos.
        expected: usize,
    },
    /// The row has no assistant turn.
    #[error("{id}: the row has no assistant turn")]
    NoAssistantTurn {
        /// File and line of the row.
        id: SampleId,
    },
    /// No token of the sample is supervised.
    #[error("{id}: none of the {num_tokens} tokens is supervised")]
    NoSupervisedToken {
        /// File and line of the row.
        id: SampleId,
        /// Number of tokens of the sample.
        num_tokens: usize,
    },
    /// An image or video file changed between reading its header and its pixels.
    #[error("{id}: an image or video changed while the row was read")]
    MediaChanged {
        /// File and line of the row.
        id: SampleId,
    },
    /// The sample is longer than `max_length` and cannot be truncated.
    #[error("{id}: {cause}")]
    Truncation {
        /// File and line of the row.
        id: SampleId,
        /// Error of the truncation.
        cause: TruncationError,
    },
}

impl SampleError {
    /// Returns the key under which rejected rows are counted, such as `wrong_type`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "unreadable",
            Self::Json { .. } | Self::NotAnObject { .. } => "json",
            Self::UnknownForm { .. } => "row_form",
            Self::WrongType { .. } => "wrong_type",
            Self::TooLarge { what: PIXELS_OF_MEDIA, .. } => "media_too_large",
            Self::TooLarge { .. } => "row_too_large",
            Self::Missing { .. } => "missing_key",
            Self::NoMessages { .. } => "no_messages",
            Self::UnknownRole { .. } | Self::SystemNotFirst { .. } => "role",
            Self::NotSupported { .. } | Self::TextOnlyModel { .. } => "not_supported",
            Self::UnknownKey { .. } => "unknown_key",
            Self::MediaMissing { .. } => "media_missing",
            Self::ImageCount { .. } | Self::RenderedPlaceholders { .. } => "image_count",
            Self::VideoCount { .. } => "video_count",
            Self::Image { cause, .. } => cause.reason(),
            Self::Video { cause, .. } => cause.reason(),
            Self::ReservedToken { .. } | Self::ReservedInText { .. } => "reserved_token",
            Self::Template { cause, .. } => cause.reason(),
            Self::Grounding { cause, .. } => cause.reason(),
            Self::Tokenizer { .. } => "tokenizer",
            Self::ImageTokens { .. } => "image_tokens",
            Self::NoAssistantTurn { .. } => "no_assistant_turn",
            Self::NoSupervisedToken { .. } => "no_supervised_token",
            Self::MediaChanged { .. } => "media_changed",
            Self::Truncation { cause, .. } => cause.reason(),
        }
    }

    /// Returns the fix that the error message suggests; `None` if the message alone is enough.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotAnObject { .. } => {
                "write each row as one JSON object; a file may also be one JSON array of such objects"
            }
            Self::TextOnlyModel { .. } => {
                "remove the row, or use a model with a vision encoder (`model.path`)"
            }
            Self::UnknownKey { nearest: Some(nearest), .. } => {
                return Some(format!(
                    "did you mean `{nearest}`? `data.unknown_keys: ignore` accepts the row as it is"
                ));
            }
            Self::UnknownKey { nearest: None, .. } => {
                "remove the key, or set `data.unknown_keys: warn`; docs/data-format.md lists the keys"
            }
            Self::MediaMissing { misnamed: Some((found, meant)), .. } => {
                return Some(format!("rename `{found}` to `{meant}`"));
            }
            Self::MediaMissing { media: 1.., .. } => {
                "list one more for each placeholder; if `<image>` and `<video>` are plain text, give the listed ones as parts with their source, such as `{\"type\": \"image\", \"image\": \"a.png\"}`, and set `literal_placeholders: true` in the data set"
            }
            Self::MediaMissing { .. } => {
                "list each image in `images` and each video in `videos`; if `<image>` and `<video>` are plain text, set `literal_placeholders: true` in the data set"
            }
            Self::ImageCount { .. } => {
                "write one `<image>`, or one part of type `image`, for each image of the row"
            }
            Self::VideoCount { .. } => {
                "write one `<video>`, or one part of type `video`, for each video of the row"
            }
            Self::RenderedPlaceholders { .. } => {
                "chat templates render images and videos in user turns only: move them to a user turn"
            }
            Self::ReservedToken { .. } => {
                "write `<image>` or `<video>` and list the file in `images` or `videos`, or remove the token from the text"
            }
            Self::TooLarge { what: PIXELS_OF_MEDIA, .. } => {
                "divide the row into several, scale its images down, or take fewer frames of its videos (`data.video.max_frames`, `data.video.fps`)"
            }
            Self::TooLarge { .. } => {
                "divide the row into several; docs/corpora.md describes data sets of plain text"
            }
            Self::ReservedInText { .. } => "remove the token from the text",
            Self::SystemNotFirst { .. } => "move it to the first place, or make it a user turn",
            Self::NotSupported { .. } | Self::UnknownRole { .. } => {
                "convert or remove the row; docs/data-format.md lists what is supported"
            }
            Self::NoSupervisedToken { .. } => {
                "add an assistant turn, or remove `\"train\": false` from one"
            }
            Self::Template { cause, .. } => cause.hint(),
            Self::Grounding { cause, .. } => cause.hint(),
            Self::Json { .. } => "write one complete JSON object per line, in UTF-8",
            Self::UnknownForm { .. } => {
                "docs/data-format.md shows each row form; other columns are named in the data set, for example `columns: {prompt: question, response: answer, images: image}`"
            }
            Self::WrongType { .. } | Self::Missing { .. } => {
                "docs/data-format.md shows each row form"
            }
            Self::NoMessages { .. } | Self::NoAssistantTurn { .. } => {
                "add at least one assistant turn"
            }
            Self::Image { cause, .. } => cause.hint(),
            Self::MediaChanged { .. } => "do not change data files during a run",
            Self::Truncation { cause, .. } => cause.hint(),
            Self::Video { cause, .. } => cause.hint(),
            Self::Read { .. } | Self::Tokenizer { .. } | Self::ImageTokens { .. } => return None,
        };
        Some(hint.to_owned())
    }

    /// File and line of the rejected row.
    pub fn id(&self) -> &SampleId {
        match self {
            Self::Read { id, .. }
            | Self::Json { id, .. }
            | Self::NotAnObject { id, .. }
            | Self::UnknownForm { id, .. }
            | Self::WrongType { id, .. }
            | Self::TooLarge { id, .. }
            | Self::Missing { id, .. }
            | Self::NoMessages { id, .. }
            | Self::UnknownRole { id, .. }
            | Self::SystemNotFirst { id, .. }
            | Self::NotSupported { id, .. }
            | Self::UnknownKey { id, .. }
            | Self::MediaMissing { id, .. }
            | Self::TextOnlyModel { id, .. }
            | Self::ImageCount { id, .. }
            | Self::VideoCount { id, .. }
            | Self::Image { id, .. }
            | Self::Video { id, .. }
            | Self::Grounding { id, .. }
            | Self::ReservedToken { id, .. }
            | Self::ReservedInText { id, .. }
            | Self::RenderedPlaceholders { id, .. }
            | Self::Template { id, .. }
            | Self::Tokenizer { id, .. }
            | Self::ImageTokens { id, .. }
            | Self::NoAssistantTurn { id }
            | Self::MediaChanged { id }
            | Self::Truncation { id, .. }
            | Self::NoSupervisedToken { id, .. } => id,
        }
    }
}

fn kind_name(kind: MediumKind) -> &'static str {
    match kind {
        MediumKind::Image => "image",
        MediumKind::Video => "video",
    }
}

fn described(misnamed: Option<&(String, &'static str)>) -> String {
    misnamed.map_or_else(String::new, |(found, meant)| {
        format!(" (unknown key `{found}`, did you mean `{meant}`?)")
    })
}
