//! Loads a model folder, and compares settings with the model: experts, and the heads that the
//! ranks of `distributed.sequence` divide.

use super::adapter::{AdapterError, OpenAdapter};
use super::error::{RunError, SetupError};
use super::model_files::{differs_from_copy, files_error, open_files, unused};
use super::new_tokens::{NewRows, NewVocabulary};
use crate::checkpoint::{SavedTensor, WeightFiles};
use crate::config::RunConfig;
use crate::models::{Model, ModelConfig, read_config};
use crate::nn::{DecoderConfig, ParamSpec, TensorNames, random_part};
use crate::ops::{AttentionBackend, Matmul, Nf4, gpu_without_e4m3};
use crate::optim::{GroupError, Named, ParamGroups};
use crate::tape::{Param, Trainable};
use crate::train::{AttentionChoice, BaseContents, MatmulChoice, ModelSection, SavedAs, Weights};
use candle_core::{DType, Device, Tensor};
use indexmap::IndexMap;
use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub struct LoadedModel {
    pub model: Model,
    /// Parameters in the compute dtype, in the order of the specs.
    pub params: Vec<Param>,
    /// The folder.
    pub open: OpenModel,
}

/// A model folder whose weights are not loaded yet.
pub struct OpenModel {
    /// The complete `config.json`.
    pub config_json: Value,
    /// Name, shape and component of each parameter; those of an adapter follow those of the model.
    pub specs: Vec<ParamSpec>,
    pub adapter: Option<OpenAdapter>,
    /// The vocabulary, if it has received tokens.
    pub(super) vocabulary: Option<NewVocabulary>,
    /// Rows of the new tokens, by the index of their parameter.
    new_rows: HashMap<usize, NewRows>,
    config: ModelConfig,
    source: WeightSource,
    folder: PathBuf,
    dtype: DType,
    matrices: MatrixDtype,
    attention: Arc<dyn AttentionBackend>,
    matmul: Matmul,
    /// Weights in NF4 that are needed once more.
    pub(super) quantized: Mutex<HashMap<usize, Nf4>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MatrixDtype {
    Compute,
    /// `bf16` if the files have it, otherwise the compute dtype.
    Stored,
}

/// Fails if `device` is a GPU that does not multiply in the format.
pub(super) fn check_matmul(matmul: MatmulChoice, device: &Device) -> Result<(), SetupError> {
    if matmul != MatmulChoice::Native
        && let Some((major, minor)) = gpu_without_e4m3(device)?
    {
        return Err(SetupError::Fp8OnGpu { major, minor });
    }
    Ok(())
}

/// Fails for the masks of `model.attention: masked` on a GPU.
pub(super) fn check_masks(attention: AttentionChoice, on_gpu: bool) -> Result<(), SetupError> {
    if on_gpu && attention == AttentionChoice::Masked {
        return Err(SetupError::MaskedOnGpu);
    }
    Ok(())
}

/// Source of the exact `f32` weights.
enum WeightSource {
    Files(Arc<WeightFiles>),
    Seed(u64),
}

impl OpenModel {
    /// Opens the model at `section.path`; random weights are drawn from `seed`.
    pub fn open(section: &ModelSection, seed: u64, device: &Device) -> Result<Self, SetupError> {
        check_masks(section.attention, !device.is_cpu())?;
        check_matmul(section.matmul, device)?;
        let folder = section.path.as_path();
        let (mut config, mut config_json) = read_config(folder)
            .map_err(|source| SetupError::Config { folder: folder.to_owned(), source })?;
        let source = match section.weights {
            Weights::Random => WeightSource::Seed(seed),
            Weights::Pretrained => {
                let files;
                (config, files) = open_files(folder, &config)?;
                WeightSource::Files(Arc::new(files))
            }
        };
        let (vocabulary, mut new_rows) = (NewVocabulary::of(section)?, HashMap::new());
        if let Some(vocabulary) = &vocabulary {
            // rows that are drawn at random are drawn with the others
            if let WeightSource::Files(files) = &source {
                new_rows = vocabulary.rows((section, &config.param_specs()), files)?;
            }
            config.text.vocab_size = vocabulary.vocab_size;
            config_json.clone_from(&vocabulary.config_json);
        }
        Ok(Self {
            config_json,
            specs: config.param_specs(),
            adapter: None,
            vocabulary,
            new_rows,
            config,
            source,
            folder: folder.to_owned(),
            dtype: section.precision.dtype(),
            matrices: MatrixDtype::Compute,
            attention: section.attention.backend(),
            matmul: section.matmul.format(),
            quantized: Mutex::default(),
        })
    }

    /// Adds an adapter that `open` makes for the parameters of the model.
    pub fn with_adapter(
        mut self,
        open: impl FnOnce(&[ParamSpec]) -> Result<OpenAdapter, AdapterError>,
    ) -> Result<Self, SetupError> {
        let adapter = open(&self.specs)?;
        self.specs.extend(adapter.specs.iter().cloned());
        self.adapter = Some(adapter);
        Ok(self)
    }

    /// From now on, [`Self::load`] keeps the weights of linear layers, the embedding and the head
    /// in `bf16` if the files have them so. The computation is the same, in `f32`, but memory and
    /// the time to read a weight are halved. For inference on the CPU; ops on a GPU need one dtype.
    #[must_use]
    pub fn with_stored_dtype(mut self, device: &Device) -> Self {
        if device.is_cpu() && self.dtype == DType::F32 && !self.is_quantized() {
            self.matrices = MatrixDtype::Stored;
        }
        self
    }

    /// Dtype of the weight `index` after [`Self::load`].
    fn dtype_of(&self, index: usize) -> DType {
        let spec = &self.specs[index];
        let (WeightSource::Files(files), MatrixDtype::Stored) = (&self.source, self.matrices)
        else {
            return self.dtype;
        };
        let of_folder = |adapter: &OpenAdapter| adapter.is_frozen(index) && !adapter.splits(spec);
        let is_stored = files.dtype(&spec.name) == Some(DType::BF16)
            && self.adapter.as_ref().is_none_or(of_folder);
        if is_stored && spec.is_large_matrix() { DType::BF16 } else { self.dtype }
    }

    /// How checkpoints contain the parameters, in order; `None` for those that they do not contain.
    pub(super) fn saved_as(&self) -> candle_core::Result<Vec<Option<SavedAs>>> {
        let saved = |(index, spec): (usize, &ParamSpec)| {
            if let Some(adapter) = &self.adapter {
                return adapter.saved_as(index, spec, self.dtype);
            }
            let (name, in_f32) = (self.name_in_file(&spec.name), spec.is_saved_in_f32());
            let original = self.original_in_f32(spec).filter(|_| in_f32);
            let pieces = self.pieces_in_file(spec);
            Ok(Some(SavedAs { name, pieces, twin: None, joined: None, in_f32, original }))
        };
        self.specs.iter().enumerate().map(saved).collect()
    }

    /// A weight of the model folder in `f32`, read when it is written.
    fn original_in_f32(&self, spec: &ParamSpec) -> Option<SavedTensor> {
        let WeightSource::Files(files) = &self.source else { return None };
        let (files, of) = (Arc::clone(files), spec.name.clone());
        let make = move || files.load(&of, DType::F32, &Device::Cpu);
        let name = self.name_in_file(&spec.name);
        Some(SavedTensor::made(name, &spec.shape, DType::F32, make))
    }

    /// The tensors of the model folder that the model does not use, as they are stored. The
    /// checkpoints of an adapter do not contain them.
    pub(super) fn kept(&self) -> Vec<SavedTensor> {
        let (WeightSource::Files(files), None) = (&self.source, &self.adapter) else {
            return Vec::new();
        };
        let kept = unused(files, &self.specs).into_iter().filter_map(|name| {
            let (dtype, shape) = (files.dtype(name)?, files.shape(name)?);
            // It is read once now, so that no checkpoint fails because of it.
            if let Err(error) = files.load(name, dtype, &Device::Cpu) {
                tracing::warn!(
                    "checkpoints will not contain a tensor that the model does not use: {error}"
                );
                return None;
            }
            let (files, of) = (Arc::clone(files), name.to_owned());
            let make = move || files.load(&of, dtype, &Device::Cpu);
            Some(SavedTensor::made(self.name_in_file(name), &shape, dtype, make))
        });
        kept.collect()
    }

    fn name_in_file(&self, name: &str) -> String {
        self.config.tensor_names.in_file(name)
    }

    /// [`ParamSpec::pieces`], with their names in the files of a model folder.
    fn pieces_in_file(&self, spec: &ParamSpec) -> Vec<(String, Vec<usize>)> {
        let pieces = spec.pieces().into_iter();
        pieces.map(|(name, shape)| (self.name_in_file(&name), shape)).collect()
    }

    /// How weight files name the tensors.
    pub(super) fn tensor_names(&self) -> TensorNames {
        self.config.tensor_names
    }

    pub(super) fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(super) fn text(&self) -> &DecoderConfig {
        &self.config.text
    }

    pub fn load(self, device: &Device) -> Result<LoadedModel, SetupError> {
        let this = self.split_weights()?;
        // In parallel: one thread takes minutes to draw or convert billions of weights.
        let params = this.specs.par_iter().enumerate().map(|(index, spec)| {
            let all = 0..spec.shape.iter().product();
            let tensor = match &this.adapter {
                Some(adapter) if adapter.rounds(index, spec) => this.rounded(index, device)?,
                _ => this.load_part(index, all, this.dtype_of(index), device)?,
            };
            Ok(Param::new(spec.name.as_str(), index, tensor.reshape(spec.shape.as_slice())?))
        });
        let params = params.collect::<Result<Vec<_>, SetupError>>()?;
        this.with_params(params)
    }

    /// Builds the model with these parameters.
    pub(super) fn with_params(self, params: Vec<Param>) -> Result<LoadedModel, SetupError> {
        let adapters = self.adapter.as_ref().map(|adapter| adapter.adapters(&self.specs));
        let model = self.config.build(&params, &self.attention, adapters.as_ref(), self.matmul)?;
        Ok(LoadedModel { model, params, open: self })
    }

    /// Builds the model with these parameters and another attention.
    pub(super) fn build(
        &self,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
    ) -> Result<Model, SetupError> {
        let adapters = self.adapter.as_ref().map(|adapter| adapter.adapters(&self.specs));
        Ok(self.config.build(params, attention, adapters.as_ref(), self.matmul)?)
    }

    /// As [`Self::load_part`], with the weights of the model folder.
    pub(super) fn original_part(
        &self,
        index: usize,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, SetupError> {
        let adapter = self.adapter.as_ref();
        let part = adapter.map(|adapter| adapter.load_part(self, index, &elements, dtype, device));
        if let Some(part) = part.transpose()?.flatten() {
            return Ok(part);
        }
        let stored = |elements| self.stored_part(index, elements, dtype, device);
        match self.new_rows.get(&index) {
            Some(rows) => rows.part(&elements, (dtype, device), stored),
            None => stored(elements),
        }
    }

    /// As [`Self::original_part`], without new tokens and adapters.
    fn stored_part(
        &self,
        index: usize,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, SetupError> {
        let spec = &self.specs[index];
        match &self.source {
            WeightSource::Files(files) => files
                .load_part(&spec.name, elements, dtype, device)
                .map_err(|source| files_error(&self.folder, source)),
            WeightSource::Seed(seed) => {
                let range = self.config.text.initializer_range;
                Ok(random_part(spec, range, *seed, elements, device)?.to_dtype(dtype)?)
            }
        }
    }

    /// The index of the parameter `name`, if it has rows of new tokens.
    pub(super) fn with_new_rows(&self, name: &str) -> Option<usize> {
        self.new_rows.keys().copied().find(|index| self.specs[*index].name == name)
    }

    /// The parameter `index`, which has rows of new tokens.
    pub(super) fn grown(&self, index: usize, dtype: DType) -> candle_core::Result<Tensor> {
        let shape = self.specs[index].shape.as_slice();
        let part = self.original_part(index, 0..shape.iter().product(), dtype, &Device::Cpu);
        part.map_err(candle_core::Error::wrap)?.reshape(shape)
    }

    /// As [`differs_from_copy`], for this model.
    pub(super) fn differs_from_copy(&self, adapter: &Path) -> Option<&'static str> {
        let grown = self.vocabulary.as_ref().map(|of| of.of_encoder().tokenizer);
        differs_from_copy(adapter, &self.folder, grown)
    }

    /// Whether the weight `index` is drawn at random. A part of it takes as long as all elements
    /// before its end.
    pub(super) fn is_drawn(&self, index: usize) -> bool {
        let is_drawn = |adapter: &OpenAdapter| adapter.is_drawn(index);
        matches!(self.source, WeightSource::Seed(_)) || self.adapter.as_ref().is_some_and(is_drawn)
    }

    pub(super) fn is_quantized(&self) -> bool {
        matches!(&self.source, WeightSource::Files(files) if files.is_quantized())
    }

    /// The weight `index` in NF4, if it is stored so.
    pub(super) fn stored_nf4(&self, index: usize) -> Result<Option<Nf4>, SetupError> {
        match &self.source {
            WeightSource::Files(files) => files
                .nf4(&self.specs[index].name)
                .map_err(|source| files_error(&self.folder, source)),
            WeightSource::Seed(_) => Ok(None),
        }
    }

    /// Elements of the flat weight in `f32`: the initial value of a master weight.
    pub fn master(
        &self,
        param: &Param,
        elements: Range<usize>,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let loaded = self.load_part(param.index(), elements, DType::F32, device);
        loaded.map_err(candle_core::Error::wrap)
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Digest of names and shapes, and of some values of each tensor, without the rows of new tokens.
    /// Ranks that see different files have different digests.
    pub(super) fn digest(&self) -> Result<String, SetupError> {
        const VALUES: usize = 16;
        let mut digest = Sha256::new();
        for (index, spec) in self.specs.iter().enumerate() {
            let grown = self.new_rows.get(&index);
            let shape = grown.map_or(&spec.shape, |rows| &rows.stored);
            digest.update(format!("{} {shape:?} ", spec.name));
            if let WeightSource::Seed(seed) = &self.source {
                digest.update(seed.to_le_bytes());
                continue;
            }
            if self.adapter.as_ref().is_some_and(|adapter| adapter.is_drawn(index)) {
                continue;
            }
            let len: usize = shape.iter().product();
            let count = VALUES.min(len);
            for start in [0, (len - count) / 2, len - count] {
                let part = start..start + count;
                let values = match grown {
                    Some(_) => self.stored_part(index, part, DType::F32, &Device::Cpu)?,
                    None => self.load_part(index, part, DType::F32, &Device::Cpu)?,
                };
                for value in values.to_vec1::<f32>()? {
                    digest.update(value.to_le_bytes());
                }
            }
        }
        Ok(format!("{:x}", digest.finalize()))
    }

    /// Digests of `config.json` and of every byte of the weights. If the files are those of
    /// `before`, the weights are not read again.
    pub(super) fn contents(
        &self,
        before: Option<&BaseContents>,
    ) -> Result<BaseContents, SetupError> {
        let config = format!("{:x}", Sha256::digest(sorted(&self.config_json).to_string()));
        let files = match &self.source {
            WeightSource::Files(files) => files,
            WeightSource::Seed(seed) => {
                let (weights, stamps) = (format!("seed {seed}"), String::new());
                return Ok(BaseContents { config, weights, stamps });
            }
        };
        let stamps = files.stamps().map_err(|source| files_error(&self.folder, source))?;
        let known = before.filter(|before| before.stamps == stamps);
        let weights = known.map_or_else(|| files.digest(), |known| known.weights.clone());
        Ok(BaseContents { config, weights, stamps })
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
        match &self.adapter {
            None => ParamGroups::new(&named, freeze, lr_multipliers),
            Some(adapter) => {
                let frozen = (0..named.len()).map(|index| adapter.is_frozen(index)).collect();
                ParamGroups::with_frozen(&named, frozen, lr_multipliers)
            }
        }
    }
}

/// `config.json` with sorted keys, without the fields that only name where it is from and the dtype
/// of the files.
fn sorted(json: &Value) -> Value {
    const NAMES: [&str; 4] = ["_name_or_path", "dtype", "torch_dtype", "transformers_version"];
    match json {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, _)| !NAMES.contains(&name.as_str()));
            let fields: BTreeMap<_, _> = fields.map(|(name, of)| (name, sorted(of))).collect();
            fields.into_iter().map(|(name, of)| (name.clone(), of)).collect()
        }
        Value::Array(values) => values.iter().map(sorted).collect(),
        other => other.clone(),
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
    OpenModel::open(section, seed, device)?.load(device)
}

/// Fails if the config has an auxiliary loss and the model has no experts.
pub(super) fn check_experts(config: &RunConfig, open: &OpenModel) -> Result<(), SetupError> {
    let aux_loss = config.model.aux_loss;
    if aux_loss != 0.0 && open.text().moe().is_none() {
        return Err(SetupError::NoExperts { aux_loss });
    }
    Ok(())
}

/// Checks that the micro-batches of a step can be divided evenly among `world` ranks.
pub(crate) fn check_world(config: &RunConfig, world: usize) -> Result<(), RunError> {
    let sequence = config.distributed.sequence.get();
    if !world.is_multiple_of(sequence) {
        return Err(RunError::SequenceWorld { sequence, world });
    }
    let slots = config.train.gradient_accumulation_steps.get();
    let groups = world / sequence;
    if slots.is_multiple_of(groups) {
        return Ok(());
    }
    let fits = |groups: &usize| slots.is_multiple_of(*groups);
    let below = (1..groups).rev().find(fits).map(|groups| groups * sequence);
    let above = (groups + 1..=slots).find(fits).map(|groups| groups * sequence);
    Err(RunError::World { world, sequence, slots, below, above })
}

/// Checks that `sequence` ranks can share the heads of the decoder's attention and linear attention
/// evenly.
pub(super) fn check_heads(open: &OpenModel, sequence: usize) -> Result<(), RunError> {
    let text = open.text();
    // The numbers of query heads and of value heads are multiples of these.
    let mut heads = vec![(text.num_key_value_heads, "key-value heads")];
    if let Some(linear) = text.linear_attention() {
        heads.push((linear.num_key_heads, "key heads of linear attention"));
    }
    let fits = |size: &usize| heads.iter().all(|(heads, _)| heads.is_multiple_of(*size));
    if fits(&sequence) {
        return Ok(());
    }
    let fitting = (1..=heads[0].0).filter(fits).collect();
    let heads = heads.iter().map(|(number, name)| format!("{number} {name}")).collect();
    Err(RunError::SequenceHeads { sequence, heads, fitting })
}
