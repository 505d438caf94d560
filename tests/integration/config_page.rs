//! The tables of docs/config.md and the JSON Schema are those of the program.
//!
//! `UPDATE=1 cargo test --test integration -- config_page` writes them.

use serde_json::Value;
use settings::{Key, Kind, Setting, join, schema};
use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs};
use trainer::config::RunConfig;

/// The column `type`.
fn kind_name(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "bool".to_owned(),
        Kind::Integer { .. } => "integer".to_owned(),
        Kind::Number => "number".to_owned(),
        Kind::Text => "text".to_owned(),
        Kind::Path => "path".to_owned(),
        Kind::Choice(values) => {
            let names = values.iter().map(|(name, _)| format!("`{name}`"));
            names.collect::<Vec<_>>().join(", ")
        }
        Kind::Section(..) => "section".to_owned(),
        Kind::List(item) if matches!(**item, Kind::Choice(_)) => {
            format!("list of {}", kind_name(item))
        }
        Kind::List(_) => "list".to_owned(),
        Kind::Array(item, count) => format!("{count} {}s", kind_name(item)),
        Kind::Map(_) => "map".to_owned(),
        Kind::Optional(kind) => kind_name(kind),
        Kind::OneOf(kinds) => kinds.iter().map(kind_name).collect::<Vec<_>>().join(" or "),
    }
}

/// The column `meaning`.
fn meaning(key: &Key) -> String {
    let range = key.ranges.last().map_or(String::new(), |(_, expected)| format!("; {expected}"));
    key.doc.to_owned() + &range
}

fn default(key: &Key) -> String {
    match &key.default {
        None => "required".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
    }
}

/// The table of sections, or of the keys outside of sections.
fn table(sections: &str) -> Vec<String> {
    let is_here = |name: &str| match (name.split_once('.'), sections) {
        (None, "top level") => true,
        (Some((section, _)), sections) => sections.split(", ").any(|here| here == section),
        _ => false,
    };
    let config = RunConfig::kind();
    let rows = config.flat().into_iter().filter(|(name, key)| {
        // A section of its own has no line at the top level.
        is_here(name) && (name.contains('.') || key.kind.keys().is_empty())
    });
    let head = ["| key | type | default | meaning |", "|---|---|---|---|"].map(str::to_owned);
    let line = |(name, key): (String, &Key)| {
        let (kind, default) = (kind_name(&key.kind), default(key));
        format!("| `{name}` | {kind} | {default} | {} |", meaning(key))
    };
    head.into_iter().chain(rows.map(line)).collect()
}

/// The keys that a resumed run may change, one line for each section.
fn neutral() -> Vec<String> {
    fn add(section: &str, keys: &[Key], lines: &mut Vec<String>) {
        let named = |key: &Key| join(section, key.name);
        let neutral = keys.iter().filter(|key| key.is_neutral);
        let names: Vec<String> = neutral
            .map(|key| match key.kind {
                Kind::Section(..) => format!("all keys of `{}`", named(key)),
                _ => format!("`{}`", named(key)),
            })
            .collect();
        if !names.is_empty() {
            lines.push(format!("- {}", names.join(", ")));
        }
        for key in keys.iter().filter(|key| !key.is_neutral) {
            add(&named(key), key.kind.keys(), lines);
        }
    }
    let mut lines = Vec::new();
    add("", RunConfig::kind().keys(), &mut lines);
    // A line of the page has at most 100 columns.
    lines.iter().flat_map(|line| wrapped(line)).collect()
}

/// The lines of a list item with at most 100 columns.
fn wrapped(item: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in item.split_inclusive(", ") {
        if lines.last().unwrap().len() + word.trim_end().len() > 100 {
            let line = lines.last_mut().unwrap();
            *line = line.trim_end().to_owned();
            lines.push("  ".to_owned());
        }
        *lines.last_mut().unwrap() += word;
    }
    lines
}

/// Compares a file with what it should be, or writes it.
fn assert_is(path: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if env::var_os("UPDATE").is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap();
    let different = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    let update = "run `UPDATE=1 cargo test --test integration -- config_page`";
    assert!(found == expected, "{}: {update}; first difference: {different:?}", path.display());
}

#[test]
fn the_tables_of_the_config_page_are_those_of_the_program() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/config.md"));
    let page = page.unwrap();
    let (mut expected, mut tables) = (Vec::new(), BTreeSet::new());
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        expected.push(line.to_owned());
        let marker = line.strip_prefix("<!-- keys: ").and_then(|rest| rest.strip_suffix(" -->"));
        let Some(marker) = marker else { continue };
        tables.extend(marker.split(", "));
        expected.push(String::new());
        expected.extend(if marker == "may change" { neutral() } else { table(marker) });
        expected.push(String::new());
        lines.next();
        lines.by_ref().find(|line| line.is_empty());
    }
    let config = RunConfig::kind();
    let sections = config.keys().iter().filter(|key| !key.kind.keys().is_empty());
    let all: BTreeSet<&str> =
        sections.map(|key| key.name).chain(["top level", "may change"]).collect();
    assert_eq!(tables, all, "docs/config.md");
    assert_is("docs/config.md", &(expected.join("\n") + "\n"));
}

#[test]
fn the_schema_in_configs_is_that_of_the_program() {
    let schema = schema(&RunConfig::kind(), "A config of trainer");
    assert_is("configs/schema.json", &format!("{schema:#}\n"));
}
