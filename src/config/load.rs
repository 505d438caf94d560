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

/// As [`load`], with all errors: after each, the value or key that caused it is left out. Without it,
/// the rest may not be a config; then there is only the list of errors.
pub fn load_all<T: DeserializeOwned>(
    path: &Path,
    overrides: &[String],
) -> (Option<T>, Vec<ConfigError>) {
    let mut root = match tree(path, overrides) {
        Ok(root) => root,
        Err(error) => return (None, vec![error]),
    };
    let mut errors = Vec::new();
    loop {
        let error = match read(&root) {
            Ok(config) => return (Some(config), errors),
            Err(error) => error,
        };
        let left_out = match error.place() {
            Some(place) if !matches!(error, ConfigError::MissingKey { .. }) => {
                root.value.remove(place)
            }
            _ => false,
        };
        // A key that is missing because its wrong value was left out is no error of the file.
        if errors.is_empty() || left_out {
            errors.push(error);
        }
        if !left_out || errors.len() == MAX_ERRORS {
            return (None, errors);
        }
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
