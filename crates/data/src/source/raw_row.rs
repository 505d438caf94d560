//! A row of a data file before its form is known.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::error::SampleFault;
use super::rows::type_name;
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
    /// Parses a JSON object.
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
