//! Files and folders that appear complete or not at all.
//!
//! The order is always: write under a hidden name, sync the content, rename, sync the parent.
//! Without the first sync, a power loss may keep the new name but lose the content. Without the
//! last one, it may lose the new name.
//!
//! The folder of a run must stay at its path while the run writes there by its path.

use super::CheckpointError;
use crate::files;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Prefix of what is being written; incomplete, and removed at the next start.
const TEMPORARY: &str = ".tmp-";
/// Prefix of a complete folder that is about to replace an older one of the same name.
const REPLACEMENT: &str = ".new-";
/// Prefix of a folder that is being deleted.
const DOOMED: &str = ".delete-";

/// Replaces the content of the file `path` by `bytes`. A reader sees either the old content or the
/// new one.
///
/// On an error the old file is unchanged and no other file is left behind.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let temporary = hidden(TEMPORARY, path);
    let written = write_synced(&temporary, bytes).and_then(|()| rename(&temporary, path));
    if written.is_err() {
        // Report the first error; `recover` removes a leftover file at the next start.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    sync_folder(parent(path))
}

/// Writes a new file and syncs it.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(CheckpointError::write(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(CheckpointError::write(path))
}

/// Makes the creation, renaming and removal of entries of `folder` durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    files::sync_folder(folder).map_err(CheckpointError::write(folder))
}

/// A new folder that is being filled, in the same parent and with a hidden name. Dropping it
/// removes it.
#[derive(Debug)]
pub(super) struct NewFolder {
    target: PathBuf,
    temporary: Option<PathBuf>,
}

impl NewFolder {
    /// Creates the empty hidden folder [`temporary_folder`] of `target`.
    pub(super) fn create(target: &Path) -> Result<Self, CheckpointError> {
        let temporary = temporary_folder(target);
        remove_if_there(&temporary)?;
        let new = Self { target: target.to_owned(), temporary: Some(temporary.clone()) };
        fs::create_dir_all(&temporary).map_err(CheckpointError::write(&temporary))?;
        Ok(new)
    }

    /// Gives the folder its name. All files in it must be synced. An older `target` stays until the
    /// new one is complete.
    ///
    /// Replacing takes two renames, as there is no portable way to exchange two folders. A reader
    /// that looks between them finds no `target`; [`recover`] finishes the exchange if the process
    /// is killed between them.
    pub(super) fn complete(mut self) -> Result<(), CheckpointError> {
        let (target, temporary) = (self.target.clone(), temporary_folder(&self.target));
        sync_folder(&temporary)?;
        self.temporary = None;
        let parent = parent(&target);
        if fs::symlink_metadata(&target).is_err() {
            rename(&temporary, &target)?;
        } else {
            let replacement = hidden(REPLACEMENT, &target);
            remove_if_there(&replacement)?;
            rename(&temporary, &replacement)?;
            sync_folder(parent)?;
            exchange(&replacement, &target)?;
        }
        sync_folder(parent)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // There is an error already, and `recover` removes a leftover folder at the next start.
            let _ = fs::remove_dir_all(temporary);
        }
    }
}

/// The hidden folder that [`NewFolder::create`] creates for `target`.
pub(super) fn temporary_folder(target: &Path) -> PathBuf {
    hidden(TEMPORARY, target)
}

/// Creates the folder `target`, or replaces it. `fill` receives an empty hidden folder in the same
/// parent and must sync the files that it writes.
pub(super) fn build_folder(
    target: &Path,
    fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let new = NewFolder::create(target)?;
    fill(&temporary_folder(target))?;
    new.complete()
}

/// Removes a folder. If the process is killed meanwhile, no incomplete folder keeps the name.
pub(super) fn remove_folder(folder: &Path) -> Result<(), CheckpointError> {
    let doomed = hidden(DOOMED, folder);
    remove_if_there(&doomed)?;
    rename(folder, &doomed)?;
    sync_folder(parent(folder))?;
    remove_if_there(&doomed)
}

/// Cleans `folder` after a killed run: finishes exchanges and removes incomplete files and folders.
/// Does nothing if `folder` does not exist.
pub(super) fn recover(folder: &Path) -> Result<(), CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CheckpointError::read(folder)(error)),
    };
    for entry in entries {
        let path = entry.map_err(CheckpointError::read(folder))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if let Some(target) = name.strip_prefix(REPLACEMENT) {
            exchange(&path, &folder.join(target))?;
            sync_folder(folder)?;
        } else if name.starts_with(TEMPORARY) || name.starts_with(DOOMED) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

fn exchange(replacement: &Path, target: &Path) -> Result<(), CheckpointError> {
    if fs::symlink_metadata(target).is_ok() {
        let doomed = hidden(DOOMED, target);
        remove_if_there(&doomed)?;
        rename(target, &doomed)?;
        rename(replacement, target)?;
        remove_if_there(&doomed)
    } else {
        rename(replacement, target)
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).map_err(CheckpointError::write(to))
}

fn remove_if_there(path: &Path) -> Result<(), CheckpointError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CheckpointError::write(path)(error))
        }
        _ => Ok(()),
    }
}

fn hidden(prefix: &str, path: &Path) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

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
    use fault::Fault;
    use std::thread;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_reader_sees_the_old_file_or_the_new_one_but_never_a_part() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let versions = [vec![b'a'; 300_000], vec![b'b'; 100_000]];
        write_atomically(&path, &versions[0]).unwrap();
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..40 {
                    write_atomically(&path, &versions[round % 2]).unwrap();
                }
            });
            while !writer.is_finished() {
                assert!(versions.contains(&fs::read(&path).unwrap()));
            }
        });
        assert_eq!(names(folder.path()), ["state.json"]);
    }

    #[test]
    fn a_failed_write_names_the_path_and_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("occupied");
        fs::create_dir_all(path.join("child")).unwrap(); // a file cannot replace a folder
        let error = write_atomically(&path, b"new").unwrap_err();
        assert!(error.is_write() && error.to_string().contains("occupied"), "{error}");
        assert_eq!(names(folder.path()), ["occupied"]);
    }

    #[test]
    fn a_full_disk_is_named_with_a_hint() {
        // Opening `/dev/full` works, and each write fails with "no space left on device".
        let error = write_synced(Path::new("/dev/full"), b"bytes").unwrap_err();
        assert_eq!(error.to_string(), "cannot write `/dev/full`");
        assert!(error.hint().unwrap().contains("free space"), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_filled_leaves_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("final");
        build_folder(&target, |new| write_synced(&new.join("a"), b"old")).unwrap();
        let failed = build_folder(&target, |new| {
            write_synced(&new.join("a"), b"half")?;
            write_synced(&new.join("no/such/folder"), b"")
        });
        assert!(failed.is_err());
        assert_eq!(names(folder.path()), ["final"]);
        assert_eq!(fs::read(target.join("a")).unwrap(), b"old");
    }

    #[test]
    fn an_exchange_is_finished_after_a_kill_at_each_of_its_points() {
        // Before the first rename, between the two, and before the deletion.
        for (old, doomed) in [(true, false), (false, true), (false, false)] {
            let folder = tempfile::tempdir().unwrap();
            let write = |name: &str, bytes: &[u8]| {
                fs::create_dir_all(folder.path().join(name)).unwrap();
                write_synced(&folder.path().join(name).join("a"), bytes).unwrap();
            };
            write(".new-final", b"new");
            write(".tmp-step-00000001", b"half");
            if old {
                write("final", b"old");
            }
            if doomed {
                write(".delete-final", b"old");
            }
            recover(folder.path()).unwrap();
            assert_eq!(names(folder.path()), ["final"]);
            assert_eq!(fs::read(folder.path().join("final/a")).unwrap(), b"new");
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_is_clean() {
        recover(Path::new("/no/such/folder")).unwrap();
    }

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
