//! Writes our config, with a comment on each line that says where it came from.

use super::error::ConvertError;
use crate::config::{RunConfig, load_text};
use serde_json::Value;
use std::path::Path;

/// A key, its value as YAML, and the origin of the value.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) key: String,
    pub(super) value: String,
    pub(super) comment: String,
}

/// A config in the making.
#[derive(Debug)]
pub(super) struct Output {
    lines: Vec<Line>,
    /// The data sets of `data.train` and `data.eval`; each is a list of lines.
    pub(super) train: Vec<Vec<Line>>,
    pub(super) eval: Vec<Vec<Line>>,
    defaults: Value,
}

const SMALLEST: &str = "output_dir: ''\nadapter: {}\nmodel: {path: ''}\ndata: {train: []}\n";

impl Output {
    pub(super) fn new() -> Result<Self, ConvertError> {
        let config: RunConfig = load_text(Path::new(""), SMALLEST)?;
        let defaults = serde_json::to_value(&config)
            .map_err(|error| ConvertError::Bug { problem: error.to_string() })?;
        Ok(Self { lines: Vec::new(), train: Vec::new(), eval: Vec::new(), defaults })
    }

    /// Sets a key. The first value stays.
    pub(super) fn set(&mut self, key: &str, value: &str, comment: &str) {
        if !self.has(key) {
            let (key, value, comment) = (key.to_owned(), value.to_owned(), comment.to_owned());
            self.lines.push(Line { key, value, comment });
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.lines.iter().any(|line| line.key == key)
    }

    /// The number that a key is set to.
    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.lines.iter().find(|line| line.key == key)?.value.parse().ok()
    }

    /// Whether the list of names that a key is set to has `name`.
    pub(super) fn lists(&self, key: &str, name: &str) -> Option<bool> {
        let list = &self.lines.iter().find(|line| line.key == key)?.value;
        Some(list.trim_matches(['[', ']']).split(", ").any(|entry| entry == name))
    }

    /// Whether `value` is our default of `key`.
    pub(super) fn is_default(&self, key: &str, value: &str) -> bool {
        let path = format!("/{}", key.replace('.', "/"));
        match self.defaults.pointer(&path) {
            Some(Value::String(text)) => text == value,
            Some(Value::Bool(flag)) => flag.to_string() == value,
            Some(Value::Number(number)) => {
                value.parse::<f64>().is_ok_and(|value| number.as_f64() == Some(value))
            }
            _ => false,
        }
    }

    /// The config as YAML, in the order of docs/config.md.
    pub(super) fn yaml(mut self) -> String {
        let mut order = Vec::new();
        keys(&self.defaults, "", &mut order);
        let place = |key: &str| order.iter().position(|known| key == known);
        self.lines.sort_by_key(|line| place(&line.key));
        let eval = self.lines.partition_point(|line| place(&line.key) < place("data.eval"));
        let train = self.lines.partition_point(|line| place(&line.key) < place("data.train"));
        for (at, key, sets) in [(eval, "data.eval", &self.eval), (train, "data.train", &self.train)]
        {
            if !sets.is_empty() {
                let (value, comment) = (String::new(), String::new());
                self.lines.insert(at, Line { key: key.to_owned(), value, comment });
            }
        }
        let mut text = String::new();
        let mut open: Vec<&str> = Vec::new(); // the sections of the previous line
        for line in &self.lines {
            let mut sections: Vec<&str> = line.key.split('.').collect();
            let name = sections.pop().unwrap_or_default();
            let common = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
            for (depth, section) in sections.iter().enumerate().skip(common) {
                text.extend([&" ".repeat(2 * depth), *section, ":\n"]);
            }
            let indent = 2 * sections.len();
            match name {
                "train" if indent > 0 => data_sets(&mut text, name, &self.train),
                "eval" if indent > 0 => data_sets(&mut text, name, &self.eval),
                _ => text += &line_of(indent, "", name, line),
            }
            open = sections;
        }
        text
    }
}

fn data_sets(text: &mut String, name: &str, sets: &[Vec<Line>]) {
    text.extend(["  ", name, ":\n"]);
    for set in sets {
        for (index, line) in set.iter().enumerate() {
            *text += &line_of(4, if index == 0 { "- " } else { "  " }, &line.key, line);
        }
    }
}

fn line_of(indent: usize, mark: &str, name: &str, line: &Line) -> String {
    format!("{:indent$}{mark}{name}: {}  # {}\n", "", line.value, line.comment)
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

/// A text as a YAML scalar.
pub(super) fn quoted(text: &str) -> String {
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || "/.".contains(c))
        && !matches!(text.to_ascii_lowercase().as_str(), "true" | "false" | "null" | "." | "..");
    if is_plain { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_in_the_order_of_the_sections() {
        let mut output = Output::new().unwrap();
        for (key, value) in [
            ("optim.lr", "1e-4"),
            ("data.video.fps", "1"),
            ("data.packing", "false"),
            ("model.path", "m"),
            ("output_dir", "o"),
        ] {
            output.set(key, value, "c");
        }
        let line = |key: &str, value: &str| Line {
            key: key.to_owned(),
            value: value.to_owned(),
            comment: "d".to_owned(),
        };
        output.train =
            vec![vec![line("path", "a"), line("image_root", "b")], vec![line("path", "c")]];
        assert_eq!(
            output.yaml(),
            "output_dir: o  # c\nmodel:\n  path: m  # c\ndata:\n  train:\n    - path: a  # d\n      \
             image_root: b  # d\n    - path: c  # d\n  packing: false  # c\n  video:\n    fps: 1  # c\n\
             optim:\n  lr: 1e-4  # c\n"
        );
    }

    #[test]
    fn a_text_that_yaml_would_read_as_something_else_is_quoted() {
        for text in ["a/b.jsonl", "Qwen/Qwen3-VL-2B-Instruct", "./a", "/a_b"] {
            assert_eq!(quoted(text), text);
        }
        for text in ["", "1.5", "true", "a b", "a: b", "x#1", "*.merger", "-a", "é", "."] {
            assert!(quoted(text).starts_with('"'), "{text}");
        }
    }
}
