//! Finds the rows of JSONL files and of JSON arrays in one scan. The index says where the rows of a
//! file begin, for formats without an index of their own.

use std::io::{self, BufRead, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::sniff::BOM;
use crate::source::source_error::SourceError;

/// Finds the lines with text. Blank lines count in line numbers. CRLF, a byte order mark and a
/// missing last newline are accepted.
pub(super) fn scan_lines(mut reader: impl BufRead) -> io::Result<RowIndex> {
    let mut hasher = Sha256::new();
    let mut index = RowIndex::default();
    let mut offset = 0; // of the next byte
    let mut line_start = 0;
    let mut has_text = false;
    let mut line = 1;
    loop {
        let chunk = reader.fill_buf()?;
        if chunk.is_empty() {
            break;
        }
        hasher.update(chunk);
        let length = chunk.len();
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            let mut text = piece.trim_ascii_start();
            if offset == 0 && text.starts_with(BOM) {
                line_start = BOM.len() as u64;
                text = text[BOM.len()..].trim_ascii_start();
            }
            if !text.is_empty() && !has_text {
                has_text = true;
                index.push(line_start, line);
            }
            offset += piece.len() as u64;
            if piece.ends_with(b"\n") {
                line += 1;
                has_text = false;
                line_start = offset;
            }
        }
        reader.consume(length);
    }
    Ok(index.finish(offset, hasher.finalize().into()))
}

/// The result of [`scan_array`].
#[derive(Debug)]
pub(super) enum Array {
    /// The rows are the elements. Line numbers are the numbers of the elements.
    Rows(RowIndex),
    /// Text follows the array: the file has one value per line, and the first is an array.
    Lines,
}

/// Finds the elements of a JSON array. Each element ends before the comma or bracket that follows.
pub(super) fn scan_array(path: &Path, mut reader: impl BufRead) -> Result<Array, SourceError> {
    let mut hasher = Sha256::new();
    let mut index = RowIndex::default();
    let mut offset = 0u64;
    let mut scan = JsonScan::default();
    let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
    let broken = |rows: usize, problem: &str| {
        SourceError::broken(path, "a JSON array", &format!("{problem} row {rows}"))
    };
    loop {
        let chunk = reader.fill_buf().map_err(unreadable)?;
        if chunk.is_empty() {
            break;
        }
        hasher.update(chunk);
        for (at, byte) in (offset..).zip(chunk) {
            match scan.byte(*byte) {
                JsonStep::Inside => {}
                JsonStep::Row => index.push(at, index.len() as u64 + 1),
                JsonStep::Gap => {
                    return Err(broken(index.len(), "a comma has no row after it, after"));
                }
                JsonStep::Trailing => return Ok(Array::Lines),
            }
        }
        offset += chunk.len() as u64;
        let length = chunk.len();
        reader.consume(length);
    }
    match scan.place {
        JsonPosition::After => Ok(Array::Rows(index.finish(offset, hasher.finalize().into()))),
        _ => Err(broken(index.len(), "it ends without `]` in or after")),
    }
}

/// Where a scan is.
#[derive(Debug, Default)]
enum JsonPosition {
    #[default]
    Before,
    /// After `[`: a row or `]`.
    First,
    /// After a comma: a row.
    Next,
    /// In a row, in this number of brackets of its own.
    Row(u32),
    /// After `]`.
    After,
}

#[derive(Debug, Default)]
struct JsonScan {
    place: JsonPosition,
    in_string: bool,
    escaped: bool,
}

enum JsonStep {
    Inside,
    /// A row begins.
    Row,
    /// A comma without a row.
    Gap,
    /// Text after the array.
    Trailing,
}

impl JsonScan {
    fn byte(&mut self, byte: u8) -> JsonStep {
        if self.in_string {
            self.in_string = self.escaped || byte != b'"';
            self.escaped = !self.escaped && byte == b'\\';
            return JsonStep::Inside;
        }
        if byte.is_ascii_whitespace() {
            return JsonStep::Inside;
        }
        match (&mut self.place, byte) {
            (JsonPosition::Before, b'[') => self.place = JsonPosition::First,
            (JsonPosition::First | JsonPosition::Row(0), b']') => self.place = JsonPosition::After,
            (JsonPosition::First | JsonPosition::Next, b',') | (JsonPosition::Next, b']') => {
                return JsonStep::Gap;
            }
            (JsonPosition::First | JsonPosition::Next, _) => {
                self.place = JsonPosition::Row(u32::from(matches!(byte, b'{' | b'[')));
                self.in_string = byte == b'"';
                return JsonStep::Row;
            }
            (JsonPosition::Row(0), b',') => self.place = JsonPosition::Next,
            (JsonPosition::Row(depth), b'{' | b'[') => *depth += 1,
            (JsonPosition::Row(depth), b'}' | b']') => *depth = depth.saturating_sub(1),
            (JsonPosition::Row(_), b'"') => self.in_string = true,
            // before the array, the byte order mark
            (JsonPosition::Before | JsonPosition::Row(_), _) => {}
            (JsonPosition::After, _) => return JsonStep::Trailing,
        }
        JsonStep::Inside
    }
}

/// Removes the comma or bracket after an element, and spaces.
pub(super) fn element(bytes: &[u8]) -> &[u8] {
    let bytes = bytes.trim_ascii_end();
    bytes.strip_suffix(b",").or_else(|| bytes.strip_suffix(b"]")).unwrap_or(bytes).trim_ascii_end()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(text: &str) -> Result<Option<Vec<String>>, String> {
        // a buffer of 3 bytes cuts rows, strings and escapes
        let reader = io::BufReader::with_capacity(3, text.as_bytes());
        match scan_array(Path::new("a.json"), reader) {
            Ok(Array::Lines) => Ok(None),
            Ok(Array::Rows(index)) => {
                let range = |row| index.start(row) as usize..index.end(row) as usize;
                let of = |row| element(&text.as_bytes()[range(row)]);
                let rows = (0..index.len()).map(|row| String::from_utf8_lossy(of(row)).into());
                Ok(Some(rows.collect()))
            }
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn each_element_of_an_array_is_a_row_whatever_its_strings_contain() {
        let rows = [r#"{"a": "],[\"\\", "b": [1, {}]}"#, "3", r#""x,]""#, "[[2]]", "{\n}"];
        let text = format!("\u{feff} [\n{}\r\n]\n", rows.join(" ,\n "));
        assert_eq!(elements(&text), Ok(Some(rows.map(str::to_owned).to_vec())));
        assert_eq!(elements("[]"), Ok(Some(Vec::new())));
        assert_eq!(elements("[1]\n{\"messages\": []}"), Ok(None));
    }

    #[test]
    fn a_broken_array_is_an_error_with_the_row() {
        for (text, problem) in [
            ("[{\"a\": 1}, {\"a\"", "ends without `]` in or after row 2"),
            ("[{\"a\": \"]}", "ends without `]` in or after row 1"),
            ("[1, 2, ]", "no row after it, after row 2"),
            ("[, 2]", "no row after it, after row 0"),
        ] {
            let error = elements(text).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
