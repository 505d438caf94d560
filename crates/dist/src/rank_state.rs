//! What this rank is doing, and the error that ends it; shared by its channels and its monitor.

use super::DistError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Clone)]
pub(super) struct Status {
    /// Its last report.
    pub(super) work: String,
    pub(super) waits: bool,
    /// Time of its last progress.
    pub(super) since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    /// The thread that reports to the monitor waits for other ranks.
    Rank,
    /// The loader waits for the loaders of other ranks.
    Loader,
}

/// What this rank is doing, and the error that ends it.
pub(super) struct RankState {
    status: Mutex<Status>,
    loader_waits: AtomicBool,
    /// Another rank has received a request to stop.
    stop: AtomicBool,
    /// Set when this rank receives a request to stop.
    own_stop: Mutex<Option<Arc<AtomicBool>>>,
    end: Mutex<Option<DistError>>,
    ended: Condvar,
    closers: Mutex<Vec<Closer>>,
}

type Closer = Box<dyn Fn() + Send + Sync>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RankState {
    pub(super) fn new() -> Self {
        let status = Status { work: "start".to_owned(), waits: false, since: Instant::now() };
        Self {
            status: Mutex::new(status),
            loader_waits: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            own_stop: Mutex::default(),
            end: Mutex::default(),
            ended: Condvar::new(),
            closers: Mutex::default(),
        }
    }

    pub(super) fn status(&self) -> Status {
        lock(&self.status).clone()
    }

    /// Sets what this rank is doing from now on.
    pub(super) fn report(&self, work: &str, waits: bool) {
        *lock(&self.status) = Status { work: work.to_owned(), waits, since: Instant::now() };
    }

    /// Calls `f`, which waits for other ranks.
    pub(super) fn while_waiting<T>(&self, waits: Waits, f: impl FnOnce() -> T) -> T {
        if waits == Waits::Loader {
            self.loader_waits.store(true, Ordering::Relaxed);
            let result = f();
            self.loader_waits.store(false, Ordering::Relaxed);
            return result;
        }
        let before = self.set_waits(true);
        let result = f();
        self.set_waits(before);
        result
    }

    fn set_waits(&self, waits: bool) -> bool {
        let mut status = lock(&self.status);
        status.since = Instant::now();
        std::mem::replace(&mut status.waits, waits)
    }

    pub(super) fn loader_waits(&self) -> bool {
        self.loader_waits.load(Ordering::Relaxed)
    }

    /// Another rank has received a request to stop.
    pub(super) fn request_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// `stop` is set when this rank receives a request to stop.
    pub(super) fn pass_on(&self, stop: Arc<AtomicBool>) {
        *lock(&self.own_stop) = Some(stop);
    }

    pub(super) fn is_stop_requested(&self) -> bool {
        let own = || lock(&self.own_stop).as_ref().is_some_and(|own| own.load(Ordering::Relaxed));
        self.stop.load(Ordering::Relaxed) || own()
    }

    /// Does not count a time in which the process was stopped.
    pub(super) fn forgive(&self, stopped: Duration) {
        let mut status = lock(&self.status);
        status.since = (status.since + stopped).min(Instant::now());
    }

    /// `close` runs when an error ends this rank.
    pub(super) fn at_end(&self, close: Closer) {
        lock(&self.closers).push(close);
    }

    /// Ends this rank with an error, and closes its channels. Only the first error counts.
    pub(super) fn end(&self, error: &DistError) {
        lock(&self.end).get_or_insert_with(|| error.clone());
        self.ended.notify_all();
        for close in &*lock(&self.closers) {
            close();
        }
    }

    /// The error that ends this rank; waits for it for at most `limit`, or until `stop`.
    pub(super) fn wait_for_end(
        &self,
        limit: Duration,
        stop: impl Fn() -> bool,
    ) -> Option<DistError> {
        let deadline = Instant::now() + limit;
        let mut end = lock(&self.end);
        while end.is_none() && !stop() && Instant::now() < deadline {
            let tick = Duration::from_millis(10);
            end = self.ended.wait_timeout(end, tick).unwrap_or_else(PoisonError::into_inner).0;
        }
        end.clone()
    }
}
