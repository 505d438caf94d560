//! Files that options name, such as `--html FILE`.

use super::failure::{Exit, Failure};
use crate::checkpoint::write_atomically;
use rustix::fs::{Access, access};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that an option names. It is checked, or opened, before the work whose result it receives.
#[derive(Debug)]
pub(super) struct OutputFile {
    option: &'static str,
    path: PathBuf,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// A regular file, or none yet: replaced by the complete content. It is what a link names, so
    /// that the link stays.
    File(PathBuf),
    /// A device, a pipe or an open file of a process: written through.
    Stream(File),
}

impl OutputFile {
    /// Checks that the file can be written. Nothing is changed yet.
    pub(super) fn open(option: &'static str, path: &Path) -> Result<Self, Failure> {
        let target = target(path).map_err(|error| refused(option, path, &error))?;
        Ok(Self { option, path: path.to_owned(), target })
    }

    /// [`OutputFile::open`] for an option that may be left out.
    pub(super) fn open_given(
        option: &'static str,
        path: Option<&PathBuf>,
    ) -> Result<Option<Self>, Failure> {
        path.map(|path| Self::open(option, path)).transpose()
    }

    /// The path as given.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the content of the file.
    pub(super) fn write(self, bytes: &[u8]) -> Result<(), Failure> {
        match self.target {
            Target::File(target) => write_atomically(&target, bytes)
                .map_err(|error| Failure::of(Exit::CannotWrite, error).hint(hint(self.option))),
            Target::Stream(mut stream) => stream
                .write_all(bytes)
                .and_then(|()| stream.flush())
                .map_err(|error| refused(self.option, &self.path, &error)),
        }
    }
}

fn refused(option: &str, path: &Path, error: &io::Error) -> Failure {
    let message = format!("cannot write `{}`: {error}", path.display());
    Failure::new(Exit::CannotWrite, message).hint(hint(option))
}

fn hint(option: &str) -> String {
    format!("check the path given to `{option}`")
}

fn target(path: &Path) -> io::Result<Target> {
    let stream = || File::options().append(true).open(path).map(Target::Stream);
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if !found.is_file() => return stream(),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let Some(file) = end_of_links(path)? else { return stream() };
    let folder = match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    access(folder, Access::WRITE_OK)?;
    Ok(Target::File(file))
}

/// The path that a chain of links ends at; `None` if a link names an open file of a process, as
/// `/dev/stdout` does. That file must be written through, because others have it open.
fn end_of_links(path: &Path) -> io::Result<Option<PathBuf>> {
    const MAX_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        if path.starts_with("/proc") || path.starts_with("/dev/fd") {
            return Ok(None);
        }
        match fs::read_link(&path) {
            // `join` with an absolute path returns that path
            Ok(named) => path = path.parent().unwrap_or(Path::new("")).join(named),
            Err(_) => return Ok(Some(path)), // no link
        }
    }
    Err(io::Error::other("too many links"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, symlink};
    use std::thread;

    fn write(path: &Path, text: &str) -> Result<(), Failure> {
        OutputFile::open("--out", path)?.write(text.as_bytes())
    }

    #[test]
    fn the_file_that_a_link_names_is_replaced_and_the_link_stays() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("to")).unwrap();
        symlink("to/file", at("link")).unwrap();
        symlink(at("link"), at("second")).unwrap();
        // the first write creates the file that the links name
        for text in ["old", "new"] {
            write(&at("second"), text).unwrap();
            assert!(at("link").is_symlink() && at("second").is_symlink());
            assert_eq!(fs::read_to_string(at("to/file")).unwrap(), text);
        }
    }

    #[test]
    fn a_pipe_is_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        mknodat(CWD, path.as_path(), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let from = path.clone();
        let reader = thread::spawn(move || {
            let mut text = String::new();
            File::open(from).unwrap().read_to_string(&mut text).unwrap();
            text
        });
        write(&path, "text").unwrap();
        assert_eq!(reader.join().unwrap(), "text");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
    }

    #[test]
    fn a_device_is_written_through() {
        write(Path::new("/dev/null"), "text").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        assert!(write(Path::new("/dev/full"), "text").is_err());
    }

    #[test]
    fn an_open_file_of_a_process_is_written_through() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(file.as_file());
        write(Path::new(&format!("/proc/self/fd/{descriptor}")), "text").unwrap();
        let mut text = String::new();
        file.as_file().read_to_string(&mut text).unwrap(); // the open file, not one of its name
        assert_eq!(text, "text");
    }

    #[test]
    fn a_folder_and_a_file_in_no_folder_are_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("no/file")] {
            let failure = OutputFile::open("--out", &path).unwrap_err();
            assert_eq!(failure.exit, Exit::CannotWrite);
            assert_eq!(failure.hint.as_deref(), Some("check the path given to `--out`"));
        }
    }
}
