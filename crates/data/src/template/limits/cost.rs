//! Counts what a rendering reads and makes, and stops it above a budget.
//!
//! One byte of a text counts 1, one item of a list or map [`ITEM`]. Each rendering has a budget
//! that grows with the conversation. It bounds the memory, since nothing is made that is not
//! counted, and the time, together with the number of instructions.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Cost of an item.
const ITEM: usize = 24;
/// Budget of a conversation without text.
const BASE: u64 = 32 << 20;
/// Budget per byte of the conversation.
const PER_BYTE: u64 = 128;
/// Most lists and maps within each other.
const MAX_DEPTH: usize = 200;

thread_local! {
    /// What is left of the budget of the rendering on this thread.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// Starts to count a rendering of a conversation of `bytes`.
pub(super) fn start(bytes: usize) {
    LEFT.set(budget(bytes));
}

/// The budget of a conversation of `bytes`; also the limit of its output.
pub(super) fn budget(bytes: usize) -> u64 {
    (bytes as u64).saturating_mul(PER_BYTE).saturating_add(BASE)
}

/// Counts `cost`.
pub(super) fn count(cost: usize) -> Result<(), Error> {
    if let Some(left) = LEFT.get().checked_sub(cost as u64) {
        LEFT.set(left);
        return Ok(());
    }
    LEFT.set(0);
    let message = "it makes or reads more text than a conversation of this size needs";
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Counts `number` items.
pub(super) fn count_items(number: usize) -> Result<(), Error> {
    count(number.saturating_mul(ITEM))
}

/// The number of items of a list, an iterable or a map; 0 for other values.
pub(super) fn num_items(value: &Value) -> usize {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            value.len().or_else(|| Some(value.try_iter().ok()?.count())).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Counts a text by its bytes, and a list or map by its items.
pub(super) fn count_size(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => count(text.len()),
        None => count_items(num_items(value)),
    }
}

/// Counts a text or an iterable, which an index reads; lists and maps are not read.
pub(super) fn count_indexed(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => Ok(()),
        _ => count_size(value),
    }
}

/// Counts a text, or a list or map with everything in it.
pub(super) fn count_all(value: &Value) -> Result<(), Error> {
    count_nested(value, true, 0)
}

/// Counts the items of a list or map and of those in it, and limits their depth.
pub(super) fn count_built(value: &Value) -> Result<(), Error> {
    count_nested(value, false, 0)
}

fn count_nested(value: &Value, with_texts: bool, depth: usize) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return count(if with_texts { text.len() } else { 0 });
    }
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth >= MAX_DEPTH {
        let message = format!("lists and maps are nested more than {MAX_DEPTH} deep");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    for item in value.try_iter()? {
        count_items(1)?;
        count_nested(&item, with_texts, depth + 1)?;
        if kind == ValueKind::Map {
            count_nested(&value.get_item(&item)?, with_texts, depth + 1)?;
        }
    }
    Ok(())
}
