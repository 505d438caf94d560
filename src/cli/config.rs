//! `trainer config`: the keys of a config.

use super::stdout::stdout;
use crate::config::RunConfig;
use clap::Args;
use settings::{Key, Kind, Setting, schema};
use std::io::Write as _;

/// Arguments of `config`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainer config\n  \
    trainer config --schema > schema.json\n\n\
    An editor with the YAML language server completes and checks keys in a config that begins with\n  \
    # yaml-language-server: $schema=schema.json")]
pub(super) struct ConfigArgs {
    /// Print the JSON Schema for editors
    #[arg(long)]
    schema: bool,
}

/// Prints every key with its default and meaning, or the schema.
pub(super) fn run(args: &ConfigArgs) -> anyhow::Result<()> {
    let config = RunConfig::kind();
    let mut text = String::new();
    if args.schema {
        text = format!("{:#}\n", schema(&config, "A config of trainer"));
    } else {
        add_lines("", config.keys(), &mut text);
    }
    Ok(stdout().write_all(text.as_bytes())?)
}

fn add_lines(section: &str, keys: &[Key], text: &mut String) {
    for key in keys {
        let name = settings::join(section, key.name);
        if !matches!(key.kind, Kind::Section(..)) {
            let default = key.default.as_ref().map_or("required".to_owned(), ToString::to_string);
            text.extend([&name, ": ", &default, "\n    ", &key.plain_doc(), "\n"]);
        }
        let item = if matches!(key.kind, Kind::List(_)) { "[]" } else { "" };
        add_lines(&format!("{name}{item}"), key.kind.keys(), text);
    }
}
