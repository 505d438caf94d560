//! The output of `bench`.

use crate::cli::stdout::stdout;
use std::io::Write as _;

/// Prints rows of named figures, aligned for people or as JSON.
pub(super) struct Table {
    pub(super) json: bool,
}

impl Table {
    pub(super) fn text(&mut self, name: &str, key: &str, value: &str) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            writeln!(out, "{}", serde_json::json!({ "name": name, key: value }))?;
        } else {
            writeln!(out, "{name:44}  {key} {value}")?;
        }
        Ok(())
    }

    pub(super) fn row(&mut self, name: &str, figures: &[(&str, f64)]) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            let mut object = serde_json::Map::new();
            object.insert("name".to_owned(), name.into());
            for (key, value) in figures {
                object.insert((*key).to_owned(), (*value).into());
            }
            writeln!(out, "{}", serde_json::Value::Object(object))?;
        } else {
            write!(out, "{name:44}")?;
            for (key, value) in figures {
                let digits = if value.abs() >= 1000.0 { 0 } else { 3 };
                write!(out, "  {key} {value:>9.digits$}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}
