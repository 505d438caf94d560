//! Where the rows of a file begin, for formats without an index of their own.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// Byte offsets and line numbers of the rows of a file, and the hash of its bytes.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RowIndex {
    starts: Vec<u64>,        // [rows], byte offsets
    gaps: Vec<(usize, u64)>, // (row, lines before it without a row), ascending; where they change
    num_bytes: u64,
    sha256: [u8; 32],
}

impl RowIndex {
    /// Builds the index from the byte offset and the line number of each row, in order.
    pub(crate) fn of_rows(
        rows: impl Iterator<Item = (u64, u64)>,
        num_bytes: u64,
        sha256: [u8; 32],
    ) -> Self {
        let mut index = Self::default();
        for (start, line) in rows {
            index.push(start, line);
        }
        index.finish(num_bytes, sha256)
    }

    /// Adds a row. Lines ascend.
    pub(super) fn push(&mut self, start: u64, line: u64) {
        let row = self.starts.len();
        if self.line(row) != line {
            self.gaps.push((row, line.saturating_sub(row as u64 + 1)));
        }
        self.starts.push(start);
    }

    pub(super) fn finish(self, num_bytes: u64, sha256: [u8; 32]) -> Self {
        Self { num_bytes, sha256, ..self }
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The byte offset of a row.
    pub(super) fn start(&self, row: usize) -> u64 {
        self.starts[row]
    }

    /// The byte offset after a row and what separates it from the next.
    pub(super) fn end(&self, row: usize) -> u64 {
        self.starts.get(row + 1).copied().unwrap_or(self.num_bytes)
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    pub(super) fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    /// Returns the line number of a row, starting at 1.
    pub(super) fn line(&self, row: usize) -> u64 {
        let after = self.gaps.partition_point(|gap| gap.0 <= row);
        let num_blank = if after == 0 { 0 } else { self.gaps[after - 1].1 };
        row as u64 + num_blank + 1
    }
}

/// Hashes and counts the bytes that are read through it.
pub(super) struct Hashing<R> {
    inner: R,
    hasher: Sha256,
    num_bytes: u64,
}

impl<R: Read> Hashing<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new(), num_bytes: 0 }
    }

    /// Reads the rest, and returns the number of bytes and their SHA-256.
    pub(super) fn finish(mut self) -> io::Result<(u64, [u8; 32])> {
        let mut buffer = vec![0; 1 << 18];
        while self.read(&mut buffer)? > 0 {}
        Ok((self.num_bytes, self.hasher.finalize().into()))
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num_read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..num_read]);
        self.num_bytes += num_read as u64;
        Ok(num_read)
    }
}
