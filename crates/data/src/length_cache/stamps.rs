//! Size and modification time of image files. For an unchanged row, `stat` takes most of the time.
//!
//! The system resolves a path component by component. So `stat` is called relative to the folder of
//! all images, and for consecutive images of one folder relative to that. The result is the same as
//! for the whole path: the system follows links, `..` and absolute paths.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};

use crate::source::ImageStamp;

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
