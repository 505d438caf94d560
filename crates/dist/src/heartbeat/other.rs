//! The monitor of the ranks from 1 on.

use super::message::{MAX, Message};
use super::{Clock, Over, Request, Shared, TICK};
use crate::DistError;
use crate::frame::{Arrival, Inbox};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// The connection to rank 0, and what has arrived there.
pub(super) struct Other {
    stream: TcpStream,
    inbox: Inbox,
    shared: Arc<Shared>,
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
    pub(super) fn new(streams: Vec<TcpStream>, shared: Arc<Shared>) -> io::Result<Self> {
        let stream = streams.into_iter().next();
        let stream = stream.ok_or_else(|| io::Error::other("no connection to rank 0"))?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        let work = "start".to_owned();
        let (inbox, clock) = (Inbox::new(MAX), Clock::new(shared.timeout));
        Ok(Self { stream, inbox, shared, clock, last_beat: Instant::now(), work })
    }

    pub(super) fn run(mut self) {
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
            self.shared.watch.forgive(stopped);
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
                        self.shared.watch.request_stop();
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
