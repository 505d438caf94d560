//! Watches all ranks: each sends heartbeats to rank 0, which decides whether a rank is lost or
//! hangs, and ends all ranks with the same error.

mod first;
mod judge;
mod message;
mod other;

use super::watch::Watch;
use super::{DistError, Monitor};
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time between heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which a monitor checks its connections and its own rank.
const TICK: Duration = Duration::from_millis(50);
/// Maximum time in which an error of this rank is sent to the others.
const SEND_ERROR: Duration = Duration::from_secs(3);

/// Runs when an error ends this rank.
type OnFailure = Box<dyn Fn(&DistError) + Send + Sync>;

/// The monitor of a rank. Its thread ends when all ranks have finished, when an error ends them, or
/// when the monitor is dropped.
pub(super) struct TcpMonitor(Arc<Shared>);

/// What the thread and the callers share.
struct Shared {
    watch: Arc<Watch>,
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
    on_failure: OnFailure,
}

#[derive(Default)]
struct State {
    request: Option<Request>,
    /// The thread has ended.
    is_over: bool,
    is_dropped: bool,
}

#[derive(Debug, Clone)]
enum Request {
    Fail(String),
    Finish,
}

impl TcpMonitor {
    /// Starts the thread. `streams`: rank 0 has a connection to each other rank, in their order;
    /// the others have one to rank 0.
    pub(super) fn start(
        rank: usize,
        streams: Vec<TcpStream>,
        timeout: Duration,
        watch: &Arc<Watch>,
        on_failure: OnFailure,
    ) -> Result<Self, DistError> {
        let failed = |error: std::io::Error| DistError::Collective {
            operation: "starting the monitor",
            problem: error.to_string(),
        };
        let (state, changed) = (Mutex::default(), Condvar::new());
        let watch = Arc::clone(watch);
        let shared = Arc::new(Shared { watch, state, changed, timeout, on_failure });
        let run: Box<dyn FnOnce() + Send> = if rank == 0 {
            let first = first::First::new(streams, Arc::clone(&shared)).map_err(failed)?;
            Box::new(|| first.run())
        } else {
            let other = other::Other::new(streams, Arc::clone(&shared)).map_err(failed)?;
            Box::new(|| other.run())
        };
        thread::Builder::new().name("rank-monitor".to_owned()).spawn(run).map_err(failed)?;
        Ok(Self(shared))
    }
}

impl Monitor for TcpMonitor {
    fn report(&self, work: &str) {
        self.0.watch.report(&message::cut(work), false);
    }

    fn wait(&self, work: &str) {
        self.0.watch.report(&message::cut(work), true);
    }

    fn pass_on(&self, stop: Arc<AtomicBool>) {
        self.0.watch.pass_on(stop);
    }

    fn is_stop_requested(&self) -> bool {
        self.0.watch.is_stop_requested()
    }

    fn fail(&self, message: &str) {
        self.0.request(Request::Fail(message::cut(message)), Some(SEND_ERROR));
    }

    fn finish(&self) {
        self.0.request(Request::Finish, None);
    }
}

impl Drop for TcpMonitor {
    fn drop(&mut self) {
        self.0.state().is_dropped = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a request to the thread, and waits until the thread has ended.
    fn request(&self, request: Request, limit: Option<Duration>) {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.state();
        if !state.is_over {
            state.request = Some(request);
        }
        self.changed.notify_all();
        while !state.is_over && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            let waited = self.changed.wait_timeout(state, TICK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn interval(&self) -> Duration {
        INTERVAL.min(self.timeout / 4)
    }

    fn heartbeat(&self) -> message::Message {
        let status = self.watch.status();
        let age_ms = status.since.elapsed().as_millis() as u64;
        let (work, waits) = (status.work, status.waits);
        let (loader_waits, stop) = (self.watch.loader_waits(), self.watch.is_stop_requested());
        message::Message::Heartbeat { work, waits, loader_waits, age_ms, stop }
    }

    /// Ends this rank with an error, unless it ends by itself.
    fn end(&self, error: &DistError) {
        // First, because it may end the process with a message; the lanes return the error too.
        if !matches!(self.state().request, Some(Request::Fail(_))) {
            (self.on_failure)(error);
        }
        self.watch.end(error);
    }
}

/// Sets `is_over` when the thread ends, for whatever reason.
struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.state().is_over = true;
        self.0.changed.notify_all();
    }
}

/// Finds out whether the whole process was stopped for a while, for example by SIGSTOP.
pub(super) struct Clock {
    last: Instant,
    limit: Duration,
}

impl Clock {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { last: Instant::now(), limit: timeout / 2 }
    }

    /// Called at each tick. Returns the time that the process was stopped.
    pub(super) fn stopped(&mut self) -> Option<Duration> {
        let gap = self.last.elapsed();
        self.last = Instant::now();
        Some(gap).filter(|gap| *gap > self.limit)
    }
}
