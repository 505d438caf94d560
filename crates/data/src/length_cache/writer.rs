//! Writing a cache, and reading what a killed process wrote.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use arrow_ipc::MetadataVersion;
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions};

use super::file::{CacheError, Footer, METADATA, Place};
use super::rows::{Rows, schema};
use crate::checksums::{SummedFile, checked_bytes, seal_arrow};

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
pub(super) fn read_stream(path: &Path) -> Vec<Rows> {
    let read = || {
        let mut file = files::open(path)?;
        let num_bytes = checked_bytes(&file, &sums_of(path))?;
        file.seek(SeekFrom::Start(ALIGNMENT as u64))?;
        let bytes = BufReader::new(file.take(num_bytes.saturating_sub(ALIGNMENT as u64)));
        StreamReader::try_new(bytes, None)
    };
    let Ok(reader) = read() else { return Vec::new() };
    reader.map_while(|batch| Rows::from_batch(&batch.ok()?).ok()).collect()
}

/// Writes a cache.
pub(super) struct Writer {
    place: Place,
    temporary: PathBuf,
    file: FileWriter<BufWriter<SummedFile>>,
}

impl Writer {
    pub(super) fn create(place: &Place) -> Result<Self, CacheError> {
        Self::at(place, place.sibling(".tmp"))
    }

    pub(super) fn at(place: &Place, temporary: PathBuf) -> Result<Self, CacheError> {
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
    pub(super) fn write(&mut self, rows: &Rows) -> Result<(), CacheError> {
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
