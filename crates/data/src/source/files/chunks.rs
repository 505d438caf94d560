//! Decoded parts of columnar files, shared by all threads and files of the process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use arrow_array::RecordBatch;

/// Maximum memory of the decoded chunks of all files, in bytes. In addition, each thread that reads
/// may hold a chunk of its own.
const MAX_BYTES: usize = 64 << 20;

/// A file and a number of a chunk in it.
type Key = (u64, usize);
type Slot = Arc<OnceLock<Result<RecordBatch, String>>>;

/// The most recently used chunks.
#[derive(Debug, Default)]
struct Chunks {
    entries: BTreeMap<Key, Entry>,
    bytes: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    slot: Slot,
    bytes: usize,
    last_used: u64,
}

static CHUNKS: LazyLock<Mutex<Chunks>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, Chunks> {
    CHUNKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies an open file in the cache of chunks. Drop releases its chunks.
#[derive(Debug)]
pub(super) struct FileChunks(u64);

impl FileChunks {
    pub(super) fn new() -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        Self(FILES.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns chunk `number`, which one thread decodes if it is not in memory. `memory` returns
    /// the bytes that keeping it takes.
    pub(super) fn get(
        &self,
        number: usize,
        decode: impl FnOnce() -> Result<RecordBatch, String>,
        memory: impl FnOnce(&RecordBatch) -> usize,
    ) -> Result<RecordBatch, String> {
        let key = (self.0, number);
        let slot = lock().slot(key);
        let mut is_new = false;
        let batch = slot.get_or_init(|| {
            is_new = true;
            decode()
        });
        match batch {
            Ok(batch) if is_new => lock().account(key, &slot, memory(batch)),
            Err(_) if is_new => lock().forget(key, &slot), // the next reader tries again
            _ => {}
        }
        batch.clone()
    }
}

impl Drop for FileChunks {
    fn drop(&mut self) {
        let mut chunks = lock();
        let mut rest = chunks.entries.split_off(&(self.0, 0));
        let mut later = rest.split_off(&(self.0 + 1, 0));
        chunks.entries.append(&mut later);
        chunks.bytes -= rest.values().map(|entry| entry.bytes).sum::<usize>();
    }
}

impl Chunks {
    fn slot(&mut self, key: Key) -> Slot {
        self.clock += 1;
        let new = || Entry { slot: Slot::default(), bytes: 0, last_used: 0 };
        let entry = self.entries.entry(key).or_insert_with(new);
        entry.last_used = self.clock;
        entry.slot.clone()
    }

    /// Removes a chunk that cannot be decoded.
    fn forget(&mut self, key: Key, slot: &Slot) {
        if self.entries.get(&key).is_some_and(|entry| Arc::ptr_eq(&entry.slot, slot)) {
            self.entries.remove(&key);
        }
    }

    /// Adds the size of a decoded chunk, and removes the least recently used ones above the limit.
    fn account(&mut self, key: Key, slot: &Slot, bytes: usize) {
        match self.entries.get_mut(&key) {
            Some(entry) if Arc::ptr_eq(&entry.slot, slot) => entry.bytes = bytes,
            _ => return, // removed in the meantime
        }
        self.bytes += bytes;
        while self.bytes > MAX_BYTES {
            let decoded = self.entries.iter().filter(|(_, entry)| entry.bytes > 0);
            let Some(oldest) = decoded.min_by_key(|(_, entry)| entry.last_used) else { break };
            let oldest = *oldest.0;
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_all_files_stay_within_the_limit_and_the_least_recently_used_one_is_removed() {
        let mut chunks = Chunks::default();
        let keep = |chunks: &mut Chunks, file: u64, bytes: usize| {
            let slot = chunks.slot((file, 0));
            chunks.account((file, 0), &slot, bytes);
        };
        for file in 0..4 {
            keep(&mut chunks, file, MAX_BYTES / 4);
        }
        assert_eq!((chunks.bytes, chunks.entries.len()), (MAX_BYTES, 4));
        let _used = chunks.slot((0, 0));
        keep(&mut chunks, 4, 1);
        let files: Vec<u64> = chunks.entries.keys().map(|(file, _)| *file).collect();
        assert_eq!(files, [0, 2, 3, 4]);
        assert_eq!(chunks.bytes, MAX_BYTES / 4 * 3 + 1);
        // not kept: the thread that reads it holds it
        keep(&mut chunks, 5, MAX_BYTES + 1);
        assert_eq!((chunks.bytes, chunks.entries.len()), (0, 0));
    }
}
