//! The cache of the hub on disk, in the layout of huggingface_hub, which also reads it.
//!
//! ```text
//! models--owner--name/
//!   blobs/ETAG                 content of a file; ETAG.incomplete while it is downloaded
//!   refs/main                  the commit of a branch or tag when it was last looked up
//!   snapshots/COMMIT/FILE      a link to its blob
//!   trainer/COMMIT.json        the paths of all files of the commit; written by this program
//! .locks/models--owner--name/ETAG.lock
//! ```

use super::error::HubError;
use super::id::{Repo, is_commit, is_relative};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The folder of one repository in the cache.
#[derive(Debug)]
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, repo: &Repo) -> Self {
        // Links in the cache are relative, but a folder of a config must not depend on the working
        // folder.
        let cache = std::path::absolute(cache).unwrap_or_else(|_| cache.to_owned());
        let name = repo.folder();
        Self { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// The commit of a revision when it was last looked up.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = files::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        replace(&self.folder.join("refs").join(revision), commit.as_bytes())
    }

    /// The paths of all files of a commit, if [`Self::set_list`] stored them.
    pub(super) fn list(&self, commit: &str) -> Option<Vec<String>> {
        serde_json::from_slice(&files::read(self.list_path(commit)).ok()?).ok()
    }

    /// Stores the paths of all files of a commit, so that an incomplete download is recognised
    /// without a connection.
    pub(super) fn set_list(&self, commit: &str, names: &[String]) -> Result<(), HubError> {
        let path = self.list_path(commit);
        if path.exists() {
            return Ok(());
        }
        let json =
            serde_json::to_vec(names).map_err(|error| HubError::write(&path)(error.into()))?;
        replace(&path, &json)
    }

    fn list_path(&self, commit: &str) -> PathBuf {
        self.folder.join("trainer").join(format!("{commit}.json"))
    }

    /// The folder with the files of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Locks a blob against other processes until the file is dropped. They use the same file
    /// whether they are written in Python or Rust.
    pub(super) fn lock(&self, etag: &str) -> Result<File, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        create_parent(&path)?;
        create_parent(&self.blob(etag))?;
        let file = File::options().create(true).write(true).truncate(false).open(&path);
        let file = file.map_err(HubError::write(&path))?;
        match file.lock() {
            // Some network file systems do not support locks.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(file),
            locked => locked.map(|()| file).map_err(HubError::write(path)),
        }
    }

    /// Adds a blob to a snapshot.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name);
        create_parent(&path)?;
        if path.exists() {
            return Ok(());
        }
        // A link whose blob was deleted.
        let _ = fs::remove_file(&path);
        let up = "../".repeat(2 + name.split('/').count() - 1);
        match link(Path::new(&format!("{up}blobs/{etag}")), &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // A file system without symbolic links.
            Err(_) => fs::rename(self.blob(etag), &path).map_err(HubError::write(path)),
            Ok(()) => Ok(()),
        }
    }
}

#[cfg(unix)]
fn link(target: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(not(unix))]
fn link(_target: &Path, _path: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Writes a file that other processes may read now.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    create_parent(path)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = files::create(&temporary).and_then(|mut file| file.write_all(bytes));
    written.and_then(|()| fs::rename(&temporary, path)).map_err(HubError::write(path))
}

fn create_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(HubError::write(parent))
}

/// Whether a name from the hub can be the name of a file in the cache.
pub(super) fn is_file_name(name: &str) -> bool {
    !name.is_empty() && is_relative(name)
}

/// Whether a tag from the hub can be the name of a blob.
pub(super) fn is_etag(etag: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    !etag.is_empty() && etag.len() <= 128 && etag.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_the_hub_cannot_leave_the_cache() {
        for name in ["config.json", "data/train.parquet", "a..b"] {
            assert!(is_file_name(name), "{name}");
        }
        for name in ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a\\b", "./a", "a/"] {
            assert!(!is_file_name(name), "{name}");
        }
        assert!(is_etag("d0c21a-5") && !is_etag("../a") && !is_etag("") && !is_etag("a/b"));
        assert!(!is_commit("main") && !is_commit("../../../../../../../../../../../../aaaa"));
    }

    #[cfg(unix)]
    #[test]
    fn a_file_in_a_folder_of_the_repository_is_linked_to_its_blob() {
        let folder = tempfile::tempdir().unwrap();
        let repo = Repo::model("o/n").unwrap();
        let cache = RepoCache::new(folder.path(), &repo);
        let commit = "a".repeat(40);
        drop(cache.lock("e1").unwrap());
        File::create(cache.blob("e1")).unwrap().write_all(b"content").unwrap();
        for name in ["a.json", "data/sub/a.json"] {
            cache.link(&commit, name, "e1").unwrap();
            cache.link(&commit, name, "e1").unwrap();
            assert_eq!(fs::read(cache.snapshot(&commit).join(name)).unwrap(), b"content", "{name}");
        }
        cache.set_commit("refs/pr/1", &commit).unwrap();
        assert_eq!(cache.commit("refs/pr/1"), Some(commit.clone()));
        assert_eq!(cache.commit(&commit), Some(commit));
        assert_eq!(cache.commit("main"), None);
    }
}
