//! Errors of assembling, training, verifying and replaying a run, with the config key that caused
//! them, and of loading a model.

use super::adapter::AdapterError;
use super::device::device_hint;
use crate::batch::BatchError;
use crate::checkpoint::{CheckpointError, write_hint};
use crate::config::{ConfigChange, ConfigError, LeftOut, ValueError};
use crate::data::{
    CacheError, LoaderError, ModelFolderError, OrderError, SourceError, TokenizerError,
    TransientRowError,
};
use crate::dist::DistError;
use crate::metrics::JsonlError;
use crate::models::ModelConfigError;
use crate::net::HttpError;
use crate::net::hub::HubError;
use crate::nn::WeightError;
use crate::optim::GroupError;
use crate::train::{TrainError, TrainState};
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// The reason why a run cannot be assembled, trained, verified or replayed.
///
/// Where a config key is the cause, [`RunError::keys`] returns it.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum RunError {
    #[error(transparent)]
    Value(#[from] ValueError),
    #[error("`output_dir`: cannot create folder `{}`: {problem}", .folder.display())]
    #[fault(exit = CannotWrite, hint = write_hint(problem))]
    CreateOutputDir { folder: PathBuf, problem: io::Error },
    #[error("cannot {action} `{}`: {problem}", .path.display())]
    #[fault(exit = CannotWrite, hint = write_hint(problem))]
    OutputFile {
        /// The action that failed: `open`, `move`, ..
        action: &'static str,
        path: PathBuf,
        problem: io::Error,
    },
    #[error("another run is using `{}`", .folder.display())]
    #[fault(hint = "wait for it or stop it, or set another `output_dir`")]
    Busy { folder: PathBuf },
    #[error("`model.path` is in `output_dir` `{}`, and a new run there moves the files of the earlier run", .output_dir.display())]
    #[fault(hint = "set another `output_dir` for the run that starts from these weights")]
    ModelInOutputDir { output_dir: PathBuf },
    #[error("checkpoint `{}` was written by a run with another config{}", .folder.display(), changes_text(.changes))]
    #[fault(
        hint = "restore the config; docs/config.md lists the keys that a resumed run may change. To start a new run from its weights, set `model.path` to the checkpoint"
    )]
    OtherConfig {
        folder: PathBuf,
        /// The settings that differ, if the earlier config is known.
        changes: Vec<ConfigChange>,
    },
    #[error(
        "trainer_state.json of `{}` has version {version}, and this program reads version {}",
        .folder.display(), TrainState::VERSION
    )]
    #[fault(
        exit = Data,
        hint = "continue with the version of the program that wrote it; set `model.path` to the checkpoint to start from its weights"
    )]
    StateVersion { folder: PathBuf, version: u32 },
    #[error("changed since checkpoint `{}`: {}", .folder.display(), .what.join(", "))]
    #[fault(
        exit = Data,
        hint = "restore these files, or start a new run with `--resume never`; set `model.path` to the checkpoint to start from its weights"
    )]
    InputsChanged { folder: PathBuf, what: Vec<String> },
    #[error(
        "images or videos of the rows changed since the start of the run of checkpoint `{}`{}",
        .folder.display(), first_text(.first.as_deref())
    )]
    #[fault(
        exit = Data,
        hint = "restore them, or start a new run with `--resume never`; set `model.path` to the checkpoint to start from its weights"
    )]
    MediaChanged {
        folder: PathBuf,
        /// The first file, as written in its row, if it is known.
        first: Option<String>,
    },
    #[error(transparent)]
    #[fault(
        exit = Data,
        hint = "pass a folder in `checkpoints/` to `--resume`; to start from the weights alone, set `model.path` to this folder"
    )]
    NoOptimizer { problem: CheckpointError },
    #[error("cannot read trainer_state.json of `{}`", .folder.display())]
    #[fault(
        exit = Data,
        hint = "the file is damaged: use an older checkpoint, or copy the folder again"
    )]
    State { folder: PathBuf, source: serde_json::Error },
    #[error("the training files changed since `{}`", .folder.display())]
    #[fault(
        exit = Data,
        hint = "restore them, or start a new run with `--resume never`; set `model.path` to the checkpoint to start from its weights"
    )]
    DataChanged { folder: PathBuf },
    #[error("{problem}")]
    #[fault(exit = Usage, from = problem)]
    Setting {
        /// Dotted key of the config.
        key: String,
        problem: ModelFolderError,
    },
    #[error("`{key}`: {problem}")]
    #[fault(from = problem)]
    Hub {
        /// Dotted key of the config.
        key: String,
        problem: Box<HubError>,
    },
    #[error("`data.allow_urls`: {0}")]
    #[fault(exit = Usage, from)]
    Urls(#[source] HttpError),
    #[error("`data.{list}.{index}.{key}`: {problem}")]
    #[fault(exit = Usage, from = problem)]
    DataSet {
        list: &'static str,
        /// Which entry, from 0.
        index: usize,
        /// Dotted key in the entry.
        key: String,
        problem: Box<SourceError>,
    },
    #[error("{file}: {unusable} of {measured} rows cannot be used. The first one: {first}")]
    #[fault(
        exit = Data,
        hint = "pass `--image-root FOLDER` if images are in another folder than the data file, and correct the rows otherwise"
    )]
    UnusableRows { file: String, unusable: usize, measured: usize, first: String },
    #[error("`model.weights` is `pretrained`, but there are {problem}")]
    #[fault(exit = Usage, from = problem)]
    NoWeights { problem: CheckpointError },
    #[error("{problem}")]
    #[fault(from = problem)]
    Groups {
        /// Keys that lead to the pattern.
        keys: Vec<String>,
        problem: GroupError,
    },
    #[error("`device` is `cuda:{ordinal}`, which cannot be used: {problem}")]
    #[fault(exit = Usage, hint = device_hint())]
    Device { ordinal: usize, problem: String },
    #[error(transparent)]
    Encoder(#[from] ModelFolderError),
    #[error(transparent)]
    Data(#[from] SourceError),
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Plan(#[from] LoaderError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Sink(#[from] JsonlError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "a step has {slots} micro-batches (`train.gradient_accumulation_steps`), which {world} ranks{} cannot share evenly",
        groups_text(*.sequence)
    )]
    #[fault(hint = world_hint(*world / *sequence, [*below, *above]))]
    World {
        world: usize,
        /// Number of ranks that compute the same micro-batches.
        sequence: usize,
        /// Number of micro-batches of a step.
        slots: usize,
        /// The next smaller number of ranks that fits.
        below: Option<usize>,
        /// The next larger number of ranks that fits.
        above: Option<usize>,
    },
    #[error(
        "`distributed.sequence` is {sequence}, which does not divide the number of ranks, {world}"
    )]
    #[fault(hint = "start a multiple of {sequence} ranks, or set `distributed.sequence` to 1")]
    SequenceWorld { sequence: usize, world: usize },
    #[error(
        "`distributed.sequence` is {sequence}, but {sequence} ranks cannot share {} evenly", .heads.join(" and ")
    )]
    #[fault(hint = fitting_hint(fitting))]
    SequenceHeads {
        sequence: usize,
        /// Numbers of heads of each kind, such as "2 key-value heads".
        heads: Vec<String>,
        fitting: Vec<usize>,
    },
    #[error(transparent)]
    Ranks(#[from] DistError),
    #[error(transparent)]
    Train(Box<TrainError>),
    #[error(transparent)]
    Row(#[from] TransientRowError),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    #[fault(exit = None, hint = None)]
    Candle(#[from] candle_core::Error),
    #[error("the run has no step {step}")]
    #[fault(hint = "metrics.jsonl of the run has its steps")]
    NoStep { step: u64 },
    #[error("none of the {rejected} rows of an epoch can be used{first}")]
    #[fault(exit = Data, hint = "repair the rows; the warnings above list them")]
    NoRows {
        rejected: usize,
        /// The first rejection, after a colon.
        first: String,
    },
    #[error("the {rows} rows have no supervised token")]
    #[fault(
        exit = Data,
        hint = "choose more rows with `--rows`, or see which tokens are supervised with `inspect`"
    )]
    NoTargets { rows: usize },
    #[error("`log.trackers`: cannot start Python as `{python}`: {problem}")]
    #[fault(hint = "install Python 3, or set TRAINER_PYTHON to the Python that has the client")]
    NoPython { python: String, problem: io::Error },
    #[error("`log.trackers`: `{python}` cannot import the package `{package}`: {problem}")]
    #[fault(
        hint = "run `{python} -m pip install {package}`, or set TRAINER_PYTHON to the Python that has it"
    )]
    NoClient { python: String, package: &'static str, problem: String },
    #[error("tracker `{tracker}`: the process that sends the rows failed ({status})")]
    #[fault(hint = "repair what its messages name, and run the same command again: it continues")]
    NotTracked { tracker: &'static str, status: ExitStatus },
    #[error("temporary folder `{}`: {problem}", .folder.display())]
    #[fault(exit = CannotWrite, hint = "free space there, or set TMPDIR to another folder")]
    TemporaryFolder { folder: PathBuf, problem: io::Error },
}

impl From<TrainError> for RunError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl RunError {
    /// Whether the process or a disk failed while rows were read, so that nothing is known about
    /// them.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Row(_) | Self::Plan(LoaderError::Transient(_)) => true,
            Self::Cache(error) => error.transient_failure().is_some(),
            _ => false,
        }
    }

    /// Keys that lead from the top of the config to the value that caused the error, list items by
    /// number. `None` if the cause is not a value of the config.
    pub fn keys(&self) -> Option<Vec<String>> {
        let dotted = |key: &str| key.split('.').map(str::to_owned).collect();
        match self {
            Self::Value(error) => Some(dotted(&error.key)),
            Self::CreateOutputDir { .. } => Some(dotted("output_dir")),
            Self::ModelInOutputDir { .. } | Self::Setup(SetupError::QuantizedBase { .. }) => {
                Some(dotted("model.path"))
            }
            Self::DataSet { list, index, key, .. } => {
                Some(dotted(&format!("data.{list}.{index}.{key}")))
            }
            Self::Setting { key, .. }
            | Self::Hub { key, .. }
            | Self::Setup(SetupError::NewToken { key, .. }) => Some(dotted(key)),
            Self::Urls(_) => Some(dotted("data.allow_urls")),
            Self::NoWeights { .. } => Some(dotted("model.weights")),
            Self::Device { .. } => Some(dotted("device")),
            Self::NoPython { .. } | Self::NoClient { .. } => Some(dotted("log.trackers")),
            Self::Setup(SetupError::Adapter(error)) => error.key().map(dotted),
            Self::Setup(SetupError::Fp8OnGpu { .. }) => Some(dotted("model.matmul")),
            Self::Setup(SetupError::FrozenRows { key, .. }) => Some(dotted(key)),
            Self::Setup(SetupError::MaskedOnGpu) => Some(dotted("model.attention")),
            Self::Groups { keys, .. } => Some(keys.clone()),
            Self::World { .. } => Some(dotted("train.gradient_accumulation_steps")),
            Self::SequenceWorld { .. } | Self::SequenceHeads { .. } => {
                Some(dotted("distributed.sequence"))
            }
            _ => None,
        }
    }

    /// Replaces the numbers of list items by those in the file, from which `left_out` was left out.
    pub fn number_as_in_file(&mut self, left_out: &LeftOut) {
        match self {
            Self::DataSet { list, index, .. } => {
                *index = left_out.number_in_file(&format!("data.{list}"), *index);
            }
            Self::Value(ValueError { key, .. }) | Self::Hub { key, .. } => {
                let keys: Vec<String> = key.split('.').map(str::to_owned).collect();
                *key = left_out.in_file(&keys).join(".");
            }
            Self::Groups { keys, .. } => *keys = left_out.in_file(keys),
            _ => {}
        }
    }

    /// The error of the connections between ranks that caused this one.
    pub(super) fn lost(&self) -> Option<&DistError> {
        match self {
            Self::Ranks(error) | Self::Plan(LoaderError::Ranks(error)) => Some(error),
            Self::Train(error) => error.lost(),
            _ => None,
        }
    }
}

fn world_hint(groups: usize, near: [Option<usize>; 2]) -> String {
    let ranks: Vec<String> = near.into_iter().flatten().map(|ranks| ranks.to_string()).collect();
    format!(
        "start {} ranks, or set `train.gradient_accumulation_steps` to a multiple of {groups}. \
         `batch_size` x `gradient_accumulation_steps` is the step of the whole run, not of one rank",
        ranks.join(" or ")
    )
}

fn fitting_hint(fitting: &[usize]) -> String {
    let fitting: Vec<String> = fitting.iter().map(ToString::to_string).collect();
    format!("this model fits: {}", fitting.join(", "))
}

/// The settings that differ, after a sentence about them.
fn changes_text(changes: &[ConfigChange]) -> String {
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    if changes.is_empty() { String::new() } else { format!(": {}", changes.join(", ")) }
}

/// The first changed file, after a sentence about all of them.
fn first_text(first: Option<&str>) -> String {
    first.map(|first| format!(", the first: `{first}`")).unwrap_or_default()
}

/// How `sequence` ranks compute the same micro-batches, after a number of ranks.
fn groups_text(sequence: usize) -> String {
    if sequence > 1 { format!(" in groups of {sequence}") } else { String::new() }
}

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum SetupError {
    #[error(
        "`model.attention: masked` is the reference implementation, which runs on the CPU only"
    )]
    #[fault(exit = Usage, hint = "use `model.attention: auto`, or `device: cpu`")]
    MaskedOnGpu,
    #[error(
        "products in FP8 need a GPU of compute capability 8.9 or later (Ada, Hopper), found \
         {major}.{minor}"
    )]
    #[fault(exit = Usage, hint = "remove `model.matmul`, or use `device: cpu`")]
    Fp8OnGpu { major: u32, minor: u32 },
    #[error("`model.aux_loss` is {aux_loss}, but the model has no experts")]
    #[fault(exit = Usage, hint = "remove `model.aux_loss`")]
    NoExperts { aux_loss: f64 },
    #[error("model folder `{}` cannot be used", .folder.display())]
    #[fault(from = source)]
    Config { folder: PathBuf, source: ModelConfigError },
    #[error("model folder `{}`: {what}", .folder.display())]
    #[fault(hint = *hint)]
    Contradiction { folder: PathBuf, what: String, hint: &'static str },
    #[error("model folder `{}` cannot be written for llama.cpp: {what}", .folder.display())]
    #[fault(hint = "export it without `--gguf`; docs/gguf.md lists what llama.cpp runs")]
    NoGguf { folder: PathBuf, what: String },
    #[error("model folder `{}` cannot be used", .folder.display())]
    #[fault(from = source)]
    Files { folder: PathBuf, source: Box<CheckpointError> },
    #[error(
        "model folder `{}`: {count} of {total} tensors are missing, the first is `{first}`{}",
        .folder.display(), .instead.as_deref().unwrap_or_default()
    )]
    #[fault(
        hint = "`config.json` and the weights belong to different models, or a weight file is missing"
    )]
    MissingTensors {
        folder: PathBuf,
        count: usize,
        total: usize,
        first: String,
        instead: Option<String>,
    },
    #[error("model folder `{}`: `{name}` has shape {found:?}, expected {expected:?} according to `config.json`", .folder.display())]
    #[fault(hint = "`config.json` and the weights belong to different models: copy both again")]
    Shape { folder: PathBuf, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("`model.path`: the weights of `{}` are stored in 4 bits, which cannot be trained", .folder.display())]
    #[fault(
        exit = Usage,
        hint = "train an adapter with `adapter: {{quantize: nf4}}`, or use the folder of the original weights"
    )]
    QuantizedBase { folder: PathBuf },
    #[error("`{key}` is `{token}`, {problem}")]
    #[fault(exit = Usage, hint = *hint)]
    NewToken {
        /// Dotted key of the config.
        key: String,
        token: String,
        problem: String,
        hint: &'static str,
    },
    #[error("model folder `{}` cannot receive tokens", .folder.display())]
    #[fault(from = source)]
    Tokenizer { folder: PathBuf, source: TokenizerError },
    #[error("`{key}`: `{name}` has the rows of new tokens and is not trained")]
    #[fault(exit = Usage, hint = hint.clone())]
    FrozenRows { key: &'static str, name: String, hint: String },
    #[error(transparent)]
    Groups(#[from] GroupError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error(transparent)]
    Weights(#[from] WeightError),
    #[error(transparent)]
    #[fault(exit = None, hint = None)]
    Candle(#[from] candle_core::Error),
}
