//! Arguments that several commands share, the files that options name, such as `--html FILE`, and
//! `~` and environment variables in the paths of arguments and configs.
//!
//! A shell replaces them only at the start of a word: `--config=~/a.yaml` and the paths of a config
//! reach the program as they are written.

use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use crate::checkpoint::write_atomically;
use crate::config::{self, ConfigError, LeftOut, RunConfig};
use crate::run::{self, RunError};
use crate::train::Weights;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser};
use fault::{Fault, IntoHint};
use rustix::fs::{Access, access};
use std::any::TypeId;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A config file and changes to it.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// YAML config
    #[arg(long, value_name = "FILE")]
    pub(super) config: PathBuf,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

impl ConfigArgs {
    /// Reads and checks the config, and downloads what it names on the hub.
    pub(super) fn load(&self, logging: &Logging) -> anyhow::Result<RunConfig> {
        let mut config: RunConfig = config::load(&self.config, &self.overrides)?;
        if let Some(error) = self.expand(&mut config, &LeftOut::default()).into_iter().next() {
            return Err(error.into());
        }
        run::check(&config).map_err(|error| self.located(error))?;
        run::download(&config, &SetupBars(logging)).map_err(|error| self.located(error))
    }

    /// Returns an error about the value under `keys` that shows its line in the config file.
    pub(super) fn refuse<K: AsRef<str>>(
        &self,
        keys: &[K],
        problem: impl Into<String>,
        hint: impl IntoHint,
    ) -> ConfigError {
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        config::refuse(&self.config, &self.overrides, &keys, problem.into(), hint.into_hint())
    }

    /// Adds the line in the config file to an error that a config key caused.
    pub(super) fn located(&self, error: RunError) -> anyhow::Error {
        let Some(keys) = error.keys() else { return error.into() };
        let exit = error.exit().unwrap_or(Exit::Usage);
        Failure::of(exit, self.refuse(&keys, error.to_string(), error.hint())).into()
    }
}

/// The folder of an argument that is a model folder or a hub id.
pub(super) fn model_folder(path: &Path, logging: &Logging) -> anyhow::Result<PathBuf> {
    Ok(run::model_folder(path, Weights::Pretrained, &SetupBars(logging))?)
}

pub(super) fn check_folder(argument: &str, path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let found = if path.exists() { "a file" } else { "nothing" };
    let message =
        format!("`{argument}`: there is {found} at `{}`, expected a folder", path.display());
    Err(Failure::new(Exit::Usage, message).hint("check the path").into())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub(super) enum PathError {
    /// `~name`.
    #[error("`{0}` begins with the home folder of another user")]
    #[fault(hint = "write the whole path, or `./~` for a file with this name")]
    OtherUser(String),
    /// A variable without a value.
    #[error("the environment variable `{0}` is not set")]
    #[fault(hint = "set `{_0}`, or write `$$` for the letter `$`")]
    NotSet(String),
    /// `${` without `}`.
    #[error("`{0}` has `${{` without `}}`")]
    #[fault(hint = "close it, or write `$$` for the letter `$`")]
    Open(String),
}

/// Replaces `~` at the start, `$NAME`, `${NAME}` and `$$`. `variable` looks up the environment.
fn expanded(path: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, PathError> {
    let get = |name: &str| {
        let value = variable(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| PathError::NotSet(name.to_owned()))
    };
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    if let Some(after) = path.strip_prefix('~') {
        if !after.is_empty() && !after.starts_with('/') {
            return Err(PathError::OtherUser(path.to_owned()));
        }
        out.push_str(&get("HOME")?);
        rest = after;
    }
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        rest = if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            after
        } else if let Some(after) = after.strip_prefix('{') {
            let (name, after) =
                after.split_once('}').ok_or_else(|| PathError::Open(path.to_owned()))?;
            out.push_str(&get(name)?);
            after
        } else if after.starts_with(|c: char| is_name(c) && !c.is_ascii_digit()) {
            let end = after.find(|c| !is_name(c)).unwrap_or(after.len());
            out.push_str(&get(&after[..end])?);
            &after[end..]
        } else {
            out.push('$');
            after
        };
    }
    out.push_str(rest);
    Ok(out)
}

/// Expands with the environment of this process.
pub(super) fn expand(path: &str) -> Result<String, PathError> {
    expanded(path, &|name| std::env::var(name).ok())
}

/// Expands the paths among the arguments of all commands.
pub(super) fn expand_arguments(command: clap::Command) -> clap::Command {
    let read = |text: OsString| match text.to_str() {
        Some(text) => expand(text).map(PathBuf::from).map_err(|error| {
            let hint = error.hint().unwrap_or_default();
            format!("{error}\n\nhint: {hint}")
        }),
        None => Ok(PathBuf::from(text)), // not text, so it cannot name a variable
    };
    command.mut_subcommands(move |command| {
        command.mut_args(|argument| {
            if argument.get_value_parser().type_id() != TypeId::of::<PathBuf>() {
                return argument;
            }
            argument.value_parser(ValueParser::new(OsStringValueParser::new().try_map(read)))
        })
    })
}

impl ConfigArgs {
    /// Expands the paths of the config, which lacks `left_out`. The errors have the lines of the
    /// paths that cannot be expanded.
    pub(super) fn expand(&self, config: &mut RunConfig, left_out: &LeftOut) -> Vec<ConfigError> {
        let refuse = |(keys, error): (Vec<String>, PathError)| {
            self.refuse(&left_out.in_file(&keys), error.to_string(), error.hint())
        };
        config.expand_paths(&expand).into_iter().map(refuse).collect()
    }
}

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

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

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

    fn with(path: &str) -> Result<String, PathError> {
        expanded(path, &|name| match name {
            "HOME" => Some("/u/ada".to_owned()),
            "RUNS" => Some("/scratch/runs".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn home_and_variables_are_replaced() {
        for (path, expanded) in [
            ("~", "/u/ada"),
            ("~/a.yaml", "/u/ada/a.yaml"),
            ("$RUNS/x", "/scratch/runs/x"),
            ("${RUNS}-2/$RUNS", "/scratch/runs-2//scratch/runs"),
            ("a~/b", "a~/b"),
            ("./~/b", "./~/b"),
            ("a$$RUNS", "a$RUNS"),
            ("price$5$", "price$5$"),
            ("hf://datasets/a/b", "hf://datasets/a/b"),
        ] {
            assert_eq!(with(path).unwrap(), expanded);
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_refused() {
        assert_eq!(with("~bob/x"), Err(PathError::OtherUser("~bob/x".to_owned())));
        assert_eq!(with("$NONE/x"), Err(PathError::NotSet("NONE".to_owned())));
        assert_eq!(with("$EMPTY/x"), Err(PathError::NotSet("EMPTY".to_owned())));
        assert_eq!(with("${RUNS/x"), Err(PathError::Open("${RUNS/x".to_owned())));
    }

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
