//! CSV and TSV: a header line with the names of the columns, then one record per row.

use std::io::Read;
use std::path::Path;

use csv::{ByteRecord, Reader, ReaderBuilder};
use serde_json::{Map, Value};

use super::columns::json_cell;
use super::index::{Hashing, RowIndex};
use crate::data::source::file_error::FileError;
use crate::data::source::raw_row::RawRow;
use crate::data::source::source_error::SourceError;

/// The names of the columns, and the byte between cells.
#[derive(Debug, Clone)]
pub(super) struct Header {
    names: Vec<String>,
    delimiter: u8,
}

fn reader<R: Read>(delimiter: u8, input: R) -> Reader<R> {
    let mut builder = ReaderBuilder::new();
    builder.delimiter(delimiter).has_headers(false).flexible(true).buffer_capacity(1 << 18);
    builder.from_reader(input)
}

impl Header {
    /// Reads the first record of the file.
    pub(super) fn read(path: &Path, delimiter: u8, input: impl Read) -> Result<Self, SourceError> {
        let mut record = ByteRecord::new();
        let read = reader(delimiter, input).read_byte_record(&mut record);
        read.map_err(|error| failed(path, error))?;
        let fault = |problem: String| FileError::Header { path: path.to_owned(), problem };
        let mut names: Vec<String> = Vec::new();
        for (column, cell) in (1..).zip(&record) {
            let name = std::str::from_utf8(cell)
                .map_err(|_| fault(format!("the name of column {column} is not UTF-8")))?;
            let name = name.trim_start_matches('\u{feff}').trim();
            if name.is_empty() {
                return Err(fault(format!("column {column} has no name")).into());
            }
            if names.iter().any(|other| other == name) {
                return Err(fault(format!("two columns have the name `{name}`")).into());
            }
            names.push(name.to_owned());
        }
        Ok(Self { names, delimiter })
    }

    /// Finds the records after the header. Line numbers are those of their first lines.
    pub(super) fn scan(&self, path: &Path, input: impl Read) -> Result<RowIndex, SourceError> {
        let mut reader = reader(self.delimiter, Hashing::new(input));
        let (mut record, mut index) = (ByteRecord::new(), RowIndex::default());
        let mut is_header = true;
        while reader.read_byte_record(&mut record).map_err(|error| failed(path, error))? {
            let position = record.position().expect("a record that was read has a position");
            if !std::mem::replace(&mut is_header, false) {
                index.push(position.byte(), position.line());
            }
        }
        let finished = reader.into_inner().finish();
        let (num_bytes, sha256) =
            finished.map_err(|cause| SourceError::Read { path: path.to_owned(), cause })?;
        Ok(index.finish(num_bytes, sha256))
    }

    /// The row of a record.
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
        _ => FileError::broken(path, "CSV", problem).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn records_are_rows_with_the_lines_on_which_they_begin() {
        let text = "\u{feff}instruction,messages,output\r\n\"a \"\"b\"\",\nc\",,d\n\nx,\"[{\"\"role\"\": \"\"user\"\"}]\",[1]\n";
        let path = Path::new("a.csv");
        let header = Header::read(path, b',', text.as_bytes()).unwrap();
        let index = header.scan(path, text.as_bytes()).unwrap();
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

    #[test]
    fn a_header_that_is_not_usable_and_rows_with_other_cells_are_refused() {
        let header = |text: &str| Header::read(Path::new("a.csv"), b',', text.as_bytes());
        for (text, problem) in [("a,a\n", "two columns"), ("a,,b\n", "column 2 has no name")] {
            assert!(header(text).unwrap_err().to_string().contains(problem));
        }
        let error = header("a,b\n").unwrap().row(b"1,2,3\n").unwrap_err();
        assert!(error.starts_with("the row has 3 cells and the header has 2"), "{error}");
    }
}
