//! Reads a `.txt` file in pieces that can be tokenised separately, tokenises texts in parallel, and
//! writes the tokens to a file in the order of the texts.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use sha2::digest::generic_array::GenericArray;
use sha2::{Digest, Sha256};

use super::token_file::{Separators, TokenFile, TokenWriter, TooManyTokens};
use super::{CorpusOptions, Texts};
use crate::encode::Encoder;
use crate::row::Rejection;
use crate::source::files::BOM;
use crate::source::{AtRow, MAX_TEXT_BYTES, RowFile, SampleError, SampleFault, SourceError};
use batch::SampleId;
use tokenizer::Tokens;

/// Length of the pieces of a row with a long text, in bytes.
pub(super) const ROW_PIECE_BYTES: usize = 1 << 19;
/// Maximum length of a piece in bytes; a text without a place to cut has longer pieces.
const PIECE_BYTES: usize = 32 << 10;
/// Maximum length of an added token that pieces never divide, in bytes.
const TOKEN_BYTES: usize = 256;

/// Computes the SHA-256 of a file.
pub(super) fn fingerprint(path: &Path) -> io::Result<[u8; 32]> {
    let mut file = files::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().into()),
            read => hasher.update(&buffer[..read]),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextPiece {
    pub(super) text: String,
    /// Line in which the piece starts, from 1.
    pub(super) line: u64,
}

/// The reason why the next piece of a text file cannot be read.
#[derive(Debug)]
pub(super) enum TextFault {
    Read(io::Error),
    /// A line that is not UTF-8, from 1.
    Utf8(u64),
}

/// Iterator over the pieces of a file, which together are the file without its byte order mark.
///
/// Pieces end where byte-level tokenizers of the GPT-2 kind split words, and not in an added token,
/// so that the ids of the pieces equal those of the whole text.
pub(super) struct TextPieces<'e, R> {
    reader: R,
    buffer: Vec<u8>,
    line: u64,
    begun: bool,
    ended: bool,
    piece_bytes: usize,
    encoder: &'e Encoder,
}

impl<'e, 'a> TextPieces<'e, &'a [u8]> {
    /// The pieces of the text of a row, which may begin with a byte order mark.
    pub(super) fn of_row(text: &'a str, encoder: &'e Encoder) -> Self {
        Self { begun: true, ..Self::of(text.as_bytes(), ROW_PIECE_BYTES, encoder) }
    }
}

impl<'e, R: Read> TextPieces<'e, R> {
    pub(super) fn new(reader: R, encoder: &'e Encoder) -> Self {
        Self::of(reader, PIECE_BYTES, encoder)
    }

    pub(super) fn of(reader: R, piece_bytes: usize, encoder: &'e Encoder) -> Self {
        let (buffer, line) = (Vec::new(), 1);
        Self { reader, buffer, line, begun: false, ended: false, piece_bytes, encoder }
    }

    /// Whether a token crosses `at`, as an added token with a space may.
    fn is_in_token(&self, at: usize) -> bool {
        let starts = |at: &usize| self.buffer.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
        let start = (0..=at.saturating_sub(TOKEN_BYTES)).rev().find(starts).unwrap_or(0);
        let end = (at + TOKEN_BYTES).min(self.buffer.len());
        let end = (at..=end).rev().find(starts).unwrap_or(at);
        let near = std::str::from_utf8(&self.buffer[start..end]);
        // what cannot be encoded is reported when the piece is
        let tokens = near.ok().and_then(|text| self.encoder.encode_text(text).ok());
        let crosses = |(from, to): &(usize, usize)| *from < at - start && at - start < *to;
        tokens.is_some_and(|tokens| tokens.offsets.iter().any(crosses))
    }

    /// Reads until the buffer has `bytes` bytes, or the file ends.
    fn fill(&mut self, bytes: usize) -> io::Result<()> {
        if let Some(missing) = bytes.checked_sub(self.buffer.len()).filter(|_| !self.ended) {
            let read = (&mut self.reader).take(missing as u64).read_to_end(&mut self.buffer)?;
            self.ended = read < missing;
        }
        if !self.begun {
            self.begun = true;
            if self.buffer.starts_with(BOM) {
                self.buffer.drain(..BOM.len());
            }
        }
        Ok(())
    }

    fn read(&mut self) -> Result<Option<TextPiece>, TextFault> {
        let mut wanted = self.piece_bytes;
        let end = loop {
            self.fill(wanted + TOKEN_BYTES).map_err(TextFault::Read)?; // a token may continue there
            if self.buffer.len() < wanted {
                break self.buffer.len();
            }
            let is_cut = |at: &usize| is_cut(&self.buffer, *at) && !self.is_in_token(*at);
            match (1..wanted).rev().find(is_cut) {
                Some(cut) => break cut,
                // the tokenizer refuses such a piece
                None if wanted > MAX_TEXT_BYTES => break text_end(&self.buffer),
                None => wanted *= 2,
            }
        };
        if end == 0 {
            return Ok(None);
        }
        let rest = self.buffer.split_off(end);
        let bytes = std::mem::replace(&mut self.buffer, rest);
        let line = self.line;
        self.line += newlines(&bytes);
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            TextFault::Utf8(line + newlines(&error.as_bytes()[..valid]))
        })?;
        Ok(Some(TextPiece { text, line }))
    }
}

impl<R: Read> Iterator for TextPieces<'_, R> {
    type Item = Result<TextPiece, TextFault>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// The last place of `bytes` where a character starts.
fn text_end(bytes: &[u8]) -> usize {
    let starts = |at: &usize| bytes[*at] & 0xc0 != 0x80;
    (1..bytes.len()).rev().find(starts).unwrap_or(bytes.len())
}

/// Counts the newlines in `bytes`.
pub(super) fn newlines(bytes: &[u8]) -> u64 {
    bytes.split(|byte| *byte == b'\n').count() as u64 - 1
}

/// Returns whether no word crosses `at`: between a newline and a character that is not white space,
/// or between an ASCII letter and a space that an ASCII letter follows.
fn is_cut(bytes: &[u8], at: usize) -> bool {
    let letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
    match (bytes[at - 1], bytes[at]) {
        // the four excluded bytes also start white space beyond ASCII
        (b'\n', next) => {
            next.is_ascii_graphic() || (next >= 0x80 && !matches!(next, 0xc2 | 0xe1..=0xe3))
        }
        (before, b' ') => before.is_ascii_alphabetic() && letter(at + 1),
        _ => false,
    }
}

/// Number of pieces that are tokenised in parallel while the tokens of earlier ones are written.
const TEXTS_AT_A_TIME: usize = 64;

/// Opens the cached tokens of a corpus, or tokenises it. During tokenisation, calls
/// `progress(bytes of text done, bytes of text in total)`.
pub(super) fn tokens(
    path: &Path,
    texts: &Texts,
    separators: Separators,
    encoder: &Encoder,
    options: &CorpusOptions,
    fingerprint: [u8; 32],
    progress: &dyn Fn(u64, u64),
) -> Result<TokenFile, SourceError> {
    let key = format!("{:x}", GenericArray::from(fingerprint));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = format!("{stem}-{}.tokens", &key[..16]);
    let kept = options.cache.as_ref().map(|folder| folder.join(name));
    if let Some(kept) = &kept
        && let Ok(Some(file)) = TokenFile::open(kept, &key)
    {
        return Ok(file);
    }
    let folder = options.cache.clone().unwrap_or_else(std::env::temp_dir);
    let failed =
        |cause| SourceError::WriteTokens { path: path.to_owned(), folder: folder.clone(), cause };
    tracing::info!(file = %path.display(), "tokenising a corpus");
    let mut writer = TokenWriter::create(&folder, separators, key).map_err(failed)?;
    match texts {
        Texts::Rows(file) => tokenise_rows(file, separators, encoder, &mut writer, progress),
        Texts::File(path, _) => tokenise_file(path, separators, encoder, &mut writer, progress),
    }
    .map_err(|problem| problem.at(path, &folder))?;
    writer.finish(kept.as_deref()).map_err(failed)
}

/// The reason why tokenisation stops, without the paths.
enum Problem {
    Read(io::Error),
    Write(io::Error),
    Utf8(u64),
    TooLarge,
    Text(SampleError),
}

impl Problem {
    fn at(self, path: &Path, folder: &Path) -> SourceError {
        let (path, folder) = (path.to_owned(), folder.to_owned());
        match self {
            Self::Read(cause) => SourceError::Read { path, cause },
            Self::Write(cause) => SourceError::WriteTokens { path, folder, cause },
            Self::Utf8(line) => SourceError::NotUtf8 { path, line },
            Self::TooLarge => SourceError::ManyTokens { path },
            Self::Text(error) => SourceError::Rejected(Box::new(Rejection::of(&error))),
        }
    }
}

fn push(writer: &mut TokenWriter, id: u32, line: u64) -> Result<(), Problem> {
    match writer.push(id, line) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(TooManyTokens)) => Err(Problem::TooLarge),
        Err(cause) => Err(Problem::Write(cause)),
    }
}

/// Writes what `encode` returns, while the next texts are encoded; nothing ends it. `write` returns
/// the number of bytes of text that are done, for `progress`.
fn while_encoding<T: Send>(
    mut encode: impl FnMut() -> Vec<T> + Send,
    mut write: impl FnMut(Vec<T>) -> Result<u64, Problem> + Send,
    progress: impl Fn(u64),
) -> Result<(), Problem> {
    let mut encoded = encode();
    while !encoded.is_empty() {
        let (next, done) = rayon::join(&mut encode, || write(encoded));
        progress(done?);
        encoded = next;
    }
    Ok(())
}

/// Tokenises a data set, in which every row is a text of one or more documents.
fn tokenise_rows(
    file: &RowFile,
    separators: Separators,
    encoder: &Encoder,
    writer: &mut TokenWriter,
    progress: &dyn Fn(u64, u64),
) -> Result<(), Problem> {
    let num_bytes = file.bytes_before(file.len());
    let mut first = 0;
    let encode = || {
        let mut end = first;
        let most = file.bytes_before(first) + (TEXTS_AT_A_TIME * PIECE_BYTES) as u64;
        while end < file.len() && (end == first || file.bytes_before(end) < most) {
            end = file.len().min(end + TEXTS_AT_A_TIME);
        }
        let num_rows = (end - first).div_ceil(TEXTS_AT_A_TIME).max(1);
        let parts = (first..end).into_par_iter().step_by(num_rows);
        first = end;
        let ids = |part: usize| {
            let rows = part..end.min(part + num_rows);
            rows.clone().zip(file.map_texts(rows, &|text| row_tokens(encoder, text)))
        };
        parts.flat_map_iter(ids).collect()
    };
    let write = |encoded: Vec<(usize, Result<Vec<u32>, SampleError>)>| {
        let mut done = 0;
        for (row, ids) in encoded {
            let empty =
                || Rejection::new(&file.id(row), "empty", "the text has no tokens".to_owned());
            let ids = ids.map_err(|error| Rejection::of(&error));
            let ids = ids.and_then(|ids| if ids.is_empty() { Err(empty()) } else { Ok(ids) });
            match ids {
                Err(rejection) => writer.count(Some(rejection)),
                Ok(ids) => {
                    writer.count(None);
                    let bos = separators.bos.filter(|bos| ids[0] != *bos);
                    let eos = separators.eos.filter(|eos| ids[ids.len() - 1] != *eos);
                    let line = file.line(row);
                    for id in bos.into_iter().chain(ids).chain(eos) {
                        push(writer, id, line)?;
                    }
                }
            }
            done = file.bytes_before(row + 1);
        }
        Ok(done)
    };
    while_encoding(encode, write, |done| progress(done, num_bytes))
}

/// Tokenises a row. Long texts are tokenised in pieces, which takes little memory.
fn row_tokens(encoder: &Encoder, text: &str) -> Result<Vec<u32>, SampleFault> {
    if text.len() <= ROW_PIECE_BYTES {
        return encoder.encode_text(text).map(|tokens| tokens.ids);
    }
    let mut ids = Vec::new();
    // the pieces of a string can be read
    for piece in TextPieces::of_row(text, encoder).flatten() {
        ids.extend(encoder.encode_text(&piece.text)?.ids);
    }
    Ok(ids)
}

/// Tokenises a text file, which is one text.
fn tokenise_file(
    path: &Path,
    separators: Separators,
    encoder: &Encoder,
    writer: &mut TokenWriter,
    progress: &dyn Fn(u64, u64),
) -> Result<(), Problem> {
    let file: Arc<Path> = path.into();
    let text = files::open(path).map_err(Problem::Read)?;
    let num_bytes = text.metadata().map_err(Problem::Read)?.len();
    let mut pieces = TextPieces::new(text, encoder);
    let encode = || {
        let some: Vec<Result<TextPiece, TextFault>> =
            pieces.by_ref().take(TEXTS_AT_A_TIME).collect();
        let encode = |piece: Result<TextPiece, TextFault>| {
            let piece = piece.map_err(|fault| match fault {
                TextFault::Read(cause) => Problem::Read(cause),
                TextFault::Utf8(line) => Problem::Utf8(line),
            })?;
            let id = SampleId { file: file.clone(), line: piece.line };
            let tokens = encoder.encode_text(&piece.text).at(&id).map_err(Problem::Text)?;
            Ok((piece, tokens))
        };
        some.into_par_iter().map(encode).collect()
    };
    let (mut line, mut done) = (1, 0);
    let write = |encoded: Vec<Result<(TextPiece, Tokens), Problem>>| {
        for encoded in encoded {
            let (piece, tokens) = encoded?;
            let text_bytes = piece.text.as_bytes();
            done += text_bytes.len() as u64;
            let mut counted = 0; // number of bytes whose newlines `line` includes
            line = piece.line;
            for (id, (start, _)) in tokens.ids.into_iter().zip(tokens.offsets) {
                line += newlines(&text_bytes[counted..start.max(counted)]);
                counted = counted.max(start);
                if writer.last().is_none()
                    && let Some(bos) = separators.bos.filter(|bos| *bos != id)
                {
                    push(writer, bos, line)?;
                }
                push(writer, id, line)?;
            }
        }
        Ok(done)
    };
    while_encoding(encode, write, |done| progress(done.min(num_bytes), num_bytes))?;
    progress(num_bytes, num_bytes); // the byte order mark was not counted above
    if let (Some(last), Some(eos)) = (writer.last(), separators.eos)
        && last != eos
    {
        push(writer, eos, line)?;
    }
    writer.count(None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::ENCODER;
    use super::*;

    fn pieces(text: &[u8], piece_bytes: usize) -> Vec<TextPiece> {
        let pieces = |encoder: &Encoder| {
            TextPieces::of(text, piece_bytes, encoder).map(Result::unwrap).collect()
        };
        ENCODER.with(pieces)
    }

    #[test]
    fn pieces_end_between_lines_and_words() {
        let text = "one two\nthree\n\n four five\n six";
        let found = pieces(text.as_bytes(), 10);
        let texts: Vec<(&str, u64)> = found.iter().map(|p| (p.text.as_str(), p.line)).collect();
        assert_eq!(texts, [("one two\n", 1), ("three\n\n four", 2), (" five\n six", 4)]);
        assert!(pieces(b"", 4).is_empty());
        assert_eq!(pieces(b"\xef\xbb\xbfab", 1000)[0].text, "ab");
    }

    #[test]
    fn the_error_for_invalid_utf8_names_the_line() {
        let text = &b"one\ntwo\nth\xffree\n"[..];
        let fault = ENCODER.with(|encoder| TextPieces::of(text, 4, encoder).find_map(Result::err));
        assert!(matches!(fault, Some(TextFault::Utf8(3))), "{fault:?}");
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_text_and_have_its_line_numbers(
            text in r"([a-c\u{e9}\u{4e00}\u{3000}.]{0,5}[ \n\t]{0,2}){0,40}", piece_bytes in 1usize..40
        ) {
            let found = pieces(text.as_bytes(), piece_bytes);
            prop_assert_eq!(found.iter().map(|p| p.text.as_str()).collect::<String>(), text.clone());
            let mut before = 0;
            for piece in found {
                let lines = text[..before].matches('\n').count() as u64;
                prop_assert_eq!(piece.line, lines + 1);
                before += piece.text.len();
            }
        }
    }
}
