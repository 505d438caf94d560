//! `trainer convert`: writes our config from the config of another trainer.

use super::args::OutputFile;
use super::failure::{Exit, Failure};
use super::terminal::stdout;
use crate::convert::Trainer;
use crate::run::convert_config;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::io::Write;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// Arguments of `convert`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  trainer convert --from ms-swift train.sh --out config.yaml\n  \
    trainer convert --from llama-factory train.yaml --world-size 8 --out config.yaml"
)]
pub(super) struct ConvertArgs {
    /// The other trainer
    #[arg(long, value_name = "TRAINER", value_parser = trainers())]
    from: Trainer,
    /// Its config (YAML or JSON) or the script that starts it; later files win
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// File to write; stdout if it is left out
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Number of processes (GPUs) of the other run, if the files do not contain it
    #[arg(long, value_name = "N")]
    world_size: Option<NonZeroU64>,
}

fn trainers() -> impl TypedValueParser<Value = Trainer> {
    PossibleValuesParser::new(Trainer::ALL.map(Trainer::name)).map(|name| {
        let named = Trainer::ALL.into_iter().find(|trainer| trainer.name() == name);
        named.expect("one of the possible values")
    })
}

/// Writes the config to `--out` or stdout, and dropped settings and differences to the log.
pub(super) fn run(args: &ConvertArgs) -> anyhow::Result<()> {
    if let Some(out) = args.out.as_ref().filter(|out| out.is_file()) {
        let message = format!("`{}` exists", out.display());
        return Err(Failure::new(Exit::Usage, message)
            .hint("remove it, or give another name as `--out`")
            .into());
    }
    let file = OutputFile::open_given("--out", args.out.as_ref())?;
    let converted = convert_config(args.from, &args.files, args.world_size)?;
    for line in &converted.dropped {
        tracing::info!("dropped: {line}");
    }
    for line in &converted.notes {
        tracing::info!("note: {line}");
    }
    match file {
        Some(file) => {
            let path = file.path().display().to_string();
            file.write(converted.yaml.as_bytes())?;
            tracing::info!("wrote {path}");
        }
        None => write!(stdout(), "{}", converted.yaml)?,
    }
    Ok(())
}
