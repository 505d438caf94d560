//! Rows of the small model of MiniCPM-V with the settings of 4.7, compared with transformers.
//! `canvas` compares ids without a chat around them.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::truncate::KeptEnd;
use super::*;
use crate::media::CanvasTokens;
use crate::source::RowFile;
use batch::{Pack, PaddingSide};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

fn values() -> Value {
    serde_json::from_str(&fs::read_to_string(golden("minicpm_47.json")).unwrap()).unwrap()
}

/// Sets the values of `changes`.
fn change(json: &mut Value, changes: &Value) {
    match changes.as_object() {
        Some(changes) => changes.iter().for_each(|(key, value)| change(&mut json[key], value)),
        None => *json = changes.clone(),
    }
}

/// The small model with changes of its files.
fn folder(changes: &[&Value]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ] {
        let mut text = fs::read_to_string(golden("models/small-minicpm").join(name)).unwrap();
        for changes in changes.iter().filter(|changes| !changes[name].is_null()) {
            let mut json = serde_json::from_str(&text).unwrap();
            change(&mut json, &changes[name]);
            text = json.to_string();
        }
        let mut file = fs::File::create(folder.path().join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
    folder
}

fn encoder(changes: &[&Value]) -> Encoder {
    Encoder::from_folder(folder(changes).path(), &ImageConfig::default()).unwrap()
}

/// The row of a golden case.
fn row(id: &Value) -> Sample {
    ["canvas", "image_exact"]
        .iter()
        .find_map(|name| {
            let path = golden(&format!("data/{name}.jsonl"));
            let text = fs::read_to_string(&path).unwrap();
            let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let line = rows.map(|row| row["id"].clone()).position(|of| of == *id)?;
            Some(RowFile::open(&path, Some(&golden("data"))).unwrap().read(line).unwrap())
        })
        .unwrap()
}

#[test]
fn rows_encode_as_in_transformers() {
    let golden = values();
    let none = json!({});
    let rows = |of: &Value| of["rows"].as_array().unwrap().clone();
    let variants = golden["variants"].as_object().unwrap().values();
    let variants = variants.map(|of| (&of["changes"], rows(of)));
    let mut compared = 0;
    for (changes, cases) in [(&none, rows(&golden))].into_iter().chain(variants) {
        let encoder = encoder(&[&golden["changes"], changes]);
        for case in cases {
            let (row, name) = (row(&case["id"]), format!("{} {changes}", case["id"]));
            let found = encoder.encode(&row).unwrap();
            let axes = |axis: usize| found.position_ids.iter().map(move |of| of[axis]);
            let axes = [0, 1, 2].map(|axis| axes(axis).collect::<Vec<_>>());
            assert_eq!(json!(found.input_ids), case["input_ids"], "{name}");
            assert_eq!(json!(found.labels), case["labels"], "{name}");
            assert_eq!(json!(axes), case["position_ids"], "{name}");
            let grids: Vec<_> = found.media.iter().map(|of| of.grid_thw).collect();
            assert_eq!(json!(grids), case["image_grid_thw"], "{name}");
            let values = found.media.iter().flat_map(|of| &of.pixel_values);
            let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
            let digest = (!bytes.is_empty()).then(|| format!("{:x}", Sha256::digest(&bytes)));
            assert_eq!(json!(digest), case["image_sha256"], "{name}");
            assert_eq!(encoder.length(&row).unwrap(), Length::of(&found), "{name}");
            compared += 1;
        }
    }
    assert!(compared > 50);
}

/// Truncation may take away all text before an image, and other texts.
#[test]
fn positions_are_those_of_the_tokens_that_truncation_keeps() {
    let golden = values();
    let encoder = encoder(&[&golden["changes"], &golden["variants"]["no_image_id"]["changes"]]);
    let Positions::Canvas(tokens) = encoder.media.videos.family().positions else { panic!() };
    let mut num_first = 0;
    for id in ["front", "lines", "thin"] {
        let row = row(&json!(id));
        let whole = encoder.encode(&row).unwrap();
        let images: Vec<_> = encoder.media.grids(&row.media).unwrap();
        for keep in [KeptEnd::Beginning, KeptEnd::End] {
            for max_length in (1..whole.len() as u32).step_by(3) {
                let max_length = NonZeroU32::new(max_length).unwrap();
                let cut = Some(TruncationRule { max_length, keep });
                let Ok(found) = encoder.encode_truncated(&row, cut) else { continue };
                let images = images.iter().flat_map(MediumGrid::frames);
                let (ids, rows) = (&found.input_ids, &found.vision_rows);
                let expected = canvas::position_ids(ids, rows, images, 4, tokens);
                assert_eq!(found.position_ids, expected, "{id} {cut:?}");
                num_first += usize::from(rows[0] == 1);
                // several tokens of an image at the start have position 0
                let (tokens, packs) = (found.len() as u32, vec![Pack { samples: vec![found] }]);
                let batch = crate::collate(packs, 0, PaddingSide::Right, encoder.merge_size());
                assert_eq!(batch.unwrap().segment_lengths, [[tokens]], "{id} {cut:?}");
            }
        }
    }
    assert!(num_first > 2);
}

#[test]
fn tokens_of_images_that_are_missing_or_not_those_of_the_tokenizer_are_refused() {
    let changes = &values()["changes"];
    let refused = |key: &str, value: Value| {
        let folder = folder(&[changes, &json!({"config.json": {key: value}})]);
        let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err();
        error.unwrap().to_string()
    };
    for (key, token) in CanvasTokens::KEYS {
        let error = refused(key, Value::Null);
        assert!(error.contains(&format!("config.json`: `{key}` is missing")), "{error}");
        let error = refused(key, json!(30));
        let problem = format!("config.json`: `{key}` is 30, but the token {token:?} is ");
        assert!(error.contains(&problem) && error.contains("tokenizer.json"), "{error}");
    }
}
