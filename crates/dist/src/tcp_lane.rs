//! A lane between processes: every rank has a TCP connection to rank 0.

use super::frame::{self, Arrival, Inbox};
use super::watch::{Waits, Watch};
use super::{DistError, Lane};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Maximum number of bytes of a message.
const MAX_MESSAGE: usize = 1 << 30;
/// While rank 0 waits for a message, it checks the connections of the others at this interval.
const CHECK: Duration = Duration::from_millis(100);
/// Time in which the monitor finds out why a connection was closed. It names the rank that caused
/// it.
const REASON: Duration = Duration::from_secs(1);

/// One end of a lane.
pub(super) struct TcpLane {
    world: usize,
    /// Rank 0: connections to all others, in the order of the ranks. Others: to rank 0.
    link: Arc<Link>,
    inboxes: Vec<Inbox>,
    is_first: bool,
    /// Which thread waits in this lane.
    waits: Waits,
    watch: Arc<Watch>,
}

struct Link {
    streams: Vec<TcpStream>,
    is_closed: AtomicBool,
}

impl Link {
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both); // fails if the other end has closed it
        }
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }
}

impl TcpLane {
    /// A lane over connections of [`super::rendezvous`].
    pub(super) fn new(
        (rank, world): (usize, usize),
        streams: Vec<TcpStream>,
        waits: Waits,
        watch: &Arc<Watch>,
    ) -> Result<Self, DistError> {
        let is_first = rank == 0;
        for stream in &streams {
            stream.set_read_timeout(is_first.then_some(CHECK)).map_err(|error| {
                let (operation, problem) = ("setting up a connection", error.to_string());
                DistError::Collective { operation, problem }
            })?;
        }
        let limit = if is_first { MAX_MESSAGE } else { (MAX_MESSAGE + 8) * world };
        let inboxes = streams.iter().map(|_| Inbox::new(limit)).collect();
        let link = Arc::new(Link { streams, is_closed: AtomicBool::new(false) });
        let lane = Self { world, link, inboxes, is_first, waits, watch: Arc::clone(watch) };
        watch.at_end(lane.closer());
        Ok(lane)
    }

    /// The rank at the other end of a connection.
    fn rank_of(&self, index: usize) -> usize {
        if self.is_first { index + 1 } else { 0 }
    }

    /// The error after the connection `index` has ended.
    fn ended(&self, index: usize, problem: String) -> DistError {
        let closed = || self.link.is_closed();
        match self.watch.wait_for_end(REASON, closed) {
            Some(error) => error,
            None if closed() => DistError::Closed,
            None => DistError::Lost { rank: self.rank_of(index), problem },
        }
    }

    fn receive(&mut self, index: usize) -> Result<Vec<u8>, DistError> {
        loop {
            let rank = self.rank_of(index);
            let next = self.inboxes[index].next();
            if let Some(message) = next.map_err(|problem| DistError::Message { rank, problem })? {
                return Ok(message);
            }
            match self.inboxes[index].read(&self.link.streams[index]) {
                Arrival::Bytes => {}
                Arrival::Nothing => self.check_after(index)?,
                Arrival::Closed(problem) => return Err(self.ended(index, problem)),
            }
        }
    }

    /// Returns an error if a rank whose message is still missing has closed its connection.
    fn check_after(&self, index: usize) -> Result<(), DistError> {
        for other in index + 1..self.link.streams.len() {
            if frame::is_closed(&self.link.streams[other]) {
                return Err(self.ended(other, frame::CLOSED.to_owned()));
            }
        }
        Ok(())
    }

    fn exchange(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
        if !self.is_first {
            let sent = frame::send(&self.link.streams[0], &message);
            sent.map_err(|problem| self.ended(0, problem))?;
            let messages = frame::separate(&self.receive(0)?);
            return messages.filter(|messages| messages.len() == self.world).ok_or_else(|| {
                let problem = "it does not consist of one message per rank".to_owned();
                DistError::Message { rank: 0, problem }
            });
        }
        let mut messages = vec![message];
        for index in 0..self.link.streams.len() {
            messages.push(self.receive(index)?);
        }
        let mut all = Vec::new();
        for message in &messages {
            frame::append(&mut all, message);
        }
        let mut reply = Vec::with_capacity(all.len() + 8);
        frame::append(&mut reply, &all);
        for (index, mut stream) in self.link.streams.iter().enumerate() {
            let sent = stream.write_all(&reply);
            sent.map_err(|error| self.ended(index, frame::problem(&error)))?;
        }
        Ok(messages)
    }
}

impl Lane for TcpLane {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
        if message.len() > MAX_MESSAGE {
            let problem = format!("a message of {} bytes is above {MAX_MESSAGE}", message.len());
            return Err(DistError::Collective { operation: "an exchange of messages", problem });
        }
        let (watch, waits) = (Arc::clone(&self.watch), self.waits);
        watch.while_waiting(waits, || self.exchange(message))
    }

    fn closer(&self) -> Box<dyn Fn() + Send + Sync> {
        let link = Arc::clone(&self.link);
        Box::new(move || link.close())
    }
}

impl Drop for TcpLane {
    fn drop(&mut self) {
        self.link.close();
    }
}
