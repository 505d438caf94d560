//! A setting of another trainer: its key, its value and where it was found.

use settings::{Node, Value as NodeValue};
use std::fmt;
use std::sync::Arc;

/// A value in another trainer's file, as written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Null,
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl Value {
    pub(crate) fn of(node: &Node) -> Self {
        match &node.value {
            NodeValue::LeftOut => Self::Null,
            value if value.is_null() => Self::Null,
            NodeValue::Scalar { text, .. } => Self::Text(text.clone()),
            NodeValue::List(items) => Self::List(items.iter().map(Self::of).collect()),
            NodeValue::Map(entries) => Self::Map(
                entries.iter().map(|entry| (entry.key.clone(), Self::of(&entry.node))).collect(),
            ),
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The items of a list; any other value as its only item; nothing if it is null.
    pub(crate) fn items(&self) -> &[Self] {
        match self {
            Self::Null => &[],
            Self::List(items) => items,
            other => std::slice::from_ref(other),
        }
    }

    /// The value under a key of a mapping.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, v)| v),
            _ => None,
        }
    }

    pub(crate) fn boolean(&self) -> Option<bool> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "1" => Some(true),
            "false" | "no" | "0" => Some(false),
            _ => None,
        }
    }

    pub(crate) fn number(&self) -> Option<f64> {
        self.text()?.parse().ok().filter(|number: &f64| number.is_finite())
    }

    /// A whole number of 0 or more; `3.0` counts as one.
    pub(crate) fn count(&self) -> Option<u64> {
        let number = self.number()?;
        (number >= 0.0 && number.fract() == 0.0 && number < 9e15).then_some(number as u64)
    }

    /// Whether the value switches a feature off: null, false, 0, `none`, `no` or empty.
    pub(crate) fn is_off(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Text(text) => {
                matches!(text.to_ascii_lowercase().as_str(), "" | "none" | "null")
                    || self.boolean() == Some(false)
                    || self.number() == Some(0.0)
            }
            Self::List(items) => items.is_empty(),
            Self::Map(entries) => entries.is_empty(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Text(text) => f.write_str(&text.replace('\n', " ")),
            Self::List(items) => {
                let items: Vec<_> = items.iter().map(Self::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Self::Map(entries) => {
                let entries: Vec<_> =
                    entries.iter().map(|(key, value)| format!("{key}: {value}")).collect();
                write!(f, "{{{}}}", entries.join(", "))
            }
        }
    }
}

/// Where a setting was found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Origin {
    /// File and line.
    File(Arc<str>, usize),
    /// The setting is left out; this is the other trainer's default.
    Default,
}

impl Origin {
    /// The name of the file without its folder, and the line.
    pub(crate) fn short(&self) -> String {
        let full = self.to_string();
        full.rsplit('/').next().unwrap_or(&full).to_owned()
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file, line) => write!(f, "{file}:{line}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// A setting of another trainer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    /// Its key, with dots between sections.
    pub(crate) key: String,
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

impl Setting {
    /// The key without its sections.
    pub(crate) fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    pub(crate) fn is_written(&self) -> bool {
        self.origin != Origin::Default
    }
}
