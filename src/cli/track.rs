//! `trainer track`: sends the rows of a run to trackers.

use super::failure::{Exit, Failure};
use crate::config::{self, RunConfig};
use crate::run;
use crate::train::Tracker;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

/// Arguments of `track`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer track runs/quickstart --tracker wandb\n\n\
    Environment:\n  TRAINER_PYTHON  the Python that has the client; by default `python3`")]
pub(super) struct TrackArgs {
    /// Folder of a run: its `output_dir`
    run: PathBuf,
    /// A tracker, instead of those in `log.trackers` of the run; may be given several times
    #[arg(long, value_name = "wandb|mlflow|swanlab", value_parser = tracker)]
    tracker: Vec<Tracker>,
}

fn tracker(name: &str) -> Result<Tracker, String> {
    let found =
        Tracker::ALL.into_iter().find(|one| one.package().is_some_and(|(of, _)| of == name));
    found.ok_or_else(|| "expected `wandb`, `mlflow` or `swanlab`".to_owned())
}

/// The Python that has the clients of trackers.
pub(super) fn python() -> OsString {
    std::env::var_os("TRAINER_PYTHON").unwrap_or_else(|| "python3".into())
}

pub(super) fn run(args: &TrackArgs) -> anyhow::Result<()> {
    let file = args.run.join("config.yaml");
    if !file.is_file() {
        let message = format!("cannot read `{}`", file.display());
        return Err(Failure::new(Exit::Usage, message)
            .hint("pass the `output_dir` of a run")
            .into());
    }
    let config: RunConfig = config::load(&file, &[])?;
    let config = config.with_unescaped_paths();
    let given = if args.tracker.is_empty() { &config.log.trackers } else { &args.tracker };
    if given.iter().all(|tracker| tracker.package().is_none()) {
        let message = "`log.trackers` of the run names no tracker that takes rows after the run";
        let hint = "name one, for example `--tracker wandb`";
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    }
    Ok(run::track(&python(), &args.run, &config, given)?)
}
