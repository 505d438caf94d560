//! Folders of commands that leave no files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder that is removed with its contents when the value is dropped.
pub(super) struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder in `parent`. An error has its path.
    pub(super) fn create(parent: &Path) -> Result<Self, (PathBuf, io::Error)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!(".trainer-{}-{number}", process::id()));
        match fs::create_dir(&folder) {
            Ok(()) => Ok(Self(folder)),
            Err(problem) => Err((folder, problem)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(folder = %self.0.display(), %error, "cannot remove a temporary folder");
        }
    }
}
