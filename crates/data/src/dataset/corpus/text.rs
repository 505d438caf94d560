//! Reads a `.txt` file in pieces that can be tokenised separately.

use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::source::MAX_TEXT_BYTES;

/// Length of the pieces of a row with a long text, in bytes.
pub(super) const ROW_PIECE_BYTES: usize = 1 << 19;
/// Maximum length of a piece in bytes; a text without a place to cut has longer pieces.
const PIECE_BYTES: usize = 32 << 10;
const BOM: &[u8] = b"\xef\xbb\xbf";

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

/// A piece of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
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
/// Pieces end where byte-level tokenizers of the GPT-2 kind split words, so that the ids of the
/// pieces equal those of the whole text.
pub(super) struct Pieces<R> {
    reader: R,
    buffer: Vec<u8>,
    line: u64,
    begun: bool,
    ended: bool,
    piece_bytes: usize,
}

impl<'a> Pieces<&'a [u8]> {
    /// The pieces of the text of a row, which may begin with a byte order mark.
    pub(super) fn of_row(text: &'a str) -> Self {
        Self { begun: true, ..Self::of(text.as_bytes(), ROW_PIECE_BYTES) }
    }
}

impl<R: Read> Pieces<R> {
    pub(super) fn new(reader: R) -> Self {
        Self::of(reader, PIECE_BYTES)
    }

    pub(super) fn of(reader: R, piece_bytes: usize) -> Self {
        Self { reader, buffer: Vec::new(), line: 1, begun: false, ended: false, piece_bytes }
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

    fn read(&mut self) -> Result<Option<Piece>, TextFault> {
        let mut wanted = self.piece_bytes;
        let end = loop {
            self.fill(wanted).map_err(TextFault::Read)?;
            if self.ended {
                break self.buffer.len();
            }
            match (1..self.buffer.len()).rev().find(|at| is_cut(&self.buffer, *at)) {
                Some(cut) => break cut,
                // the tokenizer refuses such a piece
                None if self.buffer.len() > MAX_TEXT_BYTES => {
                    break text_end(&self.buffer);
                }
                None => wanted = self.buffer.len() * 2,
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
        Ok(Some(Piece { text, line }))
    }
}

impl<R: Read> Iterator for Pieces<R> {
    type Item = Result<Piece, TextFault>;

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(text: &[u8], piece_bytes: usize) -> Vec<Piece> {
        Pieces::of(text, piece_bytes).map(Result::unwrap).collect()
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
        let fault = Pieces::of(&b"one\ntwo\nth\xffree\n"[..], 4).find_map(Result::err);
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
