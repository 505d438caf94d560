//! The manifest of a checkpoint: the size and checksum of each file, written last.

use super::CheckpointError;
use super::atomic::write_synced;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Component, Path};

pub(super) const MANIFEST: &str = "manifest.json";

const BUFFER_BYTES: usize = 1 << 20;

/// Size and checksum of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    bytes: u64,
    sha256: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Number of optimizer steps done when the checkpoint was written.
    pub(super) step: u64,
    /// The entry of each file, by the file's name.
    pub(super) files: BTreeMap<String, Entry>,
}

impl Manifest {
    pub(super) fn new(step: u64) -> Self {
        Self { step, files: BTreeMap::new() }
    }

    /// Writes `folder/name` with `fill`, syncs it, and records its size and checksum.
    pub(super) fn write_file(
        &mut self,
        folder: &Path,
        name: &str,
        fill: impl FnOnce(&mut dyn Write) -> Result<(), WriteFault>,
    ) -> Result<(), CheckpointError> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(CheckpointError::write(&path))?;
        let mut writer = BufWriter::with_capacity(BUFFER_BYTES, Hashing::new(file));
        fill(&mut writer).map_err(|fault| match fault {
            WriteFault::Io(source) => CheckpointError::write(&path)(source),
            WriteFault::Other(error) => error,
        })?;
        let hashing = writer
            .into_inner()
            .map_err(|error| CheckpointError::write(&path)(error.into_error()))?;
        hashing.inner.sync_all().map_err(CheckpointError::write(&path))?;
        self.files.insert(name.to_owned(), hashing.entry());
        Ok(())
    }

    /// Writes the manifest itself. No file may be added to the folder afterwards.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(MANIFEST);
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| CheckpointError::write(&path)(error.into()))?;
        write_synced(&path, &text)
    }

    /// Reads the manifest of a checkpoint.
    pub(super) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        let text = std::fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => damaged(folder, MANIFEST, "is missing"),
            _ => CheckpointError::read(&path)(error),
        })?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| damaged(folder, MANIFEST, format!("is not a manifest: {error}")))?;
        match manifest.files.keys().find(|name| !is_plain_name(name)) {
            Some(name) => {
                Err(damaged(folder, MANIFEST, format!("names `{name}`, which is not a plain name")))
            }
            None => Ok(manifest),
        }
    }

    /// Checks the size of each file without reading its content.
    pub(super) fn check_sizes(&self, folder: &Path) -> Result<(), CheckpointError> {
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let found = match std::fs::metadata(&path) {
                Ok(metadata) => metadata.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(damaged(folder, name, "is missing"));
                }
                Err(error) => return Err(CheckpointError::read(&path)(error)),
            };
            if found != entry.bytes {
                let problem = format!("has {found} bytes, expected {}", entry.bytes);
                return Err(damaged(folder, name, problem));
            }
        }
        Ok(())
    }

    /// Reads each file and compares it with its checksum.
    pub(super) fn check_contents(&self, folder: &Path) -> Result<(), CheckpointError> {
        for (name, entry) in &self.files {
            Self::check_file(folder, name, entry)?;
        }
        Ok(())
    }

    fn check_file(folder: &Path, name: &str, entry: &Entry) -> Result<(), CheckpointError> {
        let path = folder.join(name);
        let mut file = File::open(&path).map_err(CheckpointError::read(&path))?;
        let found = copy_hashed(&mut file, io::sink()).map_err(CheckpointError::read(&path))?;
        if found.bytes != entry.bytes {
            let problem = format!("has {} bytes, expected {}", found.bytes, entry.bytes);
            return Err(damaged(folder, name, problem));
        }
        if found.sha256 != entry.sha256 {
            return Err(damaged(folder, name, "does not match its checksum"));
        }
        Ok(())
    }

    /// Reads one small file after comparing it with its checksum.
    pub(super) fn read_checked(
        &self,
        folder: &Path,
        name: &str,
    ) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.files.get(name).ok_or_else(|| damaged(folder, name, "is missing"))?;
        Self::check_file(folder, name, entry)?;
        let path = folder.join(name);
        std::fs::read(&path).map_err(CheckpointError::read(&path))
    }
}

/// Why writing the content of a file failed: the disk, or the source of the content.
pub(super) enum WriteFault {
    Io(io::Error),
    Other(CheckpointError),
}

impl From<io::Error> for WriteFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

pub(super) fn damaged(folder: &Path, file: &str, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Damaged {
        folder: folder.to_owned(),
        file: file.to_owned(),
        problem: problem.into(),
    }
}

/// Whether `name` is a single path component that cannot point outside its folder.
pub(super) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none()
}

/// Copies `from` to `to` through a buffer of fixed size and returns the size and checksum.
pub(super) fn copy_hashed(from: &mut dyn Read, to: impl Write) -> io::Result<Entry> {
    let mut to = Hashing::new(to);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(to.entry()),
            Ok(num_bytes) => to.write_all(&buffer[..num_bytes])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    fn entry(&self) -> Entry {
        let digest = self.hash.clone().finalize();
        Entry { bytes: self.bytes, sha256: format!("{digest:x}") }
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_abc_is_the_published_sha256() {
        let entry = copy_hashed(&mut "abc".as_bytes(), io::sink()).unwrap();
        assert_eq!(entry.bytes, 3);
        assert_eq!(
            entry.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_manifest_is_read_back_unchanged_and_names_a_changed_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(7);
        manifest.write_file(folder.path(), "a.json", |out| Ok(out.write_all(b"{}")?)).unwrap();
        manifest.write(folder.path()).unwrap();
        let read = Manifest::read(folder.path()).unwrap();
        assert_eq!(read, manifest);
        read.check_sizes(folder.path()).unwrap();
        read.check_contents(folder.path()).unwrap();

        write_synced(&folder.path().join("a.json"), b"[]").unwrap();
        read.check_sizes(folder.path()).unwrap();
        let error = read.check_contents(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("`a.json` does not match its checksum"), "{error}");
    }

    #[test]
    fn a_manifest_cannot_name_a_file_outside_its_folder() {
        for name in ["../a", "/etc/passwd", "a/b", "..", ".", ""] {
            assert!(!is_plain_name(name), "{name}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
    }
}
