//! The command line: one file a command. The only place that reads the environment, prints and exits.

mod answers;
mod eval;
mod generate;
mod hub;
mod init;
mod inspect;
mod logging;
mod progress;
mod report;
mod sft;

use report::{Exit, Failure};

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Supervised fine-tuning of Qwen3-VL-style vision-language models, provably right, in one binary
#[derive(Debug, Parser)]
#[command(name = "trainer", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train
    Sft(sft::SftArgs),
    /// Write a model folder in the transformers layout with random weights
    Init(init::InitArgs),
    /// Show what the model will see: turns, supervised tokens, image grids, packs
    Inspect(inspect::InspectArgs),
    /// Loss and exact answers on `data.eval`
    Eval(eval::EvalArgs),
    /// Answer a prompt
    Generate(generate::GenerateArgs),
}

/// A config file and changes to it.
#[derive(Debug, Args)]
struct ConfigArgs {
    /// YAML config
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl ConfigArgs {
    fn load(&self) -> anyhow::Result<crate::config::RunConfig> {
        let mut config: crate::config::RunConfig =
            crate::config::load(&self.config, &self.overrides)?;
        config.check().map_err(|error| Failure::of(Exit::Usage, error))?;
        config.data.validate().map_err(|error| {
            let hint = error.hint();
            Failure::of(Exit::Usage, error).hint(hint)
        })?;
        config.model.path = resolve_model(&config.model.path)?;
        Ok(config)
    }
}

/// A folder as it is; a hub id is fetched into the hub's cache by builds with the feature `hub`.
fn resolve_model(path: &std::path::Path) -> anyhow::Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    hub::resolve(path)
}

/// Parses, runs, reports.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results; everything else is a usage error.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 64 } else { 0 });
        }
    };
    match run(&cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report::report(&error),
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    let logging = logging::Logging::start()?;
    match command {
        Command::Sft(args) => sft::run(args, &logging),
        Command::Init(args) => init::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Eval(args) => eval::run(args, &logging),
        Command::Generate(args) => generate::run(args),
    }
}
