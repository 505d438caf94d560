//! Updates of the length cache that are stopped, concurrent or start from a damaged file: no row
//! gets the length of another, and measured lengths are reused.

use crate::length_cache::{Place, assert_as_measured, chat, encoder, max_tokens, with_image};
use arrow_ipc::reader::FileReader;
use arrow_ipc::writer::FileWriter;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, SystemTime};
use trainer::data::{CacheError, CacheWork, Encoder, LengthCache, RowFile};
use trainer::data::{CachedRows, DataSet, JsonlRows};
use trainer::dist::Rank;

fn file(rows: &JsonlRows) -> &RowFile {
    let DataSet::Chats(file) = &rows.sets()[0] else { panic!("chats") };
    file
}

/// Distinct rows of several lengths.
fn texts(from: usize, count: usize) -> Vec<Value> {
    let row = |i: usize| chat(&format!("{i}"), &"yes ".repeat(i % 7 + 1));
    (from..from + count).map(row).collect()
}

/// Runs a background update that is cancelled after `count` calls of its `go_on`.
fn stopped_after(count: usize, place: &Place, encoder: &Encoder, rows: &JsonlRows) {
    let left = AtomicUsize::new(count);
    let go_on = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
    let done = LengthCache::update_in_background(file(rows), encoder, &place.path("cache"), &go_on);
    assert_eq!(done.unwrap(), None);
}

/// Path of the hidden file in the folder of the cache file `path`, with the suffix `ending`.
fn hidden_file(path: &Path, ending: &str) -> PathBuf {
    path.with_file_name(format!(".{}{ending}", path.file_name().unwrap().to_str().unwrap()))
}

fn touch(path: &Path) {
    thread::sleep(Duration::from_millis(20));
    File::options().append(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
}

fn quick(rows: &Arc<JsonlRows>, place: &Place, most: usize) -> Option<(CachedRows, CacheWork)> {
    CachedRows::update_if_quick(rows.clone(), &place.path("cache"), most, &|_| ()).unwrap()
}

#[test]
fn a_cache_with_a_missing_batch_gives_no_row_the_length_of_another() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 9000));
    let rows = place.rows(&encoder);
    let path = {
        place.update(&encoder);
        place.cache()
    };
    let whole = std::fs::read(&path).unwrap();
    for lacking in 0..3 {
        let reader = FileReader::try_new(std::io::Cursor::new(&whole), None).unwrap();
        let mut writer =
            FileWriter::try_new(File::create(&path).unwrap(), &reader.schema()).unwrap();
        writer.write_metadata("trainer", &reader.custom_metadata()["trainer"]);
        for (at, batch) in reader.enumerate() {
            if at != lacking {
                writer.write(&batch.unwrap()).unwrap();
            }
        }
        writer.finish().unwrap();
        let (cached, work) = place.update(&encoder);
        assert!(work.measured >= 808, "{work:?}");
        assert_as_measured(&cached, &rows);
        let (cached, work) = place.update(&encoder);
        assert_eq!(work, CacheWork { measured: 0, reused: 9000 });
        assert_as_measured(&cached, &rows);
    }
}

#[test]
fn a_stopped_pass_over_changed_images_is_continued_at_its_last_row() {
    let encoder = encoder(&max_tokens(6));
    let row = |i| with_image("a.png", &format!("moon {i}"));
    let place = Place::new(&(0..9000).map(row).collect::<Vec<_>>());
    let rows = place.rows(&encoder);
    place.update(&encoder);
    std::fs::copy(place.path("b.png"), place.path("a.png")).unwrap();
    touch(&place.path("a.png"));
    // Some of these calls are made while image headers of a batch are read.
    stopped_after(3000, &place, &encoder, &rows);
    stopped_after(3000 + 3000, &place, &encoder, &rows);
    let (cached, work) = place.update(&encoder);
    assert!(work.reused > 5900, "{work:?}");
    assert_as_measured(&cached, &rows);
    assert_eq!(place.update(&encoder).1, CacheWork { measured: 0, reused: 9000 });
}

#[test]
fn the_work_of_two_stopped_passes_is_reused() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 7000));
    stopped_after(6000, &place, &encoder, &place.rows(&encoder));
    place.write(&texts(100_000, 7000));
    stopped_after(3000, &place, &encoder, &place.rows(&encoder));
    // Half of the rows of each pass.
    let mut rows = texts(0, 7000);
    rows.truncate(3500);
    rows.extend(texts(100_000, 3500));
    place.write(&rows);
    let (cached, work) = place.update(&encoder);
    assert!(work.reused >= 3500 + 2999, "{work:?}");
    assert_as_measured(&cached, &place.rows(&encoder));
}

#[test]
fn a_quick_update_needs_a_matching_unlocked_cache_and_few_changed_images() {
    let encoder = encoder(&max_tokens(6));
    let mut texts: Vec<Value> = texts(0, 100);
    texts.extend((0..50).map(|i| with_image("a.png", &format!("moon {i}"))));
    let place = Place::new(&texts);
    let rows = place.rows(&encoder);
    assert!(quick(&rows, &place, 999).is_none() && !place.path("cache").exists());
    place.update(&encoder);
    let (cached, work) = quick(&rows, &place, 0).unwrap();
    assert_eq!(work, CacheWork { measured: 0, reused: 150 });
    assert_as_measured(&cached, &rows);
    let lock = File::create(hidden_file(&place.cache(), ".lock")).unwrap();
    lock.lock().unwrap();
    assert!(quick(&rows, &place, 999).is_none());
    drop(lock);
    touch(&place.path("a.png"));
    assert!(quick(&rows, &place, 49).is_none());
    let (cached, work) = quick(&rows, &place, 1).unwrap();
    assert_eq!(work, CacheWork { measured: 1, reused: 149 }, "the others were measured before");
    assert_as_measured(&cached, &rows);
    texts.push(chat("One more", "indeed"));
    place.write(&texts);
    assert!(quick(&place.rows(&encoder), &place, 999).is_none());
}

#[test]
fn a_background_pass_stops_for_a_waiting_process_but_not_for_a_killed_one() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 200));
    let rows = place.rows(&encoder);
    place.update(&encoder);
    let cache = place.cache();
    std::fs::remove_file(&cache).unwrap();
    let wanted = File::create(hidden_file(&cache, ".wanted")).unwrap();
    let calls = AtomicUsize::new(0);
    let waited_for = || {
        if calls.fetch_add(1, Relaxed) == 20 {
            wanted.lock_shared().unwrap();
        }
        true
    };
    let update = |go_on: &(dyn Fn() -> bool + Sync)| {
        LengthCache::update_in_background(file(&rows), &encoder, &place.path("cache"), go_on)
            .unwrap()
    };
    assert_eq!(update(&waited_for), None);
    assert_eq!(calls.load(Relaxed), 21, "it stops at the next row");
    drop(wanted); // as when the process is killed
    let work = update(&|| true).unwrap();
    assert!(work.reused > 0 && work.reused < 100 && work.measured + work.reused == 200, "{work:?}");
}

#[test]
fn a_data_file_that_changes_during_a_pass_gets_no_cache() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 100));
    let rows = place.rows(&encoder);
    let cache = place.path("cache");
    let append = || {
        let mut data = File::options().append(true).open(place.path("rows.jsonl")).unwrap();
        data.write_all(b"\n").is_ok()
    };
    let done = LengthCache::update_in_background(file(&rows), &encoder, &cache, &append);
    assert!(matches!(done, Err(CacheError::DataChanged { .. })), "{done:?}");
    assert!(!LengthCache::exists(file(&rows), &encoder, &cache));
    let (cached, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 0, reused: 100 });
    assert_as_measured(&cached, &place.rows(&encoder));
}

#[test]
fn ranks_measure_their_parts_and_the_cache_is_completed_without_measuring() {
    let place = Place::new(&texts(0, 9000)); // three batches
    let encoder = encoder(&max_tokens(4));
    let rows = place.rows(&encoder);
    let (world, mut done) = (4, 0);
    for rank in 0..world {
        let rank = Rank { rank, world, local_rank: rank, local_world: world };
        let last = AtomicUsize::new(0);
        let report = |rows: u64| last.store(rows as usize, Relaxed);
        CachedRows::measure_part(&rows, &place.path("cache"), rank, &report).unwrap();
        done += last.into_inner();
    }
    assert_eq!(done, 9000);
    let (cached, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 0, reused: 9000 });
    assert_as_measured(&cached, &rows);
    // nothing is left to do for a rank, and no file of a rank remains
    CachedRows::measure_part(&rows, &place.path("cache"), Rank::ALONE, &|_| panic!()).unwrap();
    let names = std::fs::read_dir(place.path("cache")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.contains("rank")));
}
