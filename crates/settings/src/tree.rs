//! YAML as a tree of keys and values with their places.
//!
//! Scalars have no type here: the struct that reads a plain scalar decides on its type, so that
//! `output_dir: 1.10` is the text `1.10`.

use crate::error::{ConfigError, Place, Source};
use serde_saphyr::granit_parser::{Event, Marker, Parser, ScalarStyle};
use std::collections::HashMap;

const MAX_DEPTH: usize = 64;
/// Maximum number of nodes, with aliases expanded.
const MAX_NODES: usize = 100_000;
/// The message for an alias such as `*name` without its anchor `&name`.
const NO_ANCHOR: &str = "a value that begins with `*` is a YAML alias, and this one has no anchor";

/// A value and the place where it begins.
#[derive(Debug, Clone)]
pub struct Node {
    pub place: Place,
    pub value: Value,
}

/// The kinds of YAML values.
#[derive(Debug, Clone)]
pub enum Value {
    Scalar {
        text: String,
        quoting: Quoting,
    },
    List(Vec<Node>),
    Map(Vec<Entry>),
    /// A list item that was removed. It is not read, and the other items keep their numbers.
    LeftOut,
}

/// A plain scalar may be a number, a boolean or null; a quoted scalar is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quoting {
    Plain,
    Quoted,
}

/// An entry of a mapping.
#[derive(Debug, Clone)]
pub struct Entry {
    pub key: String,
    pub key_place: Place,
    pub node: Node,
}

impl Value {
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Scalar { text, quoting: Quoting::Plain }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// Removes the entry or item at `path`, dotted keys with list items by number; returns whether
    /// there is one. A key may contain dots itself.
    pub(crate) fn remove(&mut self, path: &str) -> bool {
        let below = |key: &str| path.strip_prefix(key).and_then(|rest| rest.strip_prefix('.'));
        match self {
            Self::Scalar { .. } | Self::LeftOut => false,
            Self::List(items) => {
                let (key, rest) = path.split_once('.').map_or((path, None), |(k, r)| (k, Some(r)));
                let item = key.parse::<usize>().ok().and_then(|index| items.get_mut(index));
                match (item.map(|item| &mut item.value), rest) {
                    (None | Some(Self::LeftOut), _) => false,
                    (Some(value), Some(rest)) => value.remove(rest),
                    (Some(value), None) => {
                        *value = Self::LeftOut;
                        true
                    }
                }
            }
            Self::Map(entries) => match entries.iter().position(|entry| entry.key == path) {
                Some(index) => {
                    entries.remove(index);
                    true
                }
                None => entries.iter_mut().any(|entry| {
                    below(&entry.key).is_some_and(|rest| entry.node.value.remove(rest))
                }),
            },
        }
    }

    /// The value in an error message: `` `maybe` ``, `empty`, `a list`, `a mapping`.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Scalar { text, .. } if self.is_null() && text.is_empty() => "empty".to_owned(),
            Self::Scalar { text, quoting: Quoting::Plain } => format!("`{text}`"),
            Self::Scalar { text, quoting: Quoting::Quoted } => format!("the text {text:?}"),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) => "a mapping".to_owned(),
            Self::LeftOut => "left out".to_owned(),
        }
    }
}

impl Node {
    /// The node at `keys`, or its closest ancestor that exists.
    pub fn nearest(&self, keys: &[&str]) -> &Self {
        let Some((key, rest)) = keys.split_first() else { return self };
        let child = match &self.value {
            Value::Scalar { .. } | Value::LeftOut => None,
            Value::List(items) => key.parse::<usize>().ok().and_then(|index| items.get(index)),
            Value::Map(entries) => {
                entries.iter().find(|entry| entry.key == *key).map(|entry| &entry.node)
            }
        };
        child.map_or(self, |child| child.nearest(rest))
    }
}

/// Parses the single document in `text`; `None` if it contains only comments.
pub(crate) fn parse(text: &str, source: &Source) -> Result<Option<Node>, ConfigError> {
    let mut reader = Reader {
        parser: Parser::new_from_str(text),
        source,
        anchors: HashMap::new(),
        num_nodes: 0,
    };
    let mut root = None;
    while let Some((event, place)) = reader.next()? {
        match event {
            Event::DocumentStart(..)
            | Event::DocumentEnd
            | Event::StreamStart
            | Event::StreamEnd => {}
            _ if root.is_some() => {
                let message = "a second document begins here, expected one".to_owned();
                return Err(ConfigError::Syntax { place, message });
            }
            event => root = Some(reader.node(event, place, 0)?),
        }
    }
    let is_empty = |value: &Value| match value {
        Value::Scalar { text, quoting: Quoting::Plain } => text.is_empty(),
        _ => false,
    };
    Ok(root.filter(|node| !is_empty(&node.value)))
}

struct Reader<'a> {
    parser: Parser<'a, serde_saphyr::granit_parser::StrInput<'a>>,
    source: &'a Source,
    anchors: HashMap<usize, Node>,
    num_nodes: usize,
}

impl<'a> Reader<'a> {
    /// The next event that is not a comment.
    fn next(&mut self) -> Result<Option<(Event<'a>, Place)>, ConfigError> {
        loop {
            match self.parser.next_event() {
                None => return Ok(None),
                Some(Ok((Event::Comment(..) | Event::Anchor(..), _))) => {}
                // The parser returns a missing value as `~` with no width.
                Some(Ok((Event::Scalar(_, style, anchor, tag), span))) if span.is_empty() => {
                    let event = Event::Scalar("".into(), style, anchor, tag);
                    return Ok(Some((event, self.place(&span.start))));
                }
                Some(Ok((event, span))) => return Ok(Some((event, self.place(&span.start)))),
                Some(Err(error)) => {
                    let place = self.place(error.marker());
                    let message = match error.info() {
                        info if info.contains("unknown anchor") => NO_ANCHOR.to_owned(),
                        info => info,
                    };
                    return Err(ConfigError::Syntax { place, message });
                }
            }
        }
    }

    fn expect(&mut self, place: &Place) -> Result<(Event<'a>, Place), ConfigError> {
        self.next()?.ok_or_else(|| ConfigError::Syntax {
            place: place.clone(),
            message: "this is never closed".to_owned(),
        })
    }

    fn place(&self, marker: &Marker) -> Place {
        self.source.at(marker.line(), marker.col() + 1)
    }

    fn node(&mut self, event: Event<'a>, place: Place, depth: usize) -> Result<Node, ConfigError> {
        let refused = |message: &str| ConfigError::Syntax {
            place: place.clone(),
            message: message.to_owned(),
        };
        if depth > MAX_DEPTH {
            return Err(refused("nested too deeply"));
        }
        self.num_nodes += 1;
        if self.num_nodes > MAX_NODES {
            return Err(refused("too many values"));
        }
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let quoting = match (style, tag) {
                    (ScalarStyle::Plain, None) => Quoting::Plain,
                    _ => Quoting::Quoted,
                };
                (Value::Scalar { text: text.into_owned(), quoting }, anchor)
            }
            Event::SequenceStart(_, anchor, _) => (self.list(&place, depth)?, anchor),
            Event::MappingStart(_, anchor, _) => (self.map(&place, depth)?, anchor),
            Event::Alias(anchor) => {
                let node = self
                    .anchors
                    .get(&anchor)
                    .ok_or_else(|| refused("an alias inside its own anchor"))?;
                let value = node.value.clone();
                self.num_nodes += count(&value);
                (value, 0)
            }
            _ => return Err(refused("expected a value")),
        };
        let node = Node { place, value };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, place: &Place, depth: usize) -> Result<Value, ConfigError> {
        let mut items = Vec::new();
        loop {
            match self.expect(place)? {
                (Event::SequenceEnd, _) => return Ok(Value::List(items)),
                (event, place) => items.push(self.node(event, place, depth + 1)?),
            }
        }
    }

    fn map(&mut self, place: &Place, depth: usize) -> Result<Value, ConfigError> {
        let (mut entries, mut merged): (Vec<Entry>, Vec<Node>) = (Vec::new(), Vec::new());
        loop {
            let (event, key_place) = match self.expect(place)? {
                (Event::MappingEnd, _) => break,
                other => other,
            };
            let Value::Scalar { text: key, quoting } =
                self.node(event, key_place.clone(), depth + 1)?.value
            else {
                let message = "a key must be a text, not a list or a mapping".to_owned();
                return Err(ConfigError::Syntax { place: key_place, message });
            };
            let (event, value_place) = self.expect(place)?;
            let mut node = self.node(event, value_place, depth + 1)?;
            if matches!(&node.value, Value::Scalar { text, .. } if text.is_empty()) {
                // There is nothing to point at after the colon, so errors point at the key.
                node.place = key_place.clone();
            }
            if key == "<<" && quoting == Quoting::Plain {
                merged.push(node);
            } else if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                let first = first.key_place.clone();
                return Err(ConfigError::DuplicateKey { place: key_place, key, first });
            } else {
                entries.push(Entry { key, key_place, node });
            }
        }
        for node in merged {
            merge(&mut entries, node)?;
        }
        Ok(Value::Map(entries))
    }
}

/// Applies `<<: *anchor`: adds the entries whose keys are missing.
fn merge(entries: &mut Vec<Entry>, node: Node) -> Result<(), ConfigError> {
    let maps = match node.value {
        Value::List(items) => items,
        value => vec![Node { place: node.place.clone(), value }],
    };
    for map in maps {
        let Value::Map(inherited) = map.value else {
            let message = "`<<` takes a mapping or a list of mappings".to_owned();
            return Err(ConfigError::Syntax { place: map.place, message });
        };
        for entry in inherited {
            if !entries.iter().any(|own| own.key == entry.key) {
                entries.push(entry);
            }
        }
    }
    Ok(())
}

fn count(value: &Value) -> usize {
    match value {
        Value::Scalar { .. } | Value::LeftOut => 1,
        Value::List(items) => items.iter().map(|item| count(&item.value)).sum::<usize>() + 1,
        Value::Map(entries) => {
            entries.iter().map(|entry| 1 + count(&entry.node.value)).sum::<usize>() + 1
        }
    }
}
