//! The forms of rows.

use std::fmt;

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::super::raw_row::is_blob;
use super::values::{data_uri, is_given};

/// Layout of a row, determined by its keys. `docs/data-format.md` describes each form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowForm {
    /// Key `messages` with `role` and `content`; images and videos are parts of the content.
    Messages,
    /// Key `messages`, and `images` or `videos` for the placeholders `<image>` and `<video>` in the
    /// texts.
    MessagesWithImages,
    /// Key `conversations` with `from` and `value`.
    Conversations,
    /// Keys `prompt` and `completion`: texts, or lists of messages.
    PromptCompletion,
    /// Keys `query` and `response`.
    QueryResponse,
    /// Keys `instruction`, `input` and `output`.
    Alpaca,
    /// Images or videos, and one of the usual sets of columns: the question, if there is one, and
    /// the answer.
    BesideMedia(&'static [&'static str]),
    /// Key `text`: a document of a corpus.
    Text,
}

const MEDIA: [&str; 4] = ["images", "image", "videos", "video"];
/// The columns of [`RowForm::BesideMedia`]; of several sets, the first is used.
const BESIDE_MEDIA: [&[&str]; 8] = [
    &["texts"],
    &["question", "answer"],
    &["query", "answer"],
    &["prompt", "response"],
    &["prompt", "answer"],
    &["problem", "solution"],
    &["text"],
    &["caption"],
];
/// Other names of columns with images or videos.
const LIKE_MEDIA: [&str; 13] = [
    "img",
    "imgs",
    "picture",
    "pictures",
    "photo",
    "photos",
    "image_path",
    "image_paths",
    "image_file",
    "image_url",
    "image_bytes",
    "video_path",
    "video_file",
];

/// Whether an object next to a caption is a row, and not metadata of its image. A key is enough: a
/// row that lacks another one is rejected with its keys.
pub(in crate::source) fn is_row(object: &Map<String, Value>) -> bool {
    let beside_media = BESIDE_MEDIA.iter().map(|columns| columns[0]);
    // a data set of images and captions has these in its metadata
    let keys = beside_media.filter(|key| !["text", "caption"].contains(key));
    let mut keys = ["messages", "conversations", "instruction"].into_iter().chain(keys);
    keys.any(|key| object.contains_key(key))
}

/// Whether a key has the name of a column with images or videos.
pub(super) fn is_like_media(key: &str) -> bool {
    let key = key.to_lowercase();
    MEDIA.iter().chain(&LIKE_MEDIA).any(|name| *name == key)
}

/// A column of a row that has images or videos, by its name, or because its value has their bytes.
pub(in crate::source) fn media_column(row: &Map<String, Value>) -> Option<&str> {
    let is_media = |key: &str, value: &Value| {
        let is_uri = || key != "text" && value.as_str().is_some_and(|of| data_uri(of).is_some());
        is_like_media(key) || is_blob(value) || is_uri()
    };
    let mut columns = row.iter().filter(|(_, value)| is_given(value));
    columns.find(|(key, value)| is_media(key, value)).map(|(key, _)| key.as_str())
}

impl fmt::Display for RowForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "messages",
            Self::MessagesWithImages => "messages with a list of media",
            Self::Conversations => "conversations",
            Self::PromptCompletion => "prompt and completion",
            Self::QueryResponse => "query and response",
            Self::Alpaca => "alpaca",
            Self::BesideMedia(columns) => return write!(f, "media with {}", columns.join(" and ")),
            Self::Text => "plain text",
        })
    }
}

impl RowForm {
    /// Whether every row of this form has images or videos.
    pub(in crate::source) fn has_media(self) -> bool {
        matches!(self, Self::MessagesWithImages | Self::BesideMedia(_))
    }

    /// Detects the form of a row from its keys.
    pub(in crate::source) fn of(row: &Map<String, Value>) -> Result<Self, SampleFault> {
        let has = |key| row.get(key).is_some_and(|value: &Value| !value.is_null());
        if has("messages") {
            let listed = MEDIA.into_iter().any(has);
            Ok(if listed { Self::MessagesWithImages } else { Self::Messages })
        } else if has("conversations") {
            Ok(Self::Conversations)
        } else if has("prompt") && has("completion") {
            Ok(Self::PromptCompletion)
        } else if has("query") && has("response") {
            Ok(Self::QueryResponse)
        } else if has("instruction") && has("output") {
            Ok(Self::Alpaca)
        } else if MEDIA.into_iter().any(has)
            && let Some(columns) = BESIDE_MEDIA.iter().find(|of| of.iter().all(|key| has(key)))
        {
            Ok(Self::BesideMedia(columns))
        } else if has("text") && media_column(row).is_none() {
            Ok(Self::Text)
        } else {
            let named = |(key, value): (&String, &Value)| {
                format!("`{key}`{}", if value.is_null() { " (null)" } else { "" })
            };
            let keys: Vec<_> = row.iter().take(8).map(named).collect();
            let keys = if keys.is_empty() { "no keys".to_owned() } else { keys.join(", ") };
            Err(SampleFault::UnknownForm { keys })
        }
    }

    /// The keys that only this form has.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Messages | Self::MessagesWithImages => &["messages"],
            Self::Conversations => &["conversations"],
            Self::PromptCompletion => &["prompt", "completion"],
            Self::QueryResponse => &["query", "response", "history"],
            Self::Alpaca => &["instruction", "input", "output", "history"],
            Self::BesideMedia(columns) => columns,
            Self::Text => &["text"],
        }
    }
}
