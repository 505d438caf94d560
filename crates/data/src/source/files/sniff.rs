//! Recognises the format of a file: by its content first, and by its name where the content is
//! plain text.

use std::path::Path;

use crate::source::source_error::SourceError;

/// Number of bytes at the beginning of a file that are enough to recognise it.
pub(super) const HEAD_BYTES: usize = 4096;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// How the rows are stored in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// One JSON object per line.
    Lines,
    /// A JSON array of objects. It may turn out to be lines that begin with `[`.
    Array,
    /// Lines of cells, separated by this byte, after a header line.
    Csv(u8),
    /// A tar archive with the files of each row next to each other.
    Tar,
    Parquet,
    /// An Arrow IPC file, with a footer.
    ArrowFile,
    /// An Arrow IPC stream, which `datasets` writes.
    ArrowStream,
}

/// How a whole file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    Zstd,
}

/// Extensions of text files.
const TEXT: [&str; 6] = ["jsonl", "ndjson", "json", "csv", "tsv", "txt"];
/// Contents with a beginning of their own that are not rows.
const OTHERS: [(&[u8], &str); 12] = [
    (b"PK\x03\x04", "a ZIP archive or an office document"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"FEA1", "a Feather file of version 1"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
];

/// Returns the compression of a file that begins with `head`.
pub(super) fn compression(head: &[u8]) -> Option<Compression> {
    match head {
        [0x1f, 0x8b, ..] => Some(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        _ => None,
    }
}

/// Returns the format of the file at `path` that begins with `head`. `name` has the extension that
/// counts: for a compressed file, the one before `.gz` or `.zst`.
pub(super) fn format(path: &Path, name: &Path, head: &[u8]) -> Result<Format, SourceError> {
    let extension = name.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let extension = extension.to_ascii_lowercase();
    if head.starts_with(b"PAR1") {
        return Ok(Format::Parquet);
    }
    if head.starts_with(b"PARE") {
        return Err(SourceError::Encrypted { path: path.to_owned() });
    }
    if head.starts_with(b"ARROW1") {
        return Ok(Format::ArrowFile);
    }
    if head.starts_with(&[0xff; 4]) {
        return Ok(Format::ArrowStream);
    }
    if head.get(257..262) == Some(b"ustar") {
        return Ok(Format::Tar);
    }
    if let Some(error) = not_rows(path, &extension, head) {
        return Err(error);
    }
    let text = head.strip_prefix(BOM).unwrap_or(head).trim_ascii_start();
    Ok(match extension.as_str() {
        "csv" => Format::Csv(b','),
        "tsv" => Format::Csv(b'\t'),
        _ if text.first() == Some(&b'[') => Format::Array,
        _ => Format::Lines,
    })
}

/// The error for a file that is certainly not rows in text.
fn not_rows(path: &Path, extension: &str, head: &[u8]) -> Option<SourceError> {
    if let Some(rest) = head.strip_prefix(b"version https://git-lfs.github.com/spec") {
        let rest = String::from_utf8_lossy(rest);
        let bytes = rest.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("unknown");
        return Some(SourceError::LfsPointer { path: path.to_owned(), bytes: bytes.to_owned() });
    }
    let error = |found: String, expected, hint| {
        Some(SourceError::Format { path: path.to_owned(), found, expected, hint })
    };
    let other = OTHERS.iter().find(|(magic, _)| head.starts_with(magic));
    // a text file may have a broken row
    let is_binary = head.contains(&0) && !TEXT.contains(&extension);
    let found = match other {
        Some((_, found)) => (*found).to_owned(),
        None if is_binary => "binary data".to_owned(),
        None if head.is_empty() => "empty".to_owned(),
        None => format!("text that begins with `{}`", beginning(head)),
    };
    let again = "download or write the file again: its name and its content contradict each other";
    match extension {
        "parquet" => return error(found, "a Parquet file, which begins with `PAR1`", again),
        "arrow" | "feather" => return error(found, "an Arrow IPC file or stream", again),
        "tar" => return error(found, "a tar archive", again),
        _ => {}
    }
    if other.is_some() || is_binary {
        let hint = "convert it to JSONL, Parquet, Arrow IPC or CSV";
        return error(found, "rows in a supported format", hint);
    }
    let text = head.trim_ascii_start();
    let is_html = [&b"<!doctype html"[..], b"<html"]
        .iter()
        .any(|tag| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag)));
    let hint = "download the file itself: this is the page of a web site, perhaps a login page";
    is_html.then(|| error("an HTML page".to_owned(), "rows in a supported format", hint))?
}

/// The first characters of a text.
fn beginning(head: &[u8]) -> String {
    String::from_utf8_lossy(&head[..head.len().min(16)]).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, head: &[u8]) -> Result<Format, String> {
        let path = Path::new(name);
        format(path, path, head).map_err(|error| error.to_string())
    }

    #[test]
    fn the_content_decides_before_the_name() {
        assert_eq!(of("a.jsonl", b"PAR1...."), Ok(Format::Parquet));
        assert_eq!(of("a.csv", b"ARROW1\0\0"), Ok(Format::ArrowFile));
        assert_eq!(of("a.jsonl", b"\xef\xbb\xbf [ {"), Ok(Format::Array));
        assert_eq!(of("a.json", b"{\"messages\""), Ok(Format::Lines));
        assert_eq!(of("a.CSV", b"a,b\n1,2"), Ok(Format::Csv(b',')));
        assert_eq!(of("a.tsv", b"a\tb\n"), Ok(Format::Csv(b'\t')));
        assert_eq!(of("a", b"no rows"), Ok(Format::Lines));
    }

    #[test]
    fn a_file_that_is_not_rows_is_refused_with_what_it_is() {
        for (name, head, found) in [
            ("a.parquet", &b"{\"messages\": []}"[..], "text that begins with `{"),
            ("a.parquet", b"PARE", "encrypted"),
            ("a.arrow", b"PK\x03\x04", "ZIP"),
            ("a.xlsx", b"PK\x03\x04", "ZIP"),
            ("a.bin", b"ab\0cd", "binary data"),
            ("a.jsonl", b" <!DOCTYPE html><head>", "HTML"),
            ("a.tar", b"a,b\n", "expected a tar archive"),
            (
                "a.parquet",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4096\n",
                "Git LFS pointer to a file of 4096 bytes",
            ),
        ] {
            let error = of(name, head).unwrap_err();
            assert!(error.contains(found), "{error}");
        }
    }
}
