//! How the files of images look from outside: asking is most of what an unchanged row costs.
//!
//! The system resolves a path part by part, so it is asked relative to the folder of all images, and for
//! images of one folder after one another relative to that. The answer is that of the whole path: links,
//! `..` and absolute paths are followed by the system.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};

use crate::data::source::ImageStamp;

/// Stamps of the images of one data set, during one pass over its rows.
pub(super) struct Stamps<'a> {
    root: &'a Path,
    opened: Option<OwnedFd>, // `root`; without it whole paths are asked for
    repeats: Repeats,
}

impl<'a> Stamps<'a> {
    /// Of images whose relative paths start from `root`.
    pub(super) fn new(root: &'a Path) -> Self {
        Self {
            root,
            opened: openat(CWD, root, FOLDER, Mode::empty()).ok(),
            repeats: Repeats::default(),
        }
    }

    /// To look at the images of rows that follow one another.
    pub(super) fn walk(&self) -> Walk<'_> {
        Walk { stamps: self, folder: String::new(), opened: Opened::NotYet }
    }
}

/// Looks at images one after another. It holds a folder open, so it should be short.
pub(super) struct Walk<'a> {
    stamps: &'a Stamps<'a>,
    folder: String, // of the last image, with its `/`, as the row writes it
    opened: Opened,
}

/// The folder of the last image.
enum Opened {
    /// One image is not worth the opening.
    NotYet,
    /// It may be searched, but not listed.
    Refused,
    Open(OwnedFd),
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Walk<'_> {
    /// Of an image as a row writes it, links followed; `None` if it cannot be looked at.
    pub(super) fn stamp(&mut self, path: &str) -> Option<ImageStamp> {
        let stamps = self.stamps;
        stamps.repeats.get_or(path, || self.look(path))
    }

    fn look(&mut self, path: &str) -> Option<ImageStamp> {
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

    /// `folder`, open, if the last image was in it too.
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

/// Stamps that are known already: rows that share an image are common, and each is looked at once.
///
/// Where no image comes twice remembering them would only cost, so some are remembered until these have
/// shown that images come again.
#[derive(Default)]
struct Repeats {
    hasher: RandomState,
    shards: [Mutex<HashMap<u64, Option<ImageStamp>>>; NUM_SHARDS],
    remembers_all: AtomicBool,
    num_again: AtomicU32, // of those remembered before all are
    num_new: AtomicU32,
}

/// Threads rarely meet at one of so many.
const NUM_SHARDS: usize = 32;
/// Entries of all shards together: some 50 MB.
const MOST_REMEMBERED: usize = 1 << 20;
/// One path in so many is remembered at first.
const SAMPLE: u64 = 64;
/// All are remembered once for so many new ones in the sample one has come again.
const WORTHWHILE: u32 = 8;

impl Repeats {
    fn get_or(&self, path: &str, look: impl FnOnce() -> Option<ImageStamp>) -> Option<ImageStamp> {
        // two paths with one hash, one pair in 2^64, take one for the other
        let key = self.hasher.hash_one(path);
        let remembers_all = self.remembers_all.load(Relaxed);
        if !remembers_all && !key.is_multiple_of(SAMPLE) {
            return look();
        }
        let shard = || {
            let shard = &self.shards[(key / SAMPLE) as usize % NUM_SHARDS];
            shard.lock().unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(found) = shard().get(&key) {
            if !remembers_all {
                let num_again = self.num_again.fetch_add(1, Relaxed) + 1;
                let is_worthwhile = num_again * WORTHWHILE >= self.num_new.load(Relaxed);
                self.remembers_all.store(is_worthwhile, Relaxed);
            }
            return *found;
        }
        let found = look();
        let mut shard = shard();
        if shard.len() < MOST_REMEMBERED / NUM_SHARDS {
            shard.insert(key, found);
            if !remembers_all {
                self.num_new.fetch_add(1, Relaxed);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::time::{Duration, SystemTime};

    use super::*;

    fn write(path: &Path, text: &str) {
        File::create(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// `folder/root` with images, and links in it to what lies beside it.
    fn images(folder: &Path) -> std::path::PathBuf {
        let root = folder.join("root");
        for inner in ["root/a/b", "beside"] {
            fs::create_dir_all(folder.join(inner)).unwrap();
        }
        for (length, name) in ["x", "a/x", "a/y", "a/b/x", "../beside/x"].iter().enumerate() {
            write(&root.join(name), &"0".repeat(length + 1));
        }
        symlink("../beside", root.join("linked")).unwrap();
        symlink("../../beside/x", root.join("a/link")).unwrap();
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
            "../beside/x",
            "linked/x",
            "linked/../x",
            "linked/../beside/x",
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
            // each next to each: the folder of the one before must not show
            for path in
                paths.iter().flat_map(|one| paths.iter().flat_map(move |two| [one, two, two]))
            {
                assert_eq!(walk.look(path), expected(path), "`{path}`");
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
        write(&folder.path().join("beside/x"), "what a link leads to");
        let now = look();
        assert_eq!(now[..2], before[..2]);
        assert!(now[2] != before[2] && now[3] != before[3]);
    }

    #[test]
    fn images_are_looked_at_once_where_they_come_again_and_little_is_kept_where_not() {
        let look = |again: usize| {
            let (repeats, mut num_looks) = (Repeats::default(), 0);
            for path in (0..100_000).map(|row| (row / again).to_string()) {
                repeats.get_or(&path, || {
                    num_looks += 1;
                    None
                });
            }
            let kept: usize = repeats.shards.iter().map(|shard| shard.lock().unwrap().len()).sum();
            (num_looks, kept)
        };
        let (num_looks, kept) = look(1);
        assert!(num_looks == 100_000 && kept < 100_000 / SAMPLE as usize * 2, "{kept} kept");
        let (num_looks, _) = look(10);
        assert!(num_looks < 12_000, "{num_looks} of 10,000 images");
    }
}
