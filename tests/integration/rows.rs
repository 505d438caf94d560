//! Every row form and every mistake of `tests/fixtures/rows` has the outcome in its `table.json`.
//!
//! An entry has `like`, the row of plain messages that means the same, or `reason` and a part of the
//! `message` of the rejection. `rules` are those of the data set. `weights` and `thoughts` are those
//! of the assistant turns. `scripts/golden/row_cases.py` encodes the plain rows with transformers.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fault::Fault;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use trainer::batch::{EncodedSample, Message, Sample};
use trainer::data::{Encoder, ImageConfig, RowFile, RowRules, SampleError, UnknownKeys};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

fn encoder() -> &'static Encoder {
    static ENCODER: OnceLock<Encoder> = OnceLock::new();
    ENCODER.get_or_init(|| {
        let folder = root("golden/models/small-tied");
        Encoder::from_folder(&folder, &ImageConfig::default()).unwrap()
    })
}

fn json(path: &str) -> Vec<Value> {
    serde_json::from_slice(&fs::read(root(path)).unwrap()).unwrap()
}

fn rules(case: &Value) -> RowRules {
    RowRules {
        literal_placeholders: case["rules"]["literal_placeholders"] == true,
        unknown_keys: match case["rules"]["unknown_keys"].as_str() {
            Some("error") => UnknownKeys::Error,
            _ => UnknownKeys::Warn,
        },
        ..RowRules::default()
    }
}

/// The parsed and the encoded row, the first of the file.
fn read(path: &Path, rules: RowRules) -> Result<(Sample, EncodedSample), SampleError> {
    let images = root("fixtures/images");
    let file = RowFile::open(path, Some(&images)).unwrap().with_rules(rules);
    let sample = file.read(0)?;
    let encoded = encoder().encode(&sample)?;
    Ok((sample, encoded))
}

fn read_text(row: &str, rules: RowRules) -> Result<(Sample, EncodedSample), SampleError> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rows.jsonl");
    File::create(&path).unwrap().write_all(row.as_bytes()).unwrap();
    read(&path, rules)
}

fn answers(sample: &Sample) -> impl Iterator<Item = &Message> {
    sample.messages.iter().filter(|message| message.role == "assistant")
}

/// The outcome of a row that trains, compared with that of its plain row.
fn check_like(case: &Value, path: &Path) -> Result<(), String> {
    let (sample, found) = read(path, rules(case)).map_err(|error| error.to_string())?;
    let (_, plain) = read_text(&case["like"].to_string(), rules(case)).unwrap();
    let text = encoder().decode_with_specials(&found.input_ids).unwrap();
    let expected = encoder().decode_with_specials(&plain.input_ids).unwrap();
    if text != expected {
        return Err(format!("{text:?}, expected {expected:?}"));
    }
    if (&found.input_ids, &found.labels) != (&plain.input_ids, &plain.labels) {
        return Err(format!("other ids or labels than the plain row: {text}"));
    }
    if (&found.media, &found.position_ids) != (&plain.media, &plain.position_ids) {
        return Err("other pixels or positions than the plain row".to_owned());
    }
    if let Some(weights) = case["weights"].as_array() {
        let found: Vec<f64> = answers(&sample).map(|answer| f64::from(answer.weight)).collect();
        let expected: Vec<f64> = weights.iter().map(|weight| weight.as_f64().unwrap()).collect();
        if found != expected {
            return Err(format!("weights {found:?}, expected {expected:?}"));
        }
    }
    if let Some(thoughts) = case["thoughts"].as_array() {
        let found: Vec<_> = answers(&sample).map(|a| a.reasoning_content.as_deref()).collect();
        let expected: Vec<_> = thoughts.iter().map(Value::as_str).collect();
        if found != expected {
            return Err(format!("thoughts {found:?}, expected {expected:?}"));
        }
    }
    Ok(())
}

/// The outcome of a row that is refused.
fn check_refused(case: &Value, path: &Path) -> Result<(), String> {
    let error = match read(path, rules(case)) {
        Ok((_, encoded)) => {
            let text = encoder().decode_with_specials(&encoded.input_ids).unwrap();
            return Err(format!("it trains on {text:?}"));
        }
        Err(error) => error,
    };
    let place = format!("{}:1: ", path.display());
    let message = error.to_string();
    let is_expected = error.reason() == case["reason"].as_str().unwrap()
        && message
            .strip_prefix(&place)
            .is_some_and(|rest| rest.contains(case["message"].as_str().unwrap()));
    if is_expected { Ok(()) } else { Err(format!("{}: {message}", error.reason())) }
}

#[test]
fn every_row_form_encodes_like_its_plain_row_and_every_mistake_is_refused_by_name() {
    let cases = json("fixtures/rows/table.json");
    let mut files: Vec<String> = fs::read_dir(root("fixtures/rows"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "table.json")
        .collect();
    files.sort();
    let listed: Vec<&str> = cases.iter().map(|case| case["file"].as_str().unwrap()).collect();
    assert_eq!(listed, files);
    assert!(files.len() >= 60, "{} files", files.len());
    let mut failed = Vec::new();
    for case in &cases {
        let path = root("fixtures/rows").join(case["file"].as_str().unwrap());
        let is_refused = case.get("reason").is_some();
        let result = if is_refused { check_refused(case, &path) } else { check_like(case, &path) };
        failed.extend(result.err().map(|problem| format!("{}: {problem}", case["file"])));
    }
    assert!(failed.is_empty(), "{} differ:\n{}", failed.len(), failed.join("\n"));
}

/// `scripts/golden/row_cases.py` writes the expected ids, targets and pixels.
#[test]
fn rows_of_other_trainers_encode_as_in_transformers() {
    let cases = json("fixtures/rows/table.json");
    let golden = json("golden/row_cases.json");
    assert!(golden.len() >= 40, "{} rows", golden.len());
    for expected in golden {
        let name = &expected["file"];
        let case = cases.iter().find(|case| case["file"] == *name).unwrap();
        let path = root("fixtures/rows").join(name.as_str().unwrap());
        let (_, found) = read(&path, rules(case)).unwrap();
        assert_eq!(serde_json::json!(found.input_ids), expected["input_ids"], "ids of {name}");
        let targets: Vec<_> = (0..found.len()).filter(|at| found.labels[*at] >= 0).collect();
        assert_eq!(serde_json::json!(targets), expected["targets"], "targets of {name}");
        let mut pixels = Sha256::new();
        for value in found.media.iter().flat_map(|patches| &patches.pixel_values) {
            pixels.update([((value * 0.5 + 0.5) * 255.0).round() as u8]);
        }
        let pixels = format!("{:x}", pixels.finalize());
        assert_eq!(pixels, expected["pixels_sha256"].as_str().unwrap(), "pixels of {name}");
    }
}
