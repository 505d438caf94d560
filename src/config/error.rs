//! What can be wrong with a config, and where.

use super::excerpt::Excerpt;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a text comes from: a file, or one `--set`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    File { path: Arc<Path>, text: Arc<str> },
    Set { argument: Arc<str> },
}

impl Source {
    /// `line` and `column` count from 1, columns in characters.
    pub(super) fn at(&self, line: usize, column: usize) -> Place {
        Place(Arc::new(match self {
            Self::File { path, text } => {
                At::File { path: Arc::clone(path), text: Arc::clone(text), line, column }
            }
            Self::Set { argument } => At::Set { argument: Arc::clone(argument) },
        }))
    }
}

/// A position in a config file, or a `--set` argument.
///
/// Shown as `config.yaml:12:3` or `--set data.packing=maybe`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place(Arc<At>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    File { path: Arc<Path>, text: Arc<str>, line: usize, column: usize },
    Set { argument: Arc<str> },
}

impl Place {
    /// Line and column in the file, from 1, columns in characters; `None` for `--set`.
    pub fn position(&self) -> Option<(usize, usize)> {
        match *self.0 {
            At::File { line, column, .. } => Some((line, column)),
            At::Set { .. } => None,
        }
    }

    fn excerpt(&self) -> Excerpt<'_> {
        match &*self.0 {
            At::File { text, line, column, .. } => Excerpt::of(text, *line, *column),
            At::Set { .. } => Excerpt::none(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            At::File { path, line, column, .. } => {
                write!(f, "{}:{line}:{column}", path.display())
            }
            At::Set { argument } => write!(f, "--set {argument}"),
        }
    }
}

/// A config file or a `--set` that cannot be used.
///
/// The message names the place, the key and the nearest valid name, and shows the line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read config `{}`", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not text.
    #[error("{}:{line}:{column}: not UTF-8 text", .path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Line of the first bad byte.
        line: usize,
        /// Its column, in characters.
        column: usize,
    },
    /// The file holds nothing, or comments only.
    #[error("{}: the config is empty", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Not YAML.
    #[error("{place}: {message}{}", .place.excerpt())]
    Syntax {
        /// Where.
        place: Place,
        /// What the parser said.
        message: String,
    },
    /// The same key twice in one mapping.
    #[error("{place}: duplicate key `{key}`, first used at {first}{}", .place.excerpt())]
    DuplicateKey {
        /// The second one.
        place: Place,
        /// The key.
        key: String,
        /// The first one.
        first: Place,
    },
    /// Nothing reads this key.
    #[error("{place}: unknown key `{key}`{}{}{}", inside(.section), did_you_mean(.nearest.as_deref()), .place.excerpt())]
    UnknownKey {
        /// The key in the file, or the `--set`.
        place: Place,
        /// The key.
        key: String,
        /// The keys above it, joined by dots; empty at the top.
        section: String,
        /// The valid key that looks like it.
        nearest: Option<String>,
        /// All valid keys beside it.
        valid: Vec<String>,
    },
    /// A key without a default is not there.
    #[error("{place}: missing key `{key}`{}{}", inside(.section), .place.excerpt())]
    MissingKey {
        /// The mapping that lacks it.
        place: Place,
        /// The key.
        key: String,
        /// The keys above it, joined by dots; empty at the top.
        section: String,
    },
    /// A value is not one of those that the key knows.
    #[error("{place}: unknown value `{value}` for `{key}`{}{}", did_you_mean(.nearest.as_deref()), .place.excerpt())]
    UnknownValue {
        /// The value in the file, or the `--set`.
        place: Place,
        /// The key with those above it.
        key: String,
        /// The value.
        value: String,
        /// The valid value that looks like it.
        nearest: Option<String>,
        /// All valid values.
        valid: Vec<String>,
    },
    /// A value has the wrong type or is out of range.
    #[error("{place}: `{key}` is {found}, expected {expected}{}", .place.excerpt())]
    WrongType {
        /// The value in the file, or the `--set`.
        place: Place,
        /// The key with those above it.
        key: String,
        /// The value.
        found: String,
        /// What the key takes.
        expected: String,
    },
    /// The section's own check refused a value.
    #[error("{place}: `{key}`: {message}{}", .place.excerpt())]
    Refused {
        /// The value in the file, or the `--set`.
        place: Place,
        /// The key with those above it.
        key: String,
        /// What the check said.
        message: String,
    },
    /// A value of the right type that this run cannot work with.
    #[error("{place}: {problem}{}", .place.excerpt())]
    Value {
        /// The value in the file, the `--set`, or what should hold it.
        place: Place,
        /// The key, what was found and what was expected.
        problem: String,
        /// What to do about it.
        hint: String,
    },
    /// A `--set` has no `=`, an empty key, or leads through something that has no keys.
    #[error("--set {argument}: {message}")]
    Set {
        /// The argument.
        argument: String,
        /// What is wrong with it.
        message: String,
    },
    /// The resolved config could not be written as YAML.
    #[error("cannot write the config as YAML: {message}")]
    Write {
        /// What the serializer said.
        message: String,
    },
}

impl ConfigError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                "check the path given to `--config`".to_owned()
            }
            Self::Read { .. } => "check the permissions of the file".to_owned(),
            Self::NotUtf8 { .. } => "save the file as UTF-8".to_owned(),
            Self::Empty { .. } => "start from one of the files in `configs/`".to_owned(),
            Self::Syntax { message, .. } if message.contains("tab") => {
                "YAML is indented by spaces: replace the tab".to_owned()
            }
            Self::Syntax { .. } => {
                "check indentation, brackets and quotes here and in the line above".to_owned()
            }
            Self::DuplicateKey { .. } => "remove one of the two".to_owned(),
            Self::UnknownKey { valid, .. } if valid.is_empty() => "there are no keys here".to_owned(),
            Self::UnknownKey { valid, .. } => format!("valid keys here: {}", listed(valid)),
            Self::MissingKey { key, section, .. } => {
                let path = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
                format!("add it to the file, or pass `--set {path}=..`")
            }
            Self::UnknownValue { valid, .. } => format!("valid values: {}", listed(valid)),
            Self::WrongType { .. } | Self::Refused { .. } => {
                "change the value; `configs/` has an example of each key".to_owned()
            }
            Self::Value { hint, .. } => hint.clone(),
            Self::Set { .. } => {
                "write `--set section.key=value`, list items by number: `--set data.train.0.path=a.jsonl`"
                    .to_owned()
            }
            Self::Write { .. } => "this is an error of the program: report it".to_owned(),
        }
    }

    /// Where it is, if it is at one place.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::Syntax { place, .. }
            | Self::DuplicateKey { place, .. }
            | Self::UnknownKey { place, .. }
            | Self::MissingKey { place, .. }
            | Self::UnknownValue { place, .. }
            | Self::WrongType { place, .. }
            | Self::Refused { place, .. }
            | Self::Value { place, .. } => Some(place),
            Self::Read { .. }
            | Self::NotUtf8 { .. }
            | Self::Empty { .. }
            | Self::Set { .. }
            | Self::Write { .. } => None,
        }
    }
}

fn inside(section: &str) -> String {
    if section.is_empty() { String::new() } else { format!(" in `{section}`") }
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(", did you mean `{name}`?")).unwrap_or_default()
}

fn listed(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
