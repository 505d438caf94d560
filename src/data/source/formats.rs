//! Parses all supported row forms to [`Sample`].

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::content::{RowMedia, missing, take, wrong_type};
use super::error::SampleError;
use super::raw_row::RawRow;
use crate::batch::{Content, Message, Sample, SampleId};

/// Keys of a turn that affect training; they are not supported and must not be ignored.
const UNREAD_TURN_KEYS: [(&str, &str); 4] = [
    ("weight", "weights of turns (`\"train\": false` excludes a turn from the loss) are"),
    ("loss", "loss switches (`\"train\": false` excludes a turn from the loss) are"),
    ("reasoning_content", "reasoning outside of `content` is"),
    ("function_call", "function calls outside of `tool_calls` are"),
];

/// Layout of a row, determined by its keys. `docs/data-format.md` describes each form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowForm {
    /// Key `messages` with `role` and `content`; images and videos are parts of the content.
    Messages,
    /// Key `messages`, and `images` or `videos` for the placeholders `<image>` and `<video>` in the
    /// texts.
    MessagesWithImages,
    /// Key `conversations` with `from` and `value`.
    Conversations,
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
            Self::Alpaca => "alpaca",
            Self::Text => "plain text",
        })
    }
}

impl RowForm {
    /// Detects the form of a row from its keys.
    pub(super) fn of(id: &SampleId, row: &Map<String, Value>) -> Result<Self, SampleError> {
        let has = |key| row.get(key).is_some_and(|value: &Value| !value.is_null());
        if has("messages") {
            let listed = ["images", "image", "videos", "video"].into_iter().any(has);
            Ok(if listed { Self::MessagesWithImages } else { Self::Messages })
        } else if has("conversations") {
            Ok(Self::Conversations)
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
}

/// Parses a row of chats.
pub(super) fn parse_row(
    id: &SampleId,
    row: RawRow,
    image_root: &Arc<Path>,
) -> Result<Sample, SampleError> {
    let RawRow { object: mut row, blobs } = row;
    let form = RowForm::of(id, &row)?;
    let media = RowMedia::of_row(id, image_root, &mut row, &blobs)?;
    let tools = tools(id, &take(&mut row, "tools"))?;
    let mut turns = Turns { id, media, messages: Vec::new() };
    if let Some(system) = optional_text(id, "system", take(&mut row, "system"))? {
        turns.messages.push(turn("system", Content::Text(system)));
    }
    match form {
        RowForm::Messages | RowForm::MessagesWithImages => {
            turns.list("messages", take(&mut row, "messages"), Turns::message)?;
        }
        RowForm::Conversations => {
            turns.list("conversations", take(&mut row, "conversations"), Turns::conversation)?;
        }
        RowForm::Alpaca => turns.alpaca(&mut row)?,
        RowForm::Text => {
            let what = "plain text in a data set of chats is";
            return Err(SampleError::NotSupported { id: id.clone(), at: "text".to_owned(), what });
        }
    }
    let Turns { media, messages, .. } = turns;
    Ok(Sample { id: id.clone(), messages, media: media.finish()?, tools })
}

/// Parses the document of a row of a corpus; keys other than `text` are ignored.
pub(super) fn parse_text(id: &SampleId, mut row: RawRow) -> Result<String, SampleError> {
    text(id, "text", take(&mut row.object, "text"))
}

/// Function that parses the turn at a JSON path.
type ReadTurn<T> = fn(&mut T, &str, Map<String, Value>) -> Result<Message, SampleError>;

/// The turns parsed so far.
struct Turns<'a> {
    id: &'a SampleId,
    media: RowMedia<'a>,
    messages: Vec<Message>,
}

impl Turns<'_> {
    /// Parses each entry of the list under `key`.
    fn list(
        &mut self,
        key: &'static str,
        value: Value,
        read: ReadTurn<Self>,
    ) -> Result<(), SampleError> {
        let values = match value {
            Value::Array(values) => values,
            other => return Err(wrong_type(self.id, key, &other, "a list of turns")),
        };
        if values.is_empty() {
            return Err(SampleError::NoMessages { id: self.id.clone(), at: key });
        }
        for (index, value) in values.into_iter().enumerate() {
            let at = format!("{key}[{index}]");
            let message = match value {
                Value::Object(turn) => read(self, &at, turn)?,
                other => return Err(wrong_type(self.id, &at, &other, "an object")),
            };
            if message.role == "system" && !self.messages.is_empty() {
                return Err(SampleError::SystemNotFirst { id: self.id.clone(), at });
            }
            self.messages.push(message);
        }
        Ok(())
    }

    /// Parses a turn with `role` and `content`, as in OpenAI's and Qwen's formats.
    fn message(&mut self, at: &str, mut turn: Map<String, Value>) -> Result<Message, SampleError> {
        self.refuse_unread(at, &turn)?;
        let role = text(self.id, &format!("{at}.role"), take(&mut turn, "role"))?;
        let role = match role.as_str() {
            "system" | "user" | "assistant" | "tool" => role,
            "function" => "tool".to_owned(),
            _ => {
                let expected = "`system`, `user`, `assistant`, `tool` or `function`";
                return Err(self.unknown_role(format!("{at}.role"), role, expected));
            }
        };
        let tool_calls = match take(&mut turn, "tool_calls") {
            Value::Null => None,
            Value::Array(calls) if calls.is_empty() => None,
            calls @ Value::Array(_) => Some(calls),
            other => {
                return Err(wrong_type(self.id, &format!("{at}.tool_calls"), &other, "a list"));
            }
        };
        let content = match take(&mut turn, "content") {
            // a turn that only calls tools has no content
            Value::Null if role == "assistant" && tool_calls.is_some() => {
                Content::Text(String::new())
            }
            Value::Null => {
                let expected = "text or a list of parts";
                return Err(missing(self.id, &format!("{at}.content"), expected));
            }
            content => self.media.content(&format!("{at}.content"), content)?,
        };
        let weight = self.weight(at, &turn)?;
        Ok(Message { role, content, tool_calls, reasoning_content: None, weight })
    }

    /// Parses a turn with `from` and `value`, as in LLaVA and ShareGPT.
    fn conversation(
        &mut self,
        at: &str,
        mut turn: Map<String, Value>,
    ) -> Result<Message, SampleError> {
        self.refuse_unread(at, &turn)?;
        let from = text(self.id, &format!("{at}.from"), take(&mut turn, "from"))?;
        let role = match from.as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" => "assistant",
            "system" => "system",
            "function" | "tool" | "observation" => "tool",
            _ => {
                let expected = "`human`, `user`, `gpt`, `assistant`, `system`, `function`, `tool` or `observation`";
                return Err(self.unknown_role(format!("{at}.from"), from, expected));
            }
        };
        let value = text(self.id, &format!("{at}.value"), take(&mut turn, "value"))?;
        let content = self.media.text(value);
        let weight = self.weight(at, &turn)?;
        Ok(Message {
            role: role.to_owned(),
            content,
            tool_calls: None,
            reasoning_content: None,
            weight,
        })
    }

    /// Parses an Alpaca row: pairs of turns in `history`, then `instruction` with `input` as the
    /// user turn and `output` as the assistant turn.
    fn alpaca(&mut self, row: &mut Map<String, Value>) -> Result<(), SampleError> {
        let history = match take(row, "history") {
            Value::Null => Vec::new(),
            Value::Array(pairs) => pairs,
            other => return Err(wrong_type(self.id, "history", &other, "a list of pairs")),
        };
        for (index, pair) in history.into_iter().enumerate() {
            let at = format!("history[{index}]");
            let pair = match pair {
                Value::Array(pair) => <[Value; 2]>::try_from(pair).map_err(|pair| {
                    wrong_type(self.id, &at, &Value::Array(pair), "a pair of texts")
                })?,
                other => return Err(wrong_type(self.id, &at, &other, "a pair of texts")),
            };
            let [question, answer] = pair;
            self.exchange(
                text(self.id, &format!("{at}[0]"), question)?,
                text(self.id, &format!("{at}[1]"), answer)?,
            );
        }
        let mut question = text(self.id, "instruction", take(row, "instruction"))?;
        if let Some(input) = optional_text(self.id, "input", take(row, "input"))? {
            if !question.is_empty() {
                question.push('\n');
            }
            question.push_str(&input);
        }
        let answer = text(self.id, "output", take(row, "output"))?;
        self.exchange(question, answer);
        Ok(())
    }

    fn exchange(&mut self, question: String, answer: String) {
        for (role, text) in [("user", question), ("assistant", answer)] {
            let content = self.media.text(text);
            self.messages.push(turn(role, content));
        }
    }

    /// The weight of the loss of a turn: 0 with `"train": false`.
    fn weight(&self, at: &str, turn: &Map<String, Value>) -> Result<f32, SampleError> {
        match turn.get("train") {
            None | Some(Value::Null) => Ok(1.0),
            Some(Value::Bool(train)) => Ok(f32::from(u8::from(*train))),
            Some(other) => Err(wrong_type(self.id, &format!("{at}.train"), other, "a boolean")),
        }
    }

    fn refuse_unread(&self, at: &str, turn: &Map<String, Value>) -> Result<(), SampleError> {
        for (key, what) in UNREAD_TURN_KEYS {
            if turn.get(key).is_some_and(|value| !value.is_null() && value != "") {
                let at = format!("{at}.{key}");
                return Err(SampleError::NotSupported { id: self.id.clone(), at, what });
            }
        }
        Ok(())
    }

    fn unknown_role(&self, at: String, role: String, expected: &'static str) -> SampleError {
        SampleError::UnknownRole { id: self.id.clone(), at, role, expected }
    }
}

fn turn(role: &str, content: Content) -> Message {
    Message {
        role: role.to_owned(),
        content,
        tool_calls: None,
        reasoning_content: None,
        weight: 1.0,
    }
}

fn text(id: &SampleId, at: &str, value: Value) -> Result<String, SampleError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Null => Err(missing(id, at, "a string")),
        other => Err(wrong_type(id, at, &other, "a string")),
    }
}

/// Parses a string; `None` if it is missing, null or empty.
fn optional_text(id: &SampleId, at: &str, value: Value) -> Result<Option<String>, SampleError> {
    match value {
        Value::Null => Ok(None),
        value => Ok(Some(text(id, at, value)?).filter(|text| !text.is_empty())),
    }
}

/// Parses the tools of a row: a list of definitions, or a string with JSON of one.
fn tools(id: &SampleId, value: &Value) -> Result<Option<Value>, SampleError> {
    let parsed = match value {
        Value::Null => return Ok(None),
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        _ => value.clone(),
    };
    if parsed.is_array() {
        return Ok(Some(parsed));
    }
    Err(wrong_type(id, "tools", value, "a list, or JSON text of a list"))
}
