//! Errors of deserialization before their place and keys are complete.

use crate::error::{ConfigError, Place};
use crate::nearest::nearest;
use crate::tree::Node;
use serde::de::{self, Expected, Unexpected};
use std::fmt;

/// An error during deserialization. Each level of the tree adds its key, and the place if there is
/// none yet.
#[derive(Debug)]
pub(crate) struct UnplacedError {
    pub(crate) kind: ErrorKind,
    place: Option<Place>,
    /// Keys and list indices above the error, innermost first.
    path: Vec<String>,
}

/// The kinds of errors, with the values that their messages show.
#[derive(Debug)]
pub(crate) enum ErrorKind {
    UnknownKey { key: String, valid: &'static [&'static str] },
    MissingKey { key: &'static str },
    UnknownValue { value: String, valid: &'static [&'static str] },
    WrongType { found: String, expected: String },
    Refused { message: String },
}

impl UnplacedError {
    pub(crate) fn new(kind: ErrorKind) -> Self {
        Self { kind, place: None, path: Vec::new() }
    }

    pub(crate) fn wrong_type(node: &Node, expected: impl Into<String>) -> Self {
        let (found, expected) = (node.value.describe(), expected.into());
        Self::new(ErrorKind::WrongType { found, expected }).at(&node.place)
    }

    /// Sets the place, unless an inner level has set it.
    pub(crate) fn at(mut self, place: &Place) -> Self {
        self.place.get_or_insert_with(|| place.clone());
        self
    }

    pub(crate) fn under(mut self, key: impl Into<String>) -> Self {
        self.path.push(key.into());
        self
    }

    pub(crate) fn into_error(self) -> ConfigError {
        let place = self.place.expect("the root adds its place");
        let section = self.path.into_iter().rev().collect::<Vec<_>>().join(".");
        let (here, advice) = (None, None);
        match self.kind {
            ErrorKind::UnknownKey { key, valid } => {
                let nearest = nearest(&key, valid.iter().copied());
                ConfigError::UnknownKey { place, key, section, here, nearest, valid, advice }
            }
            ErrorKind::MissingKey { key } => {
                ConfigError::MissingKey { place, key: key.to_owned(), section }
            }
            ErrorKind::UnknownValue { value, valid } => {
                let nearest = nearest(&value, valid.iter().copied());
                ConfigError::UnknownValue { place, key: section, value, nearest, valid, advice }
            }
            ErrorKind::WrongType { found, expected } => {
                ConfigError::WrongType { place, key: or_config(section), found, expected, advice }
            }
            ErrorKind::Refused { message } => {
                ConfigError::Refused { place, key: or_config(section), message, advice }
            }
        }
    }
}

fn or_config(section: String) -> String {
    if section.is_empty() { "the config".to_owned() } else { section }
}

impl fmt::Display for UnplacedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for UnplacedError {}

impl de::Error for UnplacedError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(ErrorKind::Refused { message: message.to_string() })
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
        Self::new(ErrorKind::WrongType { found, expected: readable(&expected.to_string()) })
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(ErrorKind::UnknownValue { value: variant.to_owned(), valid: expected })
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new(ErrorKind::UnknownKey { key: field.to_owned(), valid: expected })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(ErrorKind::MissingKey { key: field })
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
