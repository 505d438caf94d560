//! The manifest of a checkpoint: the size and checksums of each file, written last; and files that
//! several ranks write at once, each its pieces at their offsets.

use super::CheckpointError;
use super::atomic::write_synced;
use crate::files;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};

pub(super) const MANIFEST: &str = "manifest.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    bytes: u64,
    #[serde(flatten)]
    checksum: Checksum,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Checksum {
    /// Of the whole file.
    Sha256(String),
    /// Of each piece, in the order of the file.
    Pieces(Vec<PieceSum>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PieceSum {
    bytes: u64,
    sha256: String,
}

impl Entry {
    /// The entry of a file that consists of `pieces`, in the order of the file.
    pub(super) fn new(pieces: Vec<Piece>) -> Self {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let mut sums: Vec<_> = pieces
            .into_iter()
            .map(|Piece { bytes, sha256, .. }| PieceSum { bytes, sha256 })
            .collect();
        let checksum = match sums.len() {
            1 => Checksum::Sha256(sums.swap_remove(0).sha256),
            _ => Checksum::Pieces(sums),
        };
        Self { bytes, checksum }
    }

    /// The pieces of the file: at least one, in the order of the file.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let sums = match &self.checksum {
            Checksum::Sha256(sha256) => {
                return vec![Piece { offset: 0, bytes: self.bytes, sha256: sha256.clone() }];
            }
            Checksum::Pieces(sums) => sums,
        };
        let mut offset = 0;
        let piece = |sum: &PieceSum| {
            let piece = Piece { offset, bytes: sum.bytes, sha256: sum.sha256.clone() };
            offset += sum.bytes;
            piece
        };
        sums.iter().map(piece).collect()
    }

    fn covers_file(&self) -> bool {
        match &self.checksum {
            Checksum::Sha256(_) => true,
            Checksum::Pieces(sums) => {
                let add = |sum: u64, piece: &PieceSum| sum.checked_add(piece.bytes);
                sums.iter().try_fold(0, add) == Some(self.bytes)
            }
        }
    }
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

    /// Writes `folder/name`, syncs it, and records its size and checksum.
    pub(super) fn write_file(
        &mut self,
        folder: &Path,
        name: &str,
        content: &[u8],
    ) -> Result<(), CheckpointError> {
        write_synced(&folder.join(name), content)?;
        let (bytes, sha256) = (content.len() as u64, format!("{:x}", Sha256::digest(content)));
        self.files.insert(name.to_owned(), Entry { bytes, checksum: Checksum::Sha256(sha256) });
        Ok(())
    }

    /// Writes the manifest itself. No file may be added to the folder afterwards.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(MANIFEST);
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| CheckpointError::write(&path)(error.into()))?;
        write_synced(&path, &text)
    }

    pub(super) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        let text =
            files::read(&path).map_err(|error| unreadable(folder, MANIFEST, &path, error))?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| damaged(folder, MANIFEST, format!("is not a manifest: {error}")))?;
        for (name, entry) in &manifest.files {
            if !is_plain_name(name) {
                let problem = format!("names `{name}`, which is not a plain name");
                return Err(damaged(folder, MANIFEST, problem));
            }
            if !entry.covers_file() {
                let problem = format!("has pieces of `{name}` that do not add up to its size");
                return Err(damaged(folder, MANIFEST, problem));
            }
        }
        Ok(manifest)
    }

    /// The manifest of a model folder that this program wrote; `None` for other folders.
    pub(super) fn of_folder(folder: &Path) -> Option<Self> {
        Self::read(folder).ok()
    }

    /// Fails unless the manifest lists each of `names`.
    pub(super) fn check_lists(&self, folder: &Path, names: &[&str]) -> Result<(), CheckpointError> {
        match names.iter().find(|name| !self.files.contains_key(**name)) {
            Some(name) => Err(not_listed(folder, name)),
            None => Ok(()),
        }
    }

    /// Checksum of the manifest, to compare those of several ranks.
    pub(super) fn digest(&self) -> String {
        let text = serde_json::to_vec(self).expect("a manifest has plain values");
        format!("{:x}", Sha256::digest(text))
    }

    /// Checks the size of each file without reading its content.
    pub(super) fn check_sizes(&self, folder: &Path) -> Result<(), CheckpointError> {
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let found = match std::fs::metadata(&path) {
                Ok(metadata) if !metadata.is_file() => {
                    return Err(damaged(folder, name, "is not a regular file"));
                }
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

    /// Compares the share of rank `rank` of `world` ranks with its checksums. The ranks together
    /// read each byte once.
    pub(super) fn check_share(
        &self,
        folder: &Path,
        rank: usize,
        world: usize,
    ) -> Result<(), CheckpointError> {
        let pieces = self.files.iter().flat_map(|(name, entry)| {
            entry.pieces().into_iter().map(move |piece| (name.as_str(), piece))
        });
        let mut pieces: Vec<_> = pieces.collect();
        // The largest first, each to the rank that has the fewest bytes so far.
        pieces.sort_by_key(|(_, piece)| std::cmp::Reverse(piece.bytes));
        let mut loads = vec![0; world];
        for (name, piece) in pieces {
            let least = (0..world).min_by_key(|rank| loads[*rank]).unwrap_or_default();
            loads[least] += piece.bytes;
            if least == rank {
                copy_piece(folder, name, &piece, (folder, io::sink()))?;
            }
        }
        Ok(())
    }

    /// Copies a file, and compares it with its checksums.
    pub(super) fn copy_file(
        &self,
        name: &str,
        from: &Path,
        to: &Path,
    ) -> Result<(), CheckpointError> {
        let target = to.join(name);
        let mut file = File::create(&target).map_err(CheckpointError::write(&target))?;
        for piece in self.files[name].pieces() {
            copy_piece(from, name, &piece, (&target, &mut file))?;
        }
        file.sync_all().map_err(CheckpointError::write(&target))
    }

    /// Reads one small file after comparing it with its checksum.
    pub(super) fn read_checked(
        &self,
        folder: &Path,
        name: &str,
    ) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.files.get(name).ok_or_else(|| damaged(folder, name, "is missing"))?;
        let mut content = Vec::new();
        for piece in entry.pieces() {
            copy_piece(folder, name, &piece, (folder, &mut content))?;
        }
        Ok(content)
    }
}

/// The error for a file that the program needs and the manifest does not list.
pub(super) fn not_listed(folder: &Path, name: &str) -> CheckpointError {
    damaged(folder, name, format!("is not listed in `{MANIFEST}`"))
}

/// The error for a file of a checkpoint that cannot be opened.
fn unreadable(folder: &Path, name: &str, path: &Path, error: io::Error) -> CheckpointError {
    match error.kind() {
        io::ErrorKind::NotFound => damaged(folder, name, "is missing"),
        io::ErrorKind::InvalidInput => damaged(folder, name, "is not a regular file"),
        _ => CheckpointError::read(path)(error),
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

/// Copies a piece of a file to `to`, which has the path `target`, and compares it with its
/// checksum.
fn copy_piece(
    folder: &Path,
    name: &str,
    piece: &Piece,
    (target, mut to): (&Path, impl Write),
) -> Result<(), CheckpointError> {
    let path = folder.join(name);
    let mut file = files::open(&path).map_err(|error| unreadable(folder, name, &path, error))?;
    file.seek(SeekFrom::Start(piece.offset)).map_err(CheckpointError::read(&path))?;
    let (mut hash, mut left) = (Sha256::new(), piece.bytes);
    let mut buffer = vec![0; BUFFER_BYTES.min(usize::try_from(left).unwrap_or(BUFFER_BYTES))];
    while left > 0 {
        let len = buffer.len().min(usize::try_from(left).unwrap_or(BUFFER_BYTES));
        match file.read(&mut buffer[..len]) {
            Ok(0) => return Err(damaged(folder, name, "is too short")),
            Ok(count) => {
                hash.update(&buffer[..count]);
                to.write_all(&buffer[..count]).map_err(CheckpointError::write(target))?;
                left -= count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CheckpointError::read(&path)(error)),
        }
    }
    if format!("{:x}", hash.finalize()) != piece.sha256 {
        let (start, end) = (piece.offset, piece.offset + piece.bytes);
        let problem = format!("does not match its checksum in the bytes {start}..{end}");
        return Err(damaged(folder, name, problem));
    }
    Ok(())
}

const BUFFER_BYTES: usize = 1 << 20;

/// Adjacent bytes of a file that one rank wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

pub(super) struct PieceWriter {
    file: File,
    /// What was not yet written; ends at `end`.
    buffer: Vec<u8>,
    hash: Sha256,
    start: u64,
    end: u64,
    pieces: Vec<Piece>,
}

impl PieceWriter {
    /// Creates the file `path` of `bytes` bytes without content.
    pub(super) fn create(path: &Path, bytes: u64) -> Result<(), CheckpointError> {
        let created = File::create(path).and_then(|file| file.set_len(bytes));
        created.map_err(CheckpointError::write(path))
    }

    /// Opens the created file at its beginning.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::options().write(true).open(path);
        let file = file.map_err(CheckpointError::write(path))?;
        let (buffer, pieces) = (Vec::with_capacity(BUFFER_BYTES), Vec::new());
        Ok(Self { file, buffer, hash: Sha256::new(), start: 0, end: 0, pieces })
    }

    /// Continues at `offset`; begins a new piece unless the last one ends there.
    pub(super) fn seek(&mut self, offset: u64) -> io::Result<()> {
        if offset != self.end {
            self.end_piece()?;
            (self.start, self.end) = (offset, offset);
        }
        Ok(())
    }

    /// Appends to the current piece.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.flush()?;
        }
        self.hash.update(bytes);
        self.buffer.extend_from_slice(bytes);
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Syncs the file and returns what was written.
    pub(super) fn finish(mut self) -> io::Result<Vec<Piece>> {
        self.end_piece()?;
        self.file.sync_all()?;
        Ok(self.pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.end - self.buffer.len() as u64)?;
        self.buffer.clear();
        Ok(())
    }

    fn end_piece(&mut self) -> io::Result<()> {
        self.flush()?;
        let (offset, bytes) = (self.start, self.end - self.start);
        let sha256 = format!("{:x}", self.hash.finalize_reset());
        if bytes > 0 {
            self.pieces.push(Piece { offset, bytes, sha256 });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_checksum_of_abc_is_the_published_sha256() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(0);
        manifest.write_file(folder.path(), "abc", b"abc").unwrap();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(
            serde_json::to_value(&manifest.files["abc"]).unwrap(),
            json!({"bytes": 3, "sha256": sha256})
        );
    }

    #[test]
    fn a_manifest_is_read_back_unchanged_and_names_a_changed_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(7);
        manifest.write_file(folder.path(), "a.json", b"{}").unwrap();
        manifest.write(folder.path()).unwrap();
        let read = Manifest::read(folder.path()).unwrap();
        assert_eq!(read, manifest);
        read.check_sizes(folder.path()).unwrap();
        read.check_share(folder.path(), 0, 1).unwrap();

        write_synced(&folder.path().join("a.json"), b"[]").unwrap();
        read.check_sizes(folder.path()).unwrap();
        let error = read.check_share(folder.path(), 0, 1).unwrap_err().to_string();
        assert!(
            error.ends_with("`a.json` does not match its checksum in the bytes 0..2"),
            "{error}"
        );
    }

    #[test]
    fn pieces_that_do_not_add_up_to_the_size_of_their_file_are_damage() {
        let folder = tempfile::tempdir().unwrap();
        let piece = |bytes: u64| json!({"bytes": bytes, "sha256": ""});
        for pieces in [json!([]), json!([piece(2)]), json!([piece(2), piece(u64::MAX)])] {
            let manifest = json!({"step": 1, "files": {"a": {"bytes": 3, "pieces": pieces}}});
            write_synced(&folder.path().join(MANIFEST), manifest.to_string().as_bytes()).unwrap();
            let error = Manifest::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains("pieces of `a` that do not add up"), "{error}");
        }
    }

    #[test]
    fn a_manifest_cannot_name_a_file_outside_its_folder() {
        for name in ["../a", "/etc/passwd", "a/b", "..", ".", ""] {
            assert!(!is_plain_name(name), "{name}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
    }
}
