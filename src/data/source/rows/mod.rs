//! Parses rows of all supported forms to [`Sample`].

mod content;
mod exchanges;
mod grounding;
mod keys;
mod limits;
mod media;
mod report;
mod switches;
mod turns;
mod values;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::SampleError;
use super::raw_row::RawRow;
use crate::batch::{Sample, SampleId};
use crate::data::json;
use keys::{Place, Use, is_given, misnamed_media};
use media::RowMedia;
use report::{Finding, Findings, Survey};
use turns::Turns;
pub(super) use values::type_name;
use values::{take, text, wrong_type};

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
    pub(super) fn of(id: &SampleId, row: &Map<String, Value>) -> Result<Self, SampleError> {
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
    fn keys(self) -> &'static [&'static str] {
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

/// How an unknown key of a row is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownKeys {
    /// Each key is reported once per file.
    #[default]
    Warn,
    /// The row is rejected.
    Error,
    /// The key is ignored.
    Ignore,
}

/// How the rows of a data set are understood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowRules {
    /// Whether `<image>` and `<video>` are plain text in rows that list no images or no videos; by
    /// default such rows are rejected.
    pub literal_placeholders: bool,
    /// How unknown keys are handled.
    pub unknown_keys: UnknownKeys,
}

impl RowRules {
    /// A text that differs between rules that accept different rows.
    pub(in crate::data) fn key(self) -> String {
        let Self { literal_placeholders, unknown_keys } = self;
        format!("literal {literal_placeholders}, strict {}", unknown_keys == UnknownKeys::Error)
    }
}

/// Parses the rows of one data file.
#[derive(Debug)]
pub(in crate::data) struct RowParser {
    /// Folder that relative paths of images and videos start from.
    pub(in crate::data) image_root: Arc<Path>,
    /// How rows are understood.
    pub(in crate::data) rules: RowRules,
    findings: Findings,
}

impl RowParser {
    /// A parser without findings.
    pub(in crate::data) fn new(image_root: &Path, rules: RowRules) -> Self {
        Self { image_root: image_root.into(), rules, findings: Findings::default() }
    }

    /// Parses a row of chats.
    pub(in crate::data) fn parse(&self, id: &SampleId, row: RawRow) -> Result<Sample, SampleError> {
        let RawRow { object: mut row, blobs } = row;
        let form = RowForm::of(id, &row)?;
        let at = At { parser: self, id, blobs: &blobs };
        if form == RowForm::Text {
            return Err(at.not_supported("text", "plain text in a data set of chats is"));
        }
        at.check_keys(Place::Row(form), "", &row)?;
        let parsed = sample(&at, form, &mut row);
        parsed.map_err(|error| match error {
            SampleError::MediaMissing { id, kind, placeholders, media, .. } => {
                let misnamed = misnamed_media(form, &row);
                SampleError::MediaMissing { id, kind, placeholders, media, misnamed }
            }
            other => other,
        })
    }

    /// Parses the document of a row of a corpus; keys other than `text` are ignored.
    pub(in crate::data) fn parse_text(
        id: &SampleId,
        mut row: RawRow,
    ) -> Result<String, SampleError> {
        text(id, "text", take(&mut row.object, "text"))
    }

    /// Parses the first rows of `file` and logs which of their keys are not read. Later rows report
    /// keys that these rows do not have.
    pub(in crate::data) fn survey(
        &self,
        file: &Path,
        rows: impl Iterator<Item = (SampleId, RawRow)>,
    ) {
        self.survey_of(rows).log(file, &self.findings);
    }

    fn survey_of(&self, rows: impl Iterator<Item = (SampleId, RawRow)>) -> Survey {
        let (image_root, rules) = (self.image_root.clone(), self.rules);
        let silent = Self { image_root, rules, findings: Findings::silent() };
        let mut survey = Survey::default();
        for (id, row) in rows {
            // rejected rows are reported when they are read
            let _ = silent.parse(&id, row);
            survey.add(silent.findings.take());
        }
        survey
    }
}

/// The parsed row `row`.
fn sample(at: &At<'_>, form: RowForm, row: &mut Map<String, Value>) -> Result<Sample, SampleError> {
    let id = at.id;
    let weight = at.weight("", row)?;
    for key in ["rejected_response", "rejected_messages", "rejected_images"] {
        if is_given(&take(row, key)) {
            at.note("rejected answers (`rejected_response`, `rejected_messages`) are not used");
        }
    }
    let media = RowMedia::of_row(at, row)?;
    let tools = tools(id, take(row, "tools"))?;
    let mut turns = Turns::new(at, media);
    turns.system(take(row, "system"))?;
    match form {
        RowForm::Messages | RowForm::MessagesWithImages => {
            turns.list("messages", take(row, "messages"))?;
        }
        RowForm::Conversations => turns.list("conversations", take(row, "conversations"))?,
        RowForm::PromptCompletion => turns.prompt_and_completion(row)?,
        RowForm::QueryResponse => turns.query_and_response(row)?,
        RowForm::Alpaca => turns.alpaca(row)?,
        RowForm::Text => {}
    }
    let (mut messages, media) = turns.finish()?;
    for message in &mut messages {
        message.weight *= weight;
    }
    let objects = at.objects(row, &messages)?;
    Ok(Sample { id: id.clone(), messages, media, tools, objects })
}

/// Parses the tools of a row: a list of definitions, or a string with JSON of one.
fn tools(id: &SampleId, value: Value) -> Result<Option<Value>, SampleError> {
    if value.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(None);
    }
    match list_in_text(value) {
        Value::Null => Ok(None),
        list @ Value::Array(_) => Ok(Some(list)),
        other => Err(wrong_type(id, "tools", &other, "a list, or JSON text of a list")),
    }
}

/// The list in a JSON text; every other value unchanged. Files without nested columns store lists
/// as text.
fn list_in_text(value: Value) -> Value {
    match value {
        Value::String(text) if text.trim_start().starts_with('[') => {
            match json::parse(text.as_bytes()) {
                Ok(list @ Value::Array(_)) => list,
                _ => Value::String(text),
            }
        }
        other => other,
    }
}

/// The row that is being parsed.
struct At<'a> {
    parser: &'a RowParser,
    id: &'a SampleId,
    blobs: &'a [Arc<[u8]>],
}

impl At<'_> {
    /// Refuses and reports keys of the object at JSON path `at` that are not read.
    fn check_keys(
        &self,
        place: Place,
        at: &str,
        object: &Map<String, Value>,
    ) -> Result<(), SampleError> {
        for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            let finding = match place.use_of(key) {
                Use::Known => continue,
                Use::Refused(_) if !is_given(value) => continue,
                Use::Refused(what) => return Err(self.not_supported(&join(at, key), what)),
                _ if self.parser.rules.unknown_keys == UnknownKeys::Ignore => continue,
                Use::Metadata => Finding::Metadata(place, key.clone()),
                Use::Unknown if self.parser.rules.unknown_keys == UnknownKeys::Error => {
                    let (id, at, nearest) = (self.id.clone(), join(at, key), place.nearest(key));
                    return Err(SampleError::UnknownKey { id, at, nearest });
                }
                Use::Unknown => Finding::Unknown(place, key.clone()),
            };
            self.parser.findings.report(self.id, finding);
        }
        Ok(())
    }

    /// Reports how the row was understood.
    fn note(&self, note: &'static str) {
        self.parser.findings.report(self.id, Finding::Note(note));
    }

    fn not_supported(&self, at: &str, what: &'static str) -> SampleError {
        SampleError::NotSupported { id: self.id.clone(), at: at.to_owned(), what }
    }
}

/// The JSON path of a key of the object at `at`, which is empty for the row itself.
fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}
