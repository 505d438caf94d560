//! Digests of the sizes, times and contents of the media files of a data set, in the order of its
//! rows. A resumed run compares them with those at its start.

use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::file::{CacheError, Place};
use super::stamps::Stamps;
use super::table::LengthCache;
use crate::checksums::{ALL_SUMMED, of_ends};
use crate::encode::Encoder;
use crate::media::image::{ImageError, resolve};
use crate::source::{ImageStamp, RowFile, SampleFault, Trouble, with_patience};

/// What a run stores about its media files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaDigests {
    /// Number of files, each counted for every row that names it.
    pub files: u64,
    /// Digest of the sizes.
    pub sizes: String,
    /// Digest of the modification times.
    pub times: String,
    /// Digest of the checksums of the first and last bytes.
    pub contents: String,
}

/// Which media files are compared with the length cache. The others are taken from it.
#[derive(Debug, Clone, Copy)]
pub enum MediaLook {
    /// None.
    Cache,
    /// Files of every n-th row.
    Every {
        /// Their sizes and times, and the contents of those with another time.
        stamps: usize,
        /// Their contents, also if size and time are those of the cache.
        contents: usize,
    },
}

impl MediaLook {
    /// Whether to look at size and time of the files of `row`, and at their contents in any case.
    fn at(self, row: usize) -> [bool; 2] {
        match self {
            Self::Cache => [false; 2],
            Self::Every { stamps, contents } => {
                let reads = row.is_multiple_of(contents);
                [reads || row.is_multiple_of(stamps), reads]
            }
        }
    }
}

/// The sizes, times and contents of media files, and which of them differ from the length cache.
#[derive(Debug, Default)]
pub struct MediaStamps {
    files: u64,
    sizes: Sha256,
    times: Sha256,
    contents: Sha256,
    changed: Option<String>,
    has_unread: bool,
}

/// A media file: its metadata and the checksum of its first and last bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MediaFile {
    stamp: ImageStamp,
    crc: u32,
}

/// A file that is missing or cannot be read.
const GONE: MediaFile = MediaFile { stamp: ImageStamp::GONE, crc: 0 };

impl MediaStamps {
    /// Adds a file of the next row.
    fn push(&mut self, path: &str, cached: MediaFile, now: MediaFile) {
        self.files += 1;
        self.sizes.update(now.stamp.bytes.to_le_bytes());
        self.times.update(now.stamp.mtime_ns.to_le_bytes());
        self.contents.update(now.crc.to_le_bytes());
        self.has_unread |= now != GONE && now.stamp.bytes > ALL_SUMMED;
        if (now.stamp.bytes, now.crc) != (cached.stamp.bytes, cached.crc) {
            self.changed.get_or_insert_with(|| path.to_owned());
        }
    }

    /// The digests of all files so far.
    pub fn digests(&self) -> MediaDigests {
        let hex = |hash: &Sha256| format!("{:x}", hash.clone().finalize());
        MediaDigests {
            files: self.files,
            sizes: hex(&self.sizes),
            times: hex(&self.times),
            contents: hex(&self.contents),
        }
    }

    /// Whether the checksum of a file does not cover all of its bytes.
    pub fn has_unread_bytes(&self) -> bool {
        self.has_unread
    }

    /// The first file whose size or content differs from the cache, as written in its row.
    pub fn changed(&self) -> Option<&str> {
        self.changed.as_deref()
    }
}

/// The checksum of the first and last bytes of a media file inside `root`.
pub(super) fn checksum(root: &Path, path: &Path) -> Result<u32, ImageError> {
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    of_ends(&resolve(root, path)?).map_err(read_error)
}

impl LengthCache {
    /// Adds the media files of `file` to `media`: those that `look` selects as they are now, and
    /// the others as they were when the cache in `folder` was updated. `None` if the cache has not
    /// all rows. Fails if the process or a disk failed.
    pub fn add_media(
        file: &RowFile,
        encoder: &Encoder,
        folder: &Path,
        look: MediaLook,
        media: &mut MediaStamps,
    ) -> Result<Option<()>, CacheError> {
        let Some((footer, batches)) = Place::of(file, encoder, folder).read() else {
            return Ok(None);
        };
        if !footer.fits(file) {
            return Ok(None);
        }
        let root = file.image_root();
        let stamps = Stamps::new(root);
        let mut num_rows = 0;
        for rows in batches {
            let mut walk = stamps.walk();
            let mut files = Vec::new(); // row, path, as it was, as it is now, whether its content is read
            for row in 0..rows.len() {
                let [looks, reads] = look.at(num_rows + row);
                for (path, stamp, crc) in rows.files(row) {
                    let cached = MediaFile { stamp, crc };
                    let now = if looks { walk.stamp(path) } else { Some(stamp) };
                    let now = now.map_or(GONE, |stamp| MediaFile { stamp, crc });
                    let is_written = now != cached && now.stamp.bytes == stamp.bytes;
                    files.push((num_rows + row, path, cached, now, reads || is_written));
                }
            }
            let read = files.par_iter_mut().filter(|(.., reads)| *reads);
            read.try_for_each(|(row, path, _, now, _)| -> Result<(), CacheError> {
                let error = |cause| SampleFault::Image { index: 1, cause }.at(&file.id(*row));
                let crc =
                    with_patience(Trouble::of, || checksum(root, Path::new(*path)).map_err(error));
                now.crc = match crc {
                    Err(error) if Trouble::of(&error).is_some() => {
                        return Err(CacheError::Exhausted { source: Box::new(error) });
                    }
                    crc => crc.unwrap_or_default(), // the file is missing
                };
                Ok(())
            })?;
            for (_, path, cached, now, _) in &files {
                media.push(path, *cached, *now);
            }
            num_rows += rows.len();
        }
        Ok((num_rows == file.len()).then_some(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHED: MediaFile = MediaFile { stamp: ImageStamp { bytes: 7, mtime_ns: 1 }, crc: 5 };

    fn media(now: MediaFile) -> MediaStamps {
        let mut media = MediaStamps::default();
        media.push("a.png", CACHED, CACHED);
        media.push("b.png", CACHED, now);
        media
    }

    #[test]
    fn another_size_content_and_time_differ_in_their_own_digests() {
        let before = media(CACHED).digests();
        let touched = media(MediaFile { stamp: ImageStamp { bytes: 7, mtime_ns: 2 }, ..CACHED });
        assert_eq!(touched.changed(), None);
        assert_eq!(touched.digests().sizes, before.sizes);
        assert_eq!(touched.digests().contents, before.contents);
        assert_ne!(touched.digests().times, before.times);
        let resized = media(MediaFile { stamp: ImageStamp { bytes: 8, mtime_ns: 2 }, ..CACHED });
        assert_eq!(resized.changed(), Some("b.png"));
        assert_ne!(resized.digests().sizes, before.sizes);
        let other = media(MediaFile { crc: 6, ..CACHED });
        assert_eq!(other.changed(), Some("b.png"));
        assert_eq!(other.digests().sizes, before.sizes);
        assert_ne!(other.digests().contents, before.contents);
    }

    #[test]
    fn a_file_is_read_whole_up_to_32_kib() {
        let of = |bytes| media(MediaFile { stamp: ImageStamp { bytes, mtime_ns: 2 }, ..CACHED });
        assert!(!of(32 << 10).has_unread_bytes());
        assert!(of((32 << 10) + 1).has_unread_bytes());
        assert!(!media(GONE).has_unread_bytes());
    }

    #[test]
    fn a_missing_file_has_another_size() {
        assert_eq!(media(GONE).changed(), Some("b.png"));
    }

    #[test]
    fn a_large_data_set_is_compared_in_a_part_of_its_rows() {
        let look = MediaLook::Every { stamps: 2, contents: 3 };
        let looked: Vec<[bool; 2]> = (0..5).map(|row| look.at(row)).collect();
        let [no, size, all] = [[false, false], [true, false], [true, true]];
        assert_eq!(looked, [all, no, size, all, size]);
        assert_eq!(MediaLook::Cache.at(0), no);
    }
}
