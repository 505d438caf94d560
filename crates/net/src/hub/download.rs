//! Downloads of single files into the cache.

use super::cache::{RepoCache, is_etag};
use super::error::HubError;
use super::id::Repo;
use crate::http::{Answer, Client, HttpError, Method, Request, Token, host};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fmt::LowerHex;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

const MAX_REDIRECTS: usize = 10;
/// Number of times a request is repeated, after a lost connection or an answer of a busy server.
pub(super) const RETRIES: u32 = 5;
/// The wait before the second retry. The first one does not wait: a server may close a connection
/// between two requests.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// A connection that was lost after as many bytes counts as the first one that was lost.
const PROGRESS_BYTES: u64 = 1 << 16;
const BUFFER_BYTES: usize = 1 << 18;
/// Maximum size of the list of files of a repository, about 500,000 names.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// Requests to one repository.
pub(super) struct Access<'a> {
    pub(super) client: &'a Client,
    pub(super) endpoint: &'a str,
    pub(super) token: Option<&'a Token>,
    pub(super) repo: &'a Repo,
}

#[derive(Debug)]
struct Retries {
    done: u32,
    most: u32,
}

impl Retries {
    /// Waits before the request is repeated, or returns `error` if repeating it does not help.
    /// `received` is the number of bytes of the last attempt.
    fn after(&mut self, error: HubError, what: &str, received: u64) -> Result<(), HubError> {
        self.done = if received < PROGRESS_BYTES { self.done + 1 } else { 1 };
        let temporary = match &error {
            HubError::Http { source, .. } => source.is_temporary(),
            HubError::Status { status, .. } => matches!(status, 429 | 500..),
            _ => false,
        };
        if self.done > self.most || !temporary {
            return Err(error);
        }
        if self.done == 1 {
            tracing::debug!(file = what, "{error}; repeating the request");
            return Ok(());
        }
        let wait = FIRST_WAIT * 2_u32.pow(self.done - 2);
        tracing::warn!(
            file = what,
            "{error}; repeating the request in {:.1} s",
            wait.as_secs_f64()
        );
        sleep(wait);
        Ok(())
    }
}

/// A file of a repository that the cache lacks.
#[derive(Debug)]
pub(super) struct Missing {
    /// Path in the repository.
    pub(super) name: String,
    /// Identifies the content: the SHA-256 of a large file, the hash of git for a small one.
    etag: String,
    pub(super) bytes: u64,
}

impl Access<'_> {
    /// Reads the list of files: the commit of the revision, and paths. Repeats a failed request
    /// `retries` times.
    pub(super) fn list(&self, retries: u32) -> Result<(String, Vec<String>), HubError> {
        let repo = self.repo.to_string();
        let text = Self::repeated(&repo, retries, || {
            let answer = self.get(&self.repo.list_path(), 0, &repo)?;
            let answer =
                self.accepted(answer, &repo, &format!("repository or revision `{repo}`"))?;
            let mut text = Vec::new();
            let mut body = answer.body.take(MAX_LIST_BYTES + 1);
            body.read_to_end(&mut text).map_err(|error| self.lost(&repo, &error))?;
            Ok(text)
        })?;
        let list = if text.len() as u64 > MAX_LIST_BYTES {
            Err(format!("the list of files has more than {} MiB", MAX_LIST_BYTES >> 20))
        } else {
            parse_list(&text)
        };
        list.map_err(|problem| HubError::Answer { what: repo, problem })
    }

    /// Repeats a request whose answer is used as a whole.
    fn repeated<T>(
        what: &str,
        most: u32,
        request: impl Fn() -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        let mut retries = Retries { done: 0, most };
        loop {
            match request() {
                Err(error) => retries.after(error, what, 0)?,
                done => return done,
            }
        }
    }

    /// Reads the size and the tag of a file.
    pub(super) fn metadata(&self, commit: &str, name: &str) -> Result<Missing, HubError> {
        let url = format!("{}/{}", self.endpoint, self.repo.file_path(commit, name));
        let what = format!("{}/{name}", self.repo.id);
        let answer = Self::repeated(&what, RETRIES, || {
            let answer = self.send(Method::Head, &url, &what)?;
            match answer.status {
                300..400 => Ok(answer), // a redirect to the store of large files
                _ => self.accepted(answer, &what, &format!("file `{what}`")),
            }
        })?;
        let etag = answer.header("x-linked-etag").or_else(|| answer.header("etag"));
        let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
        // The length of a redirect is that of its own body.
        let own = || answer.number("content-length").filter(|_| answer.status < 300);
        let bytes = answer.number("x-linked-size").or_else(own);
        let problem = match (etag.filter(|etag| is_etag(etag)), bytes) {
            (Some(etag), Some(bytes)) => return Ok(Missing { name: name.to_owned(), etag, bytes }),
            (None, _) => "it has no valid `ETag`",
            (_, None) => "it has no size",
        };
        Err(HubError::Answer { what, problem: problem.to_owned() })
    }

    /// Downloads a file, or continues its download, and adds it to the snapshot of the commit.
    /// `progress` receives the number of bytes that are there.
    pub(super) fn download(
        &self,
        cache: &RepoCache,
        commit: &str,
        file: &Missing,
        progress: &dyn Fn(u64),
    ) -> Result<(), HubError> {
        let lock = cache.lock(&file.etag)?;
        let blob = cache.blob(&file.etag);
        // Another process may have finished the same download while this one waited.
        if !fs::metadata(&blob).is_ok_and(|found| found.len() == file.bytes) {
            let part = cache.blob(&format!("{}.incomplete", file.etag));
            let checked =
                self.fill(&part, commit, file, progress).and_then(|()| check(&part, file));
            if let Err(HubError::WrongSize { .. } | HubError::WrongContent { .. }) = checked {
                let _ = fs::remove_file(&part);
            }
            checked?;
            fs::rename(&part, &blob).map_err(HubError::write(&blob))?;
        }
        progress(file.bytes);
        cache.link(commit, &file.name, &file.etag)?;
        drop(lock);
        Ok(())
    }

    /// Appends to `part` until it is complete. Reconnects if the connection is lost.
    fn fill(
        &self,
        part: &Path,
        commit: &str,
        file: &Missing,
        progress: &dyn Fn(u64),
    ) -> Result<(), HubError> {
        let opened = files::append(part);
        let mut out = opened.map_err(HubError::write(part))?;
        let mut retries = Retries { done: 0, most: RETRIES };
        loop {
            let there = out.metadata().map_err(HubError::write(part))?.len();
            if there == file.bytes {
                return Ok(());
            }
            if there > file.bytes {
                out.set_len(0).map_err(HubError::write(part))?; // left by another tool
                continue;
            }
            progress(there);
            let Err(error) = self.append(&mut out, part, there, commit, file, progress) else {
                return Ok(());
            };
            let now = out.metadata().map_err(HubError::write(part))?.len();
            retries.after(error, &file.name, now.saturating_sub(there))?;
        }
    }

    /// Sends one request and appends its body to `out`, which has `there` bytes.
    fn append(
        &self,
        out: &mut File,
        part: &Path,
        there: u64,
        commit: &str,
        file: &Missing,
        progress: &dyn Fn(u64),
    ) -> Result<(), HubError> {
        let what = format!("{}/{}", self.repo.id, file.name);
        let answer = self.get(&self.repo.file_path(commit, &file.name), there, &what)?;
        let mut answer = self.accepted(answer, &what, &format!("file `{what}`"))?;
        let mut done = there;
        if there > 0 && !continues(&answer, there) {
            // The server sends the whole file again.
            out.set_len(0).map_err(HubError::write(part))?;
            done = 0;
        }
        let announced = answer.number("content-length").is_some();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = match answer.body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.lost(&what, &error)),
            };
            out.write_all(&buffer[..count]).map_err(HubError::write(part))?;
            done += count as u64;
            if done > file.bytes {
                break;
            }
            progress(done);
        }
        // Without a length, the end of the body may also be a lost connection.
        if done < file.bytes && !announced {
            let error = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(self.lost(&what, &error));
        }
        if done != file.bytes {
            return Err(HubError::WrongSize { file: what, expected: file.bytes, found: done });
        }
        out.sync_all().map_err(HubError::write(part))
    }

    fn get(&self, path: &str, from: u64, what: &str) -> Result<Answer, HubError> {
        self.send(Method::Get { from }, &format!("{}/{path}", self.endpoint), what)
    }

    fn send(&self, method: Method, url: &str, what: &str) -> Result<Answer, HubError> {
        let request = Request { method, url, token: self.token, max_redirects: MAX_REDIRECTS };
        let answer = self.client.send(&request);
        answer.map_err(|source| HubError::Http { what: what.to_owned(), source })
    }

    /// The answer if it has a body of the file; otherwise the error that its status means.
    fn accepted(&self, answer: Answer, what: &str, missing: &str) -> Result<Answer, HubError> {
        let code = answer.header("x-error-code");
        match answer.status {
            200 | 206 => Ok(answer),
            status @ (401 | 403) => Err(HubError::Denied {
                repo: self.repo.clone(),
                status,
                code: code.map_or_else(String::new, |code| format!(", {code}")),
                with_token: self.token.is_some(),
                page: self.repo.page(self.endpoint),
            }),
            404 => Err(HubError::NotFound { what: missing.to_owned(), others: None }),
            status => Err(HubError::Status { what: what.to_owned(), status }),
        }
    }

    fn lost(&self, what: &str, error: &io::Error) -> HubError {
        let source = HttpError::lost(error, host(self.endpoint));
        HubError::Http { what: what.to_owned(), source }
    }
}

/// Whether the answer is the rest of a file from byte `there` on.
fn continues(answer: &Answer, there: u64) -> bool {
    let range = answer.header("content-range").and_then(|range| range.strip_prefix("bytes "));
    let start =
        range.and_then(|range| range.split_once('-')).and_then(|(start, _)| start.parse().ok());
    answer.status == 206 && start == Some(there)
}

/// Compares a complete file with its tag: the SHA-256 of a large file, or git's hash of a small one.
/// Tags of other lengths say nothing about the content.
fn check(part: &Path, file: &Missing) -> Result<(), HubError> {
    let tag = file.etag.to_lowercase();
    let found = match tag.len() {
        _ if !tag.chars().all(|c| c.is_ascii_hexdigit()) => return Ok(()),
        64 => digest::<Sha256>(part, ""),
        40 => digest::<Sha1>(part, &format!("blob {}\0", file.bytes)),
        _ => return Ok(()),
    };
    if found.map_err(HubError::write(part))? == tag {
        Ok(())
    } else {
        Err(HubError::WrongContent { file: file.name.clone() })
    }
}

/// The digest of `prefix` and a file, in hexadecimal digits.
fn digest<D: Digest>(path: &Path, prefix: &str) -> io::Result<String>
where
    sha2::digest::Output<D>: LowerHex,
{
    let (mut input, mut hasher) = (files::open(path)?, D::new_with_prefix(prefix));
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match input.read(&mut buffer)? {
            0 => break,
            count => hasher.update(&buffer[..count]),
        }
    }
    Ok(format!("{:x}", hasher.finalize()))
}

/// Parses `{"sha": .., "siblings": [{"rfilename": ..}]}`.
fn parse_list(text: &[u8]) -> Result<(String, Vec<String>), String> {
    use super::cache::is_file_name;
    use super::id::is_commit;
    #[derive(serde::Deserialize)]
    struct List {
        sha: String,
        siblings: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        rfilename: String,
    }
    let List { sha, siblings } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if !is_commit(&sha) {
        return Err("`sha` is not a commit".to_owned());
    }
    let names: Vec<String> = siblings.into_iter().map(|entry| entry.rfilename).collect();
    match names.iter().find(|name| !is_file_name(name)) {
        Some(name) => Err(format!("{name:?} is not a path inside a repository")),
        None => Ok((sha, names)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_a_path_outside_of_the_repository_is_refused() {
        let list = |sha: &str, name: &str| {
            let name = format!(r#"{{"rfilename": "{name}"}}"#);
            parse_list(format!(r#"{{"sha": "{sha}", "siblings": [{name}]}}"#).as_bytes())
        };
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert_eq!(list(commit, "a/b.json"), Ok((commit.to_owned(), vec!["a/b.json".to_owned()])));
        assert!(list(commit, "../../../.bashrc").is_err());
        assert!(list("../../..", "a").is_err());
        assert!(parse_list(b"<html>").is_err());
    }
}
