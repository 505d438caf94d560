//! Digests of the sizes and times of the media files of a data set, in the order of its rows. A
//! resumed run compares them with those at its start.

use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::file::Place;
use super::stamps::Stamps;
use super::table::LengthCache;
use crate::data::encode::Encoder;
use crate::data::source::{ImageStamp, RowFile};

/// What a run remembers of its media files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaDigests {
    /// Number of files, each counted for every row that names it.
    pub files: u64,
    /// Digest of the sizes.
    pub sizes: String,
    /// Digest of the modification times.
    pub times: String,
}

/// The sizes and times of media files, and which of them differ from the length cache.
#[derive(Debug, Default)]
pub struct MediaStamps {
    files: u64,
    sizes: Sha256,
    times: Sha256,
    resized: Option<String>,
    touched: Option<String>,
}

impl MediaStamps {
    /// Adds a file of the next row. `now` is `None` if the file is missing.
    fn push(&mut self, path: &str, cached: ImageStamp, now: Option<ImageStamp>) {
        let now = now.unwrap_or(ImageStamp { bytes: u64::MAX, mtime_ns: i64::MIN });
        self.files += 1;
        self.sizes.update(now.bytes.to_le_bytes());
        self.times.update(now.mtime_ns.to_le_bytes());
        if now.bytes != cached.bytes {
            self.resized.get_or_insert_with(|| path.to_owned());
        } else if now != cached {
            self.touched.get_or_insert_with(|| path.to_owned());
        }
    }

    /// The digests of all files so far.
    pub fn digests(&self) -> MediaDigests {
        let hex = |hash: &Sha256| format!("{:x}", hash.clone().finalize());
        MediaDigests { files: self.files, sizes: hex(&self.sizes), times: hex(&self.times) }
    }

    /// The first file whose size differs from the cache, as written in its row.
    pub fn resized(&self) -> Option<&str> {
        self.resized.as_deref()
    }

    /// The first file of which only the modification time differs from the cache.
    pub fn touched(&self) -> Option<&str> {
        self.touched.as_deref()
    }
}

impl LengthCache {
    /// Adds the media files of `file` to `media`: those of the file system with `look`, and otherwise as
    /// they were when the cache in `folder` was updated. `None` if the cache has not all rows.
    pub fn add_media(
        file: &RowFile,
        encoder: &Encoder,
        folder: &Path,
        look: bool,
        media: &mut MediaStamps,
    ) -> Option<()> {
        let (footer, batches) = Place::of(file, encoder, folder).read()?;
        if !footer.fits(file) {
            return None;
        }
        let stamps = Stamps::new(file.image_root());
        let mut walk = stamps.walk();
        let mut num_rows = 0;
        for rows in batches {
            num_rows += rows.len();
            for (path, cached) in (0..rows.len()).flat_map(|row| rows.files(row)) {
                let now = if look { walk.stamp(path) } else { Some(cached) };
                media.push(path, cached, now);
            }
        }
        (num_rows == file.len()).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digests(bytes: u64, mtime_ns: i64) -> MediaStamps {
        let cached = ImageStamp { bytes: 7, mtime_ns: 1 };
        let mut media = MediaStamps::default();
        media.push("a.png", cached, Some(cached));
        media.push("b.png", cached, Some(ImageStamp { bytes, mtime_ns }));
        media
    }

    #[test]
    fn another_size_differs_from_another_time() {
        let before = digests(7, 1).digests();
        let touched = digests(7, 2);
        assert_eq!((touched.resized(), touched.touched()), (None, Some("b.png")));
        assert_eq!(touched.digests().sizes, before.sizes);
        assert_ne!(touched.digests().times, before.times);
        let resized = digests(8, 2);
        assert_eq!((resized.resized(), resized.touched()), (Some("b.png"), None));
        assert_ne!(resized.digests().sizes, before.sizes);
    }

    #[test]
    fn a_missing_file_has_another_size() {
        let mut media = MediaStamps::default();
        media.push("a.png", ImageStamp { bytes: 7, mtime_ns: 1 }, None);
        assert_eq!(media.resized(), Some("a.png"));
    }
}
