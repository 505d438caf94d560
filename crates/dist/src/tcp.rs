//! A channel between processes: every rank has a TCP connection to rank 0. On a connection, the
//! length of a message (eight bytes, little endian) comes before it.

use super::rank_state::{RankState, Waits};
use super::{Channel, DistError};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of bytes of a message.
const MAX_MESSAGE: usize = 1 << 30;
/// While rank 0 waits for a message, it checks the connections of the others at this interval.
const CHECK: Duration = Duration::from_millis(100);
/// Time in which the monitor finds out why a connection was closed. It names the rank that caused
/// it.
const REASON: Duration = Duration::from_secs(1);

/// One end of a channel.
pub(super) struct TcpChannel {
    world: usize,
    /// Rank 0: connections to all others, in the order of the ranks. Others: to rank 0.
    sockets: Arc<Sockets>,
    inboxes: Vec<Inbox>,
    is_first: bool,
    /// Which thread waits in this channel.
    waits: Waits,
    rank_state: Arc<RankState>,
}

struct Sockets {
    streams: Vec<TcpStream>,
    is_closed: AtomicBool,
}

impl Sockets {
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

impl TcpChannel {
    /// A channel over connections of [`super::rendezvous`].
    pub(super) fn new(
        (rank, world): (usize, usize),
        streams: Vec<TcpStream>,
        waits: Waits,
        rank_state: &Arc<RankState>,
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
        let sockets = Arc::new(Sockets { streams, is_closed: AtomicBool::new(false) });
        let channel =
            Self { world, sockets, inboxes, is_first, waits, rank_state: Arc::clone(rank_state) };
        rank_state.at_end(channel.closer());
        Ok(channel)
    }

    /// The rank at the other end of a connection.
    fn rank_of(&self, index: usize) -> usize {
        if self.is_first { index + 1 } else { 0 }
    }

    /// The error after the connection `index` has ended.
    fn ended(&self, index: usize, problem: String) -> DistError {
        let closed = || self.sockets.is_closed();
        match self.rank_state.wait_for_end(REASON, closed) {
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
            match self.inboxes[index].read(&self.sockets.streams[index]) {
                Arrival::Bytes => {}
                Arrival::Nothing => self.check_after(index)?,
                Arrival::Closed(problem) => return Err(self.ended(index, problem)),
            }
        }
    }

    /// Returns an error if a rank whose message is still missing has closed its connection.
    fn check_after(&self, index: usize) -> Result<(), DistError> {
        for other in index + 1..self.sockets.streams.len() {
            if is_closed(&self.sockets.streams[other]) {
                return Err(self.ended(other, CLOSED.to_owned()));
            }
        }
        Ok(())
    }

    fn exchange(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
        if !self.is_first {
            let sent = send(&self.sockets.streams[0], &message);
            sent.map_err(|problem| self.ended(0, problem))?;
            let messages = separate(&self.receive(0)?);
            return messages.filter(|messages| messages.len() == self.world).ok_or_else(|| {
                let problem = "it does not consist of one message per rank".to_owned();
                DistError::Message { rank: 0, problem }
            });
        }
        let mut messages = vec![message];
        for index in 0..self.sockets.streams.len() {
            messages.push(self.receive(index)?);
        }
        let mut all = Vec::new();
        for message in &messages {
            append(&mut all, message);
        }
        let mut reply = Vec::with_capacity(all.len() + 8);
        append(&mut reply, &all);
        for (index, mut stream) in self.sockets.streams.iter().enumerate() {
            let sent = stream.write_all(&reply);
            sent.map_err(|error| self.ended(index, problem(&error)))?;
        }
        Ok(messages)
    }
}

impl Channel for TcpChannel {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
        if message.len() > MAX_MESSAGE {
            let problem = format!("a message of {} bytes is above {MAX_MESSAGE}", message.len());
            return Err(DistError::Collective { operation: "an exchange of messages", problem });
        }
        let (rank_state, waits) = (Arc::clone(&self.rank_state), self.waits);
        rank_state.while_waiting(waits, || self.exchange(message))
    }

    fn closer(&self) -> Box<dyn Fn() + Send + Sync> {
        let sockets = Arc::clone(&self.sockets);
        Box::new(move || sockets.close())
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        self.sockets.close();
    }
}

/// Bytes of the length.
const HEADER: usize = 8;
/// Maximum number of bytes that are read at a time.
const PART: usize = 1 << 16;

/// Appends a message to `bytes`, with its length.
pub(super) fn append(bytes: &mut Vec<u8>, message: &[u8]) {
    bytes.extend((message.len() as u64).to_le_bytes());
    bytes.extend(message);
}

/// Separates messages that [`append`] has joined.
fn separate(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let len = usize::try_from(u64::from_le_bytes(*header)).ok()?;
        let (message, rest) = rest.split_at_checked(len)?;
        messages.push(message.to_vec());
        bytes = rest;
    }
    Some(messages)
}

pub(super) fn send(mut stream: &TcpStream, message: &[u8]) -> Result<(), String> {
    let mut bytes = Vec::with_capacity(HEADER + message.len());
    append(&mut bytes, message);
    stream.write_all(&bytes).map_err(|error| problem(&error))
}

/// What a user reads about a connection whose other end has ended.
const CLOSED: &str = "its connection was closed";

pub(super) fn problem(error: &Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
            CLOSED.to_owned()
        }
        _ => error.to_string(),
    }
}

/// Messages of one connection that arrive in pieces.
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Maximum number of bytes of a message.
    limit: usize,
}

/// Result of reading from a connection once.
pub(super) enum Arrival {
    /// Some bytes.
    Bytes,
    /// No bytes within the time-out of the connection.
    Nothing,
    /// The connection is closed, for this reason.
    Closed(String),
}

impl Inbox {
    pub(super) fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit }
    }

    pub(super) fn read(&mut self, mut stream: &TcpStream) -> Arrival {
        let old = self.bytes.len();
        self.bytes.resize(old + PART, 0);
        let result = stream.read(&mut self.bytes[old..]);
        self.bytes.truncate(old + result.as_ref().map_or(0, |read| *read));
        match result {
            Ok(0) => Arrival::Closed(CLOSED.to_owned()),
            Ok(_) => Arrival::Bytes,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                    Arrival::Nothing
                }
                _ => Arrival::Closed(problem(&error)),
            },
        }
    }

    /// Takes out the first message, if it is complete.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let len = u64::from_le_bytes(*header);
        let fits = usize::try_from(len).ok().filter(|len| *len <= self.limit);
        let Some(len) = fits else {
            return Err(format!("its length is {len} bytes, the limit is {}", self.limit));
        };
        if rest.len() < len {
            return Ok(None);
        }
        let rest = self.bytes.split_off(HEADER + len);
        let mut message = std::mem::replace(&mut self.bytes, rest);
        message.drain(..HEADER);
        Ok(Some(message))
    }
}

/// Whether the other end has closed the connection and everything that it sent was read.
pub(super) fn is_closed(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let closed = match stream.peek(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    };
    closed || stream.set_nonblocking(false).is_err()
}

/// Ends connections so that the other ends can read everything that was sent to them: a connection
/// that is closed while received bytes are unread is reset, which deletes sent bytes.
pub(super) fn close(streams: &[&TcpStream], limit: Duration) {
    let deadline = Instant::now() + limit;
    for stream in streams {
        let _ = stream.shutdown(Shutdown::Write); // fails if the connection is already closed
    }
    let mut open: Vec<&&TcpStream> =
        streams.iter().filter(|stream| stream.set_nonblocking(true).is_ok()).collect();
    let mut unread = [0; 4096];
    while !open.is_empty() && Instant::now() < deadline {
        open.retain(|stream| {
            let mut stream: &TcpStream = stream;
            match stream.read(&mut unread) {
                Ok(read) => read > 0,
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            }
        });
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (to, listener.accept().unwrap().0)
    }

    fn next(inbox: &mut Inbox, stream: &TcpStream) -> Result<Vec<u8>, String> {
        loop {
            if let Some(message) = inbox.next()? {
                return Ok(message);
            }
            if let Arrival::Closed(problem) = inbox.read(stream) {
                return Err(problem);
            }
        }
    }

    #[test]
    fn messages_that_arrive_in_pieces_are_complete() {
        let (mut to, from) = pair();
        let messages = [vec![], vec![1], vec![2; 70_000], vec![3, 4]];
        let mut bytes = Vec::new();
        for message in &messages {
            append(&mut bytes, message);
        }
        assert_eq!(separate(&bytes).unwrap(), messages);
        let sender = thread::spawn(move || {
            for part in bytes.chunks(999) {
                to.write_all(part).unwrap();
            }
        });
        let mut inbox = Inbox::new(70_000);
        for message in &messages {
            assert_eq!(&next(&mut inbox, &from).unwrap(), message);
        }
        assert_eq!(next(&mut inbox, &from).unwrap_err(), "its connection was closed");
        sender.join().unwrap();
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_the_message_is_read() {
        let (to, from) = pair();
        send(&to, &[0; 11]).unwrap();
        let error = next(&mut Inbox::new(10), &from).unwrap_err();
        assert_eq!(error, "its length is 11 bytes, the limit is 10");
        for cut in ["\0", "\u{1}\0\0\0\0\0\0\0", "\u{7f}\0\0\0\0\0\0\u{7f}abc"] {
            assert_eq!(separate(cut.as_bytes()), None, "{cut:?}");
        }
    }

    #[test]
    fn closing_with_unread_bytes_keeps_the_last_message() {
        let (to, from) = pair();
        send(&from, &[5; 3000]).unwrap(); // never read
        send(&to, b"last").unwrap();
        let closing = thread::spawn(move || close(&[&to], Duration::from_secs(10)));
        thread::sleep(Duration::from_millis(20));
        send(&from, &[6; 3000]).unwrap();
        assert_eq!(next(&mut Inbox::new(100), &from).unwrap(), b"last");
        drop(from);
        closing.join().unwrap();
    }
}
