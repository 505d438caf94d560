//! A line of the converted config.

use serde_json::Value;

/// A key of the config with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Dotted key, list items by number.
    pub key: String,
    /// The value as YAML.
    pub value: String,
    /// Where the value came from.
    pub origin: String,
    /// Whether the value is a default of the other trainer: the line is not needed if the config here
    /// has the same default.
    pub is_default: bool,
}

/// A text as a YAML scalar.
pub(crate) fn quoted(text: &str) -> String {
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || "/.".contains(c))
        && !matches!(text.to_ascii_lowercase().as_str(), "true" | "false" | "null" | "." | "..");
    if is_plain { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

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
