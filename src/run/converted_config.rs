//! Writes the config that means the same as one of another trainer.

use crate::config::{RunConfig, explained, load_text};
use crate::convert::{self, ConvertError, Line, Trainer};
use crate::data::DatasetInfo;
use serde_json::Value;
use settings::Setting;
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
    yaml += &body(lines);
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

/// Reads the result as `trainer sft` will.
fn check(yaml: &str) -> Result<(), ConvertError> {
    let config: RunConfig = load_text(Path::new("config.yaml"), yaml)
        .map_err(|error| ConvertError::Bug { problem: error.to_string() })?;
    let invalid = |problem: String| ConvertError::Invalid { problem };
    config.check().map_err(|error| invalid(error.to_string()))
}

/// The lines as YAML, in the order of docs/config.md, without values that are default in both
/// trainers.
fn body(mut lines: Vec<Line>) -> String {
    let config = RunConfig::kind();
    let keys = config.flat();
    // The innermost key of which a line gives the value or a part; a list is one key.
    let place = |line: &Line| {
        keys.iter().rposition(|(known, _)| {
            let rest = line.key.strip_prefix(known.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let default = |line: &Line| keys[place(line)?].1.default.as_ref();
    lines.retain(|line| !line.is_default || !default(line).is_some_and(|of| is_equal(of, line)));
    lines.sort_by_cached_key(place);
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

/// Whether the value of a line is this default.
fn is_equal(default: &Value, Line { value, .. }: &Line) -> bool {
    match default {
        Value::String(text) => text == value,
        Value::Bool(default) => default.to_string() == *value,
        Value::Number(number) => {
            value.parse::<f64>().is_ok_and(|value| number.as_f64() == Some(value))
        }
        _ => false,
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
            body(lines),
            "output_dir: o  # c\nmodel:\n  path: m  # c\ndata:\n  train:\n    - path: a  # c\n      \
             image_root: b  # c\n    - path: c  # c\n  packing: false  # c\n  video:\n    fps: 1  # c\n\
             optim:\n  lr: 1e-4  # c\n"
        );
    }
}
