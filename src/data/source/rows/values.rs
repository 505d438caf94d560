//! Reads JSON values of a row; each error names the JSON path.

use serde_json::{Map, Value};

use super::super::error::SampleError;
use crate::batch::SampleId;
use crate::data::json::{self, long_integer};

/// Takes a value from an object; null if the key is missing.
pub(super) fn take(object: &mut Map<String, Value>, key: &str) -> Value {
    object.get_mut(key).map_or(Value::Null, Value::take)
}

pub(super) fn wrong_type(
    id: &SampleId,
    at: &str,
    value: &Value,
    expected: &'static str,
) -> SampleError {
    SampleError::WrongType { id: id.clone(), at: at.to_owned(), found: type_name(value), expected }
}

pub(super) fn missing(id: &SampleId, at: &str, expected: &'static str) -> SampleError {
    SampleError::Missing { id: id.clone(), at: at.to_owned(), expected }
}

/// Returns the JSON type of a value with its article, such as `a number`.
pub(in crate::data::source) fn type_name(value: &Value) -> &'static str {
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

pub(super) fn text(id: &SampleId, at: &str, value: Value) -> Result<String, SampleError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Null => Err(missing(id, at, "a string")),
        other => Err(wrong_type(id, at, &other, "a string")),
    }
}

/// Parses a string; `None` if it is missing, null or empty.
pub(super) fn optional_text(
    id: &SampleId,
    at: &str,
    value: Value,
) -> Result<Option<String>, SampleError> {
    match value {
        Value::Null => Ok(None),
        value => Ok(Some(text(id, at, value)?).filter(|text| !text.is_empty())),
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

/// The JSON path of a key of the object at `at`, which is empty for the row itself.
pub(super) fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}
