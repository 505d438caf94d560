//! Reads the config of a run, and adds to errors what the YAML reader does not know.

use crate::convert::{advice, our_key, our_value, trainer_of};
use fault::Hint;
use serde::de::DeserializeOwned;
use settings::{ConfigError, LeftOut, Loaded, Node, Value};
use std::path::Path;

/// Reads the YAML file at `path` into `T`, with `overrides` applied.
///
/// An override is `a.b=c`, where `c` is YAML: a scalar, `[a, b]` or `{a: b}`. Of several overrides
/// of one key, the last wins. A value that is overridden need not be valid, and an override may
/// give a required key. Each error names its place in the file, or the override that caused it.
pub fn load<T: DeserializeOwned>(path: &Path, overrides: &[String]) -> Result<T, ConfigError> {
    tree(path, overrides).and_then(|root| settings::read(&root)).map_err(explained)
}

/// As [`load`], with all errors: see [`settings::read_all`].
pub fn load_all<T: DeserializeOwned>(path: &Path, overrides: &[String]) -> Loaded<T> {
    let mut loaded = match tree(path, overrides) {
        Ok(root) => settings::read_all(root),
        Err(error) => Loaded { config: None, errors: vec![error], left_out: LeftOut::default() },
    };
    loaded.errors = loaded.errors.into_iter().map(explained).collect();
    loaded
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
    hint: Hint,
) -> ConfigError {
    match tree(path, overrides) {
        Ok(root) => ConfigError::Value { place: root.nearest(keys).place.clone(), problem, hint },
        Err(error) => explained(error), // the file was changed or removed after `load` read it
    }
}

/// Reads `text` into `T`; errors name it by `path`.
pub(crate) fn load_text<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    settings::parse_text(path, text).and_then(|root| settings::read(&root)).map_err(explained)
}

/// The file with its overrides. The config of another trainer is one error, not one for each of its
/// keys.
fn tree(path: &Path, overrides: &[String]) -> Result<Node, ConfigError> {
    let mut root = settings::parse_file(path)?;
    if let Some((program, from)) = other_trainer(&root) {
        let hint = match from {
            Some(from) => format!(
                "`trainer convert --from {from} {}` writes the config for this program",
                path.display()
            ),
            None => NEW.to_owned(),
        };
        return Err(ConfigError::OtherProgram { path: path.to_owned(), program, hint });
    }
    overrides.iter().try_for_each(|argument| settings::set(&mut root, argument))?;
    Ok(root)
}

/// Sections that a config of another trainer does not have.
const SECTIONS: [&str; 5] = ["model", "data", "train", "optim", "checkpoint"];

/// The other trainer whose config this is: its name, and the value of `trainer convert --from`.
fn other_trainer(root: &Node) -> Option<(&'static str, Option<&'static str>)> {
    let Value::Map(entries) = &root.value else { return None };
    let has_sections = entries.iter().any(|entry| {
        SECTIONS.contains(&entry.key.as_str()) && matches!(entry.node.value, Value::Map(_))
    });
    let keys: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
    trainer_of(&keys).filter(|(_, from)| !has_sections || *from == Some("lmms-engine"))
}

const NEW: &str = "`trainer new` writes a config for a model folder and data files";

/// The form of sections that are often written as a single value.
const FORMS: [(&str, &str); 7] = [
    ("the config", "write `model: {path: FOLDER}`"),
    ("adapter", "write `adapter: {kind: lora}`"),
    ("model", "write `model: {path: FOLDER}`"),
    ("data", "write `data: {train: [{path: FILE}]}`"),
    ("data.train", "write `train: [{path: FILE}]`"),
    ("data.eval", "write `eval: [{path: FILE}]`"),
    ("optim", "write `optim: {lr: 1e-5}`"),
];

/// The error with what is known about its key: names of other trainers, and forms of sections.
pub(crate) fn explained(mut error: ConfigError) -> ConfigError {
    let form = |key: &str| FORMS.iter().find(|(section, _)| *section == key).map(|(_, form)| *form);
    match &mut error {
        ConfigError::Empty { advice, .. } => *advice = Some(NEW),
        ConfigError::UnknownKey { key, here, advice: hint, .. } => {
            *here = our_key(key);
            *hint = if here.is_some() { None } else { advice(key) };
        }
        ConfigError::UnknownValue { value, valid, nearest, .. } => {
            // A name of another trainer says more than a similar name.
            if let Some(ours) = our_value(value, valid) {
                *nearest = Some(ours);
            }
        }
        ConfigError::WrongType { key, found, advice, .. } => {
            let is_dora = key == "adapter" && found.contains("dora");
            *advice = if is_dora { Some("write `adapter: {kind: dora}`") } else { form(key) };
        }
        ConfigError::Refused { key, advice, .. } => *advice = form(key),
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use crate::config::RunConfig;
    use settings::Setting;
    use std::collections::BTreeSet;

    #[test]
    fn the_key_for_a_name_of_another_trainer_exists() {
        let config = RunConfig::kind();
        let keys: BTreeSet<String> = config.flat().into_iter().map(|(name, _)| name).collect();
        for (name, here, _) in crate::convert::names().filter(|(_, here, _)| !here.is_empty()) {
            assert!(keys.contains(here), "`{name}`: `{here}` is no key");
        }
    }
}
