//! Recognises the format of a file, and stores files that rows can be read from in any order. The
//! format is found by the content first, and by the name where the content is plain text. Stored
//! files are unpacked ones, and Arrow files instead of Parquet files without a page index.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use crate::checksums::{has_sums, write_sums};
use crate::source::source_error::SourceError;
use crate::source::stamp::Stamp;

/// Number of bytes at the beginning of a file that are enough to recognise it.
pub(super) const HEAD_BYTES: usize = 4096;
/// The byte order mark of UTF-8, with which a text file may begin.
pub(crate) const BOM: &[u8] = b"\xef\xbb\xbf";

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

/// `path` without the extension of a compression, in any case.
pub(crate) fn without_compression(path: &Path) -> Cow<'_, Path> {
    let extension = path.extension().unwrap_or_default();
    if ["gz", "zst"].iter().any(|of| extension.eq_ignore_ascii_case(of)) {
        path.with_extension("").into()
    } else {
        path.into()
    }
}

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

/// Folder in the cache folder.
const FOLDER: &str = "unpacked";
/// Start of the names of temporary files; the process and a number follow.
const TEMPORARY: &str = ".unpack-";
/// Minimum age of a temporary file that may be removed.
const MIN_AGE: Duration = Duration::from_mins(1);
/// Numbers the files of this process.
static FILES: AtomicU64 = AtomicU64::new(0);

/// A data file that must be written in another form to read its rows in any order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed<'a> {
    pub(super) path: &'a Path,
    pub(super) stamp: &'a Stamp,
    /// Whether the stamp proves that the file is unchanged.
    pub(super) is_settled: bool,
    pub(super) cache: Option<&'a Path>,
}

impl Packed<'_> {
    /// Returns the unpacked content of `file`, which is the file at the path.
    pub(super) fn unpack(self, file: &File, compression: Compression) -> Result<File, SourceError> {
        self.store("unpacking a compressed data file", "", |unpacked, failed| {
            copy(self.path, file, compression, unpacked, failed)
        })
    }

    /// Returns a file that `write` has filled. With a cache folder, it is stored there under a name
    /// made from path and stamp, and a later call uses it if the stamp is settled. Without, it is
    /// a temporary file without a name.
    pub(super) fn store(
        self,
        why: &str,
        ending: &str,
        write: impl FnOnce(&File, &dyn Fn(io::Error) -> SourceError) -> Result<(), SourceError>,
    ) -> Result<File, SourceError> {
        let Self { path, stamp, is_settled, cache } = self;
        let folder = cache.map_or_else(std::env::temp_dir, |cache| cache.join(FOLDER));
        let failed =
            |cause| SourceError::Unpack { path: path.to_owned(), folder: folder.clone(), cause };
        let target = folder.join(format!("{}{ending}", name(path, stamp)));
        if cache.is_some()
            && is_settled
            && let Some(file) = open_stored(&target)
        {
            return Ok(file);
        }
        fs::create_dir_all(&folder).map_err(failed)?;
        remove_leftovers(&folder);
        let temporary_file = "a temporary file".to_owned();
        let into = cache.map_or(temporary_file, |_| target.display().to_string());
        tracing::info!(file = %path.display(), %into, "{why}");
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{TEMPORARY}{}-{number}", std::process::id());
        let temporary = Temporary(folder.join(temporary));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let unpacked = options.open(&temporary.0).map_err(failed)?;
        let _ = unpacked.try_lock(); // shows `remove_leftovers` that the process is running
        write(&unpacked, &failed)?;
        // another change of a file that is not settled may leave the same stamp
        if cache.is_some() && is_settled {
            unpacked.sync_all().map_err(failed)?;
            let sums = Temporary(temporary.0.with_extension("sums"));
            write_sums(&unpacked, &sums.0).map_err(failed)?;
            fs::rename(&sums.0, sums_path(&target)).map_err(failed)?;
            fs::rename(&temporary.0, &target).map_err(failed)?;
        }
        Ok(unpacked)
    }
}

/// Removes the temporary files of processes that were killed: no process has locked them, and they are
/// older than the time between creating and locking one.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let names = entries.flatten().filter(|entry| {
        let name = entry.file_name();
        let numbers = name.to_str().and_then(|name| name.strip_prefix(TEMPORARY));
        numbers.is_some_and(|numbers| numbers.bytes().all(|b| b.is_ascii_digit() || b == b'-'))
    });
    for path in names.map(|entry| entry.path()) {
        let is_left = || {
            let file = files::open(&path).ok()?;
            let age = file.metadata().ok()?.modified().ok()?.elapsed().ok()?;
            (age > MIN_AGE && file.try_lock().is_ok()).then_some(())
        };
        if is_left().is_some() {
            tracing::info!(file = %path.display(), "removing what a killed process left");
            let _ = fs::remove_file(path.with_extension("sums"));
            let _ = fs::remove_file(&path);
        }
    }
}

/// The file of the checksums of `target`.
fn sums_path(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".sums");
    target.with_file_name(name)
}

/// Opens an unpacked file. `None` if it does not exist, or if it is damaged, which is logged.
fn open_stored(target: &Path) -> Option<File> {
    let file = files::open(target).ok()?;
    match has_sums(&file, &sums_path(target)) {
        Ok(true) => return Some(file),
        Ok(false) => tracing::warn!(
            file = %target.display(),
            "the unpacked data file is damaged: unpacking the data file again"
        ),
        Err(error) => tracing::warn!(
            file = %target.display(), %error,
            "cannot read the checksums of the unpacked data file: unpacking the data file again"
        ),
    }
    None
}

/// A file that is removed when this is dropped, unless it was renamed.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The name of the unpacked file.
fn name(path: &Path, stamp: &Stamp) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut key = Sha256::new_with_prefix(absolute.as_os_str().as_encoded_bytes());
    key.update(format!("{stamp:?}"));
    let key = format!("{:x}", key.finalize());
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    format!("{}-{stem}", &key[..16])
}

fn copy(
    path: &Path,
    file: &File,
    compression: Compression,
    unpacked: &File,
    failed: &dyn Fn(io::Error) -> SourceError,
) -> Result<(), SourceError> {
    let (mut reader, format): (Box<dyn Read>, _) = match compression {
        Compression::Gzip => {
            (Box::new(MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file))), "gzip data")
        }
        Compression::Zstd => (Box::new(zstd::Decoder::new(file).map_err(failed)?), "zstd data"),
    };
    let mut writer = BufWriter::with_capacity(1 << 20, unpacked);
    let mut buffer = vec![0; 1 << 18];
    loop {
        let num_read = reader.read(&mut buffer).map_err(|error| {
            SourceError::broken(path, format, &format!("cannot be unpacked: {error}"))
        })?;
        if num_read == 0 {
            return writer.flush().map_err(failed);
        }
        writer.write_all(&buffer[..num_read]).map_err(failed)?;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn of(name: &str, head: &[u8]) -> Result<Format, String> {
        let path = Path::new(name);
        format(path, path, head).map_err(|error| error.to_string())
    }

    #[test]
    fn the_extension_of_a_compression_is_removed_in_any_case() {
        for (path, expected) in [
            ("a.b/rows.CSV.GZ", "a.b/rows.CSV"),
            ("rows.jsonl.zst", "rows.jsonl"),
            ("rows.gz", "rows"),
            ("a/.gz", "a/.gz"),
            ("a.gz/rows.csv", "a.gz/rows.csv"),
        ] {
            assert_eq!(without_compression(Path::new(path)), Path::new(expected));
        }
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStrExt as _;
            let folder = Path::new(std::ffi::OsStr::from_bytes(b"M\xfcll"));
            let found = without_compression(&folder.join("rows.csv.gz")).into_owned();
            assert_eq!(found, folder.join("rows.csv"));
        }
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

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_a_process_writes_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let made = ["1-0", "2-0", "3-0", "4-x"].map(|name| {
            let path = folder.path().join(format!("{TEMPORARY}{name}"));
            let file = File::create(&path).unwrap();
            let age = if name == "2-0" { MIN_AGE / 2 } else { 2 * MIN_AGE };
            file.set_modified(std::time::SystemTime::now() - age).unwrap();
            (path, file)
        });
        File::create(made[0].0.with_extension("sums")).unwrap();
        made[2].1.lock().unwrap();
        remove_leftovers(folder.path());
        assert_eq!(made.each_ref().map(|(path, _)| path.exists()), [false, true, true, true]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_damaged_unpacked_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl.gz");
        let stamp = Stamp::of(&File::create(&path).unwrap()).unwrap();
        let cache = Some(folder.path());
        let packed = Packed { path: &path, stamp: &stamp, is_settled: true, cache };
        let made = Cell::new(0);
        let unpack = || {
            let file = packed.store("unpacking", "", |mut file, failed| {
                made.set(made.get() + 1);
                file.write_all(b"rows").map_err(failed)
            });
            let mut text = [0; 4];
            file.unwrap().read_exact_at(&mut text, 0).unwrap();
            assert_eq!(&text, b"rows");
            made.get()
        };
        assert_eq!([unpack(), unpack()], [1, 1]);
        let target = folder.path().join(FOLDER).join(name(&path, &stamp));
        File::create(&target).unwrap().write_all(b"rowz").unwrap();
        assert_eq!([unpack(), unpack()], [2, 2]);
        fs::remove_file(sums_path(&target)).unwrap();
        assert_eq!([unpack(), unpack()], [3, 3]);
    }
}
