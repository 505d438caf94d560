//! Opening the files of model folders and checkpoints. Another program may have put a named pipe or
//! a device in their place: opening a pipe would wait for a writer, and a device may have no end.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file. Follows links: the cache of the Hugging Face Hub consists of them.
pub(super) fn open(path: &Path) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)
}

/// Reads a regular file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
pub(super) fn make_pipe(path: &Path) {
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
            let error = read(path).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file", "{}", path.display());
        }
    }
}
