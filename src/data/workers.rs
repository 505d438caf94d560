//! A pool that works on rows in parallel and hands the results out in the order of the rows.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::row::Row;

/// How far the pool may run ahead of whoever takes its results.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Threads.
    pub(super) workers: NonZeroUsize,
    /// Rows begun and not taken.
    pub(super) rows: usize,
    /// Bytes of results not taken; each worker may exceed it by the row it is at.
    pub(super) bytes: u64,
}

/// The pool. Dropping it stops and joins its threads.
pub(super) struct Workers<O> {
    shared: Arc<Shared<O>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<O> {
    queue: Mutex<Queue<O>>,
    /// A worker may begin a row, or has to end.
    room: Condvar,
    /// The next result is there, or none will come.
    done: Condvar,
}

struct Queue<O> {
    rows: Box<dyn Iterator<Item = Row> + Send>,
    slots: VecDeque<Slot<O>>, // one for each row begun and not taken, in order
    num_taken: u64,
    bytes: u64,
    phase: Phase,
}

struct Slot<O> {
    row: Row,
    result: Option<(u64, Result<O, String>)>, // with its size in bytes; none while in work
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// All rows are begun.
    Exhausted,
    /// Nobody wants the results.
    Stopped,
    /// A worker has panicked outside of the work on a row, so a result may be missing for ever.
    Broken,
}

impl<O: Send + 'static> Workers<O> {
    /// Begins to work; `size` tells the bytes of a result.
    pub(super) fn start(
        rows: impl Iterator<Item = Row> + Send + 'static,
        work: impl Fn(Row) -> O + Send + Sync + 'static,
        size: fn(&O) -> u64,
        limits: Limits,
    ) -> io::Result<Self> {
        let queue = Queue {
            rows: Box::new(rows),
            slots: VecDeque::new(),
            num_taken: 0,
            bytes: 0,
            phase: Phase::Running,
        };
        let shared =
            Shared { queue: Mutex::new(queue), room: Condvar::new(), done: Condvar::new() };
        let mut pool = Self { shared: Arc::new(shared), threads: Vec::new() };
        let work = Arc::new(work);
        for worker in 0..limits.workers.get() {
            let (shared, work) = (Arc::clone(&pool.shared), Arc::clone(&work));
            let thread =
                thread::Builder::new().name(format!("loader-{worker}")).spawn(move || {
                    let work = || shared.work(&*work, size, limits);
                    if catch_unwind(AssertUnwindSafe(work)).is_err() {
                        shared.end(Phase::Broken);
                    }
                })?; // on error `pool` is dropped
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// The next row and its result, or the message of the panic that it ended in; waits for it.
    /// `None` after the last row, and once stopped.
    pub(super) fn next(&self) -> Option<(Row, Result<O, String>)> {
        let mut queue = self.shared.lock();
        loop {
            match queue.phase {
                Phase::Stopped => return None,
                Phase::Broken => panic!("a worker of the loader panicked"), // not the data's end
                Phase::Running | Phase::Exhausted => {}
            }
            match queue.slots.pop_front() {
                Some(Slot { row, result: Some((bytes, result)) }) => {
                    queue.num_taken += 1;
                    queue.bytes -= bytes;
                    self.shared.room.notify_all();
                    return Some((row, result));
                }
                Some(in_work) => queue.slots.push_front(in_work),
                None if queue.phase == Phase::Exhausted => return None,
                None => {}
            }
            queue = self.shared.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets each worker end after the row it is at, and [`Workers::next`] at once.
    pub(super) fn stop(&self) {
        self.shared.end(Phase::Stopped);
    }
}

impl<O> Drop for Workers<O> {
    fn drop(&mut self) {
        self.shared.end(Phase::Stopped);
        for thread in self.threads.drain(..) {
            // a worker catches the panics of its work, so there is no other to pass on
            let _ = thread.join();
        }
    }
}

impl<O> Shared<O> {
    fn lock(&self) -> MutexGuard<'_, Queue<O>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No row is begun any more; wakes everyone to see it.
    fn end(&self, phase: Phase) {
        self.lock().phase = phase;
        self.room.notify_all();
        self.done.notify_all();
    }

    fn work(&self, work: &impl Fn(Row) -> O, size: fn(&O) -> u64, limits: Limits) {
        while let Some((row, number)) = self.begin(limits) {
            let result = catch_unwind(AssertUnwindSafe(|| work(row)))
                .map_err(|payload| panic_message(&*payload));
            let bytes = result.as_ref().map_or(0, size);
            let mut queue = self.lock();
            let slot = (number - queue.num_taken) as usize;
            queue.slots[slot].result = Some((bytes, result));
            queue.bytes += bytes;
            if slot == 0 {
                self.done.notify_all();
            }
        }
    }

    /// Waits for room, then gives the next row and how many were begun before it.
    ///
    /// Rows are begun in order, so the one that the taker waits for always has room or is in work.
    fn begin(&self, limits: Limits) -> Option<(Row, u64)> {
        let mut queue = self.lock();
        loop {
            if queue.phase != Phase::Running {
                return None;
            }
            if queue.slots.len() < limits.rows.max(1) && queue.bytes < limits.bytes.max(1) {
                let Some(row) = queue.rows.next() else {
                    queue.phase = Phase::Exhausted; // under the same lock: `Stopped` must stay
                    self.room.notify_all();
                    self.done.notify_all();
                    return None;
                };
                let number = queue.num_taken + queue.slots.len() as u64;
                queue.slots.push_back(Slot { row, result: None });
                return Some((row, number));
            }
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What a panic said.
pub(super) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    fn rows(count: u32) -> impl Iterator<Item = Row> + Send {
        (0..count).map(|row| Row { dataset: 0, row })
    }

    fn limits(workers: usize, rows: usize, bytes: u64) -> Limits {
        Limits { workers: NonZeroUsize::new(workers).unwrap(), rows, bytes }
    }

    #[test]
    fn results_come_in_the_order_of_the_rows_however_long_each_takes() {
        let work = |row: Row| {
            thread::sleep(Duration::from_micros(u64::from(row.row * 7919 % 300)));
            row.row
        };
        let pool = Workers::start(rows(200), work, |_| 1, limits(4, 9, u64::MAX)).unwrap();
        let results: Vec<_> =
            std::iter::from_fn(|| pool.next()).map(|(_, result)| result.unwrap()).collect();
        assert_eq!(results, (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn the_pool_runs_ahead_by_its_limits_and_no_further() {
        for (limits, most) in [(limits(2, 5, u64::MAX), 5), (limits(2, 99, 30), 4)] {
            let begun = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&begun);
            let work = move |_| counter.fetch_add(1, Ordering::SeqCst);
            let pool = Workers::start(rows(50), work, |_| 10, limits).unwrap();
            for taken in 0..10 {
                thread::sleep(Duration::from_millis(5));
                assert!(begun.load(Ordering::SeqCst) <= taken + most);
                pool.next().unwrap().1.unwrap();
            }
        }
    }

    #[test]
    fn a_panic_is_the_result_of_its_row_alone() {
        let work = |row: Row| assert_ne!(row.row, 3, "row three");
        let pool = Workers::start(rows(6), work, |()| 0, limits(2, 4, 1)).unwrap();
        let failed: Vec<_> = std::iter::from_fn(|| pool.next())
            .filter_map(|(row, result)| result.err().map(|message| (row.row, message)))
            .collect();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].0, 3);
        assert!(failed[0].1.contains("row three"), "{failed:?}");
    }

    #[test]
    #[should_panic(expected = "a worker of the loader panicked")]
    fn a_panic_outside_of_the_work_on_a_row_is_neither_a_hang_nor_the_end() {
        let rows = rows(6).inspect(|row| assert_ne!(row.row, 3));
        let pool = Workers::start(rows, |_| (), |()| 0, limits(2, 4, 1)).unwrap();
        while pool.next().is_some() {}
    }

    #[test]
    fn a_stopped_pool_gives_nothing_more() {
        let pool = Workers::start(rows(u32::MAX), |_| (), |()| 1, limits(3, 8, 1 << 20)).unwrap();
        pool.next().unwrap().1.unwrap();
        pool.stop();
        assert!(pool.next().is_none());
    }
}
