//! How a file looks from outside: enough to tell that it need not be read again.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// A file that was written to less than this before it was read may be written to again without
/// that its times show it: clocks of file systems tick.
const SETTLED: Duration = Duration::from_secs(2);

/// A data file from outside. The change time and the inode number cannot be set by hand, so writing to
/// the file, replacing it or restoring its modification time all show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct Stamp {
    bytes: u64,
    mtime_ns: i128,
    ctime_ns: i128,
    inode: u64,
    device: u64,
}

impl Stamp {
    /// Of an open file.
    pub(in crate::data) fn of(file: &File) -> io::Result<Self> {
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

    /// Whether the file has not been written to; a new name, link or owner of it is no change.
    pub(in crate::data) fn has_the_bytes_of(&self, before: &Self) -> bool {
        (self.bytes, self.mtime_ns) == (before.bytes, before.mtime_ns)
    }

    /// Whether a change of the file after `read_at` would show in its times.
    pub(in crate::data) fn is_settled(&self, read_at: SystemTime) -> bool {
        let since = read_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limit = since.saturating_sub(SETTLED).as_nanos() as i128;
        self.mtime_ns < limit && self.ctime_ns < limit
    }
}

/// An image's file from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) struct ImageStamp {
    pub(in crate::data) bytes: u64,
    pub(in crate::data) mtime_ns: i64,
}

impl ImageStamp {
    /// Of the file at `path`, links followed.
    pub(in crate::data) fn of(path: &Path) -> io::Result<Self> {
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
        let nanoseconds = stat.st_mtime_nsec as i64; // below 2^30, of a type that systems differ in
        let mtime_ns = stat.st_mtime.wrapping_mul(1_000_000_000).wrapping_add(nanoseconds);
        Self { bytes: stat.st_size as u64, mtime_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_that_was_written_a_moment_ago_is_not_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one").unwrap();
        let stamp = Stamp::of(&file).unwrap();
        assert!(!stamp.is_settled(SystemTime::now()));
        assert!(stamp.is_settled(SystemTime::now() + Duration::from_secs(4)));
    }

    #[test]
    fn a_restored_modification_time_shows() {
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
