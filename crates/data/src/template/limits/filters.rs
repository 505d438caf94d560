//! The filters, tests and methods of templates. Each counts what it reads and what it returns.
//!
//! Filters of the engine that are missing here are not available: no published chat template needs
//! them, and their cost is hard to bound.
//!
//! The cost of a rendering is what it reads and makes; above a budget it stops. One byte of a text
//! counts 1, one item of a list or map [`ITEM`]. Each rendering has a budget that grows with the
//! conversation. It bounds the memory, since nothing is made that is not counted, and the time,
//! together with the number of instructions.

use std::cell::Cell;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::source;

/// How much of its arguments a filter reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// A number of items, at most; lists are not read.
    Length,
    /// The texts that are arguments, and the items of lists but not their contents.
    Size,
    /// Everything in lists. A text is read by characters.
    All,
}

/// Filters of the engine that are removed.
const REMOVED: [&str; 9] =
    ["indent", "format", "batch", "slice", "groupby", "chain", "zip", "pprint", "urlencode"];
/// Tests of the engine that are removed.
const REMOVED_TESTS: [&str; 2] = ["filter", "test"];

/// Adds all filters and tests.
pub(super) fn add(env: &mut Environment<'static>) {
    for name in REMOVED {
        env.remove_filter(name);
    }
    for name in REMOVED_TESTS {
        env.remove_test(name);
    }
    let mut add = |name: &'static str, reads: Reads, original: Value| {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            counted(state, name, reads, &original, &args.into_values())
        });
    };
    add("length", Reads::Length, Value::from_function(filters::length));
    add("count", Reads::Length, Value::from_function(filters::length));
    add("first", Reads::Length, Value::from_function(filters::first));
    add("last", Reads::Length, Value::from_function(filters::last));
    add("items", Reads::Length, Value::from_function(filters::items));
    add("upper", Reads::Size, Value::from_function(filters::upper));
    add("lower", Reads::Size, Value::from_function(filters::lower));
    add("title", Reads::Size, Value::from_function(filters::title));
    add("capitalize", Reads::Size, Value::from_function(filters::capitalize));
    add("trim", Reads::Size, Value::from_function(filters::trim));
    add("replace", Reads::Size, Value::from_function(filters::replace));
    add("split", Reads::Size, Value::from_function(filters::split));
    add("lines", Reads::Size, Value::from_function(filters::lines));
    add("safe", Reads::Size, Value::from_function(filters::safe));
    add("escape", Reads::All, Value::from_function(filters::escape));
    add("e", Reads::All, Value::from_function(filters::escape));
    add("string", Reads::All, Value::from_function(filters::string));
    add("join", Reads::All, Value::from_function(filters::join));
    add("list", Reads::Size, Value::from_function(filters::list));
    add("reverse", Reads::Size, Value::from_function(filters::reverse));
    add("select", Reads::All, Value::from_function(filters::select));
    add("reject", Reads::All, Value::from_function(filters::reject));
    add("selectattr", Reads::All, Value::from_function(filters::selectattr));
    add("rejectattr", Reads::All, Value::from_function(filters::rejectattr));
    add("map", Reads::All, Value::from_function(filters::map));
    add("sort", Reads::All, Value::from_function(filters::sort));
    add("dictsort", Reads::All, Value::from_function(filters::dictsort));
    add("unique", Reads::All, Value::from_function(filters::unique));
    add("sum", Reads::All, Value::from_function(filters::sum));
    add("min", Reads::All, Value::from_function(filters::min));
    add("max", Reads::All, Value::from_function(filters::max));
    add_counters(env);
    add_tests(env);
}

/// Adds the filters that [`source::with_counters`] inserts.
fn add_counters(env: &mut Environment<'static>) {
    type Count = fn(&Value) -> Result<(), Error>;
    let counters: [(&'static str, Count); 4] = [
        (source::SIZE, count_size),
        (source::READ, count_all),
        (source::INDEXED, count_indexed),
        (source::BUILT, count_built),
    ];
    for (name, count) in counters {
        env.add_filter(name, move |value: Value| count(&value).map(|()| value));
    }
    env.add_filter(source::SLICED, listed);
    env.add_filter(source::BYTES, |bytes: usize| count(bytes).map(|()| ""));
}

fn add_tests(env: &mut Environment<'static>) {
    let mut add = |name: &'static str, original: Value| {
        env.add_test(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            counted(state, name, Reads::All, &original, &args.into_values())
        });
    };
    for name in ["eq", "equalto", "=="] {
        add(name, Value::from_function(tests::is_eq));
    }
    for name in ["ne", "!="] {
        add(name, Value::from_function(tests::is_ne));
    }
    for name in ["lt", "lessthan", "<"] {
        add(name, Value::from_function(tests::is_lt));
    }
    for name in ["le", "<="] {
        add(name, Value::from_function(tests::is_le));
    }
    for name in ["gt", "greaterthan", ">"] {
        add(name, Value::from_function(tests::is_gt));
    }
    for name in ["ge", ">="] {
        add(name, Value::from_function(tests::is_ge));
    }
    add("in", Value::from_function(tests::is_in));
    add("lower", Value::from_function(tests::is_lower));
    add("upper", Value::from_function(tests::is_upper));
    add("startingwith", Value::from_function(tests::is_startingwith));
    add("endingwith", Value::from_function(tests::is_endingwith));
}

/// Adds a function that makes a map of its arguments; the map counts.
pub(super) fn add_maker(env: &mut Environment<'static>, name: &'static str, original: Value) {
    env.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        for value in &args {
            count_built(value)?;
        }
        original.call(state, &args)
    });
}

/// A method of a text, list or map, as in Python.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        if name == "format" {
            return Err(Error::from(ErrorKind::UnknownMethod)); // its widths have no limit
        }
        count_size(value)?;
        for argument in args {
            count_all(argument)?;
        }
        match name {
            "join" => count_joined(args.first(), Some(value))?,
            "replace" => count_replaced(value, args.first(), args.get(1))?,
            "split" | "splitlines" => count_split(value, args.first())?,
            _ => {}
        }
    } else if name == "count" {
        count_all(value)?;
    }
    let made = unknown_method_callback(state, value, name, args)?;
    if made.kind() == ValueKind::String {
        count_size(&made)?;
    }
    Ok(made)
}

/// Calls a filter or test, and counts.
fn counted(
    state: &mut State,
    name: &str,
    reads: Reads,
    original: &Value,
    args: &[Value],
) -> Result<Value, Error> {
    for value in args {
        match reads {
            Reads::Length => count_indexed(value)?,
            Reads::Size => count_size(value)?,
            Reads::All => count_all(value)?,
        }
    }
    if let Some(value) = args.first() {
        match name {
            "join" => count_joined(Some(value), args.get(1))?,
            "replace" => count_replaced(value, args.get(1), args.get(2))?,
            "split" | "lines" => count_split(value, args.get(1))?,
            // they make a list, also of the characters of a text
            "list" | "sort" | "unique" | "map" | "select" | "reject" | "selectattr"
            | "rejectattr" => {
                let letters = value.as_str().map_or(0, str::len);
                count_items(letters.max(num_items(value)).saturating_mul(2))?;
            }
            _ => {}
        }
    }
    let made = original.call(state, args)?;
    match made.kind() {
        ValueKind::String => count_size(&made)?,
        // a list instead of a view, so that views do not nest
        ValueKind::Iterable => return listed(made),
        _ => {}
    }
    Ok(made)
}

/// Counts a slice or a view, and makes it a list.
fn listed(value: Value) -> Result<Value, Error> {
    count_size(&value)?;
    match value.kind() {
        ValueKind::Iterable => Ok(value.try_iter()?.collect::<Vec<Value>>().into()),
        _ => Ok(value),
    }
}

fn count_joined(items: Option<&Value>, separator: Option<&Value>) -> Result<(), Error> {
    let number = items.map_or(0, |items| match items.as_str() {
        Some(text) => text.len(),
        None => num_items(items),
    });
    let length = separator.and_then(Value::as_str).map_or(0, str::len);
    count(number.saturating_mul(length))
}

fn count_replaced(text: &Value, from: Option<&Value>, to: Option<&Value>) -> Result<(), Error> {
    let text = text.as_str().unwrap_or_default();
    let from = from.and_then(Value::as_str).unwrap_or_default();
    let to = to.and_then(Value::as_str).unwrap_or_default();
    count(text.matches(from).count().saturating_mul(to.len()))
}

fn count_split(text: &Value, separator: Option<&Value>) -> Result<(), Error> {
    let text = text.as_str().unwrap_or_default();
    let parts = match separator.and_then(Value::as_str) {
        Some(separator) => text.matches(separator).count(),
        None => text.matches(char::is_whitespace).count(),
    };
    count_items(parts.saturating_mul(2))
}

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
fn count_items(number: usize) -> Result<(), Error> {
    count(number.saturating_mul(ITEM))
}

/// The number of items of a list, an iterable or a map; 0 for other values.
fn num_items(value: &Value) -> usize {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            value.len().or_else(|| Some(value.try_iter().ok()?.count())).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Counts a text by its bytes, and a list or map by its items.
fn count_size(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => count(text.len()),
        None => count_items(num_items(value)),
    }
}

/// Counts a text or an iterable, which an index reads; lists and maps are not read.
fn count_indexed(value: &Value) -> Result<(), Error> {
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
fn count_built(value: &Value) -> Result<(), Error> {
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
