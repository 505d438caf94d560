//! Rows of Arrow columns as JSON.

use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, ArrowTemporalType, Date32Type, Date64Type, Float16Type, Float32Type,
    Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, Time32MillisecondType,
    Time32SecondType, Time64MicrosecondType, Time64NanosecondType, TimestampMicrosecondType,
    TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, TimeUnit};
use serde_json::{Map, Number, Value};

use crate::json;
use crate::source::raw_row::RawRow;
use crate::source::source_error::SourceError;

/// Columns of text in which a JSON list or object is parsed as that value.
const JSON_COLUMNS: [&str; 11] = [
    "messages",
    "conversations",
    "conversation",
    "images",
    "image",
    "videos",
    "video",
    "tools",
    "history",
    "objects",
    "texts",
];

/// The list or object in a cell of text, if the column may have one.
pub(super) fn json_cell(column: &str, text: &str) -> Option<Value> {
    let begins = text.trim_start().starts_with(['[', '{']);
    (begins && JSON_COLUMNS.contains(&column)).then(|| json::parse(text.as_bytes()).ok())?
}

/// Checks that every column has JSON values.
pub(super) fn check(path: &Path, schema: &Schema) -> Result<(), SourceError> {
    for field in schema.fields() {
        check_field(path, field.name(), field)?;
    }
    Ok(())
}

fn check_field(path: &Path, column: &str, field: &Field) -> Result<(), SourceError> {
    check_type(field.data_type(), column).map_err(|(column, found)| SourceError::Column {
        path: path.to_owned(),
        column,
        found,
    })
}

/// The name and type of the part that has no JSON value.
fn check_type(of: &DataType, name: &str) -> Result<(), (String, String)> {
    use DataType as D;
    let inner = |field: &Field| check_type(field.data_type(), &format!("{name}.{}", field.name()));
    match of {
        D::Null
        | D::Boolean
        | D::Date32
        | D::Date64
        | D::Time32(_)
        | D::Time64(_)
        | D::Timestamp(_, _)
        | D::FixedSizeBinary(_) => Ok(()),
        of if of.is_integer() || of.is_floating() || of.is_string() || of.is_binary() => Ok(()),
        D::List(field) | D::LargeList(field) | D::FixedSizeList(field, _) => {
            check_type(field.data_type(), name)
        }
        D::Struct(fields) => fields.iter().try_for_each(|field| inner(field)),
        D::Map(entries, _) => match entries.data_type() {
            D::Struct(fields) => match &fields[..] {
                [key, value] if key.data_type().is_string() => inner(value),
                _ => Err((name.to_owned(), of.to_string())),
            },
            _ => Err((name.to_owned(), of.to_string())),
        },
        D::Dictionary(_, values) => check_type(values, name),
        _ => Err((name.to_owned(), of.to_string())),
    }
}

/// The row at this index of a batch. A null is a missing key.
pub(super) fn row(batch: &RecordBatch, at: usize) -> RawRow {
    let mut row = RawRow::default();
    let mut object = Map::new();
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let name = field.name();
        let value = match value(column, at, &mut row) {
            Value::Null => continue,
            Value::String(text) => json_cell(name, &text).unwrap_or(Value::String(text)),
            value => value,
        };
        object.insert(name.clone(), value);
    }
    row.object = object;
    row
}

/// The value at this index. Binary data becomes a blob of `row`.
fn value(array: &dyn Array, at: usize, row: &mut RawRow) -> Value {
    use DataType as D;
    if array.is_null(at) {
        return Value::Null;
    }
    match array.data_type() {
        D::Boolean => array.as_boolean().value(at).into(),
        D::Int8 => number::<Int8Type>(array, at).into(),
        D::Int16 => number::<Int16Type>(array, at).into(),
        D::Int32 => number::<Int32Type>(array, at).into(),
        D::Int64 => number::<Int64Type>(array, at).into(),
        D::UInt8 => number::<UInt8Type>(array, at).into(),
        D::UInt16 => number::<UInt16Type>(array, at).into(),
        D::UInt32 => number::<UInt32Type>(array, at).into(),
        D::UInt64 => number::<UInt64Type>(array, at).into(),
        D::Float16 => float(f64::from(number::<Float16Type>(array, at).to_f32())),
        // the shortest decimal text of the number, as JSON writers print it
        D::Float32 => {
            float(number::<Float32Type>(array, at).to_string().parse().unwrap_or(f64::NAN))
        }
        D::Float64 => float(number::<Float64Type>(array, at)),
        D::Utf8 => array.as_string::<i32>().value(at).into(),
        D::LargeUtf8 => array.as_string::<i64>().value(at).into(),
        D::Utf8View => array.as_string_view().value(at).into(),
        D::Binary => row.blob_value(array.as_binary::<i32>().value(at).into()),
        D::LargeBinary => row.blob_value(array.as_binary::<i64>().value(at).into()),
        D::BinaryView => row.blob_value(array.as_binary_view().value(at).into()),
        D::FixedSizeBinary(_) => row.blob_value(array.as_fixed_size_binary().value(at).into()),
        D::Date32 => date::<Date32Type>(array, at),
        D::Date64 => date::<Date64Type>(array, at),
        D::Time32(TimeUnit::Second) => time::<Time32SecondType>(array, at),
        D::Time32(_) => time::<Time32MillisecondType>(array, at),
        D::Time64(TimeUnit::Microsecond) => time::<Time64MicrosecondType>(array, at),
        D::Time64(_) => time::<Time64NanosecondType>(array, at),
        D::Timestamp(TimeUnit::Second, _) => date::<TimestampSecondType>(array, at),
        D::Timestamp(TimeUnit::Millisecond, _) => date::<TimestampMillisecondType>(array, at),
        D::Timestamp(TimeUnit::Microsecond, _) => date::<TimestampMicrosecondType>(array, at),
        D::Timestamp(TimeUnit::Nanosecond, _) => date::<TimestampNanosecondType>(array, at),
        D::List(_) => list(&array.as_list::<i32>().value(at), row),
        D::LargeList(_) => list(&array.as_list::<i64>().value(at), row),
        D::FixedSizeList(_, _) => list(&array.as_fixed_size_list().value(at), row),
        D::Struct(_) => structure(array, at, row),
        D::Map(_, _) => {
            let entries = array.as_map().value(at);
            let (keys, values) = (entries.column(0), entries.column(1));
            let pairs = (0..entries.len()).filter_map(|entry| {
                let Value::String(key) = value(keys, entry, row) else { return None };
                Some((key, value(values, entry, row)))
            });
            Value::Object(pairs.collect())
        }
        D::Dictionary(_, _) => {
            let dictionary = array.as_any_dictionary();
            let key = value(dictionary.keys(), at, row).as_u64().unwrap_or_default() as usize;
            value(dictionary.values(), key, row)
        }
        _ => Value::Null, // `check` refuses other types
    }
}

fn number<T: ArrowPrimitiveType>(array: &dyn Array, at: usize) -> T::Native {
    array.as_primitive::<T>().value(at)
}

/// Null for a value that JSON cannot have, such as infinity.
/// A number; null for NaN, which represents a missing value. Infinity becomes a text, so that a key
/// that expects a number refuses it.
fn float(value: f64) -> Value {
    if value.is_infinite() {
        return Value::from(value.to_string());
    }
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

fn date<T: ArrowTemporalType>(array: &dyn Array, at: usize) -> Value
where
    i64: From<T::Native>,
{
    let date = array.as_primitive::<T>().value_as_datetime(at);
    date.map_or(Value::Null, |date| date.to_string().into())
}

fn time<T: ArrowTemporalType>(array: &dyn Array, at: usize) -> Value
where
    i64: From<T::Native>,
{
    let time = array.as_primitive::<T>().value_as_time(at);
    time.map_or(Value::Null, |time| time.to_string().into())
}

fn list(values: &Arc<dyn Array>, row: &mut RawRow) -> Value {
    (0..values.len()).map(|at| value(values, at, row)).collect()
}

/// An object without null values, or an image in the form of `datasets`: `bytes`, else `path`.
fn structure(array: &dyn Array, at: usize, row: &mut RawRow) -> Value {
    let fields = array.as_struct();
    let is_bytes = |column: &Arc<dyn Array>| {
        matches!(
            column.data_type(),
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView
        )
    };
    if fields.num_columns() == 2
        && let (Some(bytes), Some(path)) =
            (fields.column_by_name("bytes"), fields.column_by_name("path"))
        && is_bytes(bytes)
    {
        return value(if bytes.is_null(at) { path } else { bytes }, at, row);
    }
    let mut object = Map::new();
    for (field, column) in fields.fields().iter().zip(fields.columns()) {
        let value = value(column, at, row);
        if !value.is_null() {
            object.insert(field.name().clone(), value);
        }
    }
    Value::Object(object)
}
