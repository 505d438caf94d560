//! Downloads of single files into the cache.

use super::cache::{RepoCache, is_etag};
use super::error::HubError;
use super::id::Repo;
use crate::net::http::{Answer, Client, HttpError, Method, Request, Token, host};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// Maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 10;
/// Number of times a lost connection is opened again without a byte received in between.
const RETRIES: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(500);
const BUFFER_BYTES: usize = 1 << 18;

/// Requests to one repository.
pub(super) struct Access<'a> {
    pub(super) client: &'a Client,
    pub(super) endpoint: &'a str,
    pub(super) token: Option<&'a Token>,
    pub(super) repo: &'a Repo,
}

/// A file of a repository that the cache lacks.
#[derive(Debug)]
pub(super) struct Missing {
    /// Path in the repository.
    pub(super) name: String,
    /// Identifies the content; the SHA-256 of a large file.
    etag: String,
    pub(super) bytes: u64,
}

impl Access<'_> {
    /// Reads the list of files: the commit of the revision, and paths.
    pub(super) fn list(&self) -> Result<(String, Vec<String>), HubError> {
        let answer = self.get(&self.repo.list_path(), 0, &self.repo.to_string())?;
        let repo = self.repo.to_string();
        let mut answer =
            self.accepted(answer, &repo, &format!("repository or revision `{repo}`"))?;
        let mut text = String::new();
        answer.body.read_to_string(&mut text).map_err(|error| self.lost(&repo, &error))?;
        parse_list(&text).map_err(|problem| HubError::Answer { what: repo, problem })
    }

    /// Reads the size and the tag of a file.
    pub(super) fn metadata(&self, commit: &str, name: &str) -> Result<Missing, HubError> {
        let url = format!("{}/{}", self.endpoint, self.repo.file_path(commit, name));
        let what = format!("{}/{name}", self.repo.id);
        let answer = self.send(Method::Head, &url, &what)?;
        let answer = match answer.status {
            300..400 => answer, // a redirect to the store of large files
            _ => self.accepted(answer, &what, &format!("file `{what}`"))?,
        };
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
        let opened = File::options().create(true).append(true).open(part);
        let mut out = opened.map_err(HubError::write(part))?;
        let mut retries = 0;
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
            let error = match self.append(&mut out, part, there, commit, file, progress) {
                Ok(()) => return Ok(()),
                Err(
                    error @ (HubError::Http { .. } | HubError::Status { status: 429 | 500.., .. }),
                ) => error,
                Err(error) => return Err(error),
            };
            let now = out.metadata().map_err(HubError::write(part))?.len();
            retries = if now > there { 1 } else { retries + 1 };
            let temporary = match &error {
                HubError::Http { source, .. } => source.is_temporary(),
                _ => true,
            };
            if retries > RETRIES || !temporary {
                return Err(error);
            }
            let wait = FIRST_WAIT * 2_u32.pow(retries - 1);
            tracing::warn!(
                file = file.name,
                bytes = now,
                "{error}; continuing in {:.1} s",
                wait.as_secs_f64()
            );
            sleep(wait);
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

/// Compares a complete file with its tag, if that is a SHA-256.
fn check(part: &Path, file: &Missing) -> Result<(), HubError> {
    let is_sha256 = file.etag.len() == 64 && file.etag.chars().all(|c| c.is_ascii_hexdigit());
    if !is_sha256 {
        return Ok(());
    }
    let read_error = HubError::write(part);
    let hash = || {
        let (mut input, mut hasher) = (File::open(part)?, Sha256::new());
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match input.read(&mut buffer)? {
                0 => return Ok(format!("{:x}", hasher.finalize())),
                count => hasher.update(&buffer[..count]),
            }
        }
    };
    let found: String = hash().map_err(read_error)?;
    if found == file.etag.to_lowercase() {
        Ok(())
    } else {
        Err(HubError::WrongContent { file: file.name.clone() })
    }
}

/// Parses `{"sha": .., "siblings": [{"rfilename": ..}]}`.
fn parse_list(text: &str) -> Result<(String, Vec<String>), String> {
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
    let List { sha, siblings } = serde_json::from_str(text).map_err(|error| error.to_string())?;
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
            parse_list(&format!(r#"{{"sha": "{sha}", "siblings": [{{"rfilename": "{name}"}}]}}"#))
        };
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert_eq!(list(commit, "a/b.json"), Ok((commit.to_owned(), vec!["a/b.json".to_owned()])));
        assert!(list(commit, "../../../.bashrc").is_err());
        assert!(list("../../..", "a").is_err());
        assert!(parse_list("<html>").is_err());
    }
}
