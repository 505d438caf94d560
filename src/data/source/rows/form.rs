//! The forms of rows.

use std::fmt;

use serde_json::{Map, Value};

use super::super::error::SampleError;
use crate::batch::SampleId;

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
    /// Key `text`: a document of a corpus.
    Text,
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
            Self::Text => "plain text",
        })
    }
}

impl RowForm {
    /// Detects the form of a row from its keys.
    pub(in crate::data::source) fn of(
        id: &SampleId,
        row: &Map<String, Value>,
    ) -> Result<Self, SampleError> {
        let has = |key| row.get(key).is_some_and(|value: &Value| !value.is_null());
        if has("messages") {
            let listed = ["images", "image", "videos", "video"].into_iter().any(has);
            Ok(if listed { Self::MessagesWithImages } else { Self::Messages })
        } else if has("conversations") {
            Ok(Self::Conversations)
        } else if has("prompt") && has("completion") {
            Ok(Self::PromptCompletion)
        } else if has("query") && has("response") {
            Ok(Self::QueryResponse)
        } else if has("instruction") && has("output") {
            Ok(Self::Alpaca)
        } else if has("text") {
            Ok(Self::Text)
        } else {
            let keys: Vec<_> = row.keys().take(8).map(|key| format!("`{key}`")).collect();
            let keys = if keys.is_empty() { "no keys".to_owned() } else { keys.join(", ") };
            Err(SampleError::UnknownForm { id: id.clone(), keys })
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
            Self::Text => &["text"],
        }
    }
}
