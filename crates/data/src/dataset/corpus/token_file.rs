//! A tokenised corpus on disk. Ids are read by span, so the corpus may exceed the memory.
//!
//! Layout: the ids as little-endian `u32`; a JSON index; its CRC-32, little-endian; its length as
//! little-endian `u64`. The index has the checksums of the ids, which [`TokenFile::open`] compares.
//! A file is written under a temporary name and renamed when it is complete. The index takes 4
//! bytes of memory per document and 8 bytes per entry of [`Index::places`].
//!
//! The token stream is divided into documents by their separators.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::checksums;
use crate::row::Rejection;
use batch::{EncodedSample, IGNORE_INDEX, SampleId};

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

    /// Tokens of each document.
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

/// Ids that separate documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Separators {
    /// Id that ends a document; `None` if only `bos` separates documents.
    pub(super) eos: Option<u32>,
    /// Id that starts a document; `None` if only `eos` separates documents.
    pub(super) bos: Option<u32>,
}

impl Separators {
    /// Returns whether a document starts at `id`, which follows `before`.
    pub(super) fn separate(self, before: u32, id: u32) -> bool {
        self.eos == Some(before) || self.bos == Some(id)
    }

    /// Converts a span of tokens, `[T]`, to a sample. Each document in it is a segment with
    /// positions from 0, and every token except the first of a segment is a target.
    pub(super) fn sample(self, id: SampleId, ids: Vec<u32>) -> EncodedSample {
        let mut labels: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
        let mut position_ids = Vec::with_capacity(ids.len());
        let (mut start, mut segment_starts) = (0, Vec::new());
        for at in 0..ids.len() {
            if at == 0 || self.separate(ids[at - 1], ids[at]) {
                start = at;
                labels[at] = IGNORE_INDEX;
                segment_starts.extend((at > 0).then_some(at as u32));
            }
            position_ids.push([(at - start) as u32; 3]);
        }
        EncodedSample {
            weights: None,
            id,
            input_ids: ids,
            labels,
            position_ids,
            segment_starts,
            vision_rows: Vec::new(),
            media: Vec::new(),
        }
    }
}

/// Pieces of the documents of a stream: whole documents, or parts of a limited number of tokens.
///
/// A piece starts with the last token of the piece before, so that every token of a document except
/// its first is a target exactly once.
#[derive(Debug)]
pub(super) struct DocumentPieces {
    /// Maximum number of tokens of a piece; `None` does not split documents.
    at_most: Option<u32>,
    /// Number of pieces before each document, and in total, `[documents + 1]`. Empty if documents
    /// are not split.
    before: Vec<u32>,
}

impl DocumentPieces {
    /// Splits documents of these `lengths` into pieces of at most `at_most` tokens, which must be
    /// above 1. Returns `None` if there are more than `u32::MAX` pieces.
    pub(super) fn new(lengths: impl Iterator<Item = u32>, at_most: Option<u32>) -> Option<Self> {
        let mut before = Vec::new();
        if let Some(at_most) = at_most {
            let mut total = 0u32;
            before.push(0);
            for length in lengths {
                total = total.checked_add((length - 1).div_ceil(at_most - 1).max(1))?;
                before.push(total);
            }
        }
        Some(Self { at_most, before })
    }

    /// Number of pieces; `documents` is the number of documents.
    pub(super) fn len(&self, documents: usize) -> usize {
        self.before.last().map_or(documents, |pieces| *pieces as usize)
    }

    /// Returns the document of a piece, and the index of its first token in that document.
    pub(super) fn place(&self, piece: u32) -> (usize, u32) {
        match self.at_most {
            None => (piece as usize, 0),
            Some(at_most) => {
                let document = self.before.partition_point(|before| *before <= piece) - 1;
                (document, (piece - self.before[document]) * (at_most - 1))
            }
        }
    }

    /// Number of tokens of the piece that starts at token `start` of a document of `length` tokens.
    pub(super) fn tokens(&self, length: u32, start: u32) -> u32 {
        (length - start).min(self.at_most.unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::collate;
    use batch::{Pack, PaddingSide};

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

    const EOS: Separators = Separators { eos: Some(0), bos: None };
    const BOS: Separators = Separators { eos: None, bos: Some(1) };
    const BOTH: Separators = Separators { eos: Some(0), bos: Some(1) };

    fn sample(separators: Separators, ids: &[u32]) -> EncodedSample {
        let id = SampleId { file: Path::new("a.txt").into(), line: 1 };
        separators.sample(id, ids.to_vec())
    }

    #[test]
    fn a_document_ends_after_an_eos_and_begins_at_a_bos() {
        for (separators, ids, lengths) in [
            (EOS, &[5, 6, 0, 7, 8, 0][..], &[3, 3][..]),
            (EOS, &[5, 6, 0, 7], &[3, 1]),
            (EOS, &[0, 7, 8], &[1, 2]), // starts with the end of the document before
            (EOS, &[5, 6], &[2]),
            (EOS, &[5, 1, 6], &[3]), // without `bos`, id 1 is an ordinary token
            (BOS, &[1, 5, 1, 6, 7], &[2, 3]),
            (BOS, &[5, 6, 1], &[2, 1]),
            (BOTH, &[1, 5, 0, 1, 6, 0], &[3, 3]),
            (BOTH, &[1, 5, 0, 6], &[3, 1]),
        ] {
            let sample = sample(separators, ids);
            assert_eq!(sample.segment_lengths(), lengths, "{ids:?}");
            let positions: Vec<u32> = lengths.iter().flat_map(|length| 0..*length).collect();
            let found: Vec<u32> = sample.position_ids.iter().map(|axes| axes[0]).collect();
            assert_eq!(found, positions, "{ids:?}");
            for (at, label) in sample.labels.iter().enumerate() {
                let expected = if positions[at] == 0 { IGNORE_INDEX } else { i64::from(ids[at]) };
                assert_eq!(*label, expected, "token {at} of {ids:?}");
            }
        }
    }

    #[test]
    fn pieces_of_a_document_share_one_token() {
        // documents of 1, 2, 5 and 6 tokens in pieces of at most 3
        let lengths = [1u32, 2, 5, 6];
        let pieces = DocumentPieces::new(lengths.into_iter(), Some(3)).unwrap();
        let expected =
            [(0, 0, 1), (1, 0, 2), (2, 0, 3), (2, 2, 3), (3, 0, 3), (3, 2, 3), (3, 4, 2)];
        assert_eq!(pieces.len(4), expected.len());
        for (piece, expected) in (0..).zip(expected) {
            let (document, start) = pieces.place(piece);
            let tokens = pieces.tokens(lengths[document], start);
            assert_eq!((document, start, tokens), expected);
        }
        let whole = DocumentPieces::new(lengths.into_iter(), None).unwrap();
        assert_eq!((whole.len(4), whole.place(3), whole.tokens(6, 0)), (4, (3, 0), 6));
        assert!(DocumentPieces::new([u32::MAX; 3].into_iter(), Some(2)).is_none());
    }

    /// Element (`i`, `j`) of the dense attention mask `[B * L, B * L]`, computed from the ids:
    /// whether token `i` attends to token `j`. Both are (row, place).
    fn dense(
        rows: &[Vec<u32>],
        separators: Separators,
        i: (usize, usize),
        j: (usize, usize),
    ) -> bool {
        let starts_document = |at: usize| {
            let ids = &rows[i.0];
            separators.eos == Some(ids[at - 1]) || separators.bos == Some(ids[at])
        };
        i.0 == j.0 && j.1 <= i.1 && !(j.1 + 1..=i.1).any(starts_document)
    }

    proptest! {
        #[test]
        fn segment_boundaries_of_a_batch_equal_the_dense_mask(
            rows in prop::collection::vec(prop::collection::vec(0u32..5, 1..12), 1..5),
            kind in 0usize..3,
        ) {
            let separators = [EOS, BOS, BOTH][kind];
            let packs = rows.iter().map(|ids| Pack { samples: vec![sample(separators, ids)] });
            let merge = NonZeroU32::MIN;
            let batch = collate(packs.collect(), 3, PaddingSide::Right, merge).unwrap();
            let stream = batch.unpad().unwrap();
            let mut segment_of = vec![0; stream.num_tokens];
            for (index, segment) in stream.cu_seqlens.segments().enumerate() {
                segment_of[segment].fill(index);
            }
            let places: Vec<(usize, usize)> = rows.iter().enumerate()
                .flat_map(|(row, ids)| (0..ids.len()).map(move |at| (row, at))).collect();
            prop_assert_eq!(places.len(), stream.num_tokens);
            for (i, to) in places.iter().enumerate() {
                for (j, from) in places.iter().enumerate() {
                    let attends = j <= i && segment_of[i] == segment_of[j];
                    prop_assert_eq!(attends, dense(&rows, separators, *to, *from));
                }
            }
        }

        #[test]
        fn each_token_of_a_document_except_its_first_is_a_target_once(
            lengths in prop::collection::vec(1u32..60, 1..20), at_most in 2u32..20,
        ) {
            let pieces = DocumentPieces::new(lengths.iter().copied(), Some(at_most)).unwrap();
            let mut targets: Vec<Vec<u32>> =
                lengths.iter().map(|length| vec![0; *length as usize]).collect();
            for piece in 0..pieces.len(lengths.len()) as u32 {
                let (document, start) = pieces.place(piece);
                let tokens = pieces.tokens(lengths[document], start);
                prop_assert!(tokens >= 1 && tokens <= at_most);
                for at in start + 1..start + tokens {
                    targets[document][at as usize] += 1;
                }
            }
            for document in targets {
                prop_assert_eq!(document[0], 0);
                prop_assert!(document[1..].iter().all(|times| *times == 1));
            }
        }
    }
}
