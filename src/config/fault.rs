//! Errors of deserialization before their place and keys are complete.

use super::error::{ConfigError, Place};
use super::nearest::nearest;
use super::other_trainers::{our_key, our_value};
use super::tree::Node;
use serde::de::{self, Expected, Unexpected};
use std::fmt;

/// An error during deserialization. Each level of the tree adds its key, and the place if there is
/// none yet.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: Kind,
    place: Option<Place>,
    /// Keys and list indices above the error, innermost first.
    path: Vec<String>,
}

/// The kinds of errors, with the values that their messages show.
#[derive(Debug)]
pub(super) enum Kind {
    UnknownKey { key: String, valid: &'static [&'static str] },
    MissingKey { key: &'static str },
    UnknownValue { value: String, valid: &'static [&'static str] },
    WrongType { found: String, expected: String },
    Refused { message: String },
}

impl Fault {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, place: None, path: Vec::new() }
    }

    pub(super) fn wrong_type(node: &Node, expected: impl Into<String>) -> Self {
        let (found, expected) = (node.value.describe(), expected.into());
        Self::new(Kind::WrongType { found, expected }).at(&node.place)
    }

    /// Sets the place, unless an inner level has set it.
    pub(super) fn at(mut self, place: &Place) -> Self {
        self.place.get_or_insert_with(|| place.clone());
        self
    }

    pub(super) fn under(mut self, key: impl Into<String>) -> Self {
        self.path.push(key.into());
        self
    }

    pub(super) fn into_error(self) -> ConfigError {
        let place = self.place.expect("the root adds its place");
        let section = self.path.into_iter().rev().collect::<Vec<_>>().join(".");
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        match self.kind {
            Kind::UnknownKey { key, valid } => {
                let nearest = nearest(&key, valid.iter().copied()).map(str::to_owned);
                // A name of another trainer says more than a similar name of this section.
                let here = our_key(&key);
                ConfigError::UnknownKey { place, key, section, here, nearest, valid: owned(valid) }
            }
            Kind::MissingKey { key } => {
                ConfigError::MissingKey { place, key: key.to_owned(), section }
            }
            Kind::UnknownValue { value, valid } => {
                let alias = our_value(&value, valid);
                let nearest = alias.or_else(|| nearest(&value, valid.iter().copied()));
                let (key, valid, nearest) = (section, owned(valid), nearest.map(str::to_owned));
                ConfigError::UnknownValue { place, key, value, nearest, valid }
            }
            Kind::WrongType { found, expected } => {
                ConfigError::WrongType { place, key: or_config(section), found, expected }
            }
            Kind::Refused { message } => {
                ConfigError::Refused { place, key: or_config(section), message }
            }
        }
    }
}

fn or_config(section: String) -> String {
    if section.is_empty() { "the config".to_owned() } else { section }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(Kind::Refused { message: message.to_string() })
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_value(found, expected)
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Bool(value) => format!("`{value}`"),
            Unexpected::Unsigned(value) => format!("`{value}`"),
            Unexpected::Signed(value) => format!("`{value}`"),
            Unexpected::Float(value) => format!("`{value}`"),
            Unexpected::Str(value) => format!("`{value}`"),
            Unexpected::Unit | Unexpected::Option => "empty".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a mapping".to_owned(),
            other => other.to_string(),
        };
        Self::new(Kind::WrongType { found, expected: readable(&expected.to_string()) })
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(Kind::UnknownValue { value: variant.to_owned(), valid: expected })
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new(Kind::UnknownKey { key: field.to_owned(), valid: expected })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(Kind::MissingKey { key: field })
    }
}

/// Replaces names of Rust types by words for users, for example `u64` by a whole number.
fn readable(expected: &str) -> String {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => {
            format!("a whole number of 0 or more that fits {expected}")
        }
        "i8" | "i16" | "i32" | "i64" | "isize" => format!("a whole number that fits {expected}"),
        _ => match expected.strip_prefix("a nonzero u") {
            Some(_) => "a whole number of 1 or more".to_owned(),
            None => match expected.strip_prefix("struct ") {
                Some(_) => "a mapping".to_owned(),
                None => expected.to_owned(),
            },
        },
    }
}
