//! Files that several ranks write at once: each writes its pieces at their offsets.

use super::CheckpointError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Adjacent bytes of a file that one rank wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// Writes the pieces of one rank into a file.
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
