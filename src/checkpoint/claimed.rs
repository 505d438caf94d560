//! The folder of a run must stay at its path while the run writes there by its path.

use super::CheckpointError;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Fails if the folder at `path` is not the one that `open` was opened as: another run may use it.
pub(super) fn check_place(path: &Path, open: &File) -> Result<(), CheckpointError> {
    let identity = |found: &Metadata| (found.dev(), found.ino());
    let Ok(own) = open.metadata() else { return Ok(()) };
    match fs::metadata(path) {
        Ok(found) if identity(&found) == identity(&own) => return Ok(()),
        // the write that follows reports it
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Ok(()),
        _ => {}
    }
    // the path of an open folder, where the system has this file
    let now = fs::read_link(format!("/proc/self/fd/{}", open.as_raw_fd())).ok();
    let now = now.filter(|now| now.is_dir());
    Err(CheckpointError::Moved { folder: path.to_owned(), now })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_renamed_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| parent.path().join(name));
        fs::create_dir(&old).unwrap();
        let open = File::open(&old).unwrap();
        check_place(&old, &open).unwrap();
        fs::rename(&old, &new).unwrap();
        let is_moved = || matches!(check_place(&old, &open), Err(CheckpointError::Moved { .. }));
        assert!(is_moved());
        fs::create_dir(&old).unwrap();
        assert!(is_moved(), "another folder has the name");
        fs::remove_dir(&old).unwrap();
        fs::rename(&new, &old).unwrap();
        check_place(&old, &open).unwrap();
    }
}
