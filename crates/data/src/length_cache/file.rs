//! The cache on disk: names, locks, reading and writing.
//!
//! The cache folder has these files for a data set `train.jsonl`:
//!
//! - `train-<key>.arrow`: the cache, always complete
//! - `.train-<key>.arrow.tmp`: a cache being written
//! - `.train-<key>.arrow.partial`: the batches that a killed process wrote
//! - `.train-<key>.arrow.rank-<n>`: the batches that rank `n` has measured
//! - the three before with `.sums` after their name: checksums of their batches
//! - `.train-<key>.arrow.lock`: locked while a process writes
//!
//! The hidden files may be removed when no process uses the folder.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf, absolute};

use arrow_array::UInt64Array;
use arrow_ipc::MetadataVersion;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_ipc::writer::{FileWriter, IpcWriteOptions};
use arrow_schema::ArrowError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::rows::{INDEX_COLUMNS, RowBatch, column, schema};
use crate::checksums::{CheckedArrow, SummedFile, checked_bytes, seal_arrow};
use crate::encode::Encoder;
use crate::source::files::{DataFile, KnownIndex, RowIndex};
use crate::source::{RowFile, RowRules, SampleError, Stamp, TransientFailure};
use fault::{Exit, Fault, Hint};

/// Version of the file layout and of the measurement.
const VERSION: u32 = 6;
/// Number of rows of each batch except the last.
pub(super) const BATCH_ROWS: usize = 4096;
/// Key of the metadata in the footer.
pub(super) const METADATA: &str = "trainer";

/// The reason why a length cache cannot be built.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = self.transient_failure().map_or(Some(Exit::CannotWrite), |failure| failure.exit()))]
pub enum CacheError {
    #[error("cannot write the length cache `{}`", .path.display())]
    #[fault(hint = self.hint_of_transient(
        "check free space and permissions, set `data.cache_dir` to another folder, or train with `data.length_cache: off`"
    ))]
    Write {
        /// A file in the cache folder, or the folder.
        path: PathBuf,
        source: io::Error,
    },
    /// The Arrow writer failed, most often because the disk is full.
    #[error("cannot write the length cache `{}`", .path.display())]
    #[fault(
        hint = "check free space and permissions, set `data.cache_dir` to another folder, or train with `data.length_cache: off`"
    )]
    Format { path: PathBuf, source: ArrowError },
    /// The process has too many open files or no memory, or a disk failed. The rows may be valid.
    #[error("cannot measure all rows: the process or a disk failed")]
    #[fault(hint = self.hint_of_transient("run again"))]
    Exhausted {
        /// The error of the row at which it was found.
        source: Box<SampleError>,
    },
    #[error("cannot read the length cache `{}` again", .path.display())]
    #[fault(hint = "run the command again: it measures the missing rows")]
    Lost { path: PathBuf },
    #[error("`{}` was modified while its rows were measured", .path.display())]
    #[fault(
        hint = "run the command again when the file is complete: it reuses the rows measured so far"
    )]
    DataChanged {
        /// The path in the config.
        path: PathBuf,
    },
}

impl CacheError {
    /// The failure of the process or of a disk that the error comes from.
    pub fn transient_failure(&self) -> Option<TransientFailure> {
        match self {
            Self::Exhausted { source } => TransientFailure::of(source),
            Self::Write { source, .. } => TransientFailure::of_io(source)
                .filter(|failure| *failure == TransientFailure::Resources),
            _ => None,
        }
    }

    fn hint_of_transient(&self, other: &'static str) -> Hint {
        self.transient_failure().map_or_else(|| Some(other.into()), |failure| failure.hint())
    }

    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        |source| Self::Write { path: path.to_owned(), source }
    }

    pub(super) fn format(path: &Path) -> impl FnOnce(ArrowError) -> Self {
        |source| Self::Format { path: path.to_owned(), source }
    }
}

/// The data files and the limits of a cache, in its footer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Footer {
    rows: u64,
    /// Hash of all data files.
    sha256: [u8; 32],
    /// The data files, in the order of their rows.
    files: Vec<FileRecord>,
    /// The limits of the columns `length` and `visual_tokens`.
    pub(super) limits: String,
}

/// A data file, as the cache was made from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileRecord {
    path: PathBuf,
    rows: u64,
    /// Size after unpacking.
    bytes: u64,
    sha256: [u8; 32],
    /// If it matches, the file is unchanged and is not read.
    stamp: Option<Stamp>,
}

impl FileRecord {
    fn of(data_file: &DataFile) -> Self {
        Self {
            path: data_file.path().to_path_buf(),
            rows: data_file.len() as u64,
            bytes: data_file.num_bytes(),
            sha256: data_file.sha256(),
            stamp: data_file.stamp().cloned(),
        }
    }
}

impl Footer {
    pub(super) fn of(file: &RowFile, limits: String) -> Self {
        Self {
            rows: file.len() as u64,
            sha256: file.fingerprint(),
            files: file.data_files().iter().map(FileRecord::of).collect(),
            limits,
        }
    }

    /// Whether the cache has the rows of `file`.
    pub(super) fn fits(&self, file: &RowFile) -> bool {
        self.sha256 == file.fingerprint() && self.rows == file.len() as u64
    }
}

#[derive(Debug, Clone)]
pub(super) struct CachePath {
    pub(super) path: PathBuf,
}

impl CachePath {
    /// The name has a hash of the arguments; `paths` are those in the config.
    pub(super) fn new(
        folder: &Path,
        paths: &[PathBuf],
        image_root: &Path,
        rules: &RowRules,
        text_key: [u8; 32],
    ) -> Self {
        let mut key = Sha256::new_with_prefix(VERSION.to_le_bytes()).chain_update(text_key);
        key.update(rules.key());
        for path in paths.iter().map(PathBuf::as_path).chain([image_root]) {
            // a pattern cannot be resolved
            let path = path.canonicalize().or_else(|_| absolute(path)).unwrap_or_default();
            let name = path.as_os_str().as_encoded_bytes();
            key.update((name.len() as u64).to_le_bytes());
            key.update(name);
        }
        let key = format!("{:x}", key.finalize());
        let name = paths[0].file_stem().unwrap_or_default().to_string_lossy();
        let name = name.replace(['*', '?', '[', ']'], "_");
        Self { path: folder.join(format!("{name}-{}.arrow", &key[..16])) }
    }

    /// The path of the cache of `file` in `folder`.
    pub(super) fn of(file: &RowFile, encoder: &Encoder, folder: &Path) -> Self {
        Self::new(folder, file.paths(), file.image_root(), file.rules(), encoder.text_key())
    }

    pub(super) fn sibling(&self, ending: &str) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(ending);
        self.path.with_file_name(name)
    }

    /// Creates the folder and waits for other processes that write this cache.
    pub(super) fn lock(&self) -> Result<Lock, CacheError> {
        if let Some(lock) = self.try_lock()? {
            return Ok(lock);
        }
        tracing::info!("waiting for `{}`, which another process writes", self.path.display());
        let path = self.sibling(".lock");
        let file = files::create(&path).and_then(|file| file.lock().map(|()| file));
        file.map(|file| Lock::Held { _file: file }).map_err(CacheError::write(&path))
    }

    /// Creates the folder. `None` if another process writes this cache.
    pub(super) fn try_lock(&self) -> Result<Option<Lock>, CacheError> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(CacheError::write(folder))?;
        let path = self.sibling(".lock");
        Lock::of(files::create(&path)).map_err(CacheError::write(&path))
    }

    /// Opens the cache. `None` if it does not exist or cannot be read.
    pub(super) fn read(&self) -> Option<(Footer, Batches)> {
        let (footer, reader) = self.or_warn(self.open(None))?;
        Some((footer, Batches { place: self.clone(), reader }))
    }

    /// The indexes of the data files whose metadata is known.
    pub(super) fn indexes(&self) -> Vec<KnownIndex> {
        let read = || {
            let Some((footer, reader)) = self.open(Some(INDEX_COLUMNS.to_vec()))? else {
                return Ok(None);
            };
            let mut rows = Vec::with_capacity(footer.rows as usize);
            for batch in reader {
                let batch = batch?;
                let offset: UInt64Array = column(&batch, "offset")?;
                let line: UInt64Array = column(&batch, "line")?;
                rows.extend(offset.values().iter().copied().zip(line.values().iter().copied()));
            }
            let is_complete = rows.len() as u64 == footer.rows
                && footer.files.iter().map(|file| file.rows).sum::<u64>() == footer.rows;
            if !is_complete {
                return Ok(None);
            }
            let mut rows = rows.into_iter();
            let index = |FileRecord { path, rows: count, bytes, sha256, stamp }| {
                let index = RowIndex::of_rows(rows.by_ref().take(count as usize), bytes, sha256);
                stamp.map(|stamp| KnownIndex { path, stamp, index })
            };
            Ok(Some(footer.files.into_iter().filter_map(index).collect()))
        };
        self.or_warn(read()).unwrap_or_default()
    }

    fn open(&self, columns: Option<Vec<usize>>) -> Result<Option<(Footer, Reader)>, ArrowError> {
        let file = match files::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let reader = FileReader::try_new(CheckedArrow::new(file)?, columns)?;
        let footer = reader.custom_metadata().get(METADATA).map_or("", String::as_str);
        let footer = serde_json::from_str(footer);
        let footer = footer.map_err(|error| ArrowError::ExternalError(error.into()))?;
        Ok(Some((footer, reader)))
    }

    fn or_warn<T>(&self, result: Result<Option<T>, ArrowError>) -> Option<T> {
        result.unwrap_or_else(|error| {
            let path = self.path.display();
            tracing::warn!(%path, %error, "cannot read the length cache: building it again");
            None
        })
    }
}

/// Suffixes of the files of killed processes, the older one first.
pub(super) const LEFT_BEHIND: [&str; 2] = [".partial", ".tmp"];

/// The lock of a cache. Drop releases it.
#[derive(Debug)]
pub(super) enum Lock {
    /// No other process writes the cache.
    Held { _file: File },
    /// The folder has no write permission; the reason. The cache can be read, since it is complete.
    ReadOnly(io::ErrorKind),
}

impl Lock {
    /// `None` if another process has the lock.
    fn of(file: io::Result<File>) -> io::Result<Option<Self>> {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        match file {
            Err(error) if matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem) => {
                Ok(Some(Self::ReadOnly(error.kind())))
            }
            file => {
                let file = file?;
                // Some network file systems do not support locks: other errors are ignored.
                let is_taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
                Ok((!is_taken).then_some(Self::Held { _file: file }))
            }
        }
    }

    pub(super) fn may_write(&self, place: &CachePath) -> Result<(), CacheError> {
        match self {
            Self::Held { .. } => Ok(()),
            Self::ReadOnly(why) => Err(CacheError::write(&place.path)((*why).into())),
        }
    }
}

type Reader = FileReader<CheckedArrow>;

/// The batches of a cache, up to the first that cannot be read.
pub(super) struct Batches {
    place: CachePath,
    reader: Reader,
}

impl Iterator for Batches {
    type Item = RowBatch;

    fn next(&mut self) -> Option<RowBatch> {
        let rows = self.reader.next()?.and_then(|batch| RowBatch::from_batch(&batch));
        self.place.or_warn(rows.map(Some))
    }
}

/// Alignment of buffers in bytes, and offset of the first message after the magic number.
const ALIGNMENT: usize = 64;
/// Suffix of the checksums of an incomplete cache.
pub(super) const SUMS: &str = ".sums";

/// The file with the checksums of the incomplete cache at `path`.
pub(super) fn sums_of(path: &Path) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(SUMS);
    name.into()
}

/// The complete and undamaged batches of a file whose writer was killed.
pub(super) fn read_stream(path: &Path) -> Vec<RowBatch> {
    let read = || {
        let mut file = files::open(path)?;
        let num_bytes = checked_bytes(&file, &sums_of(path))?;
        file.seek(SeekFrom::Start(ALIGNMENT as u64))?;
        let bytes = BufReader::new(file.take(num_bytes.saturating_sub(ALIGNMENT as u64)));
        StreamReader::try_new(bytes, None)
    };
    let Ok(reader) = read() else { return Vec::new() };
    reader.map_while(|batch| RowBatch::from_batch(&batch.ok()?).ok()).collect()
}

pub(super) struct CacheWriter {
    place: CachePath,
    temporary: PathBuf,
    file: FileWriter<BufWriter<SummedFile>>,
}

impl CacheWriter {
    pub(super) fn create(place: &CachePath) -> Result<Self, CacheError> {
        Self::at(place, place.sibling(".tmp"))
    }

    pub(super) fn at(place: &CachePath, temporary: PathBuf) -> Result<Self, CacheError> {
        // `seal_arrow` reads what was written
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&temporary).map_err(CacheError::write(&temporary))?;
        let sums = sums_of(&temporary);
        let sums = files::create(&sums).map_err(CacheError::write(&sums))?;
        let file = BufWriter::with_capacity(1 << 20, SummedFile::new(file, sums));
        let format = || {
            let options = IpcWriteOptions::try_new(ALIGNMENT, false, MetadataVersion::V5)?;
            FileWriter::try_new_with_options(file, &schema(), options)
        };
        let file = format().map_err(CacheError::format(&temporary))?;
        Ok(Self { place: place.clone(), temporary, file })
    }

    /// Writes a batch. It is kept if the process is killed afterwards.
    pub(super) fn write(&mut self, rows: &RowBatch) -> Result<(), CacheError> {
        let mut write = || {
            self.file.write(&rows.to_batch()?)?;
            self.file.flush()
        };
        write().map_err(CacheError::format(&self.temporary))
    }

    /// Completes the file and replaces the previous cache.
    pub(super) fn finish(self, footer: &Footer) -> Result<(), CacheError> {
        let Self { place, temporary, mut file } = self;
        let text = serde_json::to_string(footer).expect("plain values");
        file.write_metadata(METADATA, text);
        let finish = || {
            file.finish()?;
            file.into_inner()
        };
        let file = finish().map_err(CacheError::format(&temporary))?;
        let sync = || {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            let mut file = file.into_inner();
            seal_arrow(&mut file)?;
            file.sync_all()?;
            fs::rename(&temporary, &place.path)?;
            files::sync_folder(place.path.parent().unwrap_or(Path::new(".")))
        };
        sync().map_err(CacheError::write(&temporary))?;
        // the new file has all of its rows
        place.remove_left_behind();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_may_not_be_made_is_the_right_to_read() {
        use io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
        for why in [PermissionDenied, ReadOnlyFilesystem] {
            let lock = Lock::of(Err(why.into())).unwrap().unwrap();
            let place = CachePath { path: "a.arrow".into() };
            assert!(matches!(lock.may_write(&place), Err(CacheError::Write { .. })));
        }
        assert!(Lock::of(Err(NotFound.into())).is_err());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::of(File::create(&path)).unwrap().unwrap();
        assert!(held.may_write(&CachePath { path: "a.arrow".into() }).is_ok());
        assert!(Lock::of(File::create(&path)).unwrap().is_none());
        drop(held);
        assert!(Lock::of(File::create(&path)).unwrap().is_some());
    }
}
