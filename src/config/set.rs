//! `--set a.b=c`: replaces one value of the tree before any struct reads it.
//!
//! The value remembers the argument, so that an error in it names the `--set` and not a line of the
//! file; everything else keeps its place in the file.

use super::error::{ConfigError, Place, Source};
use super::tree::{Entry, Node, Quoting, Value, parse};

/// Applies one argument. Keys that are not there are created: whether anything reads them is seen
/// when the tree is read. A number is the place of an item in a list; the next free one appends.
pub(super) fn set(root: &mut Node, argument: &str) -> Result<(), ConfigError> {
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

/// The child of `node` under `key`, created if needed; an error says what `node` is instead.
fn child<'a>(node: &'a mut Node, key: &str, place: &Place) -> Result<&'a mut Node, String> {
    if node.value.is_null() {
        // `0` starts a list, anything else a mapping.
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
        Value::Scalar { .. } => Err(found),
    }
}
