//! Every format of data files has the same rows: samples, order, lengths, packs and resume are those
//! of JSONL.

use super::harness::property;
use crate::length_laws::{Case, any_case, encoder, golden, steps};
use arrow_array::builder::{BinaryBuilder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_ipc::{CompressionType, MetadataVersion};
use arrow_schema::{DataType, Field, Fields};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainer::batch::{EncodedSample, SampleId};
use trainer::data::{
    CachedRows, DataPath, DataState, DatasetConfig, DatasetRows, DatasetShare, Length, Loader,
    Order, Rejection, RowReader, StepData,
};

/// Writes rows as a data set in `folder`, and returns its `path`.
type Writer = fn(&[Value], &Path) -> Value;

/// Every format, with its name.
const SOURCES: [(&str, Writer); 16] = [
    ("JSON array", |rows, folder| {
        let text =
            format!("\u{feff}[{}\n]", rows.iter().map(pretty).collect::<Vec<_>>().join(" ,\n"));
        file(folder, "rows.json", text.as_bytes())
    }),
    ("JSONL, gzip", |rows, folder| file(folder, "rows.jsonl.gz", &gzip(lines(rows).as_bytes()))),
    ("JSON array, zstd", |rows, folder| {
        let text = Value::from(rows.to_vec()).to_string();
        file(folder, "rows.json.zst", &zstd::encode_all(text.as_bytes(), 1).unwrap())
    }),
    ("CSV", |rows, folder| file(folder, "rows.csv", &csv(rows, b','))),
    ("TSV, gzip", |rows, folder| file(folder, "rows.tsv.gz", &gzip(&csv(rows, b'\t')))),
    ("TSV in capitals", |rows, folder| file(folder, "rows.TSV.GZ", &gzip(&csv(rows, b'\t')))),
    ("Parquet", |rows, folder| {
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
        parquet(rows, folder, "rows.parquet", properties.build())
    }),
    ("Parquet in small groups and pages", |rows, folder| {
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(3))
            .set_data_page_row_count_limit(1)
            .set_write_batch_size(1)
            .set_compression(Compression::ZSTD(ZstdLevel::default()));
        parquet(rows, folder, "rows.parquet", properties.build())
    }),
    ("Parquet without a page index", |rows, folder| {
        let properties = WriterProperties::builder()
            .set_offset_index_disabled(true)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_dictionary_enabled(false);
        parquet(rows, folder, "rows.parquet", properties.build())
    }),
    ("Arrow file", |rows, folder| arrow_file(rows, folder, None)),
    ("Arrow file, LZ4", |rows, folder| arrow_file(rows, folder, Some(CompressionType::LZ4_FRAME))),
    ("Arrow stream", |rows, folder| {
        let path = folder.join("rows.arrow");
        let batch = batch(rows);
        let mut writer =
            StreamWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
        for row in 0..rows.len() {
            writer.write(&batch.slice(row, 1)).unwrap();
        }
        writer.finish().unwrap();
        json!(path)
    }),
    ("folder of datasets", |rows, folder| {
        let folder = folder.join("saved");
        fs::create_dir_all(&folder).unwrap();
        let (first, rest) = rows.split_at(rows.len() / 2);
        for (rows, name) in [(first, "data-0.arrow"), (rest, "data-1.arrow")] {
            let batch = batch(rows);
            let file = File::create(folder.join(name)).unwrap();
            let mut writer = StreamWriter::try_new(file, &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            writer.finish().unwrap();
        }
        let files = json!([{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]);
        file(&folder, "state.json", json!({"_data_files": files}).to_string().as_bytes());
        json!(folder)
    }),
    ("WebDataset", |rows, folder| file(folder, "rows.tar", &tar(rows))),
    ("pattern", |rows, folder| {
        for (number, row) in rows.iter().enumerate() {
            file(folder, &format!("part-{number}.jsonl"), format!("\n{row}\n").as_bytes());
        }
        json!(folder.join("part-*.jsonl"))
    }),
    ("list of formats", |rows, folder| {
        let (first, rest) = rows.split_at(rows.len() / 2);
        let jsonl = file(folder, "first.jsonl", lines(first).as_bytes());
        let properties = WriterProperties::default();
        json!([jsonl, parquet(rest, folder, "rest.parquet", properties)])
    }),
];

fn file(folder: &Path, name: &str, bytes: &[u8]) -> Value {
    let path = folder.join(name);
    File::create(&path).unwrap().write_all(bytes).unwrap();
    json!(path)
}

fn lines(rows: &[Value]) -> String {
    let mut lines = String::new();
    for row in rows {
        writeln!(lines, "{row}").unwrap();
    }
    lines
}

fn pretty(row: &Value) -> String {
    serde_json::to_string_pretty(row).unwrap()
}

/// Two members, as `cat a.gz b.gz` makes them.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    let member = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    [member(first), member(rest)].concat()
}

fn csv(rows: &[Value], delimiter: u8) -> Vec<u8> {
    let mut writer = csv::WriterBuilder::new().delimiter(delimiter).from_writer(Vec::new());
    writer.write_record(["id", "messages"]).unwrap();
    for row in rows {
        writer.write_record([row["id"].as_str().unwrap(), &pretty(&row["messages"])]).unwrap();
    }
    writer.into_inner().unwrap()
}

/// The images of each row that exist, as files of the archive.
fn tar(rows: &[Value]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes).unwrap();
    };
    for (number, row) in rows.iter().enumerate() {
        let mut text = row.to_string();
        for name in ["exact_moon_96x64.png", "exact_moon_64x64.png"] {
            let quoted = format!("\"image\":\"{name}\"");
            if text.contains(&quoted) {
                text = text.replace(&quoted, &format!("\"image\":\"{number}.{name}\""));
                add(&format!("{number}.{name}"), &image(name).unwrap());
            }
        }
        add(&format!("{number}.json"), text.as_bytes());
    }
    builder.into_inner().unwrap()
}

fn image(name: &str) -> Option<Vec<u8>> {
    fs::read(golden("data/images").join(name)).ok()
}

fn image_fields() -> Fields {
    [("bytes", DataType::Binary), ("path", DataType::Utf8)]
        .map(|(name, of)| Field::new(name, of, true))
        .to_vec()
        .into()
}

fn part_fields() -> Fields {
    let text = DataType::Utf8;
    let frames = DataType::List(Arc::new(Field::new("item", text.clone(), true)));
    let image = DataType::Struct(image_fields());
    [("type", text.clone()), ("text", text), ("image", image), ("video", frames)]
        .map(|(name, of)| Field::new(name, of, true))
        .to_vec()
        .into()
}

/// The rows as typed columns; each image as its bytes, or as its path if it does not exist.
fn batch(rows: &[Value]) -> RecordBatch {
    let part = Arc::new(Field::new("item", DataType::Struct(part_fields()), true));
    let message: Fields = vec![
        Field::new("role", DataType::Utf8, true),
        Field::new("content", DataType::List(part), true),
    ]
    .into();
    let mut messages = ListBuilder::new(StructBuilder::from_fields(message, 0));
    for row in rows {
        for message in row["messages"].as_array().unwrap() {
            let builder = messages.values();
            text(builder, 0, &message["role"]);
            let parts: &mut ListBuilder<Box<dyn arrow_array::builder::ArrayBuilder>> =
                builder.field_builder(1).unwrap();
            let values: &mut StructBuilder = parts.values().as_any_mut().downcast_mut().unwrap();
            for part in message["content"].as_array().unwrap() {
                append_part(values, part);
            }
            parts.append(true);
            builder.append(true);
        }
        messages.append(true);
    }
    let id = rows.iter().map(|row| row["id"].as_str()).collect::<StringArray>();
    let columns = [("id", Arc::new(id) as ArrayRef), ("messages", Arc::new(messages.finish()))];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn text(builder: &mut StructBuilder, field: usize, value: &Value) {
    builder.field_builder::<StringBuilder>(field).unwrap().append_option(value.as_str());
}

fn append_part(builder: &mut StructBuilder, part: &Value) {
    text(builder, 0, &part["type"]);
    text(builder, 1, &part["text"]);
    let path = part["image"].as_str();
    let bytes = path.and_then(image);
    let path = path.filter(|_| bytes.is_none());
    let has_image = bytes.is_some() || path.is_some();
    let images: &mut StructBuilder = builder.field_builder(2).unwrap();
    images.field_builder::<BinaryBuilder>(0).unwrap().append_option(bytes);
    images.field_builder::<StringBuilder>(1).unwrap().append_option(path);
    images.append(has_image);
    let frames: &mut ListBuilder<Box<dyn arrow_array::builder::ArrayBuilder>> =
        builder.field_builder(3).unwrap();
    let values: &mut StringBuilder = frames.values().as_any_mut().downcast_mut().unwrap();
    for frame in part["video"].as_array().into_iter().flatten() {
        values.append_value(frame.as_str().unwrap());
    }
    frames.append(part["video"].is_array());
    builder.append(true);
}

fn parquet(rows: &[Value], folder: &Path, name: &str, properties: WriterProperties) -> Value {
    let path = folder.join(name);
    let batch = batch(rows);
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    json!(path)
}

fn arrow_file(rows: &[Value], folder: &Path, compression: Option<CompressionType>) -> Value {
    let path = folder.join("rows.arrow");
    let batch = batch(rows);
    let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V5).unwrap();
    let options = options.try_with_compression(compression).unwrap();
    let file = File::create(&path).unwrap();
    let mut writer = FileWriter::try_new_with_options(file, &batch.schema(), options).unwrap();
    for first in (0..rows.len()).step_by(3) {
        writer.write(&batch.slice(first, 3.min(rows.len() - first))).unwrap();
    }
    writer.finish().unwrap();
    json!(path)
}

/// What a run sees of a data set, without names of files and lines.
#[derive(Debug, PartialEq)]
struct Seen {
    samples: Vec<Result<EncodedSample, String>>,
    lengths: Vec<Result<Length, String>>,
    cached: Vec<Result<Length, String>>,
    steps: Result<Vec<StepData>, String>,
}

fn without_id(rejection: &Rejection) -> String {
    let id = format!("{}:{}", rejection.file, rejection.row);
    format!("{}: {}", rejection.reason, rejection.message.replace(&id, ""))
}

fn see(case: &Case, path: Value, folder: &Path) -> Seen {
    let path: DataPath = serde_json::from_value(path).unwrap();
    let set = DatasetConfig {
        image_root: Some(golden("data/images")),
        ..DatasetConfig::new(PathBuf::new())
    };
    let rows = DatasetRows::open(&[DatasetConfig { path, ..set }], encoder()).unwrap();
    let rows = Arc::new(rows.truncated(case.cut()));
    let (cached, work) = CachedRows::update(rows.clone(), &folder.join("cache"), &|_| ()).unwrap();
    assert_eq!(work.measured, case.rows.len() as u64);
    let nowhere = || SampleId { file: Path::new("rows").into(), line: 1 };
    let sample = |row| {
        let sample = rows.read(row).map_err(|rejection| without_id(&rejection));
        sample.map(|sample| EncodedSample { id: nowhere(), ..sample })
    };
    let length = |of: Result<Length, Rejection>| of.map_err(|rejection| without_id(&rejection));
    let share = DatasetShare { rows: case.rows.len() as u64, weight: 1.0 };
    let order = || Order::new(&[share], case.order, case.seed, [7; 32]).unwrap();
    let run = |state| {
        let options = case.options(case.workers);
        steps(&mut Loader::start(rows.clone(), order(), options, state))
    };
    let all = run(DataState::default());
    if let Ok(steps) = &all {
        let stop = case.stop.index(steps.len());
        assert!(run(steps[stop].state.clone()).unwrap() == steps[stop + 1..], "resumed");
    }
    let anonymous = |mut step: StepData| {
        step.state.rejected_by_file.clear();
        for rejection in &mut step.rejected {
            let message = without_id(rejection);
            *rejection = Rejection::new(&nowhere(), &rejection.reason, message);
        }
        step
    };
    Seen {
        samples: rows.rows().map(sample).collect(),
        lengths: rows.rows().map(|row| length(rows.length(row))).collect(),
        cached: rows.rows().map(|row| length(cached.length(row))).collect(),
        steps: all
            .map(|steps| steps.into_iter().map(anonymous).collect())
            .map_err(|_| "no steps".to_owned()),
    }
}

/// The rows with a list of parts in every message, so that columns have one type each.
fn with_parts(rows: &[Value]) -> Vec<Value> {
    let mut rows = rows.to_vec();
    for (number, row) in rows.iter_mut().enumerate() {
        row["id"] = json!(format!("row, \"{number}\""));
        for message in row["messages"].as_array_mut().unwrap() {
            if let Some(text) = message["content"].as_str() {
                message["content"] = json!([{"type": "text", "text": text}]);
            }
        }
    }
    rows
}

/// `PROPTEST_CASES=1000` is the long form.
#[test]
fn every_format_has_the_samples_order_lengths_packs_and_resume_of_jsonl() {
    let cases = std::env::var("PROPTEST_CASES").map_or(4, |cases| cases.parse().unwrap());
    let check = |mut case: Case| {
        case.rows = with_parts(&case.rows);
        let folder = tempfile::tempdir().unwrap();
        let jsonl = file(folder.path(), "rows.jsonl", lines(&case.rows).as_bytes());
        let expected = see(&case, jsonl, folder.path());
        for (name, write) in SOURCES {
            let folder = tempfile::tempdir().unwrap();
            let found = see(&case, write(&case.rows, folder.path()), folder.path());
            prop_assert_eq!(&found.samples, &expected.samples, "{}", name);
            prop_assert!(found == expected, "{}", name);
        }
        Ok(())
    };
    property(cases, &any_case(), check);
}
