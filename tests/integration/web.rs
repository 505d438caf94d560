//! A web server for tests: one thread per connection, one request per connection.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request that the server received.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    /// Path and query.
    pub(crate) path: String,
    /// Header lines in lower case.
    headers: Vec<String>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ String| -> Option<usize> {
            line.strip_prefix(name)?.strip_prefix(": ").map(|value| line.len() - value.len())
        };
        self.headers.iter().find_map(|line| Some(&line[value(line)?..]))
    }

    /// First byte of a request for the rest of a file.
    pub(crate) fn from(&self) -> usize {
        let range = self.header("range").and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// An answer of the server.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Number of bytes of the body after which the connection is closed.
    pub(crate) cut: Option<usize>,
    /// Whether the header `Content-Length` is left out.
    pub(crate) without_length: bool,
    /// Time before the answer.
    pub(crate) wait: Duration,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub(crate) fn redirect(to: impl Into<String>) -> Self {
        Self::new(302, "moved").with("Location", to)
    }

    pub(crate) fn with(mut self, header: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((header, value.into()));
        self
    }

    /// A file, or the part that the request names.
    pub(crate) fn file(request: &Seen, bytes: &[u8]) -> Self {
        match request.from() {
            0 => Self::new(200, bytes),
            from => Self::new(206, &bytes[from..])
                .with("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())),
        }
    }
}

/// A server on 127.0.0.1 that runs until the test process ends.
pub(crate) struct Server {
    pub(crate) port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    pub(crate) fn start(reply: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (seen, reply) = (Arc::new(Mutex::new(Vec::new())), Arc::new(reply));
        let server = Self { port, seen: Arc::clone(&seen) };
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, reply) = (Arc::clone(&seen), Arc::clone(&reply));
                // A client that goes away is no error of the server.
                thread::spawn(move || stream.and_then(|stream| answer(&stream, &seen, &*reply)));
            }
        });
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Number of requests since the last call of [`Self::take`].
    #[cfg(feature = "testing")]
    pub(crate) fn requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// The requests since the last call.
    pub(crate) fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

fn answer(
    mut stream: &TcpStream,
    seen: &Mutex<Vec<Seen>>,
    reply: &dyn Fn(&Seen) -> Reply,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ').map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let headers: Vec<String> =
        lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let lower = |line: &String| {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        format!("{}:{value}", name.to_lowercase())
    };
    let request = Seen { method, path, headers: headers.iter().map(lower).collect() };
    seen.lock().unwrap().push(request.clone());
    let Reply { status, headers, body, cut, without_length, wait } = reply(&request);
    thread::sleep(wait);
    let mut head = format!("HTTP/1.1 {status} Status\r\nConnection: close\r\n");
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n"); // writing to a String cannot fail
    }
    if !without_length {
        let _ = write!(head, "Content-Length: {}\r\n", body.len());
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if request.method != "HEAD" {
        stream.write_all(&body[..cut.unwrap_or(body.len())])?;
    }
    stream.flush()?;
    stream.shutdown(std::net::Shutdown::Write)
}
