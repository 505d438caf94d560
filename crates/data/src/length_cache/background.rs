//! Updates length caches in the background of a run, for the next start.

use crate::{CacheError, CacheWork, DataSet, JsonlRows, LengthCache};
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// Maximum time that the end of a run waits for the row being measured. If it is exceeded, at most
/// a batch of rows is measured again; the cache file is always complete.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Updates caches on one thread of low priority, until they are complete or this is dropped.
///
/// The run does not depend on it. A failure is logged as one warning.
#[derive(Debug)]
pub struct BackgroundCacheWriter {
    stop: Arc<AtomicBool>,
    ended: Receiver<()>, // closed when the thread ends
}

impl BackgroundCacheWriter {
    /// Starts to update the caches of `rows` in `folder`.
    pub fn start(rows: Arc<JsonlRows>, folder: PathBuf) -> Self {
        let (sender, ended) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let work = move || {
            let _open_until_the_end: Sender<()> = sender;
            set_lowest_priority();
            let go_on = || !stopped.load(Relaxed);
            // a panic is logged with its row
            match catch_unwind(AssertUnwindSafe(|| update(&rows, &folder, &go_on))) {
                Ok(Ok(Some(CacheWork { measured, reused }))) => {
                    tracing::info!(measured, reused, folder = %folder.display(), "the length cache is complete: the next start uses it");
                }
                Ok(Ok(None)) => {
                    tracing::debug!("the length cache is incomplete: the next run continues it");
                }
                Ok(Err(error)) => {
                    tracing::warn!("cannot update the length cache: {}", chain(&error));
                }
                Err(_) => {
                    tracing::warn!("cannot update the length cache: measuring a row panicked");
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("cache".to_owned()).spawn(work) {
            tracing::warn!(%error, "cannot update the length cache");
        }
        Self { stop, ended }
    }
}

impl Drop for BackgroundCacheWriter {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // after the timeout the process may end at any time
        let _ = self.ended.recv_timeout(MAX_WAIT);
    }
}

/// The messages of the error and its causes.
fn chain(error: &dyn Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// `None` if it was cancelled, or if another process is writing a cache.
fn update(
    rows: &JsonlRows,
    folder: &Path,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<CacheWork>, CacheError> {
    let mut work = Some(CacheWork::default());
    for set in rows.sets() {
        let DataSet::Chats(file) = set else { continue };
        if !go_on() {
            return Ok(None);
        }
        let more = LengthCache::update_in_background(file, rows.encoder(), folder, go_on)?;
        work = work.zip(more).map(|(work, more)| CacheWork {
            measured: work.measured + more.measured,
            reused: work.reused + more.reused,
        });
    }
    Ok(work)
}

/// Gives this thread, and those that it starts, the lowest priority.
#[cfg(target_os = "linux")]
fn set_lowest_priority() {
    // on other systems this would affect the whole process; if it fails, the priority is normal
    let _ = rustix::process::nice(19);
}

#[cfg(not(target_os = "linux"))]
fn set_lowest_priority() {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CachedRows, DatasetConfig, Encoder, ImageConfig};
    use std::fs::File;
    use std::io::Write;
    use std::time::Instant;

    fn rows(folder: &Path, count: usize) -> Arc<JsonlRows> {
        let model =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/small-tied");
        let image = ImageConfig { min_pixels: None, max_pixels: None, max_tokens: None };
        let encoder = Arc::new(Encoder::from_folder(&model, &image).unwrap());
        let path = folder.join("rows.jsonl");
        let mut file = File::create(&path).unwrap();
        for row in 0..count {
            let chat = r#"{"role": "user", "content": "Q"}, {"role": "assistant", "content": "#;
            writeln!(file, r#"{{"messages": [{chat}"{row}"}}]}}"#).unwrap();
        }
        Arc::new(JsonlRows::open(&[DatasetConfig::new(path)], encoder).unwrap())
    }

    #[test]
    fn caches_are_built_for_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let (rows, caches) = (rows(folder.path(), 100), folder.path().join("cache"));
        let writer = BackgroundCacheWriter::start(rows.clone(), caches.clone());
        assert!(writer.ended.recv_timeout(Duration::from_mins(1)).is_err());
        assert!(CachedRows::exist(&rows, &caches));
        let (_, work) = CachedRows::update(rows, &caches, &|_| ()).unwrap();
        assert_eq!(work, CacheWork { measured: 0, reused: 100 });
    }

    #[test]
    fn the_end_of_a_run_does_not_wait_for_caches_and_the_next_run_continues() {
        let folder = tempfile::tempdir().unwrap();
        let (rows, caches) = (rows(folder.path(), 100_000), folder.path().join("cache"));
        let writer = BackgroundCacheWriter::start(rows.clone(), caches.clone());
        let has_begun = || std::fs::read_dir(&caches).is_ok_and(|files| files.count() > 0);
        while !has_begun() {
            thread::sleep(Duration::from_millis(1));
        }
        let begin = Instant::now();
        drop(writer);
        // either it was cancelled in time, or the end of the run did not wait for it
        assert!(begin.elapsed() < 2 * MAX_WAIT);
        let is_done = CachedRows::exist(&rows, &caches);
        let (_, work) = CachedRows::update(rows, &caches, &|_| ()).unwrap();
        assert_eq!(work.measured + work.reused, 100_000);
        assert!(work.measured == 0 || !is_done);
    }

    #[test]
    fn a_folder_that_cannot_be_written_fails_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let rows = rows(folder.path(), 3);
        let writer =
            BackgroundCacheWriter::start(rows.clone(), rows.sets()[0].path().join("cache"));
        assert!(writer.ended.recv_timeout(Duration::from_mins(1)).is_err());
    }
}
