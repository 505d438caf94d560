//! Reads JSON values of a row; each error names the JSON path.

use serde_json::{Map, Value, json};

use super::super::error::SampleFault;
use crate::json::{self, long_integer};

/// Takes a value from an object; null if the key is missing.
pub(super) fn take(object: &mut Map<String, Value>, key: &str) -> Value {
    object.get_mut(key).map_or(Value::Null, Value::take)
}

pub(super) fn wrong_type(at: &str, value: &Value, expected: &'static str) -> SampleFault {
    SampleFault::WrongType { at: at.to_owned(), found: type_name(value), expected }
}

pub(super) fn missing(at: &str, expected: &'static str) -> SampleFault {
    SampleFault::Missing { at: at.to_owned(), expected }
}

pub(super) fn not_supported(at: &str, what: &'static str) -> SampleFault {
    SampleFault::NotSupported { at: at.to_owned(), what }
}

/// Returns the JSON type of a value with its article, such as `a number`.
pub(in crate::source) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) if long_integer(value).is_some() => "a number",
        Value::Object(_) => "an object",
    }
}

pub(super) fn text(at: &str, value: Value) -> Result<String, SampleFault> {
    match value {
        Value::String(text) => Ok(text),
        Value::Null => Err(missing(at, "a string")),
        other => Err(wrong_type(at, &other, "a string")),
    }
}

/// Parses a string; `None` if it is missing, null or empty.
pub(super) fn optional_text(at: &str, value: Value) -> Result<Option<String>, SampleFault> {
    match value {
        Value::Null => Ok(None),
        value => Ok(Some(text(at, value)?).filter(|text| !text.is_empty())),
    }
}

/// `images` or `videos` if a text has the data of one.
pub(super) fn data_uri(text: &str) -> Option<&'static str> {
    let start = text.get(..11)?;
    let kinds = [("data:image/", "images"), ("data:video/", "videos")];
    kinds.into_iter().find(|(data, _)| start.eq_ignore_ascii_case(data)).map(|(_, kind)| kind)
}

/// Returns whether a value is neither null nor an empty text, list or object.
pub(super) fn is_given(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(object) => !object.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

/// The value of the first of `keys` that is not null.
pub(super) fn first_of(
    object: &mut Map<String, Value>,
    keys: &[&'static str],
) -> Option<(&'static str, Value)> {
    keys.iter().map(|key| (*key, take(object, key))).find(|(_, value)| !value.is_null())
}

pub(super) fn one_or_more(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        one => vec![one],
    }
}

/// The list in a JSON text; every other value unchanged. Files without nested columns store lists
/// as text.
pub(super) fn list_in_text(value: Value) -> Value {
    in_text(value, '[')
}

/// The object in a JSON text; every other value unchanged.
pub(super) fn object_in_text(value: Value) -> Value {
    in_text(value, '{')
}

fn in_text(value: Value, first: char) -> Value {
    match value {
        Value::String(text) if text.trim_start().starts_with(first) => {
            json::parse(text.as_bytes()).unwrap_or(Value::String(text))
        }
        other => other,
    }
}

/// A tool or a call in OpenAI's form `{"type": "function", "function": {..}}`: a bare function, as
/// LLaMA-Factory and OpenAI's newer format write it, gets this wrapper. Others are unchanged.
pub(super) fn as_function(value: Value) -> Value {
    match value {
        Value::Object(mut bare) if !bare.contains_key("function") && bare.contains_key("name") => {
            if bare.get("type").is_some_and(|kind| kind != "function") {
                return Value::Object(bare); // a tool of another kind
            }
            bare.shift_remove("type");
            json!({"type": "function", "function": bare})
        }
        other => other,
    }
}

/// The JSON path of a key of the object at `at`, which is empty for the row itself.
pub(super) fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}
