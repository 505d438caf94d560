//! Event files of TensorBoard: records with checksums, each a protobuf message `Event`.
//!
//! Only the fields that scalars need are written, so the messages are encoded by hand.

use serde::Serialize;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// An event file. Each event is one `write`, so a killed process leaves at most one incomplete
/// event, the last, which readers leave out.
#[derive(Debug)]
pub struct EventFile(File);

impl EventFile {
    /// Creates a file in `folder` that sorts after those that exist. Readers then drop the events
    /// of earlier files from `first_step` on, because the run trains these steps again. `time` is
    /// in seconds since 1970.
    pub fn create(folder: &Path, first_step: u64, time: f64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut second = time as u64;
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name();
            let used = name
                .to_str()
                .and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok());
            second = second.max(used.map_or(0, |used| used + 1));
        }
        let name = format!("{PREFIX}{second:010}.trainer");
        let mut file = File::options().write(true).create_new(true).open(folder.join(name))?;
        file.write_all(&start(first_step, time))?;
        Ok(Self(file))
    }

    pub fn write(&mut self, step: u64, time: f64, scalars: &[(String, f64)]) -> io::Result<()> {
        self.0.write_all(&record(&scalar_event(step, time, scalars)))
    }
}

const PREFIX: &str = "events.out.tfevents.";

/// The numbers of a row of `metrics.jsonl` or `eval.jsonl`, named `KIND/KEY`; those in an object
/// `KIND/KEY/NAME`. A `null` is a loss or norm that is not finite, or a key without a value. The
/// counts of each data file are left out.
pub fn scalars(kind: &str, row: &impl Serialize) -> Vec<(String, f64)> {
    let mut found = Vec::new();
    if let Ok(Value::Object(row)) = serde_json::to_value(row) {
        for (key, value) in &row {
            let is_number = matches!(key.as_str(), "loss" | "grad_norm");
            let is_left_out = matches!(key.as_str(), "step" | "eval" | "rejected_by_file");
            if value.is_null() && is_number {
                found.push((format!("{kind}/{key}"), f64::NAN));
            } else if !is_left_out {
                add(&format!("{kind}/{key}"), value, &mut found);
            }
        }
    }
    found
}

fn add(name: &str, value: &Value, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Bool(value) => found.push((name.to_owned(), f64::from(u8::from(*value)))),
        Value::Number(number) => {
            found.extend(number.as_f64().map(|number| (name.to_owned(), number)));
        }
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| add(&format!("{name}/{key}"), value, found));
        }
        // the values of ranks
        Value::Array(list) => {
            let names = ["min", "mean", "max"].into_iter().zip(list);
            names.for_each(|(key, value)| add(&format!("{name}/{key}"), value, found));
        }
        Value::Null | Value::String(_) => {}
    }
}

/// The first two records of a file: the version of the format, and the beginning of a session.
fn start(first_step: u64, time: f64) -> Vec<u8> {
    let mut version = header(0, time);
    bytes(&mut version, 3, b"brain.Event:2");
    let mut session = header(first_step, time);
    bytes(&mut session, 7, &[0x08, 1]); // SessionLog { status: START }
    [record(&version), record(&session)].concat()
}

fn scalar_event(step: u64, time: f64, scalars: &[(String, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut scalar = Vec::new();
        bytes(&mut scalar, 1, tag.as_bytes());
        scalar.push(2 << 3 | 5); // simple_value
        scalar.extend((*value as f32).to_le_bytes());
        bytes(&mut summary, 1, &scalar);
    }
    let mut event = header(step, time);
    bytes(&mut event, 5, &summary);
    event
}

/// The first fields of an event: wall time and step.
fn header(step: u64, time: f64) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(time.to_le_bytes());
    if step > 0 {
        event.push(2 << 3);
        varint(&mut event, step);
    }
    event
}

/// Appends a field of strings or messages.
fn bytes(out: &mut Vec<u8>, field: u8, content: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, content.len() as u64);
    out.extend(content);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A record: length, checksum of the length, content, checksum of the content.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let sums = [&length, content].map(|part| masked_crc(part).to_le_bytes());
    [&length, &sums[0][..], content, &sums[1]].concat()
}

/// CRC-32C, rotated and shifted as in TFRecord files.
fn masked_crc(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_bytes_are_those_of_the_tensorboard_package() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(folder.path(), 301, 1_700_000_000.5).unwrap();
        let row = json!({"step": 301, "loss": 1.25, "lr": 1e-5, "num_tokens": 416, "loss/ü": 0.5});
        file.write(301, 1_700_000_001.0, &scalars("train", &row)).unwrap();
        let row = json!({"step": 70_000, "loss": null, "accuracy": 0.75});
        file.write(70_000, 1_700_000_002.0, &scalars("eval", &row)).unwrap();
        let path = folder.path().join("events.out.tfevents.1700000000.trainer");
        let expected = include_bytes!("../../tests/fixtures/tensorboard.tfevents");
        assert_eq!(fs::read(path).unwrap(), expected);
    }

    #[test]
    fn a_file_sorts_after_those_before_it() {
        let folder = tempfile::tempdir().unwrap();
        for time in [1_700_000_000.5, 1_700_000_000.9, 1_600_000_000.0] {
            EventFile::create(folder.path(), 1, time).unwrap();
        }
        let names = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        let seconds = ["1700000000", "1700000001", "1700000002"];
        assert_eq!(names, seconds.map(|second| format!("{PREFIX}{second}.trainer")));
    }

    #[test]
    fn numbers_in_objects_and_lists_have_names_of_their_own() {
        let row = json!({
            "step": 1, "accuracy": null, "skipped": true, "rejected_by_reason": {"bad_json": 2},
            "rejected_by_file": {"a": {"bad_json": 2}}, "ranks": {"world": 2, "data_wait_s": [0, 1, 2]},
        });
        let found = scalars("train", &row);
        let named: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let expected = [
            ("train/skipped", 1.0),
            ("train/rejected_by_reason/bad_json", 2.0),
            ("train/ranks/world", 2.0),
            ("train/ranks/data_wait_s/min", 0.0),
            ("train/ranks/data_wait_s/mean", 1.0),
            ("train/ranks/data_wait_s/max", 2.0),
        ];
        assert_eq!(named, expected);
    }
}
