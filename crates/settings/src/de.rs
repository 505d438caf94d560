//! A serde deserializer over the tree, whose errors have the place, the keys and the value.
//!
//! The errors of serde-saphyr's deserializer have the place, but neither the keys above it nor the
//! value; and it reads text, in which a `--set` would move the lines below it.

use crate::error::{ConfigError, Place};
use crate::scalar::{boolean, float, integer};
use crate::tree::{Entry, Node, Quoting, Value};
use crate::unplaced::{ErrorKind, UnplacedError};
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use std::slice;

/// Reads the tree into a struct.
pub fn read<T: DeserializeOwned>(root: &Node) -> Result<T, ConfigError> {
    T::deserialize(De { node: root, key_place: None })
        .map_err(|error| error.at(&root.place).into_error())
}

/// A node, and the place of its key, which errors about missing keys point at.
#[derive(Clone, Copy)]
struct De<'a> {
    node: &'a Node,
    key_place: Option<&'a Place>,
}

impl<'a> De<'a> {
    fn text(self, expected: &str) -> Result<&'a str, UnplacedError> {
        match &self.node.value {
            Value::Scalar { text, .. } if !self.node.value.is_null() => Ok(text),
            _ => Err(UnplacedError::wrong_type(self.node, expected)),
        }
    }

    fn plain<T>(
        self,
        expected: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<T, UnplacedError> {
        let value = match &self.node.value {
            Value::Scalar { text, quoting: Quoting::Plain } => read(text),
            _ => None,
        };
        value.ok_or_else(|| UnplacedError::wrong_type(self.node, expected))
    }

    fn whole<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        let value = self.plain("a whole number", integer)?;
        self.located(if let Ok(value) = u64::try_from(value) {
            visitor.visit_u64(value)
        } else if let Ok(value) = i64::try_from(value) {
            visitor.visit_i64(value)
        } else {
            Err(UnplacedError::wrong_type(self.node, "a whole number of at most 64 bits"))
        })
    }

    fn map<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.located(match &self.node.value {
            Value::Map(entries) => visitor.visit_map(Map { entries: entries.iter(), last: None }),
            // A section whose lines are all commented out is null and reads as an empty mapping.
            value if value.is_null() => visitor.visit_map(Map { entries: [].iter(), last: None }),
            _ => Err(UnplacedError::wrong_type(self.node, "a mapping")),
        })
    }

    fn list<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        match &self.node.value {
            Value::List(items) => {
                self.located(visitor.visit_seq(List { items: items.iter(), next: 0 }))
            }
            _ => Err(UnplacedError::wrong_type(self.node, "a list")),
        }
    }

    fn located<T>(self, result: Result<T, UnplacedError>) -> Result<T, UnplacedError> {
        result.map_err(|error| match (&error.kind, self.key_place) {
            (ErrorKind::MissingKey { .. }, Some(place)) => error.at(place),
            _ => error.at(&self.node.place),
        })
    }
}

macro_rules! whole_numbers {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
            self.whole(visitor)
        })*
    };
}

impl<'de> Deserializer<'de> for De<'de> {
    type Error = UnplacedError;

    whole_numbers! {
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        match &self.node.value {
            Value::List(_) => self.list(visitor),
            Value::Map(_) => self.map(visitor),
            Value::LeftOut => self.located(visitor.visit_unit()),
            value if value.is_null() => self.located(visitor.visit_unit()),
            Value::Scalar { text, quoting: Quoting::Plain } => {
                if let Some(value) = boolean(text) {
                    self.located(visitor.visit_bool(value))
                } else if integer(text).is_some() {
                    self.whole(visitor)
                } else if let Some(value) = float(text) {
                    self.located(visitor.visit_f64(value))
                } else {
                    self.located(visitor.visit_borrowed_str(text))
                }
            }
            Value::Scalar { text, .. } => self.located(visitor.visit_borrowed_str(text)),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        let value = self.plain("`true` or `false`", boolean)?;
        self.located(visitor.visit_bool(value))
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        let value = self.plain("a number", float)?;
        self.located(visitor.visit_f64(value))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        let text = self.text("a text")?;
        self.located(visitor.visit_borrowed_str(text))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        if self.node.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.list(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        num_items: usize,
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        match &self.node.value {
            Value::List(items) if items.len() == num_items => self.list(visitor),
            Value::List(items) => {
                let found = format!("a list of {}", items.len());
                let expected = format!("a list of {num_items}");
                Err(UnplacedError::new(ErrorKind::WrongType { found, expected })
                    .at(&self.node.place))
            }
            _ => Err(UnplacedError::wrong_type(self.node, format!("a list of {num_items}"))),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.map(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        self.map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        let (name, place, content) = match &self.node.value {
            Value::Scalar { text, .. } if !self.node.value.is_null() => {
                (text, &self.node.place, None)
            }
            Value::Map(entries) if entries.len() == 1 => {
                (&entries[0].key, &entries[0].key_place, Some(&entries[0]))
            }
            _ => {
                let expected = format!("one of `{}`", variants.join("`, `"));
                return Err(UnplacedError::wrong_type(self.node, expected));
            }
        };
        self.located(visitor.visit_enum(Variant { name, place, content }))
    }

    fn deserialize_identifier<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        match &self.node.value {
            Value::Scalar { text, .. } => self.located(visitor.visit_borrowed_str(text)),
            _ => Err(UnplacedError::wrong_type(self.node, "a name")),
        }
    }

    serde::forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct tuple_struct ignored_any
    }
}

struct Map<'a> {
    entries: slice::Iter<'a, Entry>,
    last: Option<&'a Entry>,
}

impl<'de> de::MapAccess<'de> for Map<'de> {
    type Error = UnplacedError;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, UnplacedError> {
        self.last = self.entries.next();
        let Some(entry) = self.last else { return Ok(None) };
        seed.deserialize(KeyDeserializer(&entry.key))
            .map(Some)
            .map_err(|error| error.at(&entry.key_place))
    }

    fn next_value_seed<V: de::DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, UnplacedError> {
        let entry = self.last.expect("serde reads a value after its key");
        seed.deserialize(De { node: &entry.node, key_place: Some(&entry.key_place) })
            .map_err(|error| error.at(&entry.node.place).under(&entry.key))
    }
}

/// A key, read as text or, for maps with numbers as keys, as a number.
struct KeyDeserializer<'a>(&'a str);

impl<'de> Deserializer<'de> for KeyDeserializer<'de> {
    type Error = UnplacedError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        visitor.visit_borrowed_str(self.0)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        match integer(self.0).and_then(|value| u64::try_from(value).ok()) {
            Some(value) => visitor.visit_u64(value),
            None => visitor.visit_borrowed_str(self.0),
        }
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnplacedError> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        visitor.visit_enum(self.0.into_deserializer())
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

struct List<'a> {
    items: slice::Iter<'a, Node>,
    next: usize,
}

impl<'de> de::SeqAccess<'de> for List<'de> {
    type Error = UnplacedError;

    fn next_element_seed<T: de::DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, UnplacedError> {
        let node = loop {
            let Some(node) = self.items.next() else { return Ok(None) };
            self.next += 1;
            if !matches!(node.value, Value::LeftOut) {
                break node;
            }
        };
        seed.deserialize(De { node, key_place: None })
            .map(Some)
            .map_err(|error| error.at(&node.place).under((self.next - 1).to_string()))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len())
    }
}

/// A variant of an enum: `name` or `name: {..}`.
struct Variant<'a> {
    name: &'a str,
    place: &'a Place,
    content: Option<&'a Entry>,
}

impl<'de> de::EnumAccess<'de> for Variant<'de> {
    type Error = UnplacedError;
    type Variant = Self;

    fn variant_seed<V: de::DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self), UnplacedError> {
        let value =
            seed.deserialize(KeyDeserializer(self.name)).map_err(|error| error.at(self.place))?;
        Ok((value, self))
    }
}

impl<'a> Variant<'a> {
    fn read<T>(
        self,
        read: impl FnOnce(De<'a>) -> Result<T, UnplacedError>,
    ) -> Result<T, UnplacedError> {
        let Some(entry) = self.content else {
            let found = format!("`{}` alone", self.name);
            let expected = format!("`{}: {{..}}` with its settings", self.name);
            return Err(UnplacedError::new(ErrorKind::WrongType { found, expected }).at(self.place));
        };
        read(De { node: &entry.node, key_place: Some(&entry.key_place) })
            .map_err(|error| error.at(&entry.node.place).under(self.name))
    }
}

impl<'de> de::VariantAccess<'de> for Variant<'de> {
    type Error = UnplacedError;

    fn unit_variant(self) -> Result<(), UnplacedError> {
        match self.content {
            Some(entry) if !entry.node.value.is_null() => {
                let found = format!("{} below `{}`", entry.node.value.describe(), self.name);
                let expected = format!("`{}` alone", self.name);
                Err(UnplacedError::new(ErrorKind::WrongType { found, expected })
                    .at(&entry.node.place))
            }
            _ => Ok(()),
        }
    }

    fn newtype_variant_seed<T: de::DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<T::Value, UnplacedError> {
        self.read(|content| seed.deserialize(content))
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        num_items: usize,
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        self.read(|content| content.deserialize_tuple(num_items, visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnplacedError> {
        self.read(|content| content.map(visitor))
    }
}
