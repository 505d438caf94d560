//! Digests of the sizes, times and contents of the media files of a data set, in the order of its
//! rows. A resumed run compares them with those at its start.
//!
//! Size and modification time of image files. For an unchanged row, `stat` takes most of the time.
//!
//! The system resolves a path component by component. So `stat` is called relative to the folder of
//! all images, and for consecutive images of one folder relative to that. The result is the same as
//! for the whole path: the system follows links, `..` and absolute paths.

use std::os::fd::OwnedFd;
use std::path::Path;

use rayon::prelude::*;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::file::{CacheError, CachePath};
use super::rows::LengthCache;
use crate::checksums::{ALL_SUMMED, of_ends};
use crate::encode::Encoder;
use crate::media::image::{ImageError, resolve};
use crate::source::{ImageStamp, RowFile, SampleFault, TransientFailure, retry};

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
        let Some((footer, batches)) = CachePath::of(file, encoder, folder).read() else {
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
                    retry(TransientFailure::of, || checksum(root, Path::new(*path)).map_err(error));
                now.crc = match crc {
                    Err(error) if TransientFailure::of(&error).is_some() => {
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

/// Reads the stamps of the images of a data set, during one pass over its rows.
pub(super) struct Stamps<'a> {
    root: &'a Path,
    opened: Option<OwnedFd>, // `root`; if `None`, whole paths are used
}

impl<'a> Stamps<'a> {
    /// Relative paths of images start from `root`.
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, opened: openat(CWD, root, FOLDER, Mode::empty()).ok() }
    }

    /// Starts a walk over consecutive rows.
    pub(super) fn walk(&self) -> Walk<'_> {
        Walk { stamps: self, folder: String::new(), opened: Opened::NotYet }
    }
}

/// Reads stamps one after another. It keeps a folder open, so it should be short.
pub(super) struct Walk<'a> {
    stamps: &'a Stamps<'a>,
    folder: String, // of the previous image, with its `/`, as in the row
    opened: Opened,
}

/// The folder of the previous image.
enum Opened {
    /// Only one image of the folder has been read so far, so the folder is not opened.
    NotYet,
    /// The folder cannot be opened; its files may still be readable.
    Refused,
    Open(OwnedFd),
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Walk<'_> {
    /// The stamp of an image, given the path in the row. `None` if `stat` fails.
    pub(super) fn stamp(&mut self, path: &str) -> Option<ImageStamp> {
        let (folder, name) = path.split_at(path.rfind('/').map_or(0, |slash| slash + 1));
        let stat = match &self.stamps.opened {
            Some(root) if !name.is_empty() => match self.folder(root, folder) {
                Some(folder) => statat(folder, name, AtFlags::empty()),
                None => statat(root, path, AtFlags::empty()),
            },
            _ => return ImageStamp::of(&self.stamps.root.join(path)).ok(),
        };
        stat.ok().map(|stat| ImageStamp::from(&stat))
    }

    /// The open `folder`, if the previous image was in it too.
    fn folder(&mut self, root: &OwnedFd, folder: &str) -> Option<&OwnedFd> {
        if folder != self.folder {
            folder.clone_into(&mut self.folder);
            self.opened = Opened::NotYet;
            return None;
        }
        if folder.is_empty() {
            return None;
        }
        if matches!(self.opened, Opened::NotYet) {
            let opened = openat(root, folder, FOLDER, Mode::empty());
            self.opened = opened.map_or(Opened::Refused, Opened::Open);
        }
        match &self.opened {
            Opened::Open(folder) => Some(folder),
            Opened::NotYet | Opened::Refused => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::time::{Duration, SystemTime};

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

    fn write(path: &Path, text: &str) {
        File::create(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// `folder/root` with images, and links to files outside of it.
    fn images(folder: &Path) -> std::path::PathBuf {
        let root = folder.join("root");
        for inner in ["root/a/b", "outside"] {
            fs::create_dir_all(folder.join(inner)).unwrap();
        }
        for (length, name) in ["x", "a/x", "a/y", "a/b/x", "../outside/x"].iter().enumerate() {
            write(&root.join(name), &"0".repeat(length + 1));
        }
        symlink("../outside", root.join("linked")).unwrap();
        symlink("../../outside/x", root.join("a/link")).unwrap();
        symlink("nowhere", root.join("a/broken")).unwrap();
        root
    }

    #[test]
    fn a_stamp_is_that_of_the_whole_path_whatever_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let root = images(folder.path());
        let absolute = |name: &str| root.join(name).to_str().unwrap().to_owned();
        let mut paths: Vec<String> = [
            "x",
            "a/x",
            "a/y",
            "a//y",
            "./a/x",
            "a/../x",
            "a/b/x",
            "a/b/../x",
            "../outside/x",
            "linked/x",
            "linked/../x",
            "linked/../outside/x",
            "a/link",
            "a/broken",
            "a/none",
            "none/x",
            "x/x",
            "a/",
            "a/.",
            "a/..",
            "",
            ".",
            "..",
            "/",
            "a/\0",
            "a\0/x",
        ]
        .map(str::to_owned)
        .to_vec();
        paths.extend(["x", "a/x", "a/y", "a/b/../x"].map(absolute));
        paths.push("n".repeat(300));
        let expected = |path: &str| ImageStamp::of(&root.join(path)).ok();
        assert!(paths.iter().filter(|path| expected(path).is_some()).count() > 15);
        for opened in [true, false] {
            let mut stamps = Stamps::new(&root);
            if !opened {
                stamps.opened = None;
            }
            let mut walk = stamps.walk();
            // all pairs: the folder of the previous path must not matter
            for path in
                paths.iter().flat_map(|one| paths.iter().flat_map(move |two| [one, two, two]))
            {
                assert_eq!(walk.stamp(path), expected(path), "`{path}`");
            }
        }
    }

    #[test]
    fn an_image_that_is_replaced_in_place_has_another_stamp_in_the_next_pass() {
        let folder = tempfile::tempdir().unwrap();
        let root = images(folder.path());
        let look = || {
            let stamps = Stamps::new(&root);
            let mut walk = stamps.walk();
            ["a/x", "a/y", "a/b/x", "a/link"].map(|path| walk.stamp(path))
        };
        let mut before = look();
        let old = File::options().append(true).open(root.join("a/y")).unwrap();
        old.set_modified(SystemTime::now() - Duration::from_secs(99)).unwrap(); // as long, but older
        fs::rename(root.join("x"), root.join("a/x")).unwrap(); // another file by that name
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        write(&other.join("x"), "other");
        for changed in [0, 1] {
            let now = look();
            assert_ne!(now[changed], before[changed]);
            assert_eq!(now[2..], before[2..]);
        }
        before = look();
        fs::remove_dir_all(root.join("a/b")).unwrap();
        symlink(&other, root.join("a/b")).unwrap(); // another folder by that name
        write(&folder.path().join("outside/x"), "what a link leads to");
        let now = look();
        assert_eq!(now[..2], before[..2]);
        assert!(now[2] != before[2] && now[3] != before[3]);
    }
}
