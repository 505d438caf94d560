//! A row of a data file before its form is known, and `data.train[].columns`: the columns of a data
//! set under our names.

use std::sync::Arc;

use serde_json::{Map, Value};
use settings::section;

use super::rows::type_name;
use super::sample_error::SampleFault;
use crate::json;

/// Key of an object that represents binary data; its value is an index into [`RawRow::blobs`]. No
/// JSON file has it: `\u{0}` makes it differ from every key of users.
const BLOB_KEY: &str = "\u{0}blob";

/// The keys and values of a row, and the binary values that JSON cannot hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RawRow {
    /// Keys and values. A binary value is an object made by [`RawRow::blob_value`].
    pub(crate) object: Map<String, Value>,
    /// Binary values, such as encoded images in a column of a Parquet file.
    pub(crate) blobs: Vec<Arc<[u8]>>,
}

/// Numbers that Python writes and JSON does not have.
const NO_JSON: [&str; 3] = ["NaN", "-Infinity", "Infinity"];
/// Maximum number of bytes of a row in a file. Images may be in it, but not a whole data set.
pub(crate) const MAX_ROW_BYTES: usize = 512 << 20;
/// Maximum number of values of a row, of keys that are not read, too. A parsed number takes 16
/// times the bytes of its text.
const MAX_VALUES: usize = 2_000_000;
/// Rows up to this size cannot take much memory, whatever they contain.
const SMALL_ROW_BYTES: usize = 1 << 20;

impl RawRow {
    pub(crate) fn from_json(bytes: &[u8]) -> Result<Self, SampleFault> {
        if bytes.len() > SMALL_ROW_BYTES {
            let found = json::values(bytes);
            if found > MAX_VALUES {
                let most = MAX_VALUES;
                return Err(SampleFault::TooLarge { what: "values", found, most });
            }
        }
        match json::parse(bytes) {
            Ok(Value::Object(object)) => Ok(Self { object, blobs: Vec::new() }),
            Ok(other) => Err(SampleFault::NotAnObject { found: type_name(&other) }),
            // the first line of a file that is one pretty-printed array
            Err(_) if bytes.trim_ascii() == b"[" => {
                Err(SampleFault::NotAnObject { found: "the start of an array" })
            }
            Err(error) => {
                let text = error.to_string();
                let mut problem = text.split(" at line ").next().unwrap_or(&text).to_owned();
                let at = error.column();
                let mut near = [2, 1].map(|back| bytes.get(at.saturating_sub(back)..)).into_iter();
                let named = |rest: &[u8]| NO_JSON.iter().find(|of| rest.starts_with(of.as_bytes()));
                if let Some(name) = near.find_map(|rest| named(rest?)) {
                    problem = format!("`{name}` is no JSON value; write null or a number");
                }
                Err(SampleFault::Json { column: error.column(), problem })
            }
        }
    }

    /// Adds binary data, and returns the value that represents it in [`RawRow::object`].
    pub(crate) fn blob_value(&mut self, bytes: Arc<[u8]>) -> Value {
        self.blobs.push(bytes);
        let index = Value::from(self.blobs.len() - 1);
        Value::Object(Map::from_iter([(BLOB_KEY.to_owned(), index)]))
    }
}

/// Whether `value` is binary data, or has such data in it.
pub(super) fn is_blob(value: &Value) -> bool {
    match value {
        Value::Array(values) => values.iter().any(is_blob),
        Value::Object(object) => object.contains_key(BLOB_KEY) || object.values().any(is_blob),
        _ => false,
    }
}

/// Returns the binary data that `value` represents; `None` if `value` is ordinary JSON.
pub(super) fn blob<'a>(blobs: &'a [Arc<[u8]>], value: &Value) -> Option<&'a Arc<[u8]>> {
    let index = value.as_object()?.get(BLOB_KEY)?.as_u64()?;
    blobs.get(usize::try_from(index).ok()?)
}

/// Keys that would give a row other turns than those of [`ColumnNames`].
const OTHER_TURNS: [&str; 9] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "query",
    "response",
    "instruction",
    "input",
    "output",
];

/// Names of the columns of a data set whose rows have another form.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnNames {
    /// The question: a text. Without it, the user turn has the media alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// A text that follows the question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<String>,
    /// The answer: a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<String>,
    /// The turns, instead of `prompt` and `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<String>,
    /// Earlier pairs of questions and answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<String>,
    /// The system turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Definitions of tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<String>,
    /// An image or a list of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<String>,
    /// A video or a list of videos.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub videos: Option<String>,
}

impl ColumnNames {
    /// Our key and the column of each name that is given.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { prompt, query, response, messages, history, system, tools, images, videos } =
            self;
        let pairs = [
            ("instruction", prompt),
            ("input", query),
            ("output", response),
            ("messages", messages),
            ("history", history),
            ("system", system),
            ("tools", tools),
            ("images", images),
            ("videos", videos),
        ];
        pairs.into_iter().filter_map(|(ours, theirs)| Some((ours, theirs.as_deref()?)))
    }

    /// Names that contradict each other: the key of the data set, its value, and what is expected.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let is_asked = self.prompt.is_some() || self.query.is_some();
        match (&self.messages, &self.response) {
            (Some(name), response) if response.is_some() || is_asked => {
                let expected = "no `prompt`, `query` or `response` in addition";
                Some(("columns.messages", name.clone(), expected))
            }
            (None, None) => {
                let expected = "the column of the answers, or else `messages`";
                Some(("columns.response", "missing".to_owned(), expected))
            }
            _ => None,
        }
    }

    /// A list of images or videos that is dropped because a named column replaces it.
    pub(super) fn replaced(&self, row: &RawRow) -> Option<&'static str> {
        let is_named = |key: &str| self.pairs().any(|(_, theirs)| theirs == key);
        let is_there = |theirs: &str| row.object.get(theirs).is_some_and(|value| !value.is_null());
        let pairs = self.pairs().filter(|(_, theirs)| is_there(theirs));
        let keys = pairs.flat_map(|(ours, _)| match ours {
            "images" => &["images", "image"][..],
            "videos" => &["videos", "video"],
            _ => &[],
        });
        let mut keys = keys.filter(|key| !is_named(key));
        let is_given = |value: &Value| !value.is_null() && *value != Value::Array(Vec::new());
        keys.find(|key| row.object.get(**key).is_some_and(is_given)).copied()
    }

    /// Renames the columns of a row. Other columns stay, except [`OTHER_TURNS`].
    pub(super) fn apply(&self, row: &mut RawRow) {
        let object = &mut row.object;
        let named: Vec<_> = self
            .pairs()
            .filter_map(|(ours, theirs)| Some((ours, object.get(theirs)?.clone())))
            .filter(|(_, value)| !value.is_null())
            .collect();
        for (_, theirs) in self.pairs() {
            object.shift_remove(theirs);
        }
        if self.messages.is_none() {
            for other in OTHER_TURNS {
                object.shift_remove(other);
            }
            object.insert("instruction".to_owned(), "".into());
        }
        for (ours, value) in named {
            if ours == "images" || ours == "videos" {
                object.shift_remove(&ours[..5]); // the other spelling, `image` or `video`
            }
            object.insert(ours.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;

    #[test]
    fn a_row_of_many_values_is_rejected_before_it_is_parsed() {
        let of = |bytes: &str| RawRow::from_json(bytes.as_bytes()).map(|_| ());
        let numbers = format!("{{\"x\":[{}0]}}", "0,".repeat(MAX_VALUES));
        let objects = format!("{{\"x\":[{}0]}}", "{\"a\":1},".repeat(300_000));
        for row in [&numbers, &objects] {
            let error = of(row).unwrap_err();
            assert_eq!(error.reason(), "row_too_large");
            assert!(error.to_string().contains("values"), "{error}");
        }
        // Text is no value, whatever it contains.
        let text = format!("{{\"x\":\"{}\\\",[{{\"}}", ",[{".repeat(MAX_VALUES));
        assert_eq!(of(&text).map_err(|error| error.to_string()), Ok(()));
    }

    #[test]
    fn a_blob_value_gives_its_bytes_back_and_other_values_are_no_blobs() {
        let mut row = RawRow::default();
        let [first, second] = [1u8, 2].map(|byte| row.blob_value([byte].as_slice().into()));
        assert_eq!(blob(&row.blobs, &second).map(|bytes| bytes[0]), Some(2));
        assert_eq!(blob(&row.blobs, &first).map(|bytes| bytes[0]), Some(1));
        assert_eq!(blob(&row.blobs, &Value::from("a.png")), None);
        assert_eq!(blob(&[], &first), None);
    }
}
