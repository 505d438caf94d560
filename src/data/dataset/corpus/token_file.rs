//! A tokenised corpus on disk: ids that are read by span, however many there are.
//!
//! Layout: the ids, 4 bytes each in little endian; a JSON index; the length of the index in 8 bytes.
//! A file is complete or not there: it is written under another name first. In memory are 4 bytes a
//! document and 8 bytes a place of [`Index::places`].

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::documents::Separators;
use crate::data::row::Rejection;

/// Version of the layout, part of the key.
pub(super) const VERSION: u32 = 1;
const ID_BYTES: u64 = size_of::<u32>() as u64;

/// All but the ids.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    /// Hash of text, tokenizer and separators.
    pub(super) key: String,
    /// Number of ids.
    pub(super) num_tokens: u32,
    /// First token of each document, ascending from 0.
    pub(super) documents: Vec<u32>,
    /// `(token, line)`: the line of the text that the token begins in; those after it, up to the next
    /// entry, begin there, too. Both ascend.
    pub(super) places: Vec<(u32, u32)>,
    /// Texts that could not be used.
    pub(super) rejected: Vec<Rejection>,
    /// Texts read, usable or not.
    pub(super) num_texts: u64,
}

impl Index {
    /// Line of the text in which a token begins, from 1.
    pub(super) fn line(&self, token: u32) -> u64 {
        let after = self.places.partition_point(|(at, _)| *at <= token);
        after.checked_sub(1).map_or(1, |place| u64::from(self.places[place].1))
    }

    /// Tokens of a document: the first, and the first after it.
    pub(super) fn document(&self, document: usize) -> (u32, u32) {
        let end = self.documents.get(document + 1).copied().unwrap_or(self.num_tokens);
        (self.documents[document], end)
    }

    /// Tokens of each document.
    pub(super) fn document_lengths(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.documents.len()).map(|document| {
            let (start, end) = self.document(document);
            end - start
        })
    }
}

/// A complete file, open for reading from many threads.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    pub(super) index: Index,
}

impl TokenFile {
    /// Opens the file at `path` if it is there, complete, and of this key.
    pub(super) fn open(path: &Path, key: &str) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let Some(index) = read_index(&file)? else { return Ok(None) };
        Ok((index.key == key).then_some(Self { file, index }))
    }

    /// Ids of a span that lies inside of the corpus.
    pub(super) fn read(&self, start: u32, tokens: u32) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; tokens as usize * ID_BYTES as usize];
        self.file.read_exact_at(&mut bytes, u64::from(start) * ID_BYTES)?;
        let ids = bytes.chunks_exact(ID_BYTES as usize);
        Ok(ids.map(|id| u32::from_le_bytes(id.try_into().expect("four bytes"))).collect())
    }
}

/// `None`: the file is no complete one.
fn read_index(file: &File) -> io::Result<Option<Index>> {
    let size = file.metadata()?.len();
    let Some(end) = size.checked_sub(8) else { return Ok(None) };
    let mut length = [0; 8];
    file.read_exact_at(&mut length, end)?;
    let length = u64::from_le_bytes(length);
    let Some(start) = end.checked_sub(length) else { return Ok(None) };
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, start)?;
    let index: Option<Index> = serde_json::from_slice(&json).ok();
    Ok(index.filter(|index| u64::from(index.num_tokens) * ID_BYTES == start))
}

/// More tokens than an id of a row can count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyTokens;

/// A file in the making. Dropped before its end, it leaves nothing.
pub(super) struct TokenWriter {
    out: BufWriter<File>,
    temporary: PathBuf,
    separators: Separators,
    last: Option<u32>,
    index: Index,
}

impl TokenWriter {
    /// Begins a file in `folder`, which is made if it is not there.
    pub(super) fn create(folder: &Path, separators: Separators, key: String) -> io::Result<Self> {
        static FILES: AtomicU64 = AtomicU64::new(0); // several corpora of one process
        fs::create_dir_all(folder)?;
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!(".tmp-tokens-{}-{number}", std::process::id()));
        let mut options = File::options();
        let file = options.write(true).read(true).create(true).truncate(true).open(&temporary)?;
        let out = BufWriter::with_capacity(1 << 20, file);
        let index = Index { key, ..Index::default() };
        Ok(Self { out, temporary, separators, last: None, index })
    }

    /// The next id of the corpus, which begins in this line of the text.
    pub(super) fn push(&mut self, id: u32, line: u64) -> io::Result<Result<(), TooManyTokens>> {
        let token = self.index.num_tokens;
        let (Some(next), Ok(line)) = (token.checked_add(1), u32::try_from(line)) else {
            return Ok(Err(TooManyTokens));
        };
        if self.last.is_none_or(|last| self.separators.part(last, id)) {
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

    /// The id before the next one.
    pub(super) fn last(&self) -> Option<u32> {
        self.last
    }

    /// Counts a text, and why it could not be used.
    pub(super) fn count(&mut self, rejection: Option<Rejection>) {
        self.index.num_texts += 1;
        self.index.rejected.extend(rejection);
    }

    /// Completes the file under its name, or as one without a name that ends with this process.
    pub(super) fn finish(mut self, path: Option<&Path>) -> io::Result<TokenFile> {
        let json = serde_json::to_vec(&self.index).map_err(io::Error::other)?;
        self.out.write_all(&json)?;
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
        // After `finish` there is no file of this name.
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
    fn what_was_written_is_read_by_span_document_and_line() {
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
    fn a_file_without_a_name_leaves_nothing_and_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = written(folder.path(), None);
        assert_eq!(file.read(3, 1).unwrap(), [5]);
        drop(TokenWriter::create(folder.path(), SEPARATORS, "k".to_owned()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_torn_file_is_none() {
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
