//! Loads a model folder.

use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::models::{Model, ModelConfig, ModelConfigError, read_config};
use crate::nn::{ParamSpec, WeightError, random_tensor};
use crate::optim::{GroupError, Named, ParamGroups};
use crate::tape::{Param, Trainable};
use crate::train::{AttentionChoice, ModelSection, Precision, Weights};
use candle_core::{DType, Device};
use indexmap::IndexMap;
use rayon::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The reason why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// `model.attention: masked` has no GPU kernel.
    #[error(
        "`model.attention: masked` is the reference implementation, which runs on the CPU only"
    )]
    MaskedOnGpu,
    /// `config.json` is missing or not valid.
    #[error("model folder `{}` cannot be used", .folder.display())]
    Config {
        /// The model folder.
        folder: PathBuf,
        /// The underlying error.
        source: ModelConfigError,
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
    #[error("model folder `{}`: {count} of {total} tensors are missing, the first is `{first}`", .folder.display())]
    MissingTensors {
        /// The model folder.
        folder: PathBuf,
        /// Number of missing tensors.
        count: usize,
        /// Number of tensors of the model.
        total: usize,
        /// Name of the first missing tensor.
        first: String,
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
    /// `model.freeze` or `optim.lr_multipliers` cannot be applied.
    #[error(transparent)]
    Groups(#[from] GroupError),
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
            Self::MissingTensors { .. } => {
                "`config.json` and the weights belong to different models, or a weight file is missing"
            }
            Self::Shape { .. } => {
                "`config.json` and the weights belong to different models: copy both again"
            }
            Self::MaskedOnGpu => "use `model.attention: auto`, or `device: cpu`",
            Self::Config { .. }
            | Self::Files { .. }
            | Self::Groups(_)
            | Self::Weights(_)
            | Self::Candle(_) => return None,
        };
        Some(hint.to_owned())
    }
}

/// A model, its parameters and its config.
pub struct LoadedModel {
    /// The model.
    pub model: Box<dyn Model>,
    /// The complete `config.json`.
    pub config_json: serde_json::Value,
    /// Parameters in the compute dtype, in the order of `specs`.
    pub params: Vec<Param>,
    /// Name, shape and component of each parameter.
    pub specs: Vec<ParamSpec>,
    source: WeightSource,
}

/// Source of the exact `f32` weights.
enum WeightSource {
    Files(WeightFiles),
    Seed { config: Arc<dyn ModelConfig>, seed: u64 },
}

impl WeightSource {
    fn load(
        &self,
        spec: &ParamSpec,
        folder: &Path,
        dtype: DType,
        device: &Device,
    ) -> Result<candle_core::Tensor, SetupError> {
        match self {
            Self::Files(files) => {
                files.load(&spec.name, dtype, device).map_err(|source| files_error(folder, source))
            }
            Self::Seed { config, seed } => {
                Ok(random_tensor(spec, config.initializer_range(), *seed, device)?
                    .to_dtype(dtype)?)
            }
        }
    }
}

impl LoadedModel {
    /// The weight in `f32`, from the folder or the seed: the initial value of a master weight.
    pub fn master(
        &self,
        param: &Param,
        device: &Device,
    ) -> candle_core::Result<candle_core::Tensor> {
        let spec = &self.specs[param.index()];
        let loaded = self.source.load(spec, Path::new(""), DType::F32, device);
        loaded.map_err(candle_core::Error::wrap)
    }

    /// Applies `model.freeze` and `optim.lr_multipliers`.
    pub fn groups(
        &self,
        freeze: &[String],
        lr_multipliers: &IndexMap<String, f64>,
    ) -> Result<ParamGroups, GroupError> {
        let named: Vec<Named<'_>> = self
            .specs
            .iter()
            .map(|spec| Named {
                name: &spec.name,
                component: spec.component.name,
                rank: spec.shape.len(),
            })
            .collect();
        ParamGroups::new(&named, freeze, lr_multipliers)
    }
}

/// Whether each parameter of `groups` is trained.
pub fn trainable(groups: &ParamGroups) -> Vec<Trainable> {
    let each = |frozen: bool| if frozen { Trainable::Frozen } else { Trainable::Yes };
    groups.iter().map(|setting| each(setting.frozen)).collect()
}

/// Loads the model at `section.path`; random weights are drawn from `seed`.
pub fn load_model(
    section: &ModelSection,
    seed: u64,
    device: &Device,
) -> Result<LoadedModel, SetupError> {
    if section.attention == AttentionChoice::Masked && !device.is_cpu() {
        return Err(SetupError::MaskedOnGpu);
    }
    let folder = section.path.as_path();
    let (config, config_json) = read_config(folder)
        .map_err(|source| SetupError::Config { folder: folder.to_owned(), source })?;
    let specs = config.param_specs();
    let source = match section.weights {
        Weights::Random => WeightSource::Seed { config: config.clone(), seed },
        Weights::Pretrained => WeightSource::Files(open_files(folder, &specs)?),
    };
    let dtype = section.precision.dtype();
    // In parallel: one thread takes minutes to draw or convert billions of weights.
    let params = specs.par_iter().enumerate().map(|(index, spec)| {
        let tensor = source.load(spec, folder, dtype, device)?;
        Ok(Param::new(spec.name.as_str(), index, tensor))
    });
    let params = params.collect::<Result<Vec<_>, SetupError>>()?;
    let model = config.build(&params, &section.attention.backend())?;
    Ok(LoadedModel { model, config_json, params, specs, source })
}

fn files_error(folder: &Path, source: CheckpointError) -> SetupError {
    SetupError::Files { folder: folder.to_owned(), source: Box::new(source) }
}

/// Opens the weight files and compares their names and shapes with the config.
fn open_files(folder: &Path, specs: &[ParamSpec]) -> Result<WeightFiles, SetupError> {
    let files = WeightFiles::open(folder).map_err(|source| files_error(folder, source))?;
    let missing: Vec<&ParamSpec> =
        specs.iter().filter(|spec| files.shape(&spec.name).is_none()).collect();
    if let Some(first) = missing.first() {
        return Err(SetupError::MissingTensors {
            folder: folder.to_owned(),
            count: missing.len(),
            total: specs.len(),
            first: first.name.clone(),
        });
    }
    for spec in specs {
        let found = files.shape(&spec.name).unwrap_or_default();
        if found != spec.shape {
            return Err(SetupError::Shape {
                folder: folder.to_owned(),
                name: spec.name.clone(),
                found,
                expected: spec.shape.clone(),
            });
        }
    }
    let known: std::collections::HashSet<&str> =
        specs.iter().map(|spec| spec.name.as_str()).collect();
    let unused: Vec<&str> = files.names().filter(|name| !known.contains(name)).collect();
    // Some checkpoints contain a tied head, which equals the embedding.
    let surprising = unused.iter().filter(|name| **name != "lm_head.weight").count();
    if surprising > 0 {
        tracing::warn!(
            count = surprising,
            first = unused.iter().find(|name| **name != "lm_head.weight"),
            "ignoring tensors of the model folder that this model does not use; checkpoints will not contain them"
        );
    }
    Ok(files)
}

impl Precision {
    /// `config.json` with the dtype of the saved weights.
    pub fn stamp(self, config_json: &serde_json::Value) -> serde_json::Value {
        let mut json = config_json.clone();
        let name = serde_json::Value::from(self.hf_name());
        for key in ["dtype", "torch_dtype"] {
            for pointer in ["", "/text_config", "/vision_config"] {
                let object = json.pointer_mut(pointer).and_then(serde_json::Value::as_object_mut);
                if let Some(value) = object.and_then(|object| object.get_mut(key)) {
                    *value = name.clone();
                }
            }
        }
        json
    }
}
