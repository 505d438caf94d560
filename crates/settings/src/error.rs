//! Errors of a config, with file, line and column.

use crate::excerpt::Excerpt;
use crate::keys::join;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The origin of a text: a config file or a `--set` argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    File { path: Arc<Path>, text: Arc<str> },
    Set { argument: Arc<str> },
}

impl Source {
    /// `line` and `column` count from 1, columns in characters.
    pub(crate) fn at(&self, line: usize, column: usize) -> Place {
        Place(Arc::new(match self {
            Self::File { path, text } => {
                At::File { path: Arc::clone(path), text: Arc::clone(text), line, column }
            }
            Self::Set { argument } => At::Set { argument: Arc::clone(argument) },
        }))
    }
}

/// A position in a config file, or a `--set` argument; displayed as `config.yaml:12:3` or
/// `--set data.packing=maybe`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place(Arc<At>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    File { path: Arc<Path>, text: Arc<str>, line: usize, column: usize },
    Set { argument: Arc<str> },
}

impl Place {
    /// Line and column in the file, from 1, columns in characters. `None` for `--set`.
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

/// An error of a config file or a `--set` argument.
///
/// The message names the place, the key and the nearest valid name, and shows the line. `advice` is
/// a hint from the caller in place of the general one; this crate leaves it empty.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum ConfigError {
    #[error("cannot read config `{}`", .path.display())]
    #[fault(hint = read_hint(source))]
    Read { path: PathBuf, source: io::Error },
    #[error("{}:{line}:{column}: not UTF-8 text", .path.display())]
    #[fault(hint = "save the file as UTF-8")]
    NotUtf8 {
        path: PathBuf,
        /// Line of the first invalid byte, from 1.
        line: usize,
        /// Column of the first invalid byte, from 1, in characters.
        column: usize,
    },
    #[error("{}: the config is empty", .path.display())]
    #[fault(hint = advice.map(Into::into))]
    Empty { path: PathBuf, advice: Option<&'static str> },
    #[error("{}: this is a config of {program}", .path.display())]
    #[fault(hint = hint.clone())]
    OtherProgram { path: PathBuf, program: &'static str, hint: String },
    #[error("{place}: {message}{}", .place.excerpt())]
    #[fault(hint = syntax_hint(message))]
    Syntax {
        /// Position at which the parser stopped.
        place: Place,
        message: String,
    },
    #[error("{place}: duplicate key `{key}`, first used at {first}{}", .place.excerpt())]
    #[fault(hint = "remove one of the two")]
    DuplicateKey {
        /// Position of the second occurrence.
        place: Place,
        key: String,
        /// Position of the first occurrence.
        first: Place,
    },
    #[error("{place}: unknown key `{key}`{}{}{}", inside(.section), suggested(*.here, *.nearest), .place.excerpt())]
    #[fault(hint = advice.map_or_else(|| key_hint(*here, valid), str::to_owned))]
    UnknownKey {
        place: Place,
        key: String,
        /// Dotted keys above it; empty at the top level.
        section: String,
        /// The dotted key that has this name in another program.
        here: Option<&'static str>,
        advice: Option<&'static str>,
        /// The valid key that is most similar, if one is similar.
        nearest: Option<&'static str>,
        /// All valid keys of the section.
        valid: &'static [&'static str],
    },
    #[error("{place}: missing key `{key}`{}{}", inside(.section), .place.excerpt())]
    #[fault(hint = format!("add it to the file, or pass `--set {}=..`", join(section, key)))]
    MissingKey {
        /// The mapping in which it is missing.
        place: Place,
        key: String,
        /// Dotted keys above it; empty at the top level.
        section: String,
    },
    #[error("{place}: unknown value `{value}` for `{key}`{}{}", did_you_mean(*.nearest), .place.excerpt())]
    #[fault(hint = advice.map_or_else(|| format!("valid values: {}", listed(valid)), str::to_owned))]
    UnknownValue {
        place: Place,
        /// The dotted key.
        key: String,
        value: String,
        /// The valid value that is most similar, if one is similar.
        nearest: Option<&'static str>,
        /// All valid values.
        valid: &'static [&'static str],
        advice: Option<&'static str>,
    },
    #[error("{place}: `{key}` is {found}, expected {expected}{}", .place.excerpt())]
    #[fault(hint = advice.map_or_else(|| set_hint(key), str::to_owned))]
    WrongType {
        place: Place,
        /// The dotted key.
        key: String,
        found: String,
        expected: String,
        advice: Option<&'static str>,
    },
    #[error("{place}: `{key}`: {message}{}", .place.excerpt())]
    #[fault(hint = advice.map_or_else(|| set_hint(key), str::to_owned))]
    Refused {
        place: Place,
        /// The dotted key.
        key: String,
        message: String,
        advice: Option<&'static str>,
    },
    #[error("{place}: {problem}{}", .place.excerpt())]
    #[fault(hint = hint.clone())]
    Value {
        /// The value in the file, the `--set`, or the section in which the value is missing.
        place: Place,
        /// The key, the value that was found and the values that are expected.
        problem: String,
        hint: fault::Hint,
    },
    /// A `--set` has no `=`, an empty key, or a key below a value that is neither a list nor a
    /// mapping.
    #[error("--set {argument}: {message}")]
    #[fault(
        hint = "write `--set section.key=value`, list items by number: `--set data.train.0.path=a.jsonl`"
    )]
    Set { argument: String, message: String },
    #[error("cannot write the config as YAML: {message}")]
    #[fault(hint = "this is a bug in trainer: please report it")]
    Write { message: String },
}

fn read_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "check the path given to `--config`",
        _ => "check the permissions of the file",
    }
}

fn syntax_hint(message: &str) -> &'static str {
    if message.contains("anchor") {
        "write a value that begins with `*` or `&` in quotes"
    } else if message.contains("tab") {
        "YAML is indented by spaces: replace the tab"
    } else {
        "check indentation, brackets and quotes here and in the line above"
    }
}

fn key_hint(here: Option<&str>, valid: &[&str]) -> String {
    match here {
        Some(here) => format!("write `{here}`"),
        None if valid.is_empty() => "this section has no keys".to_owned(),
        None => format!("valid keys here: {}", listed(valid)),
    }
}

fn set_hint(key: &str) -> String {
    format!("change the value, or pass `--set {key}=..`")
}

impl ConfigError {
    /// The dotted key that is unknown or missing, or whose value is wrong, list items by number.
    pub(crate) fn key(&self) -> Option<String> {
        match self {
            Self::UnknownKey { key, section, .. } | Self::MissingKey { key, section, .. } => {
                Some(join(section, key))
            }
            Self::UnknownValue { key, .. }
            | Self::WrongType { key, .. }
            | Self::Refused { key, .. } => Some(key.clone()),
            _ => None,
        }
    }

    /// The place of the error; `None` if it concerns a whole file or argument.
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
            | Self::OtherProgram { .. }
            | Self::Set { .. }
            | Self::Write { .. } => None,
        }
    }
}

fn inside(section: &str) -> String {
    if section.is_empty() { String::new() } else { format!(" in `{section}`") }
}

fn suggested(here: Option<&str>, nearest: Option<&str>) -> String {
    here.map_or_else(|| did_you_mean(nearest), |key| format!(", here: `{key}`"))
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(", did you mean `{name}`?")).unwrap_or_default()
}

fn listed(names: &[&str]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
