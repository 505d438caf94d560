//! What a type of the config reports about its values.

use super::{Range, ValueError};
use indexmap::IndexMap;
use serde_json::Value;
use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

/// A key of a section.
#[derive(Debug, Clone)]
pub struct Key {
    pub name: &'static str,
    /// Its meaning, as Markdown.
    pub doc: &'static str,
    /// `None` if the key is required.
    pub default: Option<Value>,
    /// Whether a resumed run may have another value.
    pub is_neutral: bool,
    pub kind: Kind,
    /// Ranges that all numbers of the value are in, with what the errors say of them.
    pub ranges: Vec<(Range, &'static str)>,
}

/// The values that are read.
#[derive(Debug, Clone)]
pub enum Kind {
    Bool,
    Integer {
        minimum: u64,
    },
    Number,
    Text,
    Path,
    /// Names, and what each means.
    Choice(Vec<(&'static str, &'static str)>),
    /// A struct, and its name.
    Section(&'static str, Vec<Key>),
    List(Box<Kind>),
    /// A list with this number of items.
    Array(Box<Kind>, usize),
    /// Any keys.
    Map(Box<Kind>),
    /// Or `null`.
    Optional(Box<Kind>),
    OneOf(Vec<Kind>),
}

impl Kind {
    /// The keys of a section, of an optional one, or of the sections of a list.
    pub fn keys(&self) -> &[Key] {
        match self {
            Self::Section(_, keys) => keys,
            Self::List(kind) | Self::Optional(kind) => kind.keys(),
            _ => &[],
        }
    }

    /// All keys below, with their dotted names, in order; an item of a list is `name[]`. A section that
    /// stands in two places, such as a data set, has its keys at the first one only. A section that is
    /// always there has no entry of its own.
    pub fn flat(&self) -> Vec<(String, &Key)> {
        let mut found = Vec::new();
        self.add_flat("", &mut BTreeSet::new(), &mut found);
        found
    }

    fn add_flat<'a>(
        &'a self,
        section: &str,
        shown: &mut BTreeSet<&'static str>,
        found: &mut Vec<(String, &'a Key)>,
    ) {
        match self {
            Self::Section(name, keys) if shown.insert(name) => {
                for key in keys {
                    let name = join(section, key.name);
                    if !matches!(key.kind, Self::Section(..)) {
                        found.push((name.clone(), key));
                    }
                    key.kind.add_flat(&name, shown, found);
                }
            }
            Self::List(item) => item.add_flat(&format!("{section}[]"), shown, found),
            Self::Optional(kind) => kind.add_flat(section, shown, found),
            _ => {}
        }
    }

    /// Removes the values of neutral keys.
    pub fn remove_neutral(&self, value: &mut Value) {
        match (self, value) {
            (Self::Section(_, keys), Value::Object(values)) => {
                for key in keys {
                    if key.is_neutral {
                        values.remove(key.name);
                    } else if let Some(value) = values.get_mut(key.name) {
                        key.kind.remove_neutral(value);
                    }
                }
            }
            (Self::List(kind), Value::Array(items)) => {
                for item in items {
                    kind.remove_neutral(item);
                }
            }
            (Self::Optional(kind), value) => kind.remove_neutral(value),
            _ => {}
        }
    }
}

/// A type of the values of a key.
pub trait Setting {
    fn kind() -> Kind
    where
        Self: Sized;

    /// Calls `visit` with each path, of the value at `key`.
    fn paths(&mut self, _key: &str, _visit: &mut dyn FnMut(&str, &mut PathBuf)) {}

    /// Calls `visit` with each number, of the value at `key`, outside of sections.
    fn numbers(&self, _key: &str, _visit: &mut dyn FnMut(&str, f64)) {}

    /// Adds an error for each value that is not valid by itself.
    fn check_values(&self, _key: &str, _errors: &mut Vec<ValueError>) {}
}

/// The dotted key of `key` in `section`, which is empty at the top level.
pub fn join(section: &str, key: impl std::fmt::Display) -> String {
    if section.is_empty() { key.to_string() } else { format!("{section}.{key}") }
}

macro_rules! numbers {
    ($($type:ty => $kind:expr, $to:expr;)*) => {$(
        impl Setting for $type {
            fn kind() -> Kind {
                $kind
            }

            fn numbers(&self, key: &str, visit: &mut dyn FnMut(&str, f64)) {
                let to: fn($type) -> f64 = $to;
                visit(key, to(*self));
            }
        }
    )*};
}

numbers! {
    f64 => Kind::Number, |x| x;
    u16 => Kind::Integer { minimum: 0 }, |x| x.into();
    u32 => Kind::Integer { minimum: 0 }, |x| x.into();
    u64 => Kind::Integer { minimum: 0 }, |x| x as f64;
    usize => Kind::Integer { minimum: 0 }, |x| x as f64;
    NonZeroU32 => Kind::Integer { minimum: 1 }, |x| x.get().into();
    NonZeroU64 => Kind::Integer { minimum: 1 }, |x| x.get() as f64;
    NonZeroUsize => Kind::Integer { minimum: 1 }, |x| x.get() as f64;
}

impl Setting for bool {
    fn kind() -> Kind {
        Kind::Bool
    }
}

impl Setting for String {
    fn kind() -> Kind {
        Kind::Text
    }
}

impl Setting for PathBuf {
    fn kind() -> Kind {
        Kind::Path
    }

    fn paths(&mut self, key: &str, visit: &mut dyn FnMut(&str, &mut PathBuf)) {
        visit(key, self);
    }
}

impl<T: Setting> Setting for Option<T> {
    fn kind() -> Kind {
        Kind::Optional(T::kind().into())
    }

    fn paths(&mut self, key: &str, visit: &mut dyn FnMut(&str, &mut PathBuf)) {
        if let Some(value) = self {
            value.paths(key, visit);
        }
    }

    fn numbers(&self, key: &str, visit: &mut dyn FnMut(&str, f64)) {
        if let Some(value) = self {
            value.numbers(key, visit);
        }
    }

    fn check_values(&self, key: &str, errors: &mut Vec<ValueError>) {
        if let Some(value) = self {
            value.check_values(key, errors);
        }
    }
}

macro_rules! lists {
    ($($type:ty, $kind:expr $(, const $count:ident)?;)*) => {$(
        impl<T: Setting $(, const $count: usize)?> Setting for $type {
            fn kind() -> Kind {
                $kind
            }

            fn paths(&mut self, key: &str, visit: &mut dyn FnMut(&str, &mut PathBuf)) {
                for (index, item) in self.iter_mut().enumerate() {
                    item.paths(&join(key, index), visit);
                }
            }

            fn numbers(&self, key: &str, visit: &mut dyn FnMut(&str, f64)) {
                for (index, item) in self.iter().enumerate() {
                    item.numbers(&join(key, index), visit);
                }
            }

            fn check_values(&self, key: &str, errors: &mut Vec<ValueError>) {
                for (index, item) in self.iter().enumerate() {
                    item.check_values(&join(key, index), errors);
                }
            }
        }
    )*};
}

lists! {
    Vec<T>, Kind::List(T::kind().into());
    [T; N], Kind::Array(T::kind().into(), N), const N;
}

impl<T: Setting> Setting for IndexMap<String, T> {
    fn kind() -> Kind {
        Kind::Map(T::kind().into())
    }
}
