//! CSV and TSV: a header line with the names of the columns, then one record per row.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::Path;

use csv::{ByteRecord, Reader, ReaderBuilder};
use serde_json::{Map, Value};

use super::columns::json_cell;
use super::json::{Hashing, RowIndex};
use super::sniff::BOM;
use crate::source::raw_row::RawRow;
use crate::source::source_error::SourceError;

/// The names of the columns, and the byte between cells.
#[derive(Debug, Clone)]
pub(super) struct CsvHeader {
    names: Vec<String>,
    delimiter: u8,
}

/// Where the next byte is, by the rules of the csv crate.
#[derive(Debug, Clone, Copy)]
enum CsvPosition {
    /// At the beginning of a record, or of an empty line.
    Record,
    /// At the beginning of a cell.
    Cell,
    /// In a cell without quotes.
    Plain,
    /// In a cell in quotes.
    Quoted,
    /// After a quote in such a cell: its end, or the first of two quotes for one.
    Quote,
}

impl CsvPosition {
    fn after(self, byte: u8, delimiter: u8) -> Self {
        match (self, byte) {
            (Self::Quoted, b'"') => Self::Quote,
            (Self::Quoted, _) | (Self::Record | Self::Cell | Self::Quote, b'"') => Self::Quoted,
            (_, b'\n' | b'\r') => Self::Record,
            (_, byte) if byte == delimiter => Self::Cell,
            _ => Self::Plain,
        }
    }
}

fn reader<R: Read>(delimiter: u8, input: R) -> Reader<R> {
    let mut builder = ReaderBuilder::new();
    builder.delimiter(delimiter).has_headers(false).flexible(true).buffer_capacity(1 << 18);
    builder.from_reader(input)
}

impl CsvHeader {
    /// Reads the first record of the file.
    pub(super) fn read(path: &Path, delimiter: u8, input: impl Read) -> Result<Self, SourceError> {
        let mut record = ByteRecord::new();
        let read = reader(delimiter, input).read_byte_record(&mut record);
        read.map_err(|error| failed(path, error))?;
        let fault = |problem: String| SourceError::Header { path: path.to_owned(), problem };
        let (mut names, mut seen) = (Vec::new(), HashSet::new());
        for (column, cell) in (1..).zip(&record) {
            let name = std::str::from_utf8(cell)
                .map_err(|_| fault(format!("the name of column {column} is not UTF-8")))?;
            let name = name.trim_start_matches('\u{feff}').trim();
            if name.is_empty() {
                return Err(fault(format!("column {column} has no name")));
            }
            if !seen.insert(name) {
                return Err(fault(format!("two columns have the name `{name}`")));
            }
            names.push(name.to_owned());
        }
        Ok(Self { names, delimiter })
    }

    /// Finds the records after the header. Line numbers are those of their first lines.
    pub(super) fn scan(&self, input: impl Read) -> io::Result<RowIndex> {
        let (mut input, mut index) = (Hashing::new(input), RowIndex::default());
        let mut buffer = vec![0; 1 << 18];
        let (mut offset, mut line, mut first, mut is_header) = (0, 1, 1, true);
        let mut place = CsvPosition::Record;
        loop {
            let num_read = input.read(&mut buffer)?;
            if num_read == 0 {
                break;
            }
            let skipped = if offset == 0 && buffer.starts_with(BOM) { BOM.len() } else { 0 };
            offset += skipped as u64;
            for byte in &buffer[skipped..num_read] {
                let next = place.after(*byte, self.delimiter);
                let is_first =
                    matches!(place, CsvPosition::Record) && !matches!(next, CsvPosition::Record);
                if is_first {
                    first = line;
                }
                if is_first && !std::mem::replace(&mut is_header, false) {
                    index.push(offset, line);
                }
                offset += 1;
                line += u64::from(*byte == b'\n');
                place = next;
            }
        }
        if matches!(place, CsvPosition::Quoted) {
            let problem =
                format!("the file ends inside double quotes that the record of line {first} opens");
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        let (num_bytes, sha256) = input.finish()?;
        Ok(index.finish(num_bytes, sha256))
    }

    pub(super) fn row(&self, bytes: &[u8]) -> Result<RawRow, String> {
        let mut record = ByteRecord::new();
        let read = reader(self.delimiter, bytes).read_byte_record(&mut record);
        read.map_err(|error| error.to_string())?;
        if record.len() != self.names.len() {
            let (found, expected) = (record.len(), self.names.len());
            return Err(format!(
                "the row has {found} cells and the header has {expected}: put cells that contain the separator or a \
                 newline into double quotes"
            ));
        }
        let mut object = Map::new();
        for (name, cell) in self.names.iter().zip(&record) {
            let text = std::str::from_utf8(cell)
                .map_err(|_| format!("the cell of column `{name}` is not UTF-8"))?;
            // an empty cell is a missing key
            if !text.is_empty() {
                object.insert(name.clone(), json_cell(name, text).unwrap_or(Value::from(text)));
            }
        }
        Ok(RawRow { object, blobs: Vec::new() })
    }
}

fn failed(path: &Path, error: csv::Error) -> SourceError {
    let problem = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(cause) => SourceError::Read { path: path.to_owned(), cause },
        _ => SourceError::broken(path, "CSV", &problem),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn records_are_rows_with_the_lines_on_which_they_begin() {
        let text = "\u{feff}\"instruction\",messages,output\r\n\"a \"\"b\"\",\nc\",,d\n\nx,\"[{\"\"role\"\": \"\"user\"\"}]\",[1]\n";
        let path = Path::new("a.csv");
        let header = CsvHeader::read(path, b',', text.as_bytes()).unwrap();
        let index = header.scan(text.as_bytes()).unwrap();
        let row = |row: usize| {
            let bytes = &text.as_bytes()[index.start(row) as usize..index.end(row) as usize];
            Value::Object(header.row(bytes).unwrap().object)
        };
        assert_eq!(index.len(), 2);
        assert_eq!(row(0), json!({"instruction": "a \"b\",\nc", "output": "d"}));
        assert_eq!(
            row(1),
            json!({"instruction": "x", "messages": [{"role": "user"}], "output": "[1]"})
        );
        assert_eq!(index.line(0), 2);
        assert_eq!(index.num_bytes(), text.len() as u64);
    }

    proptest! {
        #[test]
        fn each_record_found_is_the_record_of_the_csv_crate(
            text in "[ab,\"\r\n ]{0,30}"
        ) {
            let text = format!("h\n{text}");
            let header = CsvHeader { names: vec!["h".to_owned()], delimiter: b',' };
            // the csv crate accepts an open quote at the end
            let Ok(index) = header.scan(text.as_bytes()) else { return Ok(()) };
            let mut all = reader(b',', text.as_bytes());
            let expected: Vec<ByteRecord> = all.byte_records().skip(1).map(Result::unwrap).collect();
            prop_assert_eq!(index.len(), expected.len());
            for (row, expected) in expected.iter().enumerate() {
                let bytes = &text.as_bytes()[index.start(row) as usize..index.end(row) as usize];
                let mut record = ByteRecord::new();
                reader(b',', bytes).read_byte_record(&mut record).unwrap();
                prop_assert_eq!(&record, expected);
            }
        }
    }

    #[test]
    fn an_open_quote_does_not_join_the_rest_of_the_file() {
        let text = "a,b\n1,2\n3,\"4\n5,6\n";
        let header = CsvHeader::read(Path::new("a.csv"), b',', text.as_bytes()).unwrap();
        let error = header.scan(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("the record of line 3"), "{error}");
    }

    #[test]
    fn a_header_that_is_not_usable_and_rows_with_other_cells_are_refused() {
        let header = |text: &str| CsvHeader::read(Path::new("a.csv"), b',', text.as_bytes());
        for (text, problem) in [("a,a\n", "two columns"), ("a,,b\n", "column 2 has no name")] {
            assert!(header(text).unwrap_err().to_string().contains(problem));
        }
        let error = header("a,b\n").unwrap().row(b"1,2,3\n").unwrap_err();
        assert!(error.starts_with("the row has 3 cells and the header has 2"), "{error}");
    }
}
