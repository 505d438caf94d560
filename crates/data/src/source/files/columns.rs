//! Rows of Arrow columns as JSON, and what Parquet and Arrow files share: decoded chunks, kept for
//! all threads and files of the process, and a guard against damaged files. The readers panic on
//! some contents, and need stack for each level of a schema.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

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

/// Maximum memory of the decoded chunks of all files, in bytes. In addition, each thread that reads
/// may hold a chunk of its own.
const MAX_BYTES: usize = 64 << 20;

/// A file and a number of a chunk in it.
type Key = (u64, usize);
type ChunkSlot = Arc<OnceLock<Result<RecordBatch, String>>>;

/// The most recently used chunks.
#[derive(Debug, Default)]
struct Chunks {
    entries: BTreeMap<Key, CachedChunk>,
    bytes: usize,
    clock: u64,
}

#[derive(Debug)]
struct CachedChunk {
    slot: ChunkSlot,
    bytes: usize,
    last_used: u64,
}

static CHUNKS: LazyLock<Mutex<Chunks>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, Chunks> {
    CHUNKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies an open file in the cache of chunks. Drop releases its chunks.
#[derive(Debug)]
pub(super) struct FileChunks(u64);

impl FileChunks {
    pub(super) fn new() -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        Self(FILES.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns chunk `number`, which one thread decodes if it is not in memory. `memory` returns
    /// the bytes that keeping it takes.
    pub(super) fn get(
        &self,
        number: usize,
        decode: impl FnOnce() -> Result<RecordBatch, String>,
        memory: impl FnOnce(&RecordBatch) -> usize,
    ) -> Result<RecordBatch, String> {
        let key = (self.0, number);
        let slot = lock().slot(key);
        let mut is_new = false;
        let batch = slot.get_or_init(|| {
            is_new = true;
            decode()
        });
        match batch {
            Ok(batch) if is_new => lock().account(key, &slot, memory(batch)),
            Err(_) if is_new => lock().forget(key, &slot), // the next reader tries again
            _ => {}
        }
        batch.clone()
    }
}

impl Drop for FileChunks {
    fn drop(&mut self) {
        let mut chunks = lock();
        let mut rest = chunks.entries.split_off(&(self.0, 0));
        let mut later = rest.split_off(&(self.0 + 1, 0));
        chunks.entries.append(&mut later);
        chunks.bytes -= rest.values().map(|entry| entry.bytes).sum::<usize>();
    }
}

impl Chunks {
    fn slot(&mut self, key: Key) -> ChunkSlot {
        self.clock += 1;
        let new = || CachedChunk { slot: ChunkSlot::default(), bytes: 0, last_used: 0 };
        let entry = self.entries.entry(key).or_insert_with(new);
        entry.last_used = self.clock;
        entry.slot.clone()
    }

    /// Removes a chunk that cannot be decoded.
    fn forget(&mut self, key: Key, slot: &ChunkSlot) {
        if self.entries.get(&key).is_some_and(|entry| Arc::ptr_eq(&entry.slot, slot)) {
            self.entries.remove(&key);
        }
    }

    /// Adds the size of a decoded chunk, and removes the least recently used ones above the limit.
    fn account(&mut self, key: Key, slot: &ChunkSlot, bytes: usize) {
        match self.entries.get_mut(&key) {
            Some(entry) if Arc::ptr_eq(&entry.slot, slot) => entry.bytes = bytes,
            _ => return, // removed in the meantime
        }
        self.bytes += bytes;
        while self.bytes > MAX_BYTES {
            let decoded = self.entries.iter().filter(|(_, entry)| entry.bytes > 0);
            let Some(oldest) = decoded.min_by_key(|(_, entry)| entry.last_used) else { break };
            let oldest = *oldest.0;
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
    }
}

/// Maximum number of levels of a schema; a list takes two.
pub(super) const MAX_DEPTH: usize = 128;
pub(super) const MAX_ROWS: usize = u32::MAX as usize;

/// Calls the reader of a crate, whose panic becomes the error that `damaged` makes of a text.
pub(super) fn guarded<T, E>(
    damaged: impl FnOnce(&'static str) -> E,
    read: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(damaged("its content contradicts itself: the file is damaged")))
}

/// Depth of the schema in the footer of a Parquet file; `None` if it cannot be read.
pub(super) fn depth(footer: &[u8]) -> Option<usize> {
    const SCHEMA: i64 = 2;
    let mut thrift = Thrift(footer);
    let mut field = 0;
    loop {
        match thrift.field(&mut field)? {
            LIST if field == SCHEMA => break,
            kind => thrift.skip(kind, MAX_DEPTH)?,
        }
    }
    let (num_elements, kind) = thrift.list()?;
    let (mut deepest, mut open) = (0, Vec::<u64>::new());
    for _ in 0..num_elements {
        let mut children = thrift.num_children(kind)?;
        deepest = deepest.max(open.len());
        if children > 0 {
            open.push(children);
        }
        // a group is complete with its last child, and is itself a child of the one around it
        while children == 0
            && let Some(left) = open.last_mut()
        {
            *left -= 1;
            children = *left;
            if children == 0 {
                open.pop();
            }
        }
    }
    Some(deepest)
}

const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// Bytes in the compact protocol of Thrift.
struct Thrift<'a>(&'a [u8]);

impl Thrift<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.0.split_off_first().copied()
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let number = self.number()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// The type of the next field of a struct, and its number; `None` at the end of the struct.
    fn field(&mut self, number: &mut i64) -> Option<u8> {
        let head = self.byte()?;
        *number = match head >> 4 {
            0 if head != 0 => self.signed()?,
            delta => number.checked_add(delta.into())?,
        };
        (head != 0).then_some(head & 0xf)
    }

    /// Number and type of the elements of a list.
    fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let number = if head >> 4 == 15 { self.number()? } else { (head >> 4).into() };
        Some((number, head & 0xf))
    }

    /// Reads an element of the schema. Returns its number of children.
    fn num_children(&mut self, kind: u8) -> Option<u64> {
        const NUM_CHILDREN: i64 = 5;
        if kind != STRUCT {
            return None;
        }
        let (mut field, mut children) = (0, 0);
        while self.0.first()? != &0 {
            match self.field(&mut field)? {
                5 if field == NUM_CHILDREN => children = self.signed()?.max(0) as u64,
                kind => self.skip(kind, MAX_DEPTH)?,
            }
        }
        self.byte().map(|_| children)
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match kind {
            1 | 2 => Some(()), // a boolean, whose value is its type
            3 => self.byte().map(drop),
            4..=6 => self.number().map(drop),
            7 => self.0.split_off(..8).map(drop),
            8 => {
                let length = usize::try_from(self.number()?).ok()?;
                self.0.split_off(..length).map(drop)
            }
            LIST | 10 => {
                let (number, kind) = self.list()?;
                // booleans have a byte in a list
                let kind = if kind < 3 { 3 } else { kind };
                (0..number).try_for_each(|_| self.skip(kind, depth))
            }
            STRUCT => {
                let mut field = 0;
                while self.0.first()? != &0 {
                    let kind = self.field(&mut field)?;
                    self.skip(kind, depth)?;
                }
                self.byte().map(drop)
            }
            _ => None, // Parquet has no maps
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_all_files_stay_within_the_limit_and_the_least_recently_used_one_is_removed() {
        let mut chunks = Chunks::default();
        let keep = |chunks: &mut Chunks, file: u64, bytes: usize| {
            let slot = chunks.slot((file, 0));
            chunks.account((file, 0), &slot, bytes);
        };
        for file in 0..4 {
            keep(&mut chunks, file, MAX_BYTES / 4);
        }
        assert_eq!((chunks.bytes, chunks.entries.len()), (MAX_BYTES, 4));
        let _used = chunks.slot((0, 0));
        keep(&mut chunks, 4, 1);
        let files: Vec<u64> = chunks.entries.keys().map(|(file, _)| *file).collect();
        assert_eq!(files, [0, 2, 3, 4]);
        assert_eq!(chunks.bytes, MAX_BYTES / 4 * 3 + 1);
        // not kept: the thread that reads it holds it
        keep(&mut chunks, 5, MAX_BYTES + 1);
        assert_eq!((chunks.bytes, chunks.entries.len()), (0, 0));
    }

    /// The footer of a file whose schema is groups inside of each other, with a column at each
    /// level: version, schema, number of rows.
    fn footer(levels: usize) -> Vec<u8> {
        let element = |name: &[u8], children: u8| {
            let head = [&[0x48, name.len() as u8][..], name].concat();
            if children > 0 {
                [&head[..], &[0x15, children * 2, 0]].concat()
            } else {
                [&head[..], &[0]].concat()
            }
        };
        let mut elements = Vec::new();
        for _ in 0..levels {
            elements.extend(element(b"group", 2));
            elements.extend(element(b"leaf", 0));
        }
        elements.extend(element(b"last", 0));
        let number = 2 * levels + 1;
        let head = [0x15, 2, 0x19, 0xfc, (number & 0x7f) as u8 | 0x80, (number >> 7) as u8];
        [&head[..], &elements, &[0x16, 4, 0]].concat()
    }

    #[test]
    fn the_depth_of_a_schema_is_that_of_its_deepest_column() {
        for levels in [1, 2, 100, 5000] {
            assert_eq!(depth(&footer(levels)), Some(levels));
        }
        let whole = footer(3);
        for length in 0..whole.len() - 3 {
            assert_eq!(depth(&whole[..length]), None, "cut to {length}");
        }
    }

    #[test]
    fn a_panic_of_a_reader_is_an_error() {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let found = guarded(str::to_owned, || -> Result<(), _> { panic!("index out of range") });
        std::panic::set_hook(before);
        assert_eq!(found, Err("its content contradicts itself: the file is damaged".to_owned()));
    }
}
