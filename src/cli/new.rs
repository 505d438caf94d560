//! `trainer new`: writes a config for a model folder and data files.

use super::args::OutputFile;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use crate::run::{NewRun, new_config};
use clap::Args;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Arguments of `new`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer new --model data/quickstart/model \
    --data data/quickstart/digits_train.jsonl --eval data/quickstart/digits_test.jsonl --out digits.yaml")]
pub(super) struct NewArgs {
    /// Model folder in the transformers layout, or an id of the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Data files to train on: JSON lines, JSON, Parquet, Arrow, CSV or WebDataset
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Data files to evaluate on
    #[arg(long, value_name = "FILE", num_args = 1..)]
    eval: Vec<PathBuf>,
    /// Folder of the images that the rows name; by default that of each data file
    #[arg(long, value_name = "DIR")]
    image_root: Option<PathBuf>,
    /// File to write; stdout if it is left out
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// `output_dir` of the run; by default `runs/` and the name of the config
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
}

pub(super) fn run(args: &NewArgs, logging: &Logging) -> anyhow::Result<()> {
    if let Some(out) = args.out.as_ref().filter(|out| out.is_file()) {
        let message = format!("`{}` exists", out.display());
        return Err(Failure::new(Exit::Usage, message)
            .hint("remove it, or give another name as `--out`")
            .into());
    }
    let file = OutputFile::open_given("--out", args.out.as_ref())?;
    let name = args.out.as_deref().unwrap_or(Path::new("config.yaml"));
    let stem = name.file_stem().unwrap_or_default();
    let new = NewRun {
        model: args.model.clone(),
        train: args.data.clone(),
        eval: args.eval.clone(),
        image_root: args.image_root.clone(),
        output_dir: args.output_dir.clone().unwrap_or_else(|| Path::new("runs").join(stem)),
        name: name.display().to_string(),
    };
    let yaml = new_config(&new, &SetupBars(logging))?;
    match file {
        Some(file) => {
            file.write(yaml.as_bytes())?;
            tracing::info!(file = %name.display(), "wrote a config; `trainer check` checks it");
        }
        None => write!(stdout(), "{yaml}")?,
    }
    Ok(())
}
