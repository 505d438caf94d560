//! `--set a.b=c`: replaces a value in the tree before structs are read from it.
//!
//! The place of the new value is the argument, so that an error in it names the `--set`; all other
//! values keep their place in the file.

use crate::error::{ConfigError, Place, Source};
use crate::tree::{Entry, Node, Quoting, Value, parse};

/// Applies one argument. Missing keys are created; unknown ones become errors when the tree is
/// read. A number is an index into a list; the length of the list appends an item.
pub fn set(root: &mut Node, argument: &str) -> Result<(), ConfigError> {
    let refused = |message: String| ConfigError::Set { argument: argument.to_owned(), message };
    let (path, value) =
        argument.split_once('=').ok_or_else(|| refused("expected `key=value`".to_owned()))?;
    let source = Source::Set { argument: argument.into() };
    let place = source.at(1, 1);
    let null = Value::Scalar { text: String::new(), quoting: Quoting::Plain };
    let value = parse(value, &source)?.map_or(null, |node| node.value);

    let keys: Vec<_> = path.trim().split('.').collect();
    if keys.iter().any(|key| key.is_empty()) {
        return Err(refused(format!("`{path}` has an empty key")));
    }
    let mut node = root;
    for (depth, key) in keys.iter().enumerate() {
        node = child(node, key, &place).map_err(|found| {
            let above = keys[..depth].join(".");
            refused(format!("there is no `{key}` in `{above}`, which is {found}"))
        })?;
    }
    *node = Node { place, value };
    Ok(())
}

/// The child of `node` under `key`, created if it is missing. The error describes `node`, which can
/// have no such child.
fn child<'a>(node: &'a mut Node, key: &str, place: &Place) -> Result<&'a mut Node, String> {
    if node.value.is_null() {
        // The key `0` creates a list, any other key a mapping.
        let value = if key == "0" { Value::List(Vec::new()) } else { Value::Map(Vec::new()) };
        *node = Node { place: place.clone(), value };
    }
    let new = || Node {
        place: place.clone(),
        value: Value::Scalar { text: String::new(), quoting: Quoting::Plain },
    };
    let found = node.value.describe();
    match &mut node.value {
        Value::Map(entries) => {
            let index = entries.iter().position(|entry| entry.key == key).unwrap_or(entries.len());
            if index == entries.len() {
                let key = key.to_owned();
                entries.push(Entry { key, key_place: place.clone(), node: new() });
            }
            Ok(&mut entries[index].node)
        }
        Value::List(items) => match key.parse::<usize>() {
            Ok(index) if index <= items.len() => {
                if index == items.len() {
                    items.push(new());
                }
                Ok(&mut items[index])
            }
            _ => Err(format!("a list of {}", items.len())),
        },
        Value::Scalar { .. } | Value::LeftOut => Err(found),
    }
}
