//! A model folder becomes a model in memory.

use super::config::{AttentionChoice, ModelSection, Precision, Weights};
use crate::checkpoint::{CheckpointError, WeightFiles};
use crate::metrics::{ModelWork, Passes};
use crate::models::init::random_tensor;
use crate::models::{
    Model, ModelConfig, ModelConfigError, ParamSpec, Part, WeightError, param_specs,
};
use crate::optim::{GroupError, Groups, Named};
use crate::tape::{Param, Trainable};
use candle_core::{DType, Device};
use indexmap::IndexMap;
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Why a model folder cannot be trained.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The reference attention has no kernel there.
    #[error("`model.attention: masked` is the reference, and computes on the CPU only")]
    MaskedOnGpu,
    /// `config.json`.
    #[error("model folder `{}` cannot be used", .folder.display())]
    Config {
        /// The folder.
        folder: PathBuf,
        /// What is wrong.
        source: ModelConfigError,
    },
    /// The weight files.
    #[error("model folder `{}` cannot be used", .folder.display())]
    Files {
        /// The folder.
        folder: PathBuf,
        /// What is wrong; boxed, as it is large.
        source: Box<CheckpointError>,
    },
    /// Tensors that `config.json` promises and the files lack.
    #[error("model folder `{}`: {count} of {total} tensors are missing, the first is `{first}`", .folder.display())]
    MissingTensors {
        /// The folder.
        folder: PathBuf,
        /// How many.
        count: usize,
        /// How many there should be.
        total: usize,
        /// One of them.
        first: String,
    },
    /// A tensor of another shape than `config.json` says.
    #[error("model folder `{}`: `{name}` has shape {found:?}, config.json says {expected:?}", .folder.display())]
    Shape {
        /// The folder.
        folder: PathBuf,
        /// Which.
        name: String,
        /// On disk.
        found: Vec<usize>,
        /// By the config.
        expected: Vec<usize>,
    },
    /// `freeze` or `lr_multipliers`.
    #[error(transparent)]
    Groups(#[from] GroupError),
    /// A parameter that the model looked for and nobody listed.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl SetupError {
    /// What to do about it, where its cause does not say.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::MissingTensors { .. } => {
                "`config.json` and the weights are of two models, or a file of weights is missing"
            }
            Self::Shape { .. } => {
                "`config.json` and the weights are of two models: copy both again"
            }
            Self::MaskedOnGpu => "`model.attention: auto`, or `device: cpu`",
            Self::Config { .. }
            | Self::Files { .. }
            | Self::Groups(_)
            | Self::Weights(_)
            | Self::Candle(_) => return None,
        };
        Some(hint.to_owned())
    }
}

/// A model, its parameters, and what its folder says.
pub struct LoadedModel {
    /// The stages.
    pub model: Model,
    /// `config.json`, whole.
    pub config_json: serde_json::Value,
    /// In the compute dtype, in the order of `specs`.
    pub params: Vec<Param>,
    /// Names, shapes and parts.
    pub specs: Vec<ParamSpec>,
    source: WeightSource,
}

/// Where the exact value of a weight can be had again.
enum WeightSource {
    Files(WeightFiles),
    Seed { config: ModelConfig, seed: u64 },
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
                Ok(random_tensor(spec, config, *seed, device)?.to_dtype(dtype)?)
            }
        }
    }
}

impl LoadedModel {
    /// The weight in `f32`, as the folder (or the seed) has it: the start of a master copy.
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
    ) -> Result<Groups, GroupError> {
        let named: Vec<Named<'_>> = self
            .specs
            .iter()
            .map(|spec| Named { name: &spec.name, part: spec.part.name(), rank: spec.shape.len() })
            .collect();
        Groups::new(&named, freeze, lr_multipliers)
    }

    /// Sizes that decide how many operations a step takes.
    pub fn work(&self) -> ModelWork {
        let (text, vision) = (&self.model.config().text, &self.model.config().vision);
        // Matrices that a row is multiplied with: tables that are looked up do not count.
        let matrices = |part: Part| {
            let is_table = |name: &str| {
                name.ends_with("embed_tokens.weight")
                    || name == "lm_head.weight"
                    || name.ends_with("pos_embed.weight")
            };
            let specs = self.specs.iter().filter(|s| s.part == part && s.shape.len() > 1);
            let counted = specs.filter(|spec| !is_table(&spec.name));
            counted.map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>() as f64
        };
        ModelWork {
            text_params: matrices(Part::Llm),
            head_params: (text.vocab_size * text.hidden_size) as f64,
            vision_params: matrices(Part::Vision),
            merger_params: matrices(Part::Merger),
            text_attention: (text.num_hidden_layers * text.num_attention_heads * text.head_dim)
                as f64,
            vision_attention: (vision.depth * vision.hidden_size) as f64,
        }
    }

    /// Operations a weight and row of each part, as far as whole parts are frozen.
    pub fn passes(&self, groups: &Groups) -> Passes {
        let trained = |part: Part| {
            let mut settings = self.specs.iter().zip(groups.iter());
            settings.any(|(spec, setting)| spec.part == part && !setting.frozen)
        };
        let [vision, merger, text] = [Part::Vision, Part::Merger, Part::Llm].map(trained);
        let head_name = self.model.lm_head().name();
        let mut settings = self.specs.iter().zip(groups.iter());
        let head = settings.any(|(spec, setting)| spec.name == head_name && !setting.frozen);
        let passes = |trained: bool, below: bool| match (trained, below) {
            (true, _) => 6.0,
            (false, true) => 4.0,
            (false, false) => 2.0,
        };
        Passes {
            text: passes(text, vision || merger),
            head: passes(head, text || vision || merger),
            vision: passes(vision, false),
            merger: passes(merger, vision),
        }
    }
}

/// Which parameters of `groups` are trained.
pub fn trainable(groups: &Groups) -> Vec<Trainable> {
    let each = |frozen: bool| if frozen { Trainable::Frozen } else { Trainable::Yes };
    groups.iter().map(|setting| each(setting.frozen)).collect()
}

/// Reads `section.path`; random weights come from `seed`.
pub fn load_model(
    section: &ModelSection,
    seed: u64,
    device: &Device,
) -> Result<LoadedModel, SetupError> {
    if section.attention == AttentionChoice::Masked && !device.is_cpu() {
        return Err(SetupError::MaskedOnGpu);
    }
    let folder = section.path.as_path();
    let (config, config_json) = ModelConfig::from_folder(folder)
        .map_err(|source| SetupError::Config { folder: folder.to_owned(), source })?;
    let specs = param_specs(&config);
    let source = match section.weights {
        Weights::Random => WeightSource::Seed { config: config.clone(), seed },
        Weights::Pretrained => WeightSource::Files(open_files(folder, &specs)?),
    };
    let dtype = section.precision.dtype();
    // By all threads: drawing and converting billions of weights takes one of them minutes.
    let params = specs.par_iter().enumerate().map(|(index, spec)| {
        let tensor = source.load(spec, folder, dtype, device)?;
        Ok(Param::new(spec.name.as_str(), index, tensor))
    });
    let params = params.collect::<Result<Vec<_>, SetupError>>()?;
    let model = Model::new(&config, &params, &section.attention.backend())?;
    Ok(LoadedModel { model, config_json, params, specs, source })
}

fn files_error(folder: &Path, source: CheckpointError) -> SetupError {
    SetupError::Files { folder: folder.to_owned(), source: Box::new(source) }
}

/// Opens the weights and holds their names and shapes against the config.
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
    // A tied head that was saved anyway is the embedding again.
    let surprising = unused.iter().filter(|name| **name != "lm_head.weight").count();
    if surprising > 0 {
        tracing::warn!(
            count = surprising,
            first = unused.iter().find(|name| **name != "lm_head.weight"),
            "the model folder has tensors that this model does not use; they will not be in checkpoints"
        );
    }
    Ok(files)
}

impl Precision {
    /// `config.json` with the dtype that the saved weights have.
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
