//! Folders of commands that leave no files.

use crate::files;
use std::fs::{self};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of the names: process id and number follow.
const PREFIX: &str = ".trainer-";

/// Removes the folders in `parent` that killed commands have left.
pub(super) fn remove_left(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        let Some(Ok(process)) = process.map(|(process, _)| process.parse::<u32>()) else {
            continue;
        };
        // A run in the folder locks it, on another machine too.
        let is_locked =
            || files::open_folder(&folder).is_ok_and(|folder| folder.try_lock().is_err());
        let is_left = !Path::new("/proc").join(process.to_string()).exists() && !is_locked();
        if is_left && let Err(error) = fs::remove_dir_all(&folder) {
            tracing::warn!(folder = %folder.display(), %error, "cannot remove a temporary folder");
        }
    }
}

/// A folder that is removed with its contents when the value is dropped.
pub(super) struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder in `parent`. An error has its path.
    pub(super) fn create(parent: &Path) -> Result<Self, (PathBuf, io::Error)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        remove_left(parent);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("{PREFIX}{}-{number}", process::id()));
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
