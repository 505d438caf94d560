//! Messages on TCP connections: eight bytes with the length (little endian), then the message.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

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
pub(super) fn separate(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
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

/// Sends a message.
pub(super) fn send(mut stream: &TcpStream, message: &[u8]) -> Result<(), String> {
    let mut bytes = Vec::with_capacity(HEADER + message.len());
    append(&mut bytes, message);
    stream.write_all(&bytes).map_err(|error| problem(&error))
}

/// What a user reads about a connection whose other end has ended.
pub(super) const CLOSED: &str = "its connection was closed";

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

    /// Reads what has arrived.
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
