//! Trees from files, all errors of a tree at once, and structs as YAML.

use crate::de::read;
use crate::error::{ConfigError, Source};
use crate::keys::join;
use crate::tree::{Node, parse};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::path::Path;

/// Maximum number of errors that [`read_all`] returns.
const MAX_ERRORS: usize = 100;

/// The result of [`read_all`].
#[derive(Debug)]
pub struct Loaded<T> {
    /// The config without its wrong values; `None` if the rest lacks a required key.
    pub config: Option<T>,
    /// All errors.
    pub errors: Vec<ConfigError>,
    /// What `config` lacks.
    pub left_out: LeftOut,
}

/// The wrong values of a config file: dotted keys, list items by their number in the file. A key
/// that is misspelled is there with the right spelling, too.
#[derive(Debug, Default)]
pub struct LeftOut(Vec<String>);

impl LeftOut {
    /// Whether the config has all values of the file.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the value of the dotted `key`, or a part of it, was left out.
    pub fn has(&self, key: &str) -> bool {
        self.0.iter().any(|path| path == key) || self.has_part_of(key)
    }

    fn has_part_of(&self, key: &str) -> bool {
        let is_part = |rest: &str| rest.starts_with('.');
        self.0.iter().any(|path| path.strip_prefix(key).is_some_and(is_part))
    }

    /// The number in the file of an item of the list `key`, given its number in the config.
    pub fn number_in_file(&self, key: &str, number: usize) -> usize {
        let item = |path: &String| path.strip_prefix(key)?.strip_prefix('.')?.parse().ok();
        let removed: BTreeSet<usize> = self.0.iter().filter_map(item).collect();
        removed.iter().fold(number, |number, removed| number + usize::from(number >= *removed))
    }

    /// Keys in the file, given those in the config.
    pub fn in_file(&self, keys: &[String]) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for key in keys {
            let number = key.parse().map(|number| self.number_in_file(&found.join("."), number));
            found.push(number.map_or_else(|_| key.clone(), |number| number.to_string()));
        }
        found
    }
}

/// As [`read`], with all errors: after each, the value or key that caused it is left out. If a
/// required key is missing, the list item or the section in which it is missing is left out.
pub fn read_all<T: DeserializeOwned>(mut root: Node) -> Loaded<T> {
    let mut loaded = Loaded { config: None, errors: Vec::new(), left_out: LeftOut::default() };
    let Loaded { errors, left_out, .. } = &mut loaded;
    while errors.len() < MAX_ERRORS {
        let error = match read(&root) {
            Ok(config) => return Loaded { config: Some(config), ..loaded },
            Err(error) => error,
        };
        let Some(key) = error.key() else {
            errors.push(error);
            break;
        };
        // An error about what was left out before follows from that.
        let (follows, wrong) = match &error {
            ConfigError::MissingKey { section, .. } => {
                (left_out.has(&key), enclosing(section).to_owned())
            }
            _ => (left_out.has_part_of(&key), key),
        };
        if let ConfigError::UnknownKey { section, nearest: Some(nearest), .. } = &error {
            left_out.0.push(join(section, nearest));
        }
        if !follows {
            errors.push(error);
        }
        if !root.value.remove(&wrong) {
            break;
        }
        left_out.0.push(wrong);
    }
    loaded
}

/// The keys of the innermost list item that contains a section, or of the section.
fn enclosing(section: &str) -> &str {
    let is_number = |key: &str| key.parse::<usize>().is_ok();
    let mut item = section;
    while let Some((above, key)) = item.rsplit_once('.') {
        if is_number(key) {
            return item;
        }
        item = above;
    }
    section
}

/// Parses the YAML or JSON file at `path`.
pub fn parse_file(path: &Path) -> Result<Node, ConfigError> {
    // the shell gives the output of a command as `/dev/fd/63`
    let is_given_open =
        ["/dev/fd", "/dev/stdin", "/proc/self/fd"].iter().any(|at| path.starts_with(at));
    let bytes = if is_given_open { files::read_stream(path) } else { files::read(path) };
    let bytes = bytes.map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
        let line = valid.matches('\n').count() + 1;
        let column = valid.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        ConfigError::NotUtf8 { path: path.to_owned(), line, column }
    })?;
    parse_text(path, text)
}

/// Parses `text` as YAML; errors name it by `path`.
pub fn parse_text(path: &Path, text: &str) -> Result<Node, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let source = Source::File { path: path.into(), text: text.into() };
    parse(text, &source)?.ok_or_else(|| ConfigError::Empty { path: path.to_owned(), advice: None })
}

/// The config as YAML, with every key; [`read`] reads the same config from it.
pub fn to_yaml<T: Serialize>(config: &T) -> Result<String, ConfigError> {
    serde_saphyr::to_string(config)
        .map_err(|error| ConfigError::Write { message: error.to_string() })
}

#[cfg(test)]
mod tests;
