//! A row of a data file before its form is known.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::error::SampleError;
use super::rows::type_name;
use crate::batch::SampleId;
use crate::data::json;

/// Key of an object that represents binary data; its value is an index into [`RawRow::blobs`]. No
/// JSON file has it: `\u{0}` makes it differ from every key of users.
const BLOB_KEY: &str = "\u{0}blob";

/// The keys and values of a row, and the binary values that JSON cannot hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::data) struct RawRow {
    /// Keys and values. A binary value is an object made by [`RawRow::blob_value`].
    pub(in crate::data) object: Map<String, Value>,
    /// Binary values, such as encoded images in a column of a Parquet file.
    pub(in crate::data) blobs: Vec<Arc<[u8]>>,
}

impl RawRow {
    /// Parses a JSON object.
    pub(in crate::data) fn from_json(id: &SampleId, bytes: &[u8]) -> Result<Self, SampleError> {
        match json::parse(bytes) {
            Ok(Value::Object(object)) => Ok(Self { object, blobs: Vec::new() }),
            Ok(other) => Err(SampleError::NotAnObject { id: id.clone(), found: type_name(&other) }),
            // the first line of a file that is one pretty-printed array
            Err(_) if bytes.trim_ascii() == b"[" => {
                Err(SampleError::NotAnObject { id: id.clone(), found: "the start of an array" })
            }
            Err(error) => {
                let text = error.to_string();
                let problem = text.split(" at line ").next().unwrap_or(&text).to_owned();
                Err(SampleError::Json { id: id.clone(), column: error.column(), problem })
            }
        }
    }

    /// Adds binary data, and returns the value that represents it in [`RawRow::object`].
    pub(in crate::data) fn blob_value(&mut self, bytes: Arc<[u8]>) -> Value {
        self.blobs.push(bytes);
        let index = Value::from(self.blobs.len() - 1);
        Value::Object(Map::from_iter([(BLOB_KEY.to_owned(), index)]))
    }
}

/// Returns the binary data that `value` represents; `None` if `value` is ordinary JSON.
pub(super) fn blob<'a>(blobs: &'a [Arc<[u8]>], value: &Value) -> Option<&'a Arc<[u8]>> {
    let index = value.as_object()?.get(BLOB_KEY)?.as_u64()?;
    blobs.get(usize::try_from(index).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
