//! Reads a config file with `--set` overrides into a struct, and writes it as YAML.

use super::de::read;
use super::error::{ConfigError, Source};
use super::set::set;
use super::tree::{Node, parse};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;

/// Reads the YAML file at `path` into `T`, with `overrides` applied.
///
/// An override is `a.b=c`, where `c` is YAML: a scalar, `[a, b]` or `{a: b}`. Of several overrides
/// of one key, the last wins. A value that is overridden need not be valid, and an override may
/// give a required key. Each error names its place in the file, or the override that caused it.
pub fn load<T: DeserializeOwned>(path: &Path, overrides: &[String]) -> Result<T, ConfigError> {
    read(&tree(path, overrides)?)
}

/// Maximum number of errors that [`load_all`] returns.
const MAX_ERRORS: usize = 100;

/// The result of [`load_all`].
#[derive(Debug)]
pub struct Loaded<T> {
    /// The config without its wrong values; `None` if the rest lacks a required key.
    pub config: Option<T>,
    /// All errors.
    pub errors: Vec<ConfigError>,
    /// Dotted keys of the list items that were left out, each with the number that the item had then.
    left_out: Vec<String>,
}

impl<T> Loaded<T> {
    fn of(errors: Vec<ConfigError>) -> Self {
        Self { config: None, errors, left_out: Vec::new() }
    }

    /// The number in the file of an item of the list `key`, given its number in the config.
    pub fn number_in_file(&self, key: &str, number: usize) -> usize {
        let removed = self.left_out.iter().rev().filter_map(|item| {
            let (list, number) = item.rsplit_once('.')?;
            number.parse::<usize>().ok().filter(|_| list == key)
        });
        removed.fold(number, |number, removed| number + usize::from(number >= removed))
    }
}

/// As [`load`], with all errors: after each, the value or key that caused it is left out. If a required
/// key is missing, the list item or the section in which it is missing is left out.
pub fn load_all<T: DeserializeOwned>(path: &Path, overrides: &[String]) -> Loaded<T> {
    let mut root = match tree(path, overrides) {
        Ok(root) => root,
        Err(error) => return Loaded::of(vec![error]),
    };
    let mut loaded = Loaded::of(Vec::new());
    loop {
        let error = match read(&root) {
            Ok(config) => return Loaded { config: Some(config), ..loaded },
            Err(error) => error,
        };
        let errors = &mut loaded.errors;
        let is_removed = match &error {
            ConfigError::MissingKey { section, .. } => {
                let keys = enclosing(section);
                loaded.left_out.push(keys.join("."));
                root.value.remove_at(&keys)
            }
            ConfigError::WrongType { key, .. } => {
                loaded.left_out.push(key.clone());
                error.place().is_some_and(|place| root.value.remove(place))
            }
            error => error.place().is_some_and(|place| root.value.remove(place)),
        };
        if !errors.last().is_some_and(|before| follows(&error, before)) {
            errors.push(error);
        }
        if !is_removed || errors.len() == MAX_ERRORS {
            return loaded;
        }
    }
}

/// The keys of the innermost list item that contains a section, or of the section.
fn enclosing(section: &str) -> Vec<&str> {
    let mut keys: Vec<&str> = section.split('.').filter(|key| !key.is_empty()).collect();
    let is_number = |key: &&str| key.parse::<usize>().is_ok();
    if let Some(last) = keys.iter().rposition(is_number) {
        keys.truncate(last + 1);
    }
    keys
}

/// Whether a key is missing only because its wrong value, its misspelled key or its section was left
/// out before.
fn follows(error: &ConfigError, before: &ConfigError) -> bool {
    let ConfigError::MissingKey { key, section, .. } = error else { return false };
    let path = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
    match before {
        ConfigError::UnknownValue { key, .. }
        | ConfigError::WrongType { key, .. }
        | ConfigError::Refused { key, .. } => *key == path,
        ConfigError::UnknownKey { nearest, section: of, .. } => {
            nearest.as_ref() == Some(key) && of == section
        }
        ConfigError::MissingKey { section, .. } => enclosing(section).join(".") == path,
        _ => false,
    }
}

/// Returns an error about a value that [`load`] accepted but the run cannot use.
///
/// `keys` lead to the value, list items by number. The error has the position of the value, or of
/// its section if the key is not in the file.
pub fn refuse(
    path: &Path,
    overrides: &[String],
    keys: &[&str],
    problem: String,
    hint: String,
) -> ConfigError {
    match tree(path, overrides) {
        Ok(root) => ConfigError::Value { place: root.nearest(keys).place.clone(), problem, hint },
        Err(error) => error, // the file was changed or removed after `load` read it
    }
}

/// Reads `text` into `T`; errors name it by `path`.
pub(crate) fn load_text<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    read(&parse_text(path, text)?)
}

/// Parses the YAML or JSON file at `path`.
pub(crate) fn read_tree(path: &Path) -> Result<Node, ConfigError> {
    tree(path, &[])
}

/// Parses `text` as YAML.
pub(crate) fn parse_tree(text: &str) -> Result<Node, ConfigError> {
    parse_text(Path::new(""), text)
}

fn tree(path: &Path, overrides: &[String]) -> Result<Node, ConfigError> {
    let bytes =
        fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
        let line = valid.matches('\n').count() + 1;
        let column = valid.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        ConfigError::NotUtf8 { path: path.to_owned(), line, column }
    })?;
    let mut root = parse_text(path, text)?;
    for argument in overrides {
        set(&mut root, argument)?;
    }
    Ok(root)
}

fn parse_text(path: &Path, text: &str) -> Result<Node, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let source = Source::File { path: path.into(), text: text.into() };
    parse(text, &source)?.ok_or_else(|| ConfigError::Empty { path: path.to_owned() })
}

/// The config as YAML, with every key; [`load`] reads the same config from it.
pub fn to_yaml<T: Serialize>(config: &T) -> Result<String, ConfigError> {
    serde_saphyr::to_string(config)
        .map_err(|error| ConfigError::Write { message: error.to_string() })
}

#[cfg(test)]
mod tests;
