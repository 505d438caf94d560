//! Watches all ranks: each sends heartbeats to rank 0, which decides whether a rank is lost or
//! hangs, and ends all ranks with the same error.

mod verdict;

use super::rank_state::RankState;
use super::{DistError, Monitor};
use crate::tcp::{self, Arrival, Inbox};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use verdict::{End, MAX, Message, Seen, cut, judge};

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
pub(super) struct TcpMonitor(Arc<MonitorShared>);

/// What the thread and the callers share.
struct MonitorShared {
    rank_state: Arc<RankState>,
    state: Mutex<MonitorState>,
    changed: Condvar,
    timeout: Duration,
    on_failure: OnFailure,
}

#[derive(Default)]
struct MonitorState {
    request: Option<Request>,
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
        rank_state: &Arc<RankState>,
        on_failure: OnFailure,
    ) -> Result<Self, DistError> {
        let failed = |error: std::io::Error| DistError::Collective {
            operation: "starting the monitor",
            problem: error.to_string(),
        };
        let (state, changed) = (Mutex::default(), Condvar::new());
        let rank_state = Arc::clone(rank_state);
        let shared = Arc::new(MonitorShared { rank_state, state, changed, timeout, on_failure });
        let run: Box<dyn FnOnce() + Send> = if rank == 0 {
            let first = First::new(streams, Arc::clone(&shared)).map_err(failed)?;
            Box::new(|| first.run())
        } else {
            let other = Other::new(streams, Arc::clone(&shared)).map_err(failed)?;
            Box::new(|| other.run())
        };
        thread::Builder::new().name("rank-monitor".to_owned()).spawn(run).map_err(failed)?;
        Ok(Self(shared))
    }
}

impl Monitor for TcpMonitor {
    fn report(&self, work: &str) {
        self.0.rank_state.report(&cut(work), false);
    }

    fn wait(&self, work: &str) {
        self.0.rank_state.report(&cut(work), true);
    }

    fn pass_on(&self, stop: Arc<AtomicBool>) {
        self.0.rank_state.pass_on(stop);
    }

    fn is_stop_requested(&self) -> bool {
        self.0.rank_state.is_stop_requested()
    }

    fn fail(&self, message: &str) {
        self.0.request(Request::Fail(cut(message)), Some(SEND_ERROR));
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

impl MonitorShared {
    fn state(&self) -> MutexGuard<'_, MonitorState> {
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

    fn heartbeat(&self) -> Message {
        let status = self.rank_state.status();
        let age_ms = status.since.elapsed().as_millis() as u64;
        let (work, waits) = (status.work, status.waits);
        let (loader_waits, stop) =
            (self.rank_state.loader_waits(), self.rank_state.is_stop_requested());
        Message::Heartbeat { work, waits, loader_waits, age_ms, stop }
    }

    /// Ends this rank with an error, unless it ends by itself.
    fn end(&self, error: &DistError) {
        // First, because it may end the process with a message; the channels return the error too.
        if !matches!(self.state().request, Some(Request::Fail(_))) {
            (self.on_failure)(error);
        }
        self.rank_state.end(error);
    }
}

/// Sets `is_over` when the thread ends, for whatever reason.
struct Over(Arc<MonitorShared>);

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

/// Time in which the other ranks have to read why they end.
const CLOSE: Duration = Duration::from_secs(1);

/// The connections to all other ranks, and what has arrived from them.
struct First {
    peers: Vec<Peer>,
    /// Of all ranks.
    seen: Vec<Seen>,
    shared: Arc<MonitorShared>,
}

struct Peer {
    stream: TcpStream,
    inbox: Inbox,
    is_open: bool,
}

impl First {
    fn new(streams: Vec<TcpStream>, shared: Arc<MonitorShared>) -> io::Result<Self> {
        let peer = |stream: TcpStream| {
            stream.set_nonblocking(true)?;
            Ok(Peer { stream, inbox: Inbox::new(MAX), is_open: true })
        };
        let peers: Vec<Peer> = streams.into_iter().map(peer).collect::<io::Result<_>>()?;
        let now = Instant::now();
        let work = "start".to_owned();
        let start = Seen {
            loader_waits: false,
            last_beat: now,
            work,
            waits: false,
            since: now,
            is_finished: false,
        };
        let seen = vec![start; peers.len() + 1];
        Ok(Self { peers, seen, shared })
    }

    fn run(mut self) {
        let _over = Over(Arc::clone(&self.shared));
        let mut clock = Clock::new(self.shared.timeout);
        let mut sent: Option<Instant> = None;
        loop {
            let (request, is_dropped) = self.next_tick();
            if is_dropped {
                return; // the others find their connections closed
            }
            let mut end = self.receive();
            if let Some(stopped) = clock.stopped() {
                self.forgive(stopped);
            }
            match request {
                Some(Request::Fail(message)) => {
                    end = end.or(Some(End::Failed { rank: 0, message }));
                }
                Some(Request::Finish) => self.seen[0].is_finished = true,
                None => {}
            }
            self.see_own();
            let all_finished = self.seen.iter().all(|seen| seen.is_finished);
            if end.is_none() && all_finished {
                self.close(&Message::AllFinished);
                return;
            }
            let end = end.or_else(|| judge(&self.seen, Instant::now(), self.shared.timeout));
            if let Some(end) = end {
                let message = Message::End(end);
                self.close(&message);
                if let Message::End(end) = message {
                    self.shared.end(&end.into());
                }
                return;
            }
            if sent.is_none_or(|sent| sent.elapsed() >= self.shared.interval()) {
                let heartbeat = self.shared.heartbeat();
                let open = self.peers.iter().filter(|peer| peer.is_open);
                open.for_each(|peer| heartbeat.send(&peer.stream));
                sent = Some(Instant::now());
            }
        }
    }

    /// Waits for the next tick, or for a request.
    fn next_tick(&self) -> (Option<Request>, bool) {
        let state = self.shared.state();
        let waited = self.shared.changed.wait_timeout(state, TICK);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        (state.request.clone(), state.is_dropped)
    }

    /// Reads what has arrived from all ranks. Returns the first error that ends them.
    fn receive(&mut self) -> Option<End> {
        let mut end = None;
        for (peer, (rank, seen)) in self.peers.iter_mut().zip((1..).zip(&mut self.seen[1..])) {
            if peer.is_open {
                end = end.or(peer.receive(rank, seen, &self.shared.rank_state));
            }
        }
        end
    }

    fn forgive(&mut self, stopped: Duration) {
        let now = Instant::now();
        self.shared.rank_state.forgive(stopped);
        for seen in &mut self.seen {
            seen.last_beat = now;
            seen.since = (seen.since + stopped).min(now);
        }
    }

    fn see_own(&mut self) {
        let status = self.shared.rank_state.status();
        let own = &mut self.seen[0];
        own.last_beat = Instant::now();
        (own.work, own.waits, own.since) = (status.work, status.waits, status.since);
        own.loader_waits = self.shared.rank_state.loader_waits();
    }

    /// Sends the last message to all ranks, and waits until they have received it, except a rank
    /// that is lost.
    fn close(&self, message: &Message) {
        let lost = match message {
            Message::End(End::Lost { rank, .. }) => Some(*rank),
            _ => None,
        };
        let mut waits = Vec::new();
        for (rank, peer) in (1..).zip(&self.peers).filter(|(_, peer)| peer.is_open) {
            message.send(&peer.stream);
            if lost != Some(rank) {
                waits.push(&peer.stream);
            }
        }
        tcp::close(&waits, CLOSE);
    }
}

impl Peer {
    /// Reads what has arrived from this rank. Returns an error that ends all ranks.
    fn receive(&mut self, rank: usize, seen: &mut Seen, rank_state: &RankState) -> Option<End> {
        let lost = |seen: &Seen, problem: &str| {
            let problem = format!("{problem}; its last work is `{}`", seen.work);
            Some(End::Lost { rank, problem })
        };
        loop {
            let arrival = self.inbox.read(&self.stream);
            loop {
                let message = match self.inbox.next() {
                    Ok(Some(message)) => serde_json::from_slice(&message),
                    Ok(None) => break,
                    Err(problem) => return lost(seen, &problem),
                };
                seen.last_beat = Instant::now();
                match message {
                    Ok(Message::Heartbeat { work, waits, loader_waits, age_ms, stop }) => {
                        if stop {
                            rank_state.request_stop(); // the next heartbeats pass it on
                        }
                        let age = Duration::from_millis(age_ms);
                        let since = seen.last_beat.checked_sub(age).unwrap_or(seen.last_beat);
                        (seen.work, seen.waits, seen.since) = (work, waits, since);
                        seen.loader_waits = loader_waits;
                    }
                    Ok(Message::Fail(message)) => return Some(End::Failed { rank, message }),
                    Ok(Message::Finish) => seen.is_finished = true,
                    Ok(Message::AllFinished | Message::End(_)) => {} // only sent by rank 0
                    Err(error) => return lost(seen, &error.to_string()),
                }
            }
            match arrival {
                Arrival::Bytes => {}
                Arrival::Nothing => return None,
                Arrival::Closed(problem) => {
                    self.is_open = false;
                    return if seen.is_finished { None } else { lost(seen, &problem) };
                }
            }
        }
    }
}

/// The connection to rank 0, and what has arrived there.
struct Other {
    stream: TcpStream,
    inbox: Inbox,
    shared: Arc<MonitorShared>,
    clock: Clock,
    /// Time of the last message of rank 0, and its work.
    last_beat: Instant,
    work: String,
}

/// What a message means for this rank.
enum Next {
    Continue,
    Finished,
    End(DistError),
}

impl Other {
    fn new(streams: Vec<TcpStream>, shared: Arc<MonitorShared>) -> io::Result<Self> {
        let stream = streams.into_iter().next();
        let stream = stream.ok_or_else(|| io::Error::other("no connection to rank 0"))?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        let work = "start".to_owned();
        let (inbox, clock) = (Inbox::new(MAX), Clock::new(shared.timeout));
        Ok(Self { stream, inbox, shared, clock, last_beat: Instant::now(), work })
    }

    fn run(mut self) {
        let _over = Over(Arc::clone(&self.shared));
        let mut sent: Option<Instant> = None;
        let (mut has_failed, mut has_finished) = (false, false);
        loop {
            let (request, is_dropped) = {
                let state = self.shared.state();
                (state.request.clone(), state.is_dropped)
            };
            if is_dropped {
                return; // rank 0 finds the connection closed
            }
            match request {
                Some(Request::Fail(message)) if !has_failed => {
                    Message::Fail(message).send(&self.stream);
                    has_failed = true;
                }
                Some(Request::Finish) if !has_finished => {
                    Message::Finish.send(&self.stream);
                    has_finished = true;
                }
                _ => {}
            }
            if sent.is_none_or(|sent| sent.elapsed() >= self.shared.interval()) {
                self.shared.heartbeat().send(&self.stream);
                sent = Some(Instant::now());
            }
            match self.receive() {
                Next::Continue => {}
                Next::Finished => return,
                Next::End(error) => {
                    // Rank 0 waits until the connection is closed, so that the error arrives.
                    let _ = self.stream.shutdown(Shutdown::Both);
                    self.shared.end(&error);
                    return;
                }
            }
        }
    }

    fn receive(&mut self) -> Next {
        let arrival = self.inbox.read(&self.stream);
        // After the read, which waits: a process is usually stopped there.
        if let Some(stopped) = self.clock.stopped() {
            self.last_beat = Instant::now();
            self.shared.rank_state.forgive(stopped);
        }
        loop {
            let message = match self.inbox.next() {
                Ok(Some(message)) => serde_json::from_slice(&message),
                Ok(None) => break,
                Err(problem) => return Next::End(DistError::Message { rank: 0, problem }),
            };
            self.last_beat = Instant::now();
            match message {
                Ok(Message::Heartbeat { work, stop, .. }) => {
                    self.work = work;
                    if stop {
                        self.shared.rank_state.request_stop();
                    }
                }
                Ok(Message::AllFinished) => return Next::Finished,
                Ok(Message::End(end)) => return Next::End(end.into()),
                Ok(Message::Fail(_) | Message::Finish) => {} // only sent to rank 0
                Err(error) => {
                    let problem = error.to_string();
                    return Next::End(DistError::Message { rank: 0, problem });
                }
            }
        }
        let lost = |problem: String| {
            let problem = format!("{problem}; its last work is `{}`", self.work);
            Next::End(DistError::Lost { rank: 0, problem })
        };
        match arrival {
            Arrival::Closed(problem) => lost(problem),
            _ if self.last_beat.elapsed() > self.shared.timeout => {
                lost(format!("no heartbeat for {} s", self.shared.timeout.as_secs()))
            }
            _ => Next::Continue,
        }
    }
}
