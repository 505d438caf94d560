//! The command line: one file a command. The only place that prints and exits, and that reads the environment, but
//! for `TRAINER_SIMD`, which the unit tests of `ops` obey too.

mod answers;
mod bench;
mod cache;
mod eval;
mod foresight;
mod generate;
mod hub;
mod init;
mod inspect;
mod logging;
mod output_dir;
mod panics;
mod progress;
mod report;
mod sft;
mod stdout;
mod verdict;

use self::logging::Logging;
use self::progress::Progress;
use self::report::{Exit, Failure};
use crate::checkpoint::CheckpointError;
use crate::config::{self, ConfigError, RunConfig};
use crate::data::{
    CorpusError, CorpusOptions, Encoder, EncoderError, ImageConfig, ImageConfigError, Purpose,
    SourceError, VideoConfigError,
};
use crate::optim::ParamGroups;
use crate::train::{DeviceChoice, JsonlRows, LoadedModel, ModelSection, SetupError, load_model};
use candle_core::Device;
use clap::{Args, Parser, Subcommand};
use std::cell::RefCell;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

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
    /// Measure every row once, for the runs to come: the offline tokenisation step
    Cache(cache::CacheArgs),
    /// How fast this machine runs the ops, a step, and the data side
    Bench(bench::BenchArgs),
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
    fn load(&self) -> anyhow::Result<RunConfig> {
        let mut config: RunConfig = config::load(&self.config, &self.overrides)?;
        config.check().map_err(|error| {
            let keys: Vec<&str> = error.key.split('.').collect();
            self.refuse(&keys, &error, error.hint())
        })?;
        config.data.validate().map_err(|error| {
            let key = error.key();
            self.refuse(&key.split('.').collect::<Vec<_>>(), &error, error.hint())
        })?;
        let path = &config.model.path;
        if !path.is_dir() {
            config.model.path = hub::resolve(path).map_err(|error| self.model_path(&error))?;
        }
        Ok(config)
    }

    /// An error that the value under `keys` is to blame for, at its place in the file.
    fn refuse(&self, keys: &[&str], problem: impl Display, hint: impl Into<String>) -> ConfigError {
        config::refuse(&self.config, &self.overrides, keys, problem.to_string(), hint.into())
    }

    /// `model.path` is no folder, and was not found elsewhere.
    fn model_path(&self, error: &anyhow::Error) -> ConfigError {
        let problem = format!("`model.path`: {error:#}");
        self.refuse(&["model", "path"], problem, hub::HINT)
    }

    /// Opens the data sets of `data.train` or `data.eval`, with a bar while a corpus is tokenised.
    fn open_rows(
        &self,
        list: &str,
        config: &RunConfig,
        encoder: &Arc<Encoder>,
        logging: &Logging,
    ) -> anyhow::Result<JsonlRows> {
        let data = &config.data;
        // what is scored is scored whole
        let (datasets, purpose, cut) = match list {
            "eval" => (&data.eval, Purpose::Eval, None),
            _ => (&data.train, Purpose::Train(config.train.batch_size), data.cut()),
        };
        let options = CorpusOptions {
            purpose,
            split_at: data.split_at(),
            cut,
            // Beside a run; a command that only looks makes no folder.
            cache: config.output_dir.is_dir().then(|| config.cache_dir()),
            on_error: data.on_error,
            max_rejected: data.max_rejected,
        };
        let refuse = |path: &Path, key: &str, error: &SourceError| {
            let index = datasets.iter().position(|set| set.path == path).unwrap_or(0);
            let key = format!("data.{list}.{index}.{key}");
            let problem = format!("`{key}`: {error}");
            let keys: Vec<&str> = key.split('.').collect();
            self.refuse(&keys, problem, error.hint().unwrap_or_default()).into()
        };
        let bar = RefCell::new(None);
        let progress = |done, total| {
            let mut bar = bar.borrow_mut();
            let begin = || Progress::items(logging.bars(), "bytes tokenised", total);
            bar.get_or_insert_with(begin).set(done);
            if done == total {
                *bar = None; // the next corpus has its own
            }
        };
        let rows = JsonlRows::open_with(datasets, encoder.clone(), &options, &progress);
        rows.map(|rows| rows.cut(cut)).map_err(|error| match &error {
            SourceError::Read { path, .. } => refuse(path, "path", &error),
            SourceError::Corpus(CorpusError::UnknownToken { path, key, .. }) => {
                refuse(path, &format!("corpus.{key}"), &error)
            }
            // The file is what it should be, what is in it is not.
            _ => error.into(),
        })
    }

    /// Reads tokenizer, template and image settings of the model folder.
    fn encoder(&self, config: &RunConfig) -> anyhow::Result<Arc<Encoder>> {
        let ImageConfig { min_pixels, max_pixels, max_tokens } = config.data.image;
        let data = &config.data;
        let encoder = Encoder::with_video(&config.model.path, &data.image, &data.video);
        encoder.map(Arc::new).map_err(|error| match &error {
            EncoderError::Image(image @ ImageConfigError::Budget { .. })
                if min_pixels.or(max_pixels).is_some() || max_tokens.is_some() =>
            {
                let key = match (min_pixels, max_pixels) {
                    (Some(_), _) => "min_pixels",
                    (None, Some(_)) => "max_pixels",
                    (None, None) => "max_tokens",
                };
                self.refuse(&["data", "image", key], image, image.hint()).into()
            }
            EncoderError::Video(video @ VideoConfigError::Setting { key, .. }) => {
                self.refuse(&["data", "video", key], video, video.hint()).into()
            }
            _ => error.into(),
        })
    }

    /// Reads the model at `section`, which is that of the config or of a checkpoint.
    fn load_model(
        &self,
        section: &ModelSection,
        seed: u64,
        device: &Device,
    ) -> anyhow::Result<LoadedModel> {
        load_model(section, seed, device).map_err(|error| match &error {
            SetupError::Files { source, .. }
                if matches!(**source, CheckpointError::NoWeights { .. }) =>
            {
                let problem = format!("`model.weights` is `pretrained`, but there are {source}");
                self.refuse(&["model", "weights"], problem, source.hint()).into()
            }
            _ => error.into(),
        })
    }

    /// Applies `model.freeze` and `optim.lr_multipliers`.
    fn groups(&self, config: &RunConfig, loaded: &LoadedModel) -> anyhow::Result<ParamGroups> {
        let (freeze, multipliers) = (&config.model.freeze, &config.optim.lr_multipliers);
        Ok(loaded.groups(freeze, multipliers).map_err(|error| {
            let (key, pattern) = error.origin();
            let mut keys: Vec<&str> = key.split('.').collect();
            let index = freeze.iter().position(|entry| Some(entry.as_str()) == pattern);
            let index = index.map(|index| index.to_string());
            match &index {
                Some(index) if key == "model.freeze" => keys.push(index),
                _ => keys.extend(pattern),
            }
            self.refuse(&keys, &error, error.hint())
        })?)
    }
}

/// An argument that must be a folder.
fn check_folder(argument: &str, path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let found = if path.exists() { "a file" } else { "nothing" };
    let message =
        format!("`{argument}`: there is {found} at `{}`, expected a folder", path.display());
    Err(Failure::new(Exit::Usage, message).hint("check the path").into())
}

/// A folder as it is; a hub id is fetched into the hub's cache by builds with the feature `hub`.
fn resolve_model(path: &Path) -> anyhow::Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    hub::resolve(path)
}

/// The device that a config or an argument asks for.
fn open_device(choice: DeviceChoice) -> anyhow::Result<Device> {
    choice.open().map_err(|error| {
        let hint = error.hint();
        Failure::of(Exit::Usage, error).hint(hint).into()
    })
}

/// Parses, runs, reports.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results; everything else is a usage error.
            return match (error.print(), error.use_stderr()) {
                (Err(refused), false) => report::report(&stdout::wrap(refused).into()),
                (_, false) => ExitCode::SUCCESS,
                (_, true) => Exit::Usage.into(),
            };
        }
    };
    // As much stack as a main thread has; a pool that exists already is as good.
    let _ = rayon::ThreadPoolBuilder::new().stack_size(8 << 20).build_global();
    // Commands run as a worker of the pool: from outside, each of a step's hundreds of parallel ops
    // would put this thread to sleep and wake it again.
    match rayon::scope(|_| panics::caught(|| run(&cli.command))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report::report(&error),
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    let logging = logging::Logging::start()?;
    crate::ops::simd_level().map_err(|error| {
        Failure::of(Exit::Usage, error).hint("unset it: the best level of the CPU is the default")
    })?;
    match command {
        Command::Sft(args) => sft::run(args, &logging),
        Command::Init(args) => init::run(args),
        Command::Inspect(args) => inspect::run(args, &logging),
        Command::Eval(args) => eval::run(args, &logging),
        Command::Generate(args) => generate::run(args),
        Command::Cache(args) => cache::run(args, &logging),
        Command::Bench(args) => bench::run(args),
    }
}
