//! Images by URL, which are downloaded once and kept.
//!
//! ```text
//! images/
//!   urls/AB/SHA256 OF THE URL           the SHA-256 of the content
//!   content/AB/SHA256 OF THE CONTENT    the bytes
//! ```

use super::http::{Answer, Client, HttpError, Limits, Method, Reach, Request, host};
use fault::{Fault, Hint};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

const MAX_REDIRECTS: usize = 5;
/// Number of requests for a URL before its row is rejected.
const ATTEMPTS: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// Maximum wait that a server can demand.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Number of downloads that may run at the same time.
const LOCKS: usize = 64;

/// Limits on the download of one image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UrlLimits {
    /// Maximum time of a request with its redirects.
    pub timeout: Duration,
    /// Maximum size of an image.
    pub max_bytes: u64,
}

/// In a build for tests, `TRAINER_TEST_LOOPBACK_URLS` allows requests to 127.0.0.1.
fn reach() -> Reach {
    #[cfg(feature = "testing")]
    if std::env::var_os("TRAINER_TEST_LOOPBACK_URLS").is_some() {
        return Reach::PublicAndTests;
    }
    Reach::Public
}

/// Downloads images by URL and keeps them in a folder.
///
/// It connects to addresses of the public internet only, also after redirects.
#[derive(Debug)]
pub struct UrlImages {
    folder: PathBuf,
    limits: UrlLimits,
    client: Client,
    /// Two threads that need the same URL must not both request it.
    locks: [Mutex<()>; LOCKS],
}

impl UrlImages {
    /// Keeps images in `folder`, which is created with the first download.
    pub fn new(folder: &Path, limits: UrlLimits) -> Result<Self, HttpError> {
        Self::with_reach(folder, limits, reach())
    }

    fn with_reach(folder: &Path, limits: UrlLimits, reach: Reach) -> Result<Self, HttpError> {
        let timeouts = Limits { idle: limits.timeout, total: Some(limits.timeout) };
        let client = Client::new(reach, timeouts)?;
        let locks = std::array::from_fn(|_| Mutex::new(()));
        Ok(Self { folder: folder.to_owned(), limits, client, locks })
    }

    /// Returns the path of a file with the image. Downloads it if it is not there.
    pub fn path(&self, url: &str) -> Result<PathBuf, UrlError> {
        let entry = self.entry(url);
        if let Some(path) = self.stored(&entry) {
            return Ok(path);
        }
        let lock = usize::from(Sha256::digest(url)[0]) % LOCKS;
        let lock = self.locks[lock].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = self.stored(&entry) {
            return Ok(path);
        }
        let bytes = self.download(url)?;
        let digest = hex(&bytes);
        let path = self.content(&digest);
        store(&path, &bytes)?;
        store(&entry, digest.as_bytes())?;
        drop(lock);
        Ok(path)
    }

    /// The bytes of an image. A stored file that has changed since it was downloaded is downloaded
    /// again.
    pub fn read(&self, url: &str) -> Result<Vec<u8>, UrlError> {
        for _ in 0..ATTEMPTS {
            let path = self.path(url)?;
            match files::read(&path) {
                Ok(bytes) if path.file_name().is_some_and(|name| *name == *hex(&bytes)) => {
                    return Ok(bytes);
                }
                // Another thread has found the damage, too.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(UrlError::Read { path, source }),
                Ok(_) => {
                    let url = for_messages(url);
                    tracing::warn!(url, file = %path.display(), "a stored image is damaged: downloading it again");
                    let _ = fs::remove_file(&path);
                }
            }
        }
        Err(UrlError::Damaged { path: self.folder.clone() })
    }

    /// Removes a URL whose content cannot be read as an image, so that the next run requests it
    /// again. A server that is too busy may answer with a page of text.
    pub fn forget(&self, url: &str) {
        let _ = fs::remove_file(self.entry(url));
    }

    fn entry(&self, url: &str) -> PathBuf {
        let hash = hex(url.as_bytes());
        self.folder.join("urls").join(&hash[..2]).join(hash)
    }

    fn content(&self, digest: &str) -> PathBuf {
        self.folder.join("content").join(&digest[..2]).join(digest)
    }

    fn stored(&self, entry: &Path) -> Option<PathBuf> {
        let digest = files::read_to_string(entry).ok()?;
        let is_digest = digest.len() == 64 && digest.chars().all(|c| c.is_ascii_hexdigit());
        let path = is_digest.then(|| self.content(&digest))?;
        path.is_file().then_some(path)
    }

    /// Downloads an image and does not keep it.
    pub fn download(&self, url: &str) -> Result<Vec<u8>, UrlError> {
        let url = &encoded(url);
        let mut attempt = 1;
        loop {
            let (error, asked) = match self.request(url) {
                Ok(bytes) => return Ok(bytes),
                Err(failed) => failed,
            };
            if attempt == ATTEMPTS || !error.is_temporary() {
                return Err(error);
            }
            let wait = FIRST_WAIT * 4_u32.pow(attempt - 1);
            sleep(asked.unwrap_or_default().min(MAX_WAIT).max(wait));
            attempt += 1;
        }
    }

    /// On an error, also returns the wait that the server demands.
    fn request(&self, url: &str) -> Result<Vec<u8>, (UrlError, Option<Duration>)> {
        let request = Request {
            method: Method::Get { from: 0 },
            url,
            token: None,
            max_redirects: MAX_REDIRECTS,
        };
        let mut answer = self.client.send(&request).map_err(|error| (error.into(), None))?;
        if answer.status != 200 {
            let wait = answer.number("retry-after").map(Duration::from_secs);
            return Err((UrlError::Status { status: answer.status }, wait));
        }
        self.body(&mut answer, url).map_err(|error| (error, None))
    }

    fn body(&self, answer: &mut Answer, url: &str) -> Result<Vec<u8>, UrlError> {
        let limit = self.limits.max_bytes;
        let too_large = || UrlError::TooLarge { limit };
        if answer.number("content-length").is_some_and(|bytes| bytes > limit) {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        let mut body = answer.body.by_ref().take(limit.saturating_add(1));
        body.read_to_end(&mut bytes).map_err(|error| HttpError::lost(&error, host(url)))?;
        if bytes.len() as u64 > limit { Err(too_large()) } else { Ok(bytes) }
    }
}

/// Writes a file that appears with its whole content.
fn store(path: &Path, bytes: &[u8]) -> Result<(), UrlError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let error = |source| UrlError::Store { path: path.to_owned(), source };
    let number = NUMBER.fetch_add(1, Relaxed);
    let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        files::create(&temporary)?.write_all(bytes)?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        error(source)
    })
}

fn hex(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Percent-encodes what an address cannot contain, such as spaces and letters with accents, and
/// removes the part behind `#`.
fn encoded(url: &str) -> String {
    let mut encoded = String::with_capacity(url.len());
    for byte in url.split('#').next().unwrap_or_default().bytes() {
        if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Whether a text of a row is the address of an image on the web.
pub fn is_web_address(text: &str) -> bool {
    let starts_with = |scheme: &str| {
        text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    starts_with("http://") || starts_with("https://")
}

/// An address for messages: without user, password and query, which may be secret.
pub fn for_messages(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let path = rest.find(['/', '?', '#']).map_or("", |start| &rest[start..]);
    let path = path.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{}{path}", host(url))
}

/// The reason why an image cannot be downloaded.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = None)]
pub enum UrlError {
    #[error("the server answers with status {status}")]
    #[fault(hint = "check the address in a browser; download the image and give its path")]
    Status { status: u16 },
    #[error("it has more than {limit} bytes (`data.url.max_bytes`)")]
    #[fault(hint = "scale the image down, or raise `data.url.max_bytes`")]
    TooLarge { limit: u64 },
    #[error(transparent)]
    #[fault(from, hint = image_hint(_0))]
    Http(#[from] HttpError),
    #[error("cannot read `{}`: {source}", .path.display())]
    #[fault(hint = "check the disk, or set `data.cache_dir` to another folder")]
    Read { path: PathBuf, source: io::Error },
    /// A stored image changes again after each download.
    #[error("images stored in `{}` are damaged as soon as they are written", .path.display())]
    #[fault(hint = "check the disk, or set `data.cache_dir` to another folder")]
    Damaged { path: PathBuf },
    #[error("cannot write `{}`: {source}", .path.display())]
    #[fault(hint = "free space, or set `data.cache_dir` to another folder")]
    Store { path: PathBuf, source: io::Error },
}

fn image_hint(error: &HttpError) -> Hint {
    match error {
        HttpError::Timeout { .. } => {
            Some("raise `data.url.timeout_s`, or download the image and give its path".into())
        }
        error => error.hint(),
    }
}

impl UrlError {
    fn is_temporary(&self) -> bool {
        match self {
            Self::Status { status } => matches!(status, 408 | 425 | 429 | 500..),
            Self::Http(error) => error.is_temporary(),
            Self::TooLarge { .. }
            | Self::Read { .. }
            | Self::Damaged { .. }
            | Self::Store { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_no_secret_of_the_address() {
        assert_eq!(for_messages("https://u:p@a.b:8/c d.png?sig=x#y"), "https://a.b:8/c d.png");
        assert_eq!(for_messages("http://a.b?sig=x"), "http://a.b");
    }

    #[test]
    fn an_address_with_spaces_and_accents_is_encoded_and_others_are_unchanged() {
        assert_eq!(encoded("https://a.b/c d/\u{e9}.png#x"), "https://a.b/c%20d/%C3%A9.png");
        let complete = "https://a.b/c%20d.png?x=[1]&y=~'()*";
        assert_eq!(encoded(complete), complete);
    }

    #[test]
    fn an_address_that_is_not_public_is_not_requested() {
        let folder = tempfile::tempdir().unwrap();
        let limits = UrlLimits { timeout: Duration::from_secs(5), max_bytes: 1 };
        let images = UrlImages::with_reach(folder.path(), limits, Reach::Public).unwrap();
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        server.set_nonblocking(true).unwrap();
        let port = server.local_addr().unwrap().port();
        for host in [
            "127.0.0.1",
            "localhost",
            "127.1",
            "0x7f000001",
            "2130706433",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
        ] {
            let error = images.path(&format!("http://{host}:{port}/a.png")).unwrap_err();
            assert!(!matches!(error, UrlError::Status { .. }), "{host}: {error}");
        }
        assert_eq!(server.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
