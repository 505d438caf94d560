//! A thread pool that runs jobs in parallel and returns the results in the order of the jobs.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Limits on the results that wait for the consumer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLimits {
    /// Number of threads.
    pub(crate) workers: NonZeroUsize,
    /// Maximum number of jobs started whose results are not taken.
    pub(crate) items: usize,
    /// Maximum bytes of results that are not taken. Each worker may exceed it by one result.
    pub(crate) bytes: u64,
}

/// The pool. Drop stops and joins its threads.
pub(crate) struct Workers<K, J, O> {
    shared: Arc<Shared<K, J, O>>,
    threads: Vec<JoinHandle<()>>,
    slow: Option<Slow<K>>,
}

/// Receives the key of a job for whose result the consumer has waited this long.
type Slow<K> = (Duration, Box<dyn Fn(K) + Send + Sync>);

/// The key of a job and its result, or the message of the panic that ended the work on it.
pub(crate) type JobResult<K, O> = (K, Result<O, String>);

struct Shared<K, J, O> {
    queue: Mutex<Queue<K, J, O>>,
    /// Signals that a worker may start a job, or must end.
    room: Condvar,
    /// Signals that the next result is available, or that none will follow.
    done: Condvar,
}

struct Queue<K, J, O> {
    jobs: Box<dyn Iterator<Item = (K, J)> + Send>,
    fed: VecDeque<(K, J)>,       // jobs after those of `jobs`
    is_fed: bool,                // whether more may be fed
    slots: VecDeque<Slot<K, O>>, // one per job started and not taken, in order
    num_taken: u64,
    bytes: u64,
    is_full: bool, // a worker waits until a result is taken
    phase: Phase,
}

struct Slot<K, O> {
    key: K,
    result: Option<(u64, Result<O, String>)>, // with its bytes; `None` while the job runs
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// All jobs are started.
    Exhausted,
    /// The consumer needs no more results.
    Stopped,
    /// A worker panicked outside of a job, so a result may never be available.
    Broken,
}

impl<K: Copy + Send + 'static, J: Send + 'static, O: Send + 'static> Workers<K, J, O> {
    /// Starts the threads; `size` returns the bytes of a result.
    pub(crate) fn start(
        jobs: impl Iterator<Item = (K, J)> + Send + 'static,
        work: impl Fn(K, J) -> O + Send + Sync + 'static,
        size: fn(&O) -> u64,
        limits: QueueLimits,
    ) -> io::Result<Self> {
        Self::spawn(Box::new(jobs), false, work, size, limits)
    }

    /// [`Workers::start`] for the jobs of [`Workers::feed`].
    pub(crate) fn start_fed(
        work: impl Fn(K, J) -> O + Send + Sync + 'static,
        size: fn(&O) -> u64,
        limits: QueueLimits,
    ) -> io::Result<Self> {
        Self::spawn(Box::new(std::iter::empty()), true, work, size, limits)
    }

    fn spawn(
        jobs: Box<dyn Iterator<Item = (K, J)> + Send>,
        is_fed: bool,
        work: impl Fn(K, J) -> O + Send + Sync + 'static,
        size: fn(&O) -> u64,
        limits: QueueLimits,
    ) -> io::Result<Self> {
        let queue = Queue {
            jobs,
            fed: VecDeque::new(),
            is_fed,
            slots: VecDeque::new(),
            num_taken: 0,
            bytes: 0,
            is_full: false,
            phase: Phase::Running,
        };
        let shared =
            Shared { queue: Mutex::new(queue), room: Condvar::new(), done: Condvar::new() };
        let mut pool = Self { shared: Arc::new(shared), threads: Vec::new(), slow: None };
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

    /// Appends jobs to a pool of [`Workers::start_fed`].
    pub(crate) fn feed(&self, jobs: impl IntoIterator<Item = (K, J)>) {
        self.shared.lock().fed.extend(jobs);
        self.shared.room.notify_all();
    }

    /// Calls `report` once with the key of each job for whose result [`Workers::next`] waits longer
    /// than `limit`.
    pub(crate) fn reporting_slow(
        mut self,
        limit: Duration,
        report: impl Fn(K) + Send + Sync + 'static,
    ) -> Self {
        self.slow = Some((limit, Box::new(report)));
        self
    }

    /// Waits for the next result. `None` after the last job, and after [`Workers::stop`].
    pub(crate) fn next(&self) -> Option<JobResult<K, O>> {
        let mut queue = self.shared.lock();
        let mut slow = self.slow.as_ref();
        loop {
            if let Poll::Ready(result) = self.shared.take(&mut queue) {
                return result;
            }
            let Some((limit, report)) = slow else {
                queue = self.shared.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let waited = self.shared.done.wait_timeout(queue, *limit);
            let (held, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = held;
            let in_work = queue.slots.front().filter(|slot| slot.result.is_none());
            if let Some(key) = in_work.filter(|_| waited.timed_out()).map(|slot| slot.key) {
                slow = None;
                drop(queue);
                report(key);
                queue = self.shared.lock();
            }
        }
    }

    /// [`Workers::next`] without waiting.
    pub(crate) fn try_next(&self) -> Poll<Option<JobResult<K, O>>> {
        self.shared.take(&mut self.shared.lock())
    }

    /// Ends each worker after its current job, and [`Workers::next`] at once.
    pub(crate) fn stop(&self) {
        self.shared.end(Phase::Stopped);
    }
}

impl<K, J, O> Drop for Workers<K, J, O> {
    fn drop(&mut self) {
        self.shared.end(Phase::Stopped);
        for thread in self.threads.drain(..) {
            // workers catch the panics of jobs
            let _ = thread.join();
        }
    }
}

impl<K, J, O> Shared<K, J, O> {
    fn lock(&self) -> MutexGuard<'_, Queue<K, J, O>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts no further job, and wakes all threads.
    fn end(&self, phase: Phase) {
        self.lock().phase = phase;
        self.room.notify_all();
        self.done.notify_all();
    }

    fn take(&self, queue: &mut Queue<K, J, O>) -> Poll<Option<JobResult<K, O>>> {
        match queue.phase {
            Phase::Stopped => return Poll::Ready(None),
            Phase::Broken => panic!("a worker of the loader panicked"), // `None` would look like the end of the data
            Phase::Running | Phase::Exhausted => {}
        }
        match queue.slots.pop_front() {
            Some(Slot { key, result: Some((bytes, result)) }) => {
                queue.num_taken += 1;
                queue.bytes -= bytes;
                if std::mem::take(&mut queue.is_full) {
                    self.room.notify_all();
                }
                return Poll::Ready(Some((key, result)));
            }
            Some(in_work) => queue.slots.push_front(in_work),
            None if queue.phase == Phase::Exhausted => return Poll::Ready(None),
            None => {}
        }
        Poll::Pending
    }
}

impl<K: Copy, J, O> Shared<K, J, O> {
    fn work(&self, work: &impl Fn(K, J) -> O, size: fn(&O) -> u64, limits: QueueLimits) {
        while let Some((key, job, number)) = self.begin(limits) {
            let result = catch_unwind(AssertUnwindSafe(|| work(key, job)))
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

    /// Waits for room, then returns the next job and the number of jobs started before it.
    ///
    /// Jobs are started in order, so the one whose result is taken next has room or is in work.
    fn begin(&self, limits: QueueLimits) -> Option<(K, J, u64)> {
        let mut queue = self.lock();
        loop {
            if queue.phase != Phase::Running {
                return None;
            }
            if queue.slots.len() < limits.items.max(1) && queue.bytes < limits.bytes.max(1) {
                let job = catch_unwind(AssertUnwindSafe(|| queue.jobs.next()));
                let job = job.unwrap_or_else(|panic| {
                    // Under the same lock: another worker would go on with the next item.
                    queue.phase = Phase::Broken;
                    resume_unwind(panic)
                });
                if let Some((key, job)) = job.or_else(|| queue.fed.pop_front()) {
                    let number = queue.num_taken + queue.slots.len() as u64;
                    queue.slots.push_back(Slot { key, result: None });
                    return Some((key, job, number));
                }
                if !queue.is_fed {
                    queue.phase = Phase::Exhausted; // under the same lock: `Stopped` must stay
                    self.room.notify_all();
                    self.done.notify_all();
                    return None;
                }
            } else {
                queue.is_full = true;
            }
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn limits(workers: usize, items: usize, bytes: u64) -> QueueLimits {
        QueueLimits { workers: NonZeroUsize::new(workers).unwrap(), items, bytes }
    }

    fn jobs(num: u32) -> impl Iterator<Item = (u32, ())> {
        (0..num).map(|item| (item, ()))
    }

    #[test]
    fn results_come_in_the_order_of_the_items_however_long_each_takes() {
        let work = |item: u32, ()| {
            thread::sleep(Duration::from_micros(u64::from(item * 7919 % 300)));
            item
        };
        let pool = Workers::start(jobs(200), work, |_| 1, limits(4, 9, u64::MAX)).unwrap();
        let results: Vec<_> =
            std::iter::from_fn(|| pool.next()).map(|(_, result)| result.unwrap()).collect();
        assert_eq!(results, (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn the_pool_runs_ahead_by_its_limits_and_no_further() {
        for (limits, most) in [(limits(2, 5, u64::MAX), 5), (limits(2, 99, 30), 4)] {
            let begun = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&begun);
            let work = move |_, ()| counter.fetch_add(1, Ordering::SeqCst);
            let pool = Workers::start(jobs(50), work, |_| 10, limits).unwrap();
            for taken in 0..10 {
                thread::sleep(Duration::from_millis(5));
                assert!(begun.load(Ordering::SeqCst) <= taken + most);
                pool.next().unwrap().1.unwrap();
            }
        }
    }

    #[test]
    fn a_panic_is_the_result_of_its_item_alone() {
        let work = |item: u32, ()| assert_ne!(item, 3, "item three");
        let pool = Workers::start(jobs(6), work, |()| 0, limits(2, 4, 1)).unwrap();
        let failed: Vec<_> = std::iter::from_fn(|| pool.next())
            .filter_map(|(item, result)| result.err().map(|message| (item, message)))
            .collect();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].0, 3);
        assert!(failed[0].1.contains("item three"), "{failed:?}");
    }

    #[test]
    #[should_panic(expected = "a worker of the loader panicked")]
    fn a_panic_outside_of_the_work_on_an_item_is_neither_a_hang_nor_the_end() {
        let jobs = jobs(6).inspect(|(item, ())| assert_ne!(*item, 3));
        let pool = Workers::start(jobs, |_, ()| (), |()| 0, limits(2, 4, 1)).unwrap();
        while pool.next().is_some() {}
    }

    #[test]
    fn a_stopped_pool_gives_nothing_more() {
        let pool =
            Workers::start(jobs(u32::MAX), |_, ()| (), |()| 1, limits(3, 8, 1 << 20)).unwrap();
        pool.next().unwrap().1.unwrap();
        pool.stop();
        assert!(pool.next().is_none());
    }

    #[test]
    fn a_job_that_takes_long_is_reported_once() {
        let work = |item: u32, ()| {
            thread::sleep(Duration::from_millis(if item == 3 { 900 } else { 0 }));
        };
        let slow = Arc::new(Mutex::new(Vec::new()));
        let report = {
            let slow = Arc::clone(&slow);
            move |item| slow.lock().unwrap().push(item)
        };
        let pool = Workers::start(jobs(6), work, |()| 0, limits(2, 4, 1)).unwrap();
        let pool = pool.reporting_slow(Duration::from_millis(200), report);
        assert_eq!(std::iter::from_fn(|| pool.next()).count(), 6);
        // on a busy machine, others may be slow too
        let slow = slow.lock().unwrap();
        assert_eq!(slow.iter().filter(|item| **item == 3).count(), 1, "{slow:?}");
    }

    #[test]
    fn a_fed_pool_waits_for_more_items_and_keeps_their_order() {
        let pool = Workers::start_fed(|item: u32, ()| item, |_| 1, limits(3, 4, u64::MAX)).unwrap();
        assert!(pool.try_next().is_pending());
        for first in [0, 10, 20] {
            pool.feed((first..first + 10).map(|item| (item, ())));
            for expected in first..first + 10 {
                assert_eq!(pool.next(), Some((expected, Ok(expected))));
            }
            assert!(pool.try_next().is_pending());
        }
        pool.stop();
        assert_eq!(pool.try_next(), Poll::Ready(None));
    }
}
