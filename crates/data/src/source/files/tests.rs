//! Columns and damaged files.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::file::properties::WriterProperties;
use arrow_array::builder::{Int32Builder, MapBuilder, StringBuilder};
use arrow_array::types::Int8Type;
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, DictionaryArray,
    Float32Array, Float64Array, Int8Array, LargeStringArray, NullArray, RecordBatch, StringArray,
    StructArray, TimestampMillisecondArray, UInt64Array,
};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_schema::{DataType, Field, Schema};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::source::raw_row::blob;
use crate::source::row_file::RowFile;
use fault::Fault;

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}"#;

fn write(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    File::create(&path).unwrap().write_all(bytes).unwrap();
    path
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, of)| (name, of, true)))
        .unwrap()
}

/// Two rows `{"instruction", "output"}`.
fn chats() -> RecordBatch {
    let text = |texts: [&str; 2]| Arc::new(StringArray::from_iter_values(texts)) as ArrayRef;
    batch(vec![("instruction", text(["a", "b"])), ("output", text(["c", "d"]))])
}

fn arrow(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

fn stream(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

fn parquet(batch: &RecordBatch, properties: Option<WriterProperties>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), properties).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    bytes
}

fn raw(data_file: &DataFile, row: usize) -> RawRow {
    data_file.content(row).unwrap().into_raw().unwrap()
}

fn rows_of(path: &Path) -> Vec<RawRow> {
    let data_file = DataFile::open(path, None, None).unwrap();
    (0..data_file.len()).map(|row| raw(&data_file, row)).collect()
}

#[test]
fn columns_of_every_json_type_become_their_json_values() {
    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    map.keys().append_value("k");
    map.values().append_value(7);
    map.append(true).unwrap();
    map.append(false).unwrap();
    let bytes = Arc::new(BinaryArray::from_opt_vec(vec![Some(b"PNG"), None])) as ArrayRef;
    let path = Arc::new(StringArray::from(vec![None, Some("a.png")])) as ArrayRef;
    let image = StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), bytes),
        (Arc::new(Field::new("path", DataType::Utf8, true)), path),
    ]);
    let words: DictionaryArray<Int8Type> = ["x", "y"].into_iter().collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("bool", Arc::new(BooleanArray::from(vec![Some(true), None]))),
        ("int", Arc::new(Int8Array::from(vec![-1, 2]))),
        ("big", Arc::new(UInt64Array::from(vec![u64::MAX, 0]))),
        ("float", Arc::new(Float32Array::from(vec![0.1, f32::INFINITY]))),
        ("double", Arc::new(Float64Array::from(vec![1e-7, 2.0]))),
        ("large", Arc::new(LargeStringArray::from(vec!["[1]", ""]))),
        ("messages", Arc::new(StringArray::from(vec!["[1]", "[broken"]))),
        ("word", Arc::new(words)),
        ("day", Arc::new(Date32Array::from(vec![365, 0]))),
        ("time", Arc::new(TimestampMillisecondArray::from(vec![1500, 0]))),
        ("map", Arc::new(map.finish())),
        ("image", Arc::new(image)),
        ("nothing", Arc::new(NullArray::new(2))),
    ];
    let folder = TempDir::new().unwrap();
    let bytes = arrow(&batch(columns));
    let rows = rows_of(&write(&folder, "a.arrow", &bytes));
    let mut first = rows[0].object.clone();
    let image = first.remove("image").unwrap();
    assert_eq!(blob(&rows[0].blobs, &image).unwrap()[..], *b"PNG");
    let expected = json!({
        "bool": true, "int": -1, "big": u64::MAX, "float": 0.1, "double": 1e-7, "large": "[1]",
        "messages": [1], "word": "x", "day": "1971-01-01 00:00:00",
        "time": "1970-01-01 00:00:01.500", "map": {"k": 7},
    });
    assert_eq!(Value::Object(first), expected);
    let expected = json!({
        "int": 2, "big": 0, "float": "inf", "double": 2.0, "large": "", "messages": "[broken", "word": "y",
        "day": "1970-01-01 00:00:00", "time": "1970-01-01 00:00:00", "image": "a.png",
    });
    assert_eq!(Value::Object(rows[1].object.clone()), expected);
}

#[test]
fn a_damaged_or_unsupported_file_is_refused_with_its_problem() {
    let folder = TempDir::new().unwrap();
    let chats = chats();
    let (parquet_file, arrow_file, stream) = (parquet(&chats, None), arrow(&chats), stream(&chats));
    let decimals = Decimal128Array::from(vec![1, 2]).with_precision_and_scale(9, 2).unwrap();
    let decimals = batch(vec![("price", Arc::new(decimals) as ArrayRef)]);
    let mut encrypted = parquet_file.clone();
    let end = encrypted.len();
    encrypted[end - 4..].copy_from_slice(b"PARE");
    let mut footer = parquet_file.clone();
    footer[end - 8..end - 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let gzip = {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(CHAT.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    for (name, bytes, problem) in [
        ("a.parquet", &parquet_file[..end - 9], "does not end with a footer"),
        ("a.parquet", &footer, "its footer cannot be read"),
        ("a.parquet", &encrypted, "is an encrypted Parquet file"),
        ("a.parquet", b"PAR1", "does not end with a footer"),
        ("a.arrow", &arrow_file[..arrow_file.len() - 1], "does not end with a footer"),
        ("a.arrow", &stream[..stream.len() - 40], "ends inside a message"),
        ("a.arrow", &stream[..8], "ends inside a message"),
        ("a.parquet", &parquet(&decimals, None), "column `price` has the type `Decimal128(9, 2)`"),
        ("a.arrow", &arrow(&decimals), "column `price` has the type `Decimal128(9, 2)`"),
        ("a.jsonl.gz", &gzip[..gzip.len() - 9], "gzip data, but cannot be unpacked"),
        ("a.json", b"[{}, {", "ends without `]` in or after row 2"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the name `a`"),
    ] {
        let path = write(&folder, name, bytes);
        let error = RowFile::open(&path, None).unwrap_err();
        assert!(error.to_string().contains(problem), "{name}: {error}");
        assert!(error.to_string().contains(name) && error.hint().is_some(), "{error}");
    }
}

/// Rows of a file whose data are damaged are rejected, and the file stays usable.
#[test]
fn damaged_pages_reject_rows_with_the_row_group() {
    let folder = TempDir::new().unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(1)).build();
    let mut bytes = parquet(&chats(), Some(properties));
    bytes[4..24].fill(0xee); // the first page of the first group
    let file = RowFile::open(&write(&folder, "a.parquet", &bytes), None).unwrap();
    let error = file.read(0).unwrap_err();
    assert_eq!(error.reason(), "unreadable");
    assert!(error.to_string().contains("a.parquet:1: cannot read the row: row group 0"), "{error}");
    assert!(file.read(1).is_ok());
}

#[test]
fn a_parquet_file_written_as_arrow_has_the_same_rows() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.parquet", &parquet(&chats(), None));
    let rows = ParquetRows::open(&path, Arc::new(File::open(&path).unwrap())).unwrap();
    let copy = folder.path().join("a.arrow");
    let failed = |cause| panic!("{cause}");
    rows.write_arrow(&File::create(&copy).unwrap(), &failed).unwrap();
    assert!(!rows.is_slow());
    assert_eq!(rows_of(&copy), rows_of(&path));
}

/// The index given has another hash than the file, which shows that the file was not read.
#[test]
fn an_unchanged_file_of_any_format_is_not_scanned_again() {
    let folder = TempDir::new().unwrap();
    let array = format!("[{CHAT},\n {CHAT}]");
    let zstd = zstd::encode_all(array.as_bytes(), 0).unwrap();
    let csv = b"instruction,output\na,b\n\"c\nd\",e\n";
    for (name, bytes) in [
        ("a.jsonl", format!("{CHAT}\n\n{CHAT}").as_bytes()),
        ("lines.jsonl", format!("[1]\n{CHAT}").as_bytes()),
        ("a.json", array.as_bytes()),
        ("a.json.zst", &zstd),
        ("a.csv", csv),
        ("a.parquet", &parquet(&chats(), None)),
        ("a.arrow", &arrow(&chats())),
        ("b.arrow", &stream(&chats())),
    ] {
        let path = write(&folder, name, bytes);
        let data_file = DataFile::open(&path, None, Some(folder.path())).unwrap();
        let positions =
            (0..data_file.len()).map(|row| (data_file.offset(row), data_file.line(row)));
        let known = KnownIndex {
            path: path.clone(),
            stamp: Stamp::of(&File::open(&path).unwrap()).unwrap(),
            index: RowIndex::of_rows(positions, data_file.num_bytes(), [9; 32]),
        };
        let again = DataFile::open(&path, Some(&known), Some(folder.path())).unwrap();
        assert_eq!((again.sha256(), again.len()), ([9; 32], 2), "{name}");
        for row in 0..2 {
            let [hash, hash_again] = [&data_file, &again].map(|of| of.content(row).unwrap().hash());
            assert_eq!((again.line(row), hash_again), (data_file.line(row), hash), "{name}");
        }
        fs::remove_file(&path).unwrap();
        write(&folder, name, &[bytes, b" "].concat());
        let changed = DataFile::open(&path, Some(&known), Some(folder.path()));
        assert!(changed.is_err() || changed.unwrap().sha256() != [9; 32], "{name}");
    }
}

/// `scripts/golden/columnar_fixtures.py` writes the files. Some bytes are changed; all of them, in
/// three ways, with `TRAINER_LONG_TESTS=1`.
#[test]
fn a_changed_byte_of_a_columnar_file_is_an_error_or_changes_values() {
    let folder = TempDir::new().unwrap();
    let is_long = std::env::var_os("TRAINER_LONG_TESTS").is_some();
    let (mut refused, mut rejected) = (0, 0);
    for name in ["rows.parquet", "rows.arrow", "stream.arrow"] {
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/columnar");
        let whole = fs::read(Path::new(fixtures).join(name)).unwrap();
        assert_eq!(rows_of(&write(&folder, name, &whole)).len(), 6);
        for at in (0..whole.len()).step_by(if is_long { 1 } else { 11 }) {
            for change in [1, 0x80, 0xff].into_iter().skip(if is_long { 0 } else { at % 3 }) {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                let path = write(&folder, name, &bytes);
                match DataFile::open(&path, None, None) {
                    Err(_) => refused += 1,
                    Ok(data_file) => {
                        let rows = (0..data_file.len().min(100)).map(|row| data_file.content(row));
                        rejected += rows.filter(Result::is_err).count();
                    }
                }
            }
        }
    }
    assert!(refused > 50 && rejected > 200, "{refused} refused, {rejected} rows rejected");
}

/// Numbers that only a header declares cost neither time nor memory.
#[test]
fn rows_and_bytes_that_a_columnar_file_declares_but_cannot_have_are_errors() {
    let folder = TempDir::new().unwrap();
    let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/columnar"));
    // the number of rows of a batch, the highest bytes of two lengths after unpacking, and the
    // number of rows of a row group
    for (name, at, value, problem) in [
        ("rows.arrow", 2410, 128, "its first column has another number"),
        ("rows.arrow", 1587, 255, "bytes after unpacking"),
        ("rows.arrow", 3043, 254, "bytes after unpacking"),
        ("rows.parquet", 3607, 0x7e, "more rows than a column has values"),
    ] {
        let mut bytes = fs::read(fixtures.join(name)).unwrap();
        bytes[at] = value;
        let found = match DataFile::open(&write(&folder, name, &bytes), None, None) {
            Err(error) => error.to_string(),
            Ok(data_file) => {
                let rows = (0..data_file.len()).filter_map(|row| data_file.content(row).err());
                rows.map(|error| error.to_string()).collect()
            }
        };
        assert!(found.contains(problem), "{name}, byte {at}: {found}");
    }
}

#[test]
fn a_map_without_values_and_a_deep_schema_are_refused() {
    let folder = TempDir::new().unwrap();
    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    map.append(true).unwrap();
    let whole = arrow(&batch(vec![("map", Arc::new(map.finish()) as ArrayRef)]));
    assert!(DataFile::open(&write(&folder, "a.arrow", &whole), None, None).is_ok());
    let deep = |levels: usize| {
        let leaf = Arc::new(StringArray::from(vec!["x"])) as ArrayRef;
        let group = |inside: ArrayRef, _| {
            let field = Arc::new(Field::new("g", inside.data_type().clone(), true));
            Arc::new(StructArray::from(vec![(field, inside)])) as ArrayRef
        };
        parquet(&batch(vec![("g", (1..levels).fold(leaf, group))]), None)
    };
    assert!(DataFile::open(&write(&folder, "a.parquet", &deep(20)), None, None).is_ok());
    let Err(error) = DataFile::open(&write(&folder, "a.parquet", &deep(130)), None, None) else {
        panic!("a schema of 130 levels is read");
    };
    assert!(error.to_string().contains("has more than 128 levels"), "{error}");
    let only_keys = Schema::new(vec![Field::new(
        "map",
        DataType::Map(
            Arc::new(Field::new(
                "entries",
                DataType::Struct(vec![Field::new("keys", DataType::Utf8, false)].into()),
                false,
            )),
            false,
        ),
        true,
    )]);
    let error = columns::check(Path::new("a.arrow"), &only_keys).unwrap_err();
    assert!(error.to_string().contains("column `map` has the type `Map("), "{error}");
}

#[test]
fn rows_that_are_read_together_equal_rows_that_are_read_alone() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (0..40usize)
        .map(|row| format!(r#"{{"text": "{}"}}"#, "a".repeat(row * 331 % 9000)))
        .collect();
    let spread = rows.join("\n\n  ");
    let tables: Vec<String> = (0..40).map(|row| format!("{row},\"a\n{row}\"\n")).collect();
    let array = format!("[{} ]", rows.join(" ,\n"));
    let csv = format!("id,text\n{}", tables.concat());
    let long = format!("{}\n{}\n", rows[1], "b".repeat(2 * BLOCK_BYTES));
    for (name, text) in [("a.jsonl", spread), ("a.json", array), ("a.csv", csv), ("b.jsonl", long)]
    {
        let file = DataFile::open(&write(&folder, name, text.as_bytes()), None, None).unwrap();
        let alone: Vec<String> =
            (0..file.len()).map(|row| format!("{:?}", file.content(row).unwrap())).collect();
        for (start, end) in
            (0..=file.len()).flat_map(|end| (0..=end).map(move |start| (start, end)))
        {
            let together = file.contents(start..end);
            let together: Vec<String> =
                together.map(|content| format!("{:?}", content.unwrap())).collect();
            assert_eq!(together, alone[start..end], "rows {start}..{end} of {name}");
        }
    }
}

#[test]
fn rows_that_are_read_together_are_errors_only_where_the_file_became_shorter() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a.jsonl", &format!("{CHAT}\n").repeat(5).into_bytes());
    let file = DataFile::open(&path, None, None).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(3 * CHAT.len() as u64).unwrap();
    let read: Vec<bool> = file.contents(0..5).map(|content| content.is_ok()).collect();
    assert_eq!(read, [true, true, false, false, false]);
}
