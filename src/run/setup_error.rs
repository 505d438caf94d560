//! Errors of loading a model.

use super::adapter::AdapterError;
use crate::checkpoint::CheckpointError;
use crate::models::ModelConfigError;
use crate::nn::WeightError;
use crate::optim::GroupError;
use std::path::PathBuf;

/// The reason why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// `model.attention: masked` has no GPU kernel.
    #[error(
        "`model.attention: masked` is the reference implementation, which runs on the CPU only"
    )]
    MaskedOnGpu,
    /// The auxiliary loss has no GPU kernel.
    #[error("`model.aux_loss` is computed on the CPU only")]
    AuxLossOnGpu,
    /// The tensor cores of the GPU do not multiply in FP8.
    #[error(
        "products in FP8 need a GPU of compute capability 8.9 or later (Ada, Hopper), found \
         {major}.{minor}"
    )]
    Fp8OnGpu {
        /// Compute capability of the GPU.
        major: u32,
        /// Its second number.
        minor: u32,
    },
    /// A setting of the routers, and a model that has none.
    #[error("`model.aux_loss` is {aux_loss}, but the model has no experts")]
    NoExperts {
        /// The value.
        aux_loss: f64,
    },
    /// `config.json` is missing or not valid.
    #[error("model folder `{}` cannot be used", .folder.display())]
    Config {
        /// The model folder.
        folder: PathBuf,
        /// The underlying error.
        source: ModelConfigError,
    },
    /// Two files of the folder contradict each other.
    #[error("model folder `{}`: {what}", .folder.display())]
    Contradiction {
        /// The model folder.
        folder: PathBuf,
        /// Both facts and their files.
        what: String,
        /// The fix.
        hint: &'static str,
    },
    /// The weight files cannot be read.
    #[error("model folder `{}` cannot be used", .folder.display())]
    Files {
        /// The model folder.
        folder: PathBuf,
        /// The underlying error; boxed because of its size.
        source: Box<CheckpointError>,
    },
    /// The files lack tensors that a model of this `config.json` has.
    #[error(
        "model folder `{}`: {count} of {total} tensors are missing, the first is `{first}`{}",
        .folder.display(), .instead.as_deref().unwrap_or_default()
    )]
    MissingTensors {
        /// The model folder.
        folder: PathBuf,
        /// Number of missing tensors.
        count: usize,
        /// Number of tensors of the model.
        total: usize,
        /// Name of the first missing tensor.
        first: String,
        /// What the files have instead.
        instead: Option<String>,
    },
    /// A tensor has another shape than `config.json` implies.
    #[error("model folder `{}`: `{name}` has shape {found:?}, expected {expected:?} according to `config.json`", .folder.display())]
    Shape {
        /// The model folder.
        folder: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape by `config.json`.
        expected: Vec<usize>,
    },
    /// The weights are quantised, and there is no adapter.
    #[error("`model.path`: the weights of `{}` are stored in 4 bits, which cannot be trained", .folder.display())]
    QuantizedBase {
        /// The model folder.
        folder: PathBuf,
    },
    /// `model.freeze` or `optim.lr_multipliers` cannot be applied.
    #[error(transparent)]
    Groups(#[from] GroupError),
    /// The adapter cannot be made or loaded.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// A stage of the model has a parameter that the list of parameters lacks.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl SetupError {
    /// Returns the fix that the error message suggests; `None` if the wrapped error has it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Contradiction { hint, .. } => hint,
            Self::MissingTensors { .. } => {
                "`config.json` and the weights belong to different models, or a weight file is missing"
            }
            Self::Shape { .. } => {
                "`config.json` and the weights belong to different models: copy both again"
            }
            Self::QuantizedBase { .. } => {
                "train an adapter with `adapter: {quantize: nf4}`, or use the folder of the original \
                 weights"
            }
            Self::AuxLossOnGpu => "remove `model.aux_loss`, or use `device: cpu`",
            Self::Fp8OnGpu { .. } => "remove `model.matmul`, or use `device: cpu`",
            Self::NoExperts { .. } => "remove `model.aux_loss`",
            Self::MaskedOnGpu => "use `model.attention: auto`, or `device: cpu`",
            Self::Config { .. }
            | Self::Files { .. }
            | Self::Groups(_)
            | Self::Adapter(_)
            | Self::Weights(_)
            | Self::Candle(_) => return None,
        };
        Some(hint.to_owned())
    }
}
