//! Errors of assembling a run, with the config key that caused them.

use super::device::DeviceError;
use super::setup_error::SetupError;
use crate::checkpoint::CheckpointError;
use crate::config::{Change, ConfigError, LeftOut, ValueError};
use crate::data::{
    CacheError, DataConfigError, EncoderError, ImageConfigError, LoaderError, OrderError,
    SourceError, VideoConfigError,
};
use crate::dist::DistError;
use crate::metrics::JsonlError;
use crate::net::HttpError;
use crate::net::hub::HubError;
use crate::ops::AlgorithmTableError;
use crate::optim::GroupError;
use crate::train::TrainState;
use std::io;
use std::path::PathBuf;

/// The reason why a run cannot be assembled.
///
/// Where a config key is the cause, [`RunError::keys`] returns it.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A value of the config is out of range.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// A value of the section `data` is out of range.
    #[error(transparent)]
    DataConfig(#[from] DataConfigError),
    /// `output_dir` does not exist and cannot be created.
    #[error("`output_dir`: cannot create folder `{}`: {problem}", .folder.display())]
    CreateOutputDir {
        /// `output_dir`.
        folder: PathBuf,
        /// The error of the operating system.
        problem: io::Error,
    },
    /// A file or folder below `output_dir` cannot be changed.
    #[error("cannot {action} `{}`: {problem}", .path.display())]
    OutputFile {
        /// The action that failed: `open`, `move`, ..
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        problem: io::Error,
    },
    /// Another process trains in `output_dir`.
    #[error("another run is using `{}`", .folder.display())]
    Busy {
        /// `output_dir`.
        folder: PathBuf,
    },
    /// The new run would move away the model that it starts from.
    #[error("`model.path` is in `output_dir` `{}`, and a new run there moves the files of the earlier run", .output_dir.display())]
    ModelInOutputDir {
        /// `output_dir`.
        output_dir: PathBuf,
    },
    /// The checkpoint to resume from was written under another config.
    #[error("checkpoint `{}` was written by a run with another config{}", .folder.display(), changes_text(.changes))]
    OtherConfig {
        /// The checkpoint.
        folder: PathBuf,
        /// The settings that differ, if the earlier config is known.
        changes: Vec<Change>,
    },
    /// Another version of the program wrote the checkpoint to resume from.
    #[error(
        "trainer_state.json of `{}` has version {version}, and this program reads version {}",
        .folder.display(), TrainState::VERSION
    )]
    StateVersion {
        /// The checkpoint.
        folder: PathBuf,
        /// The version in the file.
        version: u32,
    },
    /// The model folder or the processor encodes rows in another way than at the checkpoint.
    #[error("changed since checkpoint `{}`: {}", .folder.display(), .what.join(", "))]
    InputsChanged {
        /// The checkpoint.
        folder: PathBuf,
        /// What differs.
        what: Vec<String>,
    },
    /// Media files of the rows have other sizes or contents than at the start of the run.
    #[error(
        "images or videos of the rows changed since the start of the run of checkpoint `{}`{}",
        .folder.display(), first_text(.first.as_deref())
    )]
    MediaChanged {
        /// The checkpoint.
        folder: PathBuf,
        /// The first file, as written in its row, if it is known.
        first: Option<String>,
    },
    /// The checkpoint to resume from has no optimizer state.
    #[error(transparent)]
    NoOptimizer {
        /// The underlying error.
        problem: CheckpointError,
    },
    /// `trainer_state.json` of the checkpoint is not valid.
    #[error("cannot read trainer_state.json of `{}`", .folder.display())]
    State {
        /// The checkpoint.
        folder: PathBuf,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// The training files are not those that the checkpoint was trained on.
    #[error("the training files changed since `{}`", .folder.display())]
    DataChanged {
        /// The checkpoint.
        folder: PathBuf,
    },
    /// An image setting contradicts the model folder.
    #[error("{problem}")]
    ImageSetting {
        /// Key in `data.image`.
        key: &'static str,
        /// The underlying error.
        problem: ImageConfigError,
    },
    /// A video setting contradicts the model folder.
    #[error("{problem}")]
    VideoSetting {
        /// Key in `data.video`.
        key: &'static str,
        /// The underlying error.
        problem: VideoConfigError,
    },
    /// A model or data file of the hub cannot be used.
    #[error("`{key}`: {problem}")]
    Hub {
        /// Dotted key of the config.
        key: String,
        /// The underlying error.
        problem: Box<HubError>,
    },
    /// Images by URL cannot be downloaded.
    #[error("`data.allow_urls`: {0}")]
    Urls(#[source] HttpError),
    /// A file or token in an entry of `data.train` or `data.eval` cannot be used.
    #[error("`data.{list}.{index}.{key}`: {problem}")]
    DataSet {
        /// `train` or `eval`.
        list: &'static str,
        /// Which entry, from 0.
        index: usize,
        /// Dotted key in the entry.
        key: String,
        /// The underlying error.
        problem: SourceError,
    },
    /// Too many rows of a data set cannot be used to choose settings.
    #[error("{file}: {unusable} of {measured} rows cannot be used. The first one: {first}")]
    UnusableRows {
        /// The data file.
        file: String,
        /// Number of rows that cannot be used.
        unusable: usize,
        /// Number of rows that were measured.
        measured: usize,
        /// Why the first one cannot be used.
        first: String,
    },
    /// The model folder has no weights.
    #[error("`model.weights` is `pretrained`, but there are {problem}")]
    NoWeights {
        /// Which files are missing.
        problem: CheckpointError,
    },
    /// A pattern of `model.freeze` or `optim.lr_multipliers` cannot be applied.
    #[error("{problem}")]
    Groups {
        /// Keys that lead to the pattern.
        keys: Vec<String>,
        /// The underlying error.
        problem: GroupError,
    },
    /// A table of algorithms cannot be read.
    #[error("cannot read the table of algorithms `{}`: {problem}", .file.display())]
    AlgorithmsFile {
        /// The file.
        file: PathBuf,
        /// The error of the operating system.
        problem: io::Error,
    },
    /// A file is not a table of algorithms.
    #[error("the table of algorithms `{}`, {problem}", .file.display())]
    Algorithms {
        /// The file.
        file: PathBuf,
        /// The underlying error.
        problem: AlgorithmTableError,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Tokenizer, template or image settings of the model folder cannot be used.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// A data file cannot be used.
    #[error(transparent)]
    Data(#[from] SourceError),
    /// The data sets cannot be mixed as configured.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// The model cannot be loaded.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The length cache cannot be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The loader cannot make the steps that the config requires from the rows.
    #[error(transparent)]
    Plan(#[from] LoaderError),
    /// A checkpoint or a file of the run cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// `metrics.jsonl`, `eval.jsonl` or `rejects.jsonl` cannot be opened or written.
    #[error(transparent)]
    Sink(#[from] JsonlError),
    /// The config cannot be written to `output_dir`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The micro-batches of a step cannot be divided among the ranks.
    #[error(
        "a step has {slots} micro-batches (`train.gradient_accumulation_steps`), which {world} ranks{} cannot share evenly",
        groups_text(*.sequence)
    )]
    World {
        /// Number of ranks.
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
    /// The ranks cannot be divided into sequence groups.
    #[error(
        "`distributed.sequence` is {sequence}, which does not divide the number of ranks, {world}"
    )]
    SequenceWorld {
        /// Number of ranks of a sequence group.
        sequence: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The ranks of a sequence group cannot share the heads of the model.
    #[error(
        "`distributed.sequence` is {sequence}, but {sequence} ranks cannot share {} evenly", .heads.join(" and ")
    )]
    SequenceHeads {
        /// Number of ranks of a sequence group.
        sequence: usize,
        /// Numbers of heads of each kind, such as "2 key-value heads".
        heads: Vec<String>,
        /// Numbers of ranks that fit.
        fitting: Vec<usize>,
    },
    /// The ranks cannot work together.
    #[error(transparent)]
    Ranks(#[from] DistError),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Hint if `output_dir` cannot be written.
const WRITABLE: &str = "set `output_dir` to a folder that you may write to";

/// Hint if a table of algorithms cannot be used.
pub(super) const MEASURE: &str =
    "measure it with `trainer bench --tune FILE --config CONFIG`, or remove `model.algorithms`";

impl RunError {
    /// Whether the process or a disk failed while rows were read, so that nothing is known about
    /// them.
    pub fn is_trouble(&self) -> bool {
        match self {
            Self::Plan(LoaderError::Trouble(_)) => true,
            Self::Cache(error) => error.trouble().is_some(),
            _ => false,
        }
    }

    /// Keys that lead from the top of the config to the value that caused the error, list items by
    /// number. `None` if the cause is not a value of the config.
    pub fn keys(&self) -> Option<Vec<String>> {
        let dotted = |key: &str| key.split('.').map(str::to_owned).collect();
        match self {
            Self::Value(error) => Some(dotted(error.key)),
            Self::DataConfig(error) => Some(dotted(&error.key())),
            Self::CreateOutputDir { .. } => Some(dotted("output_dir")),
            Self::ModelInOutputDir { .. } | Self::Setup(SetupError::QuantizedBase { .. }) => {
                Some(dotted("model.path"))
            }
            Self::ImageSetting { key, .. } => Some(dotted(&format!("data.image.{key}"))),
            Self::VideoSetting { key, .. } => Some(dotted(&format!("data.video.{key}"))),
            Self::DataSet { list, index, key, .. } => {
                Some(dotted(&format!("data.{list}.{index}.{key}")))
            }
            Self::Hub { key, .. } => Some(dotted(key)),
            Self::Urls(_) => Some(dotted("data.allow_urls")),
            Self::NoWeights { .. } => Some(dotted("model.weights")),
            Self::AlgorithmsFile { .. } | Self::Algorithms { .. } => {
                Some(dotted("model.algorithms"))
            }
            Self::Device(_) => Some(dotted("device")),
            Self::Setup(SetupError::Adapter(error)) => error.key().map(dotted),
            Self::Setup(SetupError::Fp8OnGpu { .. }) => Some(dotted("model.matmul")),
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
            Self::DataSet { list, index, .. }
            | Self::DataConfig(DataConfigError::Weight { list, index, .. }) => {
                *index = left_out.number_in_file(&format!("data.{list}"), *index);
            }
            Self::DataConfig(DataConfigError::Entry { key, .. }) | Self::Hub { key, .. } => {
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
            _ => None,
        }
    }

    /// Returns the fix that the error message suggests; `None` if the wrapped error has it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Value(error) => return Some(error.hint()),
            Self::DataConfig(error) => error.hint(),
            Self::CreateOutputDir { .. } | Self::OutputFile { .. } => WRITABLE,
            Self::Busy { .. } => "wait for it or stop it, or set another `output_dir`",
            Self::ModelInOutputDir { .. } => {
                "set another `output_dir` for the run that starts from these weights"
            }
            Self::OtherConfig { .. } => {
                "restore the config; docs/config.md lists the keys that a resumed run may change. \
                 To start a new run from its weights, set `model.path` to the checkpoint"
            }
            Self::NoOptimizer { .. } => {
                "pass a folder in `checkpoints/` to `--resume`; to start from the weights alone, set `model.path` to this folder"
            }
            Self::StateVersion { .. } => {
                "continue with the version of the program that wrote it; set `model.path` to the checkpoint to start from its weights"
            }
            Self::UnusableRows { .. } => {
                "pass `--image-root FOLDER` if images are in another folder than the data file, and correct the rows otherwise"
            }
            Self::AlgorithmsFile { .. } => MEASURE,
            Self::Algorithms { .. } => {
                "remove the file, and measure it again with `trainer bench --tune FILE --config CONFIG`"
            }
            Self::InputsChanged { .. } => {
                "restore these files, or start a new run with `--resume never`; set `model.path` to the checkpoint to start from its weights"
            }
            Self::DataChanged { .. } | Self::MediaChanged { .. } => {
                "restore them, or start a new run with `--resume never`; set `model.path` to the checkpoint to start from its weights"
            }
            Self::ImageSetting { problem, .. } => return Some(problem.hint().into()),
            Self::VideoSetting { problem, .. } => return Some(problem.hint().into()),
            Self::DataSet { problem, .. } => return Some(problem.hint().unwrap_or_default()),
            Self::Hub { problem, .. } => return Some(problem.hint()),
            Self::Urls(problem) => problem.hint(),
            Self::NoWeights { problem } => return Some(problem.hint()),
            Self::Groups { problem, .. } => return Some(problem.hint()),
            Self::Ranks(problem) => problem.hint(),
            Self::Device(problem) => return Some(problem.hint()),
            Self::Setup(SetupError::Adapter(problem)) => return problem.hint(),
            Self::Setup(problem) => return problem.hint(),
            Self::SequenceWorld { sequence, .. } => {
                return Some(format!(
                    "start a multiple of {sequence} ranks, or set `distributed.sequence` to 1"
                ));
            }
            Self::SequenceHeads { fitting, .. } => {
                let fitting: Vec<String> = fitting.iter().map(ToString::to_string).collect();
                return Some(format!("this model fits: {}", fitting.join(", ")));
            }
            Self::World { world, sequence, below, above, .. } => {
                let groups = world / sequence;
                let ranks: Vec<String> =
                    [below, above].into_iter().flatten().map(ToString::to_string).collect();
                return Some(format!(
                    "start {} ranks, or set `train.gradient_accumulation_steps` to a multiple of {groups}. \
                     `batch_size` x `gradient_accumulation_steps` is the step of the whole run, not of one rank",
                    ranks.join(" or ")
                ));
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// The settings that differ, after a sentence about them.
fn changes_text(changes: &[Change]) -> String {
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
