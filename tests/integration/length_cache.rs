//! Lengths from the length cache equal newly measured ones for every limit, after files were
//! changed or copied and after updates were killed.

use super::budgets::header_of_large_image;
use super::harness::write;
use super::images::bmp;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use trainer::data::{
    CacheWork, DatasetConfig, Encoder, ImageConfig, KeptEnd, Length, MediaLook, Rejection,
    RowReader, RowRules, SampleIndex, TruncationRule, VideoConfig, open_indexed,
};
use trainer::data::{CachedRows, DatasetRows};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub(crate) fn encoder(image: &ImageConfig) -> Arc<Encoder> {
    Arc::new(Encoder::from_folder(&golden("models/small-tied"), image).unwrap())
}

pub(crate) fn max_tokens(tokens: u32) -> ImageConfig {
    let max_tokens = NonZeroU32::new(tokens);
    ImageConfig { min_pixels: Some(1024), max_pixels: None, max_tokens }
}

/// A folder with a data file, two images and a cache.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    pub(crate) fn new(rows: &[Value]) -> Self {
        let place = Self { folder: TempDir::new().unwrap() };
        for (name, image) in [("a.png", "exact_moon_96x64.png"), ("b.png", "exact_moon_64x64.png")]
        {
            std::fs::copy(golden("data/images").join(image), place.path(name)).unwrap();
        }
        place.write(rows);
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, rows: &[Value]) {
        let text = rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
        File::create(self.path("rows.jsonl")).unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn rows(&self, encoder: &Arc<Encoder>) -> Arc<DatasetRows> {
        let set = DatasetConfig::new(self.path("rows.jsonl"));
        Arc::new(DatasetRows::open(&[set], encoder.clone()).unwrap())
    }

    pub(crate) fn update(&self, encoder: &Arc<Encoder>) -> (CachedRows, CacheWork) {
        CachedRows::update(self.rows(encoder), &self.path("cache"), &|_| ()).unwrap()
    }

    /// Path of the cache file.
    pub(crate) fn cache(&self) -> PathBuf {
        let files = std::fs::read_dir(self.path("cache")).unwrap();
        let mut files = files.map(|file| file.unwrap().path());
        files
            .find(|path| {
                path.extension().is_some_and(|ending| ending == "arrow") && !is_hidden(path)
            })
            .unwrap()
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().unwrap().to_str().unwrap().starts_with('.')
}

pub(crate) fn chat(question: &str, answer: &str) -> Value {
    json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
}

pub(crate) fn with_image(name: &str, answer: &str) -> Value {
    json!({"messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": answer}], "images": [name]})
}

/// Rows of every kind: text, one image, two images, a video, and broken rows.
fn mixed(count: usize) -> Vec<Value> {
    let row = |i: usize| match i % 7 {
        0 => with_image("a.png", &format!("moon {i}")),
        1 => with_image("b.png", "a short one"),
        2 => json!({"messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "or"}, {"type": "image", "image": "b.png"}]},
            {"role": "assistant", "content": format!("the first of {i}")},
        ]}),
        3 if i.is_multiple_of(2) => with_image("no.png", "nothing"),
        4 if i.is_multiple_of(3) => json!({"messages": []}),
        5 if i.is_multiple_of(2) => json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "video", "video": ["b.png", "b.png", "b.png"]}, {"type": "image", "image": "a.png"}]},
            {"role": "assistant", "content": format!("moving {i}")},
        ]}),
        _ => chat(&format!("What is {i} + {i}?"), &"It is so. ".repeat(i % 5 + 1)),
    };
    (0..count).map(row).collect()
}

/// Asserts that every cached length and rejection equals the newly measured one.
pub(crate) fn assert_as_measured(cached: &CachedRows, rows: &Arc<DatasetRows>) {
    for row in rows.rows() {
        assert_eq!(cached.length(row), rows.length(row), "{}", rows.id(row));
    }
}

#[test]
fn lengths_from_the_cache_are_those_of_measuring_under_every_limit() {
    let place = Place::new(&mixed(60));
    place.update(&encoder(&max_tokens(4)));
    for tokens in [1, 2, 3, 6, 100] {
        let encoder = encoder(&max_tokens(tokens));
        for max_length in [0, 1, 8, 14, 20, 33] {
            for keep in [KeptEnd::Beginning, KeptEnd::End] {
                let cut = NonZeroU32::new(max_length)
                    .map(|max_length| TruncationRule { max_length, keep });
                let set = DatasetConfig::new(place.path("rows.jsonl"));
                let rows = DatasetRows::open(&[set], encoder.clone()).unwrap().truncated(cut);
                let rows = Arc::new(rows);
                let (cached, work) =
                    CachedRows::update(rows.clone(), &place.path("cache"), &|_| ()).unwrap();
                assert_eq!(work.measured, 4, "rows whose image is missing");
                assert_as_measured(&cached, &rows);
            }
        }
    }
}

#[test]
fn a_row_rejected_by_its_cached_length_has_the_same_error_and_is_not_read() {
    let place = Place::new(&mixed(60));
    let encoder = encoder(&max_tokens(6));
    let (cached, _) = place.update(&encoder);
    let rows = place.rows(&encoder);
    let lengths = rows.rows().filter_map(|row| cached.length(row).ok());
    let mut lengths: Vec<usize> = lengths.map(|length| length.tokens).collect();
    lengths.sort_unstable();
    let most = lengths[lengths.len() / 2];
    let refuse = |length: Length| match length.tokens {
        tokens if tokens > most => {
            let id = rows.id(SampleIndex { dataset: 0, row: 0 });
            Err(Rejection::new(&id, "too_long", format!("{tokens} tokens")))
        }
        _ => Ok(()),
    };
    let read = |reader: &dyn RowReader, row| {
        let length = reader.length(row)?;
        refuse(length)?;
        reader.read_of_length(row, length)
    };
    let results: Vec<_> = rows.rows().map(|row| read(&cached, row)).collect();
    for (row, result) in rows.rows().zip(&results) {
        assert!(*result == read(&*rows, row), "{}", rows.id(row));
    }
    let usable = results.iter().filter(|result| result.is_ok()).count();
    assert!((5..55).contains(&usable), "{usable} rows are usable");
    // Delete the images: reading a row fails now, but a row that is rejected by its length is not
    // read.
    for name in ["a.png", "b.png"] {
        std::fs::remove_file(place.path(name)).unwrap();
    }
    let mut num_missing = 0;
    for (row, before) in rows.rows().zip(&results) {
        let now = read(&cached, row);
        if before.is_err() || now.is_ok() {
            assert!(now == *before, "{}", rows.id(row));
        } else {
            num_missing += 1;
        }
    }
    assert!(num_missing > 0);
}

#[test]
fn only_new_and_changed_rows_are_measured_again() {
    let encoder = encoder(&max_tokens(6));
    let mut rows: Vec<Value> = (0..40).map(|i| chat(&format!("Row {i}"), "yes")).collect();
    rows[7] = with_image("a.png", "seven");
    rows[8] = json!({"messages": []});
    let place = Place::new(&rows);
    assert_eq!(place.update(&encoder).1, CacheWork { measured: 40, reused: 0 });
    assert_eq!(place.update(&encoder).1, CacheWork { measured: 0, reused: 40 });
    rows.push(chat("One more", "indeed"));
    rows[3] = chat("Another third", "no");
    rows.swap(8, 20);
    place.write(&rows);
    let (cached, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 2, reused: 39 });
    assert_as_measured(&cached, &place.rows(&encoder));
    // A copy of the data file has the same rows.
    std::fs::rename(place.path("rows.jsonl"), place.path("old.jsonl")).unwrap();
    std::fs::copy(place.path("old.jsonl"), place.path("rows.jsonl")).unwrap();
    assert_eq!(place.update(&encoder).1.measured, 0);
}

#[test]
fn a_changed_or_repaired_image_is_measured_again() {
    let encoder = encoder(&max_tokens(6));
    let rows = [with_image("a.png", "yes"), with_image("b.png", "yes"), with_image("c.png", "yes")];
    let place = Place::new(&rows);
    let tokens = |cached: &CachedRows, row| {
        cached
            .length(SampleIndex { dataset: 0, row })
            .map(|length| length.tokens)
            .map_err(|rejection| rejection.reason)
    };
    let (before, _) = place.update(&encoder);
    assert_eq!(tokens(&before, 2), Err("image_missing".to_owned()));
    assert_ne!(tokens(&before, 0), tokens(&before, 1));
    for name in ["a.png", "c.png"] {
        std::fs::copy(place.path("b.png"), place.path(name)).unwrap();
    }
    let (after, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 2, reused: 1 });
    assert_eq!([0, 1, 2].map(|row| tokens(&after, row)), [0; 3].map(|_| tokens(&before, 1)));
}

#[test]
fn a_changed_video_frame_is_measured_again_and_other_video_settings_use_another_cache() {
    let model = golden("models/small-tied");
    let encoder = |fps| {
        let video = VideoConfig { fps: Some(fps), ..VideoConfig::default() };
        Arc::new(Encoder::with_video(&model, &max_tokens(6), &video).unwrap())
    };
    let video = json!({"type": "video", "video": ["b.png", "b.png", "c.png", "b.png"], "fps": 4.0});
    let place = Place::new(&[json!({"messages": [
        {"role": "user", "content": [video]}, {"role": "assistant", "content": "yes"},
    ]})]);
    let copy = || std::fs::copy(place.path("b.png"), place.path("c.png")).unwrap();
    copy();
    for (fps, measured) in [(4.0, 1), (4.0, 0), (1.0, 1), (4.0, 0)] {
        let (cached, work) = place.update(&encoder(fps));
        assert_eq!(work.measured, measured);
        assert_as_measured(&cached, &place.rows(&encoder(fps)));
    }
    std::thread::sleep(Duration::from_millis(20));
    copy();
    let later = File::options().append(true).open(place.path("c.png")).unwrap();
    later.set_modified(SystemTime::now()).unwrap();
    assert_eq!(place.update(&encoder(4.0)).1.measured, 1);
}

#[test]
fn a_row_with_too_many_pixels_is_measured_again_although_its_text_is_unchanged() {
    let encoder = encoder(&max_tokens(6));
    let row = json!({"messages": [
        {"role": "user", "content": "<image>".repeat(65)}, {"role": "assistant", "content": "yes"},
    ], "images": vec!["large.bmp"; 65]});
    let place = Place::new(&[row]);
    write(&place.path("large.bmp"), &header_of_large_image());
    let index = SampleIndex { dataset: 0, row: 0 };
    let (before, _) = place.update(&encoder);
    assert_eq!(before.length(index).unwrap_err().reason, "media_too_large");
    write(&place.path("large.bmp"), &bmp(64, 64));
    let (after, work) = place.update(&encoder);
    assert_eq!(work.measured, 1);
    assert!(after.length(index).is_ok());
    assert_eq!(place.update(&encoder).1.measured, 0);
}

/// Only the first frame is read to measure a row.
#[test]
fn a_frame_that_is_still_missing_is_unchanged() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&[json!({"messages": [
        {"role": "user", "content": [{"type": "video", "video": ["b.png", "b.png", "c.png", "b.png"]}]},
        {"role": "assistant", "content": "yes"},
    ]})]);
    for measured in [1, 0] {
        assert_eq!(place.update(&encoder).1, CacheWork { measured, reused: 1 - measured });
    }
    let media = |look| {
        CachedRows::media(&place.rows(&encoder), &place.path("cache"), look).unwrap().unwrap()
    };
    let (before, now) = (MediaLook::Cache, MediaLook::Every { stamps: 1, contents: 1 });
    assert_eq!(media(before).digests(), media(now).digests());
    assert_eq!(media(now).changed(), None);
    std::fs::copy(place.path("b.png"), place.path("c.png")).unwrap();
    assert_eq!(media(now).changed(), Some("c.png"));
    assert_eq!(place.update(&encoder).1.measured, 1);
}

#[test]
fn a_killed_update_is_continued_and_a_damaged_cache_is_rebuilt() {
    let encoder = encoder(&max_tokens(6));
    let rows: Vec<Value> = (0..9000).map(|i| chat(&format!("{i}"), "yes")).collect();
    let place = Place::new(&rows);
    let killed = |after: u64| {
        let progress = |done| assert!(done < after, "killed");
        let update =
            || CachedRows::update(place.rows(&encoder), &place.path("cache"), &progress).map(drop);
        assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
    };
    killed(1);
    killed(8000);
    let (cached, work) = place.update(&encoder);
    assert_eq!(work.measured + work.reused, 9000);
    assert!(work.reused >= 2 * 4096, "{work:?}");
    let whole = std::fs::read(place.cache()).unwrap();
    for row in place.rows(&encoder).rows().step_by(97) {
        assert_eq!(cached.length(row), place.rows(&encoder).length(row));
    }
    // Truncated in the middle of the rows, truncated at the end, and not an Arrow file.
    for damaged in [&whole[..whole.len() / 2], &whole[..whole.len() - 9], b"nothing of the kind"] {
        File::create(place.cache()).unwrap().write_all(damaged).unwrap();
        let (cached, _) = place.update(&encoder);
        let row = SampleIndex { dataset: 0, row: 8999 };
        assert_eq!(cached.length(row), place.rows(&encoder).length(row));
        assert_eq!(place.update(&encoder).1, CacheWork { measured: 0, reused: 9000 });
    }
}

#[test]
fn damaged_batches_of_a_killed_update_are_measured_again() {
    let encoder = encoder(&max_tokens(6));
    let rows: Vec<Value> = (0..9000).map(|i| chat(&format!("{i}"), "yes")).collect();
    let place = Place::new(&rows);
    let progress = |done| assert!(done < 8000, "killed");
    let update =
        || CachedRows::update(place.rows(&encoder), &place.path("cache"), &progress).map(drop);
    assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
    let is_left = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "tmp");
    let entries = std::fs::read_dir(place.path("cache")).unwrap();
    let left = entries.map(|entry| entry.unwrap().path()).find(is_left).unwrap();
    let mut bytes = std::fs::read(&left).unwrap();
    let middle = bytes.len() * 3 / 4; // in the second batch
    bytes[middle] ^= 4;
    File::create(&left).unwrap().write_all(&bytes).unwrap();
    let (cached, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 9000 - 4096, reused: 4096 });
    assert_as_measured(&cached, &place.rows(&encoder));
}

#[test]
fn another_chat_template_has_its_own_cache() {
    let place = Place::new(&[chat("One", "two")]);
    let names = || {
        let files = std::fs::read_dir(place.path("cache")).unwrap();
        files.filter(|file| !is_hidden(&file.as_ref().unwrap().path())).count()
    };
    place.update(&encoder(&max_tokens(6)));
    place.update(&encoder(&max_tokens(1)));
    assert_eq!(names(), 1, "other limits use the same cache");
    let model = place.path("model");
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(golden("models/small-tied")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let template = std::fs::read_to_string(model.join("chat_template.jinja")).unwrap();
    let other = template.replace("user\\n", "human\\n");
    assert_ne!(other, template);
    File::create(model.join("chat_template.jinja")).unwrap().write_all(other.as_bytes()).unwrap();
    place.update(&Arc::new(Encoder::from_folder(&model, &max_tokens(6)).unwrap()));
    assert_eq!(names(), 2);
}

/// The index is read from the cache only if the file's stamp is unchanged, and is the same index.
#[test]
fn a_cached_file_is_opened_without_a_scan_and_a_changed_one_is_scanned_again() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&[]);
    let text = "\u{feff}\n{\"messages\": []}\r\n\n\n".to_owned()
        + &chat("a", "b").to_string()
        + "\n  \n"
        + &chat("c", "d").to_string();
    File::create(place.path("rows.jsonl")).unwrap().write_all(text.as_bytes()).unwrap();
    let open = || {
        let paths = [place.path("rows.jsonl")];
        open_indexed(&paths, None, RowRules::default(), &encoder, &place.path("cache")).unwrap()
    };
    let settled = SystemTime::now() + Duration::from_millis(2100);
    place.update(&encoder);
    let fresh = open();
    while SystemTime::now() < settled {
        std::thread::sleep(Duration::from_millis(50));
    }
    place.update(&encoder); // now the file is old enough for its stamp to be trusted
    let known = open();
    assert!(format!("{fresh:?}").contains("stamp: None"));
    assert!(format!("{known:?}").contains("stamp: Some"));
    assert_eq!((known.len(), known.fingerprint()), (fresh.len(), fresh.fingerprint()));
    for row in 0..known.len() {
        assert_eq!(known.id(row), fresh.id(row));
        assert_eq!(known.read(row).ok(), fresh.read(row).ok());
    }
    let text = text.replace("\"c\"", "\"e\"");
    File::create(place.path("rows.jsonl")).unwrap().write_all(text.as_bytes()).unwrap();
    assert_ne!(open().fingerprint(), known.fingerprint());
}
