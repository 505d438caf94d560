//! Metadata of a file, used to decide whether the file must be read again.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// Minimum age of the last change when a file is read. A file that changed more recently may change
/// again without new times, because file systems store times with limited resolution.
const SETTLED: Duration = Duration::from_secs(2);

/// Metadata of a data file. Users cannot set the change time and the inode number, so the stamp
/// changes when the file is written to or replaced, even if its modification time is restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    bytes: u64,
    mtime_ns: i128,
    ctime_ns: i128,
    inode: u64,
    device: u64,
}

impl Stamp {
    /// Reads the metadata of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let nanoseconds =
            |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(Self {
            bytes: metadata.len(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            inode: metadata.ino(),
            device: metadata.dev(),
        })
    }

    /// Returns whether the size and modification time are those of `before`. Renaming the file or
    /// changing its owner does not count as a change.
    pub(crate) fn has_same_size_and_mtime(&self, before: &Self) -> bool {
        (self.bytes, self.mtime_ns) == (before.bytes, before.mtime_ns)
    }

    /// Returns whether a change of the file after `read_at` is certain to change its times.
    pub(crate) fn is_settled(&self, read_at: SystemTime) -> bool {
        let since = read_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limit = since.saturating_sub(SETTLED).as_nanos() as i128;
        self.mtime_ns < limit && self.ctime_ns < limit
    }
}

/// Metadata of an image or video file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImageStamp {
    pub(crate) bytes: u64,
    pub(crate) mtime_ns: i64,
}

impl ImageStamp {
    /// The stamp of a file that is missing or cannot be read.
    pub(crate) const GONE: Self = Self { bytes: u64::MAX, mtime_ns: i64::MIN };

    /// Reads the metadata of the file at `path`; follows symbolic links.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for ImageStamp {
    fn from(metadata: &Metadata) -> Self {
        let mtime_ns =
            metadata.mtime().wrapping_mul(1_000_000_000).wrapping_add(metadata.mtime_nsec());
        Self { bytes: metadata.len(), mtime_ns }
    }
}

impl From<&rustix::fs::Stat> for ImageStamp {
    fn from(stat: &rustix::fs::Stat) -> Self {
        let nanoseconds = stat.st_mtime_nsec as i64; // below 2^30; the type depends on the system
        let mtime_ns = stat.st_mtime.wrapping_mul(1_000_000_000).wrapping_add(nanoseconds);
        Self { bytes: stat.st_size as u64, mtime_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_recently_written_file_is_not_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one").unwrap();
        let stamp = Stamp::of(&file).unwrap();
        assert!(!stamp.is_settled(SystemTime::now()));
        assert!(stamp.is_settled(SystemTime::now() + Duration::from_secs(4)));
    }

    #[test]
    fn a_stamp_detects_a_change_with_a_restored_modification_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one").unwrap();
        let (stamp, image) = (Stamp::of(&file).unwrap(), ImageStamp::of(&path).unwrap());
        let modified = file.metadata().unwrap().modified().unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let mut again = File::create(&path).unwrap();
        again.write_all(b"two").unwrap();
        assert_ne!(ImageStamp::of(&path).unwrap(), image);
        again.set_modified(modified).unwrap();
        assert_eq!(ImageStamp::of(&path).unwrap(), image);
        assert_ne!(Stamp::of(&again).unwrap(), stamp);
    }
}
