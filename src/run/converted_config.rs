//! Writes the config that means the same as one of another trainer.

use crate::config::{RunConfig, explained, load_text};
use crate::convert::{self, ConvertError, Line, Trainer};
use crate::data::DatasetInfo;
use serde_json::Value;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

/// A converted config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertedConfig {
    /// The config as YAML. A comment on each line says where its value came from; comments at the
    /// end list the dropped settings and the differences.
    pub yaml: String,
    /// Settings without an effect here, each with the reason.
    pub dropped: Vec<String>,
    /// What differs from the other trainer although every setting is converted.
    pub notes: Vec<String>,
}

/// Converts the settings in `files`, of which later ones win.
///
/// `world_size` is the number of processes that the other trainer ran; it is needed if the files do
/// not contain it.
pub fn convert_config(
    trainer: Trainer,
    files: &[PathBuf],
    world_size: Option<NonZeroU64>,
) -> Result<ConvertedConfig, ConvertError> {
    let read_entry = |file: &Path, name: &str| match DatasetInfo::read(file, name) {
        Ok(info) => Ok((info.path().to_owned(), info.num_samples())),
        Err(error) => Err(error.to_string()),
    };
    let converted =
        convert::convert(trainer, files, world_size, &read_entry).map_err(|error| match error {
            ConvertError::Syntax(error) => ConvertError::Syntax(explained(error)),
            other => other,
        })?;
    let convert::Converted { lines, dropped, notes } = converted;
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let mut yaml = format!("# Converted from {}: {}\n", trainer.title(), names.join(", "));
    yaml += &body(lines, &defaults()?);
    for (title, lines) in [("Dropped", &dropped), ("Notes", &notes)] {
        if !lines.is_empty() {
            yaml.extend(["\n# ", title, ":\n"]);
        }
        for line in lines {
            yaml.extend(["# - ", line, "\n"]);
        }
    }
    check(&yaml)?;
    Ok(ConvertedConfig { yaml, dropped, notes })
}

/// The config with only the required keys, as JSON.
fn defaults() -> Result<Value, ConvertError> {
    let smallest = "output_dir: ''\nadapter: {}\nmodel: {path: ''}\ndata: {train: []}\n";
    let config: RunConfig = load_text(Path::new(""), smallest)?;
    serde_json::to_value(&config).map_err(|error| ConvertError::Bug { problem: error.to_string() })
}

/// Reads the result as `trainer sft` will.
fn check(yaml: &str) -> Result<(), ConvertError> {
    let config: RunConfig = load_text(Path::new("config.yaml"), yaml)
        .map_err(|error| ConvertError::Bug { problem: error.to_string() })?;
    let invalid = |problem: String| ConvertError::Invalid { problem };
    config.check().map_err(|error| invalid(error.to_string()))
}

/// The lines as YAML, in the order of docs/config.md, without values that are default in both
/// trainers.
fn body(mut lines: Vec<Line>, defaults: &Value) -> String {
    let mut order = Vec::new();
    keys(defaults, "", &mut order);
    let is_in = |known: &str, key: &str| {
        key.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    lines.retain(|line| !line.is_default || !is_equal(defaults, line));
    lines.sort_by_cached_key(|line| order.iter().position(|known| is_in(known, &line.key)));
    let mut text = String::new();
    let mut open: Vec<&str> = Vec::new(); // the sections of the previous line
    for Line { key, value, origin, .. } in &lines {
        let mut sections: Vec<&str> = key.split('.').collect();
        let name = sections.pop().unwrap_or_default();
        let common = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
        let mut mark = ""; // of the first line of a list item
        for (depth, section) in sections.iter().enumerate().skip(common) {
            if section.parse::<usize>().is_ok() {
                mark = "- ";
            } else {
                text.extend([&" ".repeat(2 * depth), *section, ":\n"]);
            }
        }
        let indent = " ".repeat(2 * sections.len() - mark.len());
        text.extend([&indent, mark, name, ": ", value, "  # ", origin, "\n"]);
        open = sections;
    }
    text
}

/// Whether the value of a line is the default here.
fn is_equal(defaults: &Value, Line { key, value, .. }: &Line) -> bool {
    match defaults.pointer(&format!("/{}", key.replace('.', "/"))) {
        Some(Value::String(text)) => text == value,
        Some(Value::Bool(default)) => default.to_string() == *value,
        Some(Value::Number(number)) => {
            value.parse::<f64>().is_ok_and(|value| number.as_f64() == Some(value))
        }
        _ => false,
    }
}

/// All dotted keys of the config, in order; a list is one key.
fn keys(config: &Value, section: &str, found: &mut Vec<String>) {
    let Value::Object(entries) = config else { return };
    for (name, value) in entries {
        let key = format!("{section}{name}");
        match value {
            Value::Object(inner) if !inner.is_empty() => keys(value, &format!("{key}."), found),
            _ => found.push(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_in_the_order_of_the_sections_without_defaults_of_both_trainers() {
        let line = |key: &str, value: &str, is_default: bool| Line {
            key: key.to_owned(),
            value: value.to_owned(),
            origin: "c".to_owned(),
            is_default,
        };
        let lines = vec![
            line("optim.lr", "1e-4", false),
            line("data.video.fps", "1", true),
            line("data.packing", "false", false),
            line("seed", "42", true),
            line("model.path", "m", false),
            line("output_dir", "o", false),
            line("data.train.0.path", "a", false),
            line("data.train.0.image_root", "b", false),
            line("data.train.1.path", "c", false),
        ];
        assert_eq!(
            body(lines, &defaults().unwrap()),
            "output_dir: o  # c\nmodel:\n  path: m  # c\ndata:\n  train:\n    - path: a  # c\n      \
             image_root: b  # c\n    - path: c  # c\n  packing: false  # c\n  video:\n    fps: 1  # c\n\
             optim:\n  lr: 1e-4  # c\n"
        );
    }
}
