//! A tokenised corpus on disk. Ids are read by span, so the corpus may exceed the memory.
//!
//! Layout: the ids as little-endian `u32`; a JSON index; its CRC-32, little-endian; its length as
//! little-endian `u64`. The index has the checksums of the ids, which [`TokenFile::open`] compares.
//! A file is written under a temporary name and renamed when it is complete. The index takes 4
//! bytes of memory per document and 8 bytes per entry of [`Index::places`].

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::documents::Separators;
use crate::checksums;
use crate::row::Rejection;

/// Version of the layout, which is part of the key.
pub(super) const VERSION: u32 = 2;
const ID_BYTES: u64 = size_of::<u32>() as u64;
/// Bytes after the index: its checksum and its length.
const END_BYTES: u64 = 12;

/// Index of the file: everything except the ids.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    /// Hash of the text, the tokenizer and the separators.
    pub(super) key: String,
    /// Number of ids.
    pub(super) num_tokens: u32,
    /// First token of each document, `[documents]`, ascending from 0.
    pub(super) documents: Vec<u32>,
    /// `(token, line)`: this token and those up to the next entry start in this line of the text.
    /// Both numbers ascend.
    pub(super) places: Vec<(u32, u32)>,
    /// Rejections of the texts that could not be used.
    pub(super) rejected: Vec<Rejection>,
    /// Number of texts, including rejected ones.
    pub(super) num_texts: u64,
    /// Checksums of the blocks of ids.
    sums: Vec<u32>,
}

impl Index {
    /// Returns the line of the text in which a token starts, from 1.
    pub(super) fn line(&self, token: u32) -> u64 {
        let after = self.places.partition_point(|(at, _)| *at <= token);
        after.checked_sub(1).map_or(1, |place| u64::from(self.places[place].1))
    }

    /// Returns the first token of a document and the first token after it.
    pub(super) fn document(&self, document: usize) -> (u32, u32) {
        let end = self.documents.get(document + 1).copied().unwrap_or(self.num_tokens);
        (self.documents[document], end)
    }

    /// Number of tokens of each document.
    pub(super) fn document_lengths(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.documents.len()).map(|document| {
            let (start, end) = self.document(document);
            end - start
        })
    }
}

/// An open, complete file. It can be read from several threads.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    pub(super) index: Index,
}

impl TokenFile {
    /// Opens the file at `path` and compares its checksums. Returns `None` if it does not exist,
    /// and logs a warning if it is damaged or has another key.
    pub(super) fn open(path: &Path, key: &str) -> io::Result<Option<Self>> {
        let file = match files::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let index = read_index(&file)?.filter(|index| index.key == key);
        if let Some(index) = index
            && checksums::of_blocks(&file, u64::from(index.num_tokens) * ID_BYTES)? == index.sums
        {
            return Ok(Some(Self { file, index }));
        }
        let path = path.display();
        tracing::warn!(%path, "the cached tokens are damaged: tokenising the corpus again");
        Ok(None)
    }

    /// Reads `tokens` ids from `start` on. The span must lie inside the corpus.
    pub(super) fn read(&self, start: u32, tokens: u32) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; tokens as usize * ID_BYTES as usize];
        self.file.read_exact_at(&mut bytes, u64::from(start) * ID_BYTES)?;
        let ids = bytes.chunks_exact(ID_BYTES as usize);
        Ok(ids.map(|id| u32::from_le_bytes(id.try_into().expect("four bytes"))).collect())
    }
}

/// Reads the index; `None` if the file is incomplete or the index damaged.
fn read_index(file: &File) -> io::Result<Option<Index>> {
    let size = file.metadata()?.len();
    let Some(end) = size.checked_sub(END_BYTES) else { return Ok(None) };
    let (mut sum, mut length) = ([0; 4], [0; 8]);
    file.read_exact_at(&mut sum, end)?;
    file.read_exact_at(&mut length, end + 4)?;
    let length = u64::from_le_bytes(length);
    let Some(start) = end.checked_sub(length) else { return Ok(None) };
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, start)?;
    if checksums::of_bytes(&json) != u32::from_le_bytes(sum) {
        return Ok(None);
    }
    let index: Option<Index> = serde_json::from_slice(&json).ok();
    Ok(index.filter(|index| u64::from(index.num_tokens) * ID_BYTES == start))
}

/// Error: the corpus has more tokens or lines than a `u32` can count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyTokens;

/// Writes a token file. If it is dropped before [`Self::finish`], it removes its temporary file.
pub(super) struct TokenWriter {
    out: BufWriter<File>,
    temporary: PathBuf,
    separators: Separators,
    last: Option<u32>,
    index: Index,
}

impl TokenWriter {
    /// Creates a temporary file in `folder`, which is created if it does not exist.
    pub(super) fn create(folder: &Path, separators: Separators, key: String) -> io::Result<Self> {
        static FILES: AtomicU64 = AtomicU64::new(0); // numbers the files of this process
        fs::create_dir_all(folder)?;
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!(".tmp-tokens-{}-{number}", std::process::id()));
        let mut options = File::options();
        let file = options.write(true).read(true).create(true).truncate(true).open(&temporary)?;
        let out = BufWriter::with_capacity(1 << 20, file);
        let index = Index { key, ..Index::default() };
        Ok(Self { out, temporary, separators, last: None, index })
    }

    /// Appends the next id of the corpus. `line` is the line of the text in which the token starts.
    pub(super) fn push(&mut self, id: u32, line: u64) -> io::Result<Result<(), TooManyTokens>> {
        let token = self.index.num_tokens;
        let (Some(next), Ok(line)) = (token.checked_add(1), u32::try_from(line)) else {
            return Ok(Err(TooManyTokens));
        };
        if self.last.is_none_or(|last| self.separators.separate(last, id)) {
            self.index.documents.push(token);
        }
        if self.index.places.last().is_none_or(|place| place.1 != line) {
            self.index.places.push((token, line));
        }
        self.last = Some(id);
        self.index.num_tokens = next;
        self.out.write_all(&id.to_le_bytes())?;
        Ok(Ok(()))
    }

    /// Last id that was appended.
    pub(super) fn last(&self) -> Option<u32> {
        self.last
    }

    /// Counts a text, and records its rejection if it could not be used.
    pub(super) fn count(&mut self, rejection: Option<Rejection>) {
        self.index.num_texts += 1;
        self.index.rejected.extend(rejection);
    }

    /// Completes the file and renames it to `path`. With `None` the file gets no name, and the
    /// operating system deletes it when it is closed.
    pub(super) fn finish(mut self, path: Option<&Path>) -> io::Result<TokenFile> {
        self.out.flush()?;
        let num_bytes = u64::from(self.index.num_tokens) * ID_BYTES;
        self.index.sums = checksums::of_blocks(self.out.get_ref(), num_bytes)?;
        let json = serde_json::to_vec(&self.index).map_err(io::Error::other)?;
        self.out.write_all(&json)?;
        self.out.write_all(&checksums::of_bytes(&json).to_le_bytes())?;
        self.out.write_all(&(json.len() as u64).to_le_bytes())?;
        self.out.flush()?;
        let file = self.out.get_ref().try_clone()?;
        match path {
            Some(path) => {
                file.sync_all()?;
                fs::rename(&self.temporary, path)?;
            }
            None => fs::remove_file(&self.temporary)?,
        }
        Ok(TokenFile { file, index: std::mem::take(&mut self.index) })
    }
}

impl Drop for TokenWriter {
    fn drop(&mut self) {
        // after `finish` no file of this name exists
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEPARATORS: Separators = Separators { eos: Some(9), bos: None };

    fn written(folder: &Path, path: Option<&Path>) -> TokenFile {
        let mut writer = TokenWriter::create(folder, SEPARATORS, "k".to_owned()).unwrap();
        for (id, line) in [(3, 1), (4, 1), (9, 1), (5, 4), (6, 6), (9, 6)] {
            writer.push(id, line).unwrap().unwrap();
        }
        writer.count(None);
        writer.finish(path).unwrap()
    }

    #[test]
    fn written_tokens_are_read_by_span_document_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let made = written(folder.path(), Some(&path));
        let found = TokenFile::open(&path, "k").unwrap().unwrap();
        assert_eq!(made.index, found.index);
        for file in [made, found] {
            assert_eq!(file.read(0, 6).unwrap(), [3, 4, 9, 5, 6, 9]);
            assert_eq!(file.read(2, 2).unwrap(), [9, 5]);
            assert_eq!(file.index.document_lengths().collect::<Vec<_>>(), [3, 3]);
            let lines: Vec<u64> = (0..6).map(|token| file.index.line(token)).collect();
            assert_eq!(lines, [1, 1, 1, 4, 6, 6]);
        }
        assert!(TokenFile::open(&path, "another").unwrap().is_none());
        assert!(TokenFile::open(&folder.path().join("none"), "k").unwrap().is_none());
    }

    #[test]
    fn a_file_without_a_name_can_be_read_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = written(folder.path(), None);
        assert_eq!(file.read(3, 1).unwrap(), [5]);
        drop(TokenWriter::create(folder.path(), SEPARATORS, "k".to_owned()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_with_a_damaged_byte_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        written(folder.path(), Some(&path));
        let bytes = fs::read(&path).unwrap();
        for (at, bit) in (0..bytes.len()).flat_map(|at| [(at, 1), (at, 128)]) {
            let mut bytes = bytes.clone();
            bytes[at] ^= bit;
            File::create(&path).unwrap().write_all(&bytes).unwrap();
            assert!(TokenFile::open(&path, "k").unwrap().is_none(), "byte {at}");
        }
    }

    #[test]
    fn an_incomplete_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        written(folder.path(), Some(&path));
        let bytes = fs::read(&path).unwrap();
        for cut in [0, 5, 24, bytes.len() - 9, bytes.len() - 1] {
            File::create(&path).unwrap().write_all(&bytes[..cut]).unwrap();
            assert!(TokenFile::open(&path, "k").unwrap().is_none(), "{cut} bytes");
        }
    }
}
