//! Append-only JSON Lines files.
//!
//! Each row is one `write` of a complete line, so a killed process leaves at most one incomplete
//! line, the last. Opening the file removes it. A resumed run also removes the rows of the steps
//! that it repeats.

use crate::files;
use serde::Serialize;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Appends rows to `metrics.jsonl`, `rejects.jsonl` and similar files.
///
/// While a row cannot be written, for example because the disk is full, it and the rows after it
/// are kept in memory and written later.
#[derive(Debug)]
pub struct JsonlSink {
    path: PathBuf,
    file: File,
    /// Bytes that could not be written yet.
    unwritten: Vec<u8>,
}

/// Rows are lost rather than more memory used.
const MAX_UNWRITTEN: usize = 64 << 20;

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = CannotWrite)]
pub enum JsonlError {
    #[error("cannot write `{}`", .path.display())]
    #[fault(hint = "check free space and permissions of `output_dir`")]
    Write { path: PathBuf, source: io::Error },
    /// The row cannot be serialized, because it has a map whose keys are not strings.
    #[error("cannot write a row of `{}` as JSON", .path.display())]
    #[fault(hint = "this is a bug in the program: please report it")]
    Row { path: PathBuf, source: serde_json::Error },
}

impl JsonlSink {
    /// Opens `path` for appending and creates it if needed. Removes an incomplete last line.
    pub fn open(path: &Path) -> Result<Self, JsonlError> {
        Self::open_keeping(path, |_| true)
    }

    /// Opens `path` for a run that resumes after `step`. Removes rows with a later `step` and an
    /// incomplete last line; keeps rows without `step`.
    pub fn open_truncated_after(path: &Path, step: u64) -> Result<Self, JsonlError> {
        Self::open_keeping(path, |row| {
            row.get("step").and_then(Value::as_u64).is_none_or(|found| found <= step)
        })
    }

    /// Appends one row. The operating system has the whole line when this returns, unless the file
    /// cannot be written: this is logged once, and the row is written later.
    pub fn write<T: Serialize>(&mut self, row: &T) -> Result<(), JsonlError> {
        let had_failed = !self.unwritten.is_empty();
        serde_json::to_writer(&mut self.unwritten, row)
            .map_err(|source| JsonlError::Row { path: self.path.clone(), source })?;
        self.unwritten.push(b'\n');
        if let Err(error) = self.flush() {
            if self.unwritten.len() > MAX_UNWRITTEN {
                return Err(write_error(&self.path)(error));
            }
            if !had_failed {
                tracing::warn!(
                    "cannot write `{}`: {error}; its rows are kept in memory and written later",
                    self.path.display()
                );
            }
        }
        Ok(())
    }

    /// Writes the rows that could not be written before, and makes all rows durable.
    pub fn sync(&mut self) -> Result<(), JsonlError> {
        let written = self.flush().and_then(|()| self.file.sync_data());
        written.map_err(write_error(&self.path))
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.unwritten.is_empty() {
            match self.file.write(&self.unwritten) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens `path` for appending. Removes rows that `keep` rejects and an incomplete last line.
    pub fn open_keeping(path: &Path, keep: impl Fn(&Value) -> bool) -> Result<Self, JsonlError> {
        rewrite(path, keep).map_err(write_error(path))?;
        let file = files::append(path).map_err(write_error(path))?;
        Ok(Self { path: path.to_owned(), file, unwritten: Vec::new() })
    }
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> JsonlError + '_ {
    move |source| JsonlError::Write { path: path.to_owned(), source }
}

/// Removes invalid lines and rows that `keep` rejects. Replaces the file only when the new one is
/// complete, and leaves it unchanged if there is nothing to remove.
fn rewrite(path: &Path, keep: impl Fn(&Value) -> bool) -> io::Result<()> {
    let old = match files::open(path) {
        Ok(old) => old,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut name = std::ffi::OsString::from(".tmp-");
    name.push(path.file_name().unwrap_or_default());
    let temporary = path.with_file_name(name);
    let result = copy_rows(old, &temporary, path, keep).and_then(|num_dropped| match num_dropped {
        0 => fs::remove_file(&temporary),
        _ => fs::rename(&temporary, path),
    });
    if result.is_err() {
        // Report the first error, not this one.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn copy_rows(
    old: File,
    new: &Path,
    path: &Path,
    keep: impl Fn(&Value) -> bool,
) -> io::Result<usize> {
    let (mut old, mut new) = (BufReader::new(old), BufWriter::new(files::create(new)?));
    let (mut line, mut number, mut num_dropped) = (Vec::new(), 0, 0);
    while old.read_until(b'\n', &mut line)? > 0 {
        number += 1;
        let row = serde_json::from_slice::<Value>(&line).ok();
        match row {
            Some(row) if line.ends_with(b"\n") => {
                if keep(&row) {
                    new.write_all(&line)?;
                } else {
                    num_dropped += 1;
                }
            }
            _ => {
                tracing::warn!("{}:{number}: removed an incomplete row", path.display());
                num_dropped += 1;
            }
        }
        line.clear();
    }
    new.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok(num_dropped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_that_cannot_be_written_are_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        File::create(&path).unwrap();
        // a file that is open for reading only fails like one on a full disk
        let file = File::open(&path).unwrap();
        let mut sink = JsonlSink { path: path.clone(), file, unwritten: Vec::new() };
        sink.write(&json!({"step": 1})).unwrap();
        sink.write(&json!({"step": 2})).unwrap();
        assert!(matches!(sink.sync(), Err(JsonlError::Write { .. })));
        sink.file = File::options().append(true).open(&path).unwrap();
        sink.write(&json!({"step": 3})).unwrap();
        sink.sync().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
    }

    fn with(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
        (folder, path)
    }

    fn num_files(folder: &tempfile::TempDir) -> usize {
        fs::read_dir(folder.path()).unwrap().count()
    }

    #[test]
    fn each_row_can_be_read_immediately_after_the_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut sink = JsonlSink::open(&path).unwrap();
        sink.write(&json!({"step": 1, "note": "two\nlines"})).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1,\"note\":\"two\\nlines\"}\n");
        sink.write(&json!({"step": 2})).unwrap();
        assert_eq!(fs::read_to_string(sink.path()).unwrap().lines().count(), 2);
    }

    #[test]
    fn a_resumed_run_keeps_rows_up_to_its_step_and_appends_later_ones() {
        let rows = "{\"step\":1}\n{\"eval\":true,\"step\":2}\n{\"step\":2}\n{\"file\":\"a\"}\n{\"step\":3}\n";
        let (folder, path) = with(&format!("{rows}{{\"step\":4,\"lo"));
        let mut sink = JsonlSink::open_truncated_after(&path, 2).unwrap();
        sink.write(&json!({"step": 3})).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), rows);
        assert_eq!(num_files(&folder), 1);
    }

    #[test]
    fn an_incomplete_last_line_is_removed_even_if_it_is_valid_json() {
        for torn in ["{\"step\":2", "{\"step\":2}", "1", "\u{0}\u{0}"] {
            let (folder, path) = with(&format!("{{\"step\":1}}\n{torn}"));
            let mut sink = JsonlSink::open(&path).unwrap();
            sink.write(&json!({"step": 2})).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
            assert_eq!(num_files(&folder), 1);
        }
    }

    #[test]
    fn a_valid_file_is_not_rewritten() {
        let (folder, path) = with("{\"step\":1}\n");
        let mut reader = File::open(&path).unwrap();
        JsonlSink::open(&path).unwrap().write(&json!({"step": 2})).unwrap();
        // The handle opened before sees the new row, so the file was not replaced.
        let mut text = String::new();
        io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert_eq!(text.lines().count(), 2);
        assert_eq!(num_files(&folder), 1);
    }

    #[test]
    fn errors_name_the_file() {
        let error = JsonlSink::open(Path::new("/no/such/folder/metrics.jsonl")).unwrap_err();
        assert_eq!(error.to_string(), "cannot write `/no/such/folder/metrics.jsonl`");
        let file = File::options().write(true).open("/dev/full").unwrap();
        let mut full = JsonlSink { path: "/dev/full".into(), file, unwritten: Vec::new() };
        full.write(&json!({"step": 1})).unwrap();
        assert_eq!(full.sync().unwrap_err().to_string(), "cannot write `/dev/full`");
    }
}
