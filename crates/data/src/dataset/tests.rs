//! Rows that are prefetched and completed later.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::{DatasetRows, Prefetched, RowReader};
use crate::{DatasetConfig, Encoder, ImageConfig, SampleIndex};

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
fn only_the_images_of_a_prefetched_row_are_read_later() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path());
    let samples: Vec<_> = rows.rows().map(|row| rows.read(row).unwrap()).collect();
    let prefetched: Vec<_> = rows.rows().map(|row| rows.prefetch(row).unwrap()).collect();
    let is_whole = |prefetched: &Prefetched| matches!(prefetched, Prefetched::Sample(_));
    assert_eq!(prefetched.iter().map(is_whole).collect::<Vec<_>>(), [false, false, false, true]);
    for ((row, prefetched), sample) in rows.rows().zip(&prefetched).zip(&samples) {
        assert!(prefetched.bytes() < 24 * sample.len() as u64 + 1000); // no pixels, no data URI
        assert_eq!(rows.load_pixels(row, prefetched.clone()).as_ref(), Ok(sample));
    }
    // after this, no row can be parsed
    File::options().write(true).open(folder.path().join("rows.jsonl")).unwrap().set_len(0).unwrap();
    assert!(rows.rows().all(|row| rows.read(row).is_err()));
    for (row, prefetched) in rows.rows().zip(prefetched) {
        let loaded = rows.load_pixels(row, prefetched);
        match row.row {
            2 => assert!(loaded.is_err(), "the image is in the row"),
            row => assert_eq!(loaded.as_ref(), Ok(&samples[row as usize])),
        }
    }
}

#[test]
fn an_image_that_is_replaced_after_its_row_was_prefetched_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path());
    let row = SampleIndex { dataset: 0, row: 0 };
    let prefetched = rows.prefetch(row).unwrap();
    fs::copy(golden("data/images/exact_moon_96x64.png"), folder.path().join("a.png")).unwrap();
    let rejection = rows.load_pixels(row, prefetched.clone()).unwrap_err();
    assert_eq!(rejection.reason, "changed");
    // another shape with the same number of tokens
    let wide = rows.prefetch(row).unwrap();
    let moon = image::open(golden("data/images/exact_moon_96x64.png")).unwrap();
    moon.rotate90().save(folder.path().join("a.png")).unwrap();
    let sample = rows.load_pixels(row, wide).unwrap();
    assert_eq!(Ok(sample), rows.read(row));
    fs::remove_file(folder.path().join("a.png")).unwrap();
    let rejection = rows.load_pixels(row, prefetched).unwrap_err();
    assert_eq!(rejection.reason, "image_missing");
}
