//! JSON Schema of a config.

use super::{Key, Kind, Range};
use serde_json::{Map, Value, json};
use std::ops::Bound;

/// The JSON Schema (draft 2020-12) of a config, for editors.
pub fn schema(config: &Kind, title: &str) -> Value {
    let mut schema = of_kind(config);
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = title.into();
    schema
}

fn of_kind(kind: &Kind) -> Value {
    match kind {
        Kind::Bool => json!({"type": "boolean"}),
        Kind::Integer { minimum } => json!({"type": "integer", "minimum": minimum}),
        Kind::Number => json!({"type": "number"}),
        Kind::Text | Kind::Path => json!({"type": "string"}),
        Kind::Choice(values) => {
            let values =
                values.iter().map(|(name, doc)| json!({"const": name, "description": doc}));
            json!({"oneOf": values.collect::<Vec<_>>()})
        }
        Kind::Section(_, keys) => section(keys),
        Kind::List(item) => json!({"type": "array", "items": of_kind(item)}),
        Kind::Array(item, count) => {
            json!({"type": "array", "items": of_kind(item), "minItems": count, "maxItems": count})
        }
        Kind::Map(value) => json!({"type": "object", "additionalProperties": of_kind(value)}),
        Kind::Optional(kind) => json!({"anyOf": [of_kind(kind), {"type": "null"}]}),
        Kind::OneOf(kinds) => json!({"anyOf": kinds.iter().map(of_kind).collect::<Vec<_>>()}),
    }
}

fn section(keys: &[Key]) -> Value {
    let mut properties = Map::new();
    for key in keys {
        let mut schema = of_kind(&key.kind);
        for (range, _) in &key.ranges {
            set_range(&mut schema, *range);
        }
        schema["description"] = key.plain_doc().into();
        if let Some(default) = &key.default {
            schema["default"] = default.clone();
        }
        properties.insert(key.name.to_owned(), schema);
    }
    let required = keys.iter().filter(|key| key.default.is_none()).map(|key| key.name);
    json!({
        "type": "object",
        "properties": properties,
        "required": required.collect::<Vec<_>>(),
        "additionalProperties": false,
    })
}

fn set_range(schema: &mut Value, (start, end): Range) {
    if let Some(kinds) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        for kind in kinds {
            set_range(kind, (start, end));
        }
    } else if let Some(items) = schema.get_mut("items") {
        set_range(items, (start, end));
    } else if schema["type"] == "number" || schema["type"] == "integer" {
        let bounds = [(start, "minimum", "exclusiveMinimum"), (end, "maximum", "exclusiveMaximum")];
        for (bound, included, excluded) in bounds {
            match bound {
                Bound::Included(bound) => schema[included] = bound.into(),
                Bound::Excluded(bound) => schema[excluded] = bound.into(),
                Bound::Unbounded => {}
            }
        }
    }
}

impl Key {
    /// The meaning without links: `[text](page)` is `text`.
    pub fn plain_doc(&self) -> String {
        let mut plain = String::new();
        let mut rest = self.doc;
        while let Some((before, link)) = rest.split_once('[') {
            plain.push_str(before);
            match link
                .split_once("](")
                .and_then(|(text, rest)| Some((text, rest.split_once(')')?.1)))
            {
                Some((text, after)) if !text.contains('[') => {
                    plain.push_str(text);
                    rest = after;
                }
                _ => {
                    plain.push('[');
                    rest = link;
                }
            }
        }
        plain + rest
    }
}
