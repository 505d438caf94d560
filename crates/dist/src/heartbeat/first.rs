//! The monitor of rank 0.

use super::judge::{Seen, judge};
use super::message::{End, MAX, Message};
use super::{Clock, Over, Request, Shared, TICK};
use crate::frame::{self, Arrival, Inbox};
use crate::watch::Watch;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Time in which the other ranks have to read why they end.
const CLOSE: Duration = Duration::from_secs(1);

/// The connections to all other ranks, and what has arrived from them.
pub(super) struct First {
    peers: Vec<Peer>,
    /// Of all ranks.
    seen: Vec<Seen>,
    shared: Arc<Shared>,
}

struct Peer {
    stream: TcpStream,
    inbox: Inbox,
    is_open: bool,
}

impl First {
    pub(super) fn new(streams: Vec<TcpStream>, shared: Arc<Shared>) -> io::Result<Self> {
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

    pub(super) fn run(mut self) {
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
                end = end.or(peer.receive(rank, seen, &self.shared.watch));
            }
        }
        end
    }

    fn forgive(&mut self, stopped: Duration) {
        let now = Instant::now();
        self.shared.watch.forgive(stopped);
        for seen in &mut self.seen {
            seen.last_beat = now;
            seen.since = (seen.since + stopped).min(now);
        }
    }

    fn see_own(&mut self) {
        let status = self.shared.watch.status();
        let own = &mut self.seen[0];
        own.last_beat = Instant::now();
        (own.work, own.waits, own.since) = (status.work, status.waits, status.since);
        own.loader_waits = self.shared.watch.loader_waits();
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
        frame::close(&waits, CLOSE);
    }
}

impl Peer {
    /// Reads what has arrived from this rank. Returns an error that ends all ranks.
    fn receive(&mut self, rank: usize, seen: &mut Seen, watch: &Watch) -> Option<End> {
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
                            watch.request_stop(); // the next heartbeats pass it on
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
