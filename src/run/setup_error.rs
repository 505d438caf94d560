//! Errors of loading a model.

use super::adapter::AdapterError;
use crate::checkpoint::CheckpointError;
use crate::models::ModelConfigError;
use crate::nn::WeightError;
use crate::optim::GroupError;
use std::path::PathBuf;

/// The reason why a model cannot be loaded.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[expect(missing_docs, reason = "the messages say it")]
#[fault(exit = Data)]
pub enum SetupError {
    #[error(
        "`model.attention: masked` is the reference implementation, which runs on the CPU only"
    )]
    #[fault(exit = Usage, hint = "use `model.attention: auto`, or `device: cpu`")]
    MaskedOnGpu,
    #[error("`model.aux_loss` is computed on the CPU only")]
    #[fault(exit = Usage, hint = "remove `model.aux_loss`, or use `device: cpu`")]
    AuxLossOnGpu,
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
