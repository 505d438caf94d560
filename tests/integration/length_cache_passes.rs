//! Updates of the length cache that are stopped, concurrent or start from a damaged file: no row
//! gets the length of another, and measured lengths are reused.

use crate::length_cache::{Place, assert_as_measured, chat, encoder, max_tokens, with_image};
use arrow_ipc::reader::FileReader;
use arrow_ipc::writer::FileWriter;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, SystemTime};
use trainer::data::{CacheError, CacheWork, CachedRows, Encoder};
use trainer::dist::Rank;

/// Distinct rows of several lengths.
fn texts(from: usize, count: usize) -> Vec<Value> {
    let row = |i: usize| chat(&format!("{i}"), &"yes ".repeat(i % 7 + 1));
    (from..from + count).map(row).collect()
}

/// Updates the cache until `rows` rows are done, as if the process was killed then.
fn killed_after(rows: u64, place: &Place, encoder: &Arc<Encoder>) {
    let progress = |done| assert!(done < rows, "killed");
    let update =
        || CachedRows::update(place.rows(encoder), &place.path("cache"), &progress).map(drop);
    assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
}

/// Path of the hidden file in the folder of the cache file `path`, with the suffix `ending`.
fn hidden_file(path: &Path, ending: &str) -> PathBuf {
    path.with_file_name(format!(".{}{ending}", path.file_name().unwrap().to_str().unwrap()))
}

fn touch(path: &Path) {
    thread::sleep(Duration::from_millis(20));
    File::options().append(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
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
fn a_killed_pass_over_changed_images_is_continued_after_its_last_batch() {
    let encoder = encoder(&max_tokens(6));
    let row = |i| with_image("a.png", &format!("moon {i}"));
    let place = Place::new(&(0..9000).map(row).collect::<Vec<_>>());
    let rows = place.rows(&encoder);
    place.update(&encoder);
    std::fs::copy(place.path("b.png"), place.path("a.png")).unwrap();
    touch(&place.path("a.png"));
    killed_after(1, &place, &encoder);
    killed_after(8000, &place, &encoder);
    let (cached, work) = place.update(&encoder);
    assert!(work.reused >= 2 * 4096 && work.measured > 0, "{work:?}");
    assert_as_measured(&cached, &rows);
    assert_eq!(place.update(&encoder).1, CacheWork { measured: 0, reused: 9000 });
}

#[test]
fn the_work_of_two_killed_passes_is_reused() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 7000));
    killed_after(1, &place, &encoder);
    place.write(&texts(100_000, 7000));
    killed_after(1, &place, &encoder);
    // Half of the rows of each pass.
    let mut rows = texts(0, 7000);
    rows.truncate(3500);
    rows.extend(texts(100_000, 3500));
    place.write(&rows);
    let (cached, work) = place.update(&encoder);
    assert_eq!(work, CacheWork { measured: 0, reused: 7000 });
    assert_as_measured(&cached, &place.rows(&encoder));
}

#[test]
fn an_update_waits_for_the_process_that_writes_and_takes_its_rows() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 200));
    place.update(&encoder);
    let lock = File::create(hidden_file(&place.cache(), ".lock")).unwrap();
    lock.lock().unwrap();
    thread::scope(|scope| {
        let update = scope.spawn(|| place.update(&encoder).1);
        thread::sleep(Duration::from_millis(100));
        assert!(!update.is_finished());
        drop(lock);
        assert_eq!(update.join().unwrap(), CacheWork { measured: 0, reused: 200 });
    });
}

#[test]
fn a_data_file_that_changes_during_a_pass_gets_no_cache() {
    let encoder = encoder(&max_tokens(6));
    let place = Place::new(&texts(0, 100));
    let append = |_| {
        let mut data = File::options().append(true).open(place.path("rows.jsonl")).unwrap();
        data.write_all(b"\n").unwrap();
    };
    let done = CachedRows::update(place.rows(&encoder), &place.path("cache"), &append).map(drop);
    assert!(matches!(done, Err(CacheError::DataChanged { .. })), "{done:?}");
    let names = std::fs::read_dir(place.path("cache")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| name.starts_with('.')), "no cache is complete");
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
