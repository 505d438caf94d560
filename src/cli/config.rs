use super::terminal::stdout;
use crate::config::RunConfig;
use clap::Args;
use settings::{Setting, schema};
use std::io::Write as _;

/// Arguments of `config`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainer config\n  \
    trainer config --schema > schema.json\n\n\
    An editor with the YAML language server completes and checks keys in a config that begins with\n  \
    # yaml-language-server: $schema=schema.json")]
pub(super) struct ConfigKeysArgs {
    /// Print the JSON Schema for editors
    #[arg(long)]
    schema: bool,
}

/// Prints every key with its default and meaning, or the schema.
pub(super) fn run(args: &ConfigKeysArgs) -> anyhow::Result<()> {
    let config = RunConfig::kind();
    let mut text = String::new();
    if args.schema {
        text = format!("{:#}\n", schema(&config, "A config of trainer"));
    } else {
        for (name, key) in config.flat() {
            let default = key.default.as_ref().map_or("required".to_owned(), ToString::to_string);
            text.extend([&name, ": ", &default, "\n    ", &key.plain_doc(), "\n"]);
        }
    }
    Ok(stdout().write_all(text.as_bytes())?)
}
