//! Rows that are measured, and read later.

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::{DatasetRows, RowReader};
use crate::loader::test_reader::options;
use crate::{
    DatasetConfig, Encoder, ImageConfig, Length, LoaderOptions, Overlong, Packing, PackingStrategy,
    SampleIndex,
};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// A row with an image, a row with the same image twice, a row with an image as a data URI, a row
/// of text.
fn rows(folder: &Path) -> DatasetRows {
    let png = include_bytes!("../../../../tests/golden/data/images/exact_moon_64x64.png");
    fs::copy(golden("data/images/exact_moon_64x64.png"), folder.join("a.png")).unwrap();
    let inline = format!("data:image/png;base64,{}", base64(png));
    let mut file = File::create(folder.join("rows.jsonl")).unwrap();
    for images in [vec!["a.png"], vec!["a.png", "a.png"], vec![&inline], vec![]] {
        let images = images.into_iter().map(|image| json!({"type": "image", "image": image}));
        let mut content: Vec<_> = images.collect();
        content.push(json!({"type": "text", "text": "Which?"}));
        let user = json!({"role": "user", "content": content});
        let assistant = json!({"role": "assistant", "content": "This one"});
        writeln!(file, "{}", json!({"messages": [user, assistant]})).unwrap();
    }
    let image = ImageConfig { min_pixels: None, max_pixels: None, max_tokens: None };
    let encoder = Encoder::from_folder(&golden("models/small-tied"), &image).unwrap();
    DatasetRows::open(&[DatasetConfig::new(folder.join("rows.jsonl"))], Arc::new(encoder)).unwrap()
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[test]
fn a_row_is_read_if_it_has_its_measured_length() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path());
    for row in rows.rows() {
        let length = rows.length(row).unwrap();
        assert_eq!(rows.read_of_length(row, length), rows.read(row));
        for other in [Length { tokens: length.tokens + 1, ..length }, Length::default()] {
            assert_eq!(rows.read_of_length(row, other).unwrap_err().reason, "changed");
        }
    }
}

#[test]
fn rows_that_are_too_long_to_train_on_are_rejected_if_there_are_limits() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path());
    let lengths: Vec<usize> = rows.rows().map(|row| rows.length(row).unwrap().tokens).collect();
    let (shortest, longest) = (*lengths.iter().min().unwrap(), *lengths.iter().max().unwrap());
    assert!(shortest < longest);
    let length = NonZeroU32::new(longest as u32 - 1).unwrap();
    let (strategy, overlong) = (PackingStrategy::BestFit, Overlong::Reject);
    let packing = Packing::On { length, strategy, overlong };
    let limited = rows.limited(LoaderOptions { packing, ..options(strategy) });
    for (row, tokens) in limited.rows().zip(lengths) {
        let [read, measured] = [limited.read(row).map(drop), limited.length(row).map(drop)];
        assert_eq!(read, measured);
        let reason = read.err().map(|rejection| rejection.reason);
        assert_eq!(reason.as_deref(), (tokens == longest).then_some("overlong"));
    }
}

#[test]
fn an_image_that_is_replaced_after_its_row_was_measured_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, image) = (rows(folder.path()), folder.path().join("a.png"));
    let row = SampleIndex { dataset: 0, row: 0 };
    let square = rows.length(row).unwrap();
    fs::copy(golden("data/images/exact_moon_96x64.png"), &image).unwrap();
    let wide = rows.length(row).unwrap();
    assert_eq!(rows.read_of_length(row, square).unwrap_err().reason, "changed");
    // another shape with the same number of tokens
    let moon = image::open(golden("data/images/exact_moon_96x64.png")).unwrap();
    moon.rotate90().save(&image).unwrap();
    assert_eq!(rows.read_of_length(row, wide), rows.read(row));
    // pixels that cannot be decoded: they are not read if the header has another size
    File::options().write(true).open(&image).unwrap().set_len(60).unwrap();
    assert_eq!(rows.length(row).unwrap(), wide);
    assert_eq!(rows.read_of_length(row, square).unwrap_err().reason, "changed");
    let reason = rows.read_of_length(row, wide).unwrap_err().reason;
    assert!(reason.starts_with("image_"), "{reason}");
    fs::remove_file(&image).unwrap();
    assert_eq!(rows.read_of_length(row, square).unwrap_err().reason, "image_missing");
}
