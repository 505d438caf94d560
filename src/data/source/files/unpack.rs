//! Unpacks compressed data files once, because rows are read in any order.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use super::sniff::Compression;
use crate::data::source::file_error::FileError;
use crate::data::source::stamp::Stamp;

/// Folder in the cache folder.
const FOLDER: &str = "unpacked";

/// Returns the unpacked content of `file`, which is the file at `path` with this `stamp`.
///
/// With a cache folder, the content is stored in it under a name made from path and stamp, and a
/// later call uses it if the stamp `is_settled`. Without, it is in a temporary file without a name.
pub(super) fn unpack(
    path: &Path,
    file: &File,
    compression: Compression,
    (stamp, is_settled): (&Stamp, bool),
    cache: Option<&Path>,
) -> Result<File, FileError> {
    let folder = cache.map_or_else(std::env::temp_dir, |cache| cache.join(FOLDER));
    let failed = |cause| FileError::Unpack { path: path.to_owned(), folder: folder.clone(), cause };
    let target = folder.join(name(path, stamp));
    if cache.is_some()
        && is_settled
        && let Ok(file) = File::open(&target)
    {
        return Ok(file);
    }
    fs::create_dir_all(&folder).map_err(failed)?;
    let into =
        if cache.is_some() { target.display().to_string() } else { "a temporary file".to_owned() };
    tracing::info!(file = %path.display(), %into, "unpacking a compressed data file");
    static FILES: AtomicU64 = AtomicU64::new(0); // numbers the files of this process
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let temporary = Temporary(folder.join(format!(".unpack-{}-{number}", std::process::id())));
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let unpacked = options.open(&temporary.0).map_err(failed)?;
    copy(path, file, compression, &unpacked, &failed)?;
    if cache.is_some() {
        unpacked.sync_all().map_err(failed)?;
        fs::rename(&temporary.0, &target).map_err(failed)?;
    }
    Ok(unpacked)
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
    failed: &dyn Fn(io::Error) -> FileError,
) -> Result<(), FileError> {
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
            FileError::broken(path, format, format!("cannot be unpacked: {error}"))
        })?;
        if num_read == 0 {
            return writer.flush().map_err(failed);
        }
        writer.write_all(&buffer[..num_read]).map_err(failed)?;
    }
}
