//! Arguments that several commands share.

use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use crate::config::{self, ConfigError, LeftOut, RunConfig};
use crate::run::{self, RunError};
use crate::train::Weights;
use clap::Args;
use fault::{Fault, IntoHint};
use std::path::{Path, PathBuf};

/// A config file and changes to it.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// YAML config
    #[arg(long, value_name = "FILE")]
    pub(super) config: PathBuf,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

impl ConfigArgs {
    /// Reads and checks the config, and downloads what it names on the hub.
    pub(super) fn load(&self, logging: &Logging) -> anyhow::Result<RunConfig> {
        let mut config: RunConfig = config::load(&self.config, &self.overrides)?;
        if let Some(error) = self.expand(&mut config, &LeftOut::default()).into_iter().next() {
            return Err(error.into());
        }
        run::check(&config).map_err(|error| self.located(error))?;
        run::download(&config, &SetupBars(logging)).map_err(|error| self.located(error))
    }

    /// Returns an error about the value under `keys` that shows its line in the config file.
    pub(super) fn refuse<K: AsRef<str>>(
        &self,
        keys: &[K],
        problem: impl Into<String>,
        hint: impl IntoHint,
    ) -> ConfigError {
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        config::refuse(&self.config, &self.overrides, &keys, problem.into(), hint.into_hint())
    }

    /// Adds the line in the config file to an error that a config key caused.
    pub(super) fn located(&self, error: RunError) -> anyhow::Error {
        let Some(keys) = error.keys() else { return error.into() };
        let exit = error.exit().unwrap_or(Exit::Usage);
        Failure::of(exit, self.refuse(&keys, error.to_string(), error.hint())).into()
    }
}

/// The folder of an argument that is a model folder or a hub id.
pub(super) fn model_folder(path: &Path, logging: &Logging) -> anyhow::Result<PathBuf> {
    Ok(run::model_folder(path, Weights::Pretrained, &SetupBars(logging))?)
}

/// Checks that an argument is a folder.
pub(super) fn check_folder(argument: &str, path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let found = if path.exists() { "a file" } else { "nothing" };
    let message =
        format!("`{argument}`: there is {found} at `{}`, expected a folder", path.display());
    Err(Failure::new(Exit::Usage, message).hint("check the path").into())
}
