//! Opening the files that a user names, and those of folders that others can write.
//!
//! A named pipe or a device may be in their place: opening a pipe would wait for another program,
//! and a device may have no end. Both are refused at once.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file for reading. Follows links: the cache of the Hugging Face Hub consists of
/// them.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    if !fs::metadata(path)?.is_file() {
        return Err(not_regular());
    }
    open_any(path)
}

/// Opens a folder, to lock it.
pub fn open_folder(path: &Path) -> io::Result<File> {
    open_any(path)
}

/// Writes the entries of a folder to the disk: the creation, renaming and removal of files in it.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    open_folder(path)?.sync_all()
}

/// Reads an input that the shell has opened, like `/dev/stdin`: it may be a pipe.
pub fn read_stream(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_any(path)?.read_to_end(&mut content)?;
    Ok(content)
}

#[expect(clippy::disallowed_methods, reason = "the callers are what others use instead")]
fn open_any(path: &Path) -> io::Result<File> {
    File::open(path)
}

pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

/// Reads the text of a regular file.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Opens a regular file for appending, or creates it.
pub fn append(path: &Path) -> io::Result<File> {
    refuse_others(path)?;
    File::options().create(true).append(true).open(path)
}

/// Empties a regular file, or creates it.
pub fn create(path: &Path) -> io::Result<File> {
    refuse_others(path)?;
    File::create(path)
}

fn refuse_others(path: &Path) -> io::Result<()> {
    let is_other = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
    if is_other { Err(not_regular()) } else { Ok(()) }
}

/// The error for a pipe, a device or a folder.
pub fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")
}

#[cfg(test)]
fn make_pipe(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_devices_and_folders_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        make_pipe(&pipe);
        let device = Path::new("/dev/zero");
        for path in [&pipe, device, folder.path()] {
            for error in [
                read(path).map(drop),
                read_to_string(path).map(drop),
                append(path).map(drop),
                create(path).map(drop),
            ] {
                let error = error.unwrap_err().to_string();
                assert_eq!(error, "it is not a regular file", "{}", path.display());
            }
        }
    }
}
