//! The adapter of a run: its layers, the source of its values, and its sum with the weights of its
//! model.

mod base;
mod error;
mod peft;
mod split;
mod targets;

pub(crate) use base::{load_for_run, load_to_generate, load_with_adapter};
pub(super) use base::{open_run_model, read_adapter, trained_on};
pub use error::AdapterError;
pub(super) use peft::{Exchanged, exchange_experts};

use self::split::{Half, Split, load_half};
use super::export::WeightChange;
use super::load_model::OpenModel;
use super::model_files::{HEAD, is_tied};
use crate::checkpoint::{CheckpointError, PeftConfig, WeightFiles};
use crate::nn::{
    AdapterDraw, AdapterModule, AdapterTensor, Adapters, ParamSpec, TensorNames, WeightError,
    peft_name, random_adapter_part,
};
use crate::ops::ExpertLayout;
use crate::train::{AdapterConfig, AdapterInit, AdapterKind, Quantize, SavedAs};
use candle_core::{D, DType, Device, Tensor};
use peft::ExpertFactors;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An adapter whose values are not loaded yet.
pub struct OpenAdapter {
    /// Layers, ranks and factors.
    pub modules: Vec<AdapterModule>,
    /// Its parameters, which follow those of the model.
    pub specs: Vec<ParamSpec>,
    /// `adapter_config.json` of checkpoints, without the model's name.
    pub peft: PeftConfig,
    /// Indexes of the parameters of the model that are trained as well.
    pub also_trained: Vec<usize>,
    source: Source,
    num_base: usize,
    dropout: f64,
    seed: u64,
    quantize: Quantize,
    /// The parts of the weights that it starts from.
    split: Option<Split>,
}

enum Source {
    New(AdapterDraw),
    /// The parts of the weights in `split`.
    Weights,
    Files {
        folder: PathBuf,
        files: Box<WeightFiles>,
        exchanged: Exchanged,
    },
}

impl OpenAdapter {
    /// The adapter of a config for a model with these parameters. Its values are drawn from `seed`,
    /// unless the config has another adapter to start from.
    pub fn new(
        config: &AdapterConfig,
        specs: &[ParamSpec],
        seed: u64,
    ) -> std::result::Result<Self, AdapterError> {
        if let Some(folder) = &config.start_from {
            let mut started = Self::resumed(config, folder, specs, seed)?;
            started.check_config(config, specs)?;
            if let Some(of) = started.modules.iter().find(|module| module.experts.is_some()) {
                targets::check_experts(config, &of.weight)?;
            }
            started.peft.lora_dropout = config.dropout;
            return Ok(started);
        }
        let modules = targets::modules(config, specs)?;
        let also_trained = targets::also_trained(config, specs, &modules)?;
        let source = match config.init {
            AdapterInit::Default => Source::New(AdapterDraw::Uniform),
            AdapterInit::Gaussian => Source::New(AdapterDraw::Normal),
            AdapterInit::Pissa | AdapterInit::Olora => Source::Weights,
        };
        let split = Split::of(config);
        if split.is_some() {
            Split::check(&modules, specs)?;
        }
        let peft = peft::config(config, &modules, &also_trained, specs);
        Ok(Self {
            specs: targets::adapter_specs(&modules, specs),
            modules,
            peft,
            also_trained,
            source,
            num_base: specs.len(),
            dropout: config.dropout,
            seed,
            quantize: config.quantize,
            split,
        })
    }

    /// The adapter in a folder in PEFT's layout, without dropout.
    pub fn read(folder: &Path, specs: &[ParamSpec]) -> std::result::Result<Self, AdapterError> {
        let (mut peft, files) = peft::open(folder, specs)?;
        // PEFT stores the setting for every model
        peft.ensure_weight_tying &= is_tied(specs);
        let modules = peft::modules(folder, &peft, &files, specs, TensorNames::Modules)?;
        let adapter_specs = targets::adapter_specs(&modules, specs);
        let exchanged = Exchanged::find(&files, &modules, &adapter_specs);
        let also_trained = peft::check(
            folder,
            (&files, &exchanged, peft.ensure_weight_tying),
            &adapter_specs,
            specs,
        )?;
        Ok(Self {
            specs: adapter_specs,
            modules,
            peft,
            also_trained,
            source: Source::Files { folder: folder.to_owned(), files: Box::new(files), exchanged },
            num_base: specs.len(),
            dropout: 0.0,
            seed: 0,
            quantize: Quantize::None,
            split: None,
        })
    }

    /// The adapter of a checkpoint, with the other settings of the config.
    pub(super) fn resumed(
        config: &AdapterConfig,
        folder: &Path,
        specs: &[ParamSpec],
        seed: u64,
    ) -> std::result::Result<Self, AdapterError> {
        let mut open = Self::read(folder, specs)?;
        (open.dropout, open.seed, open.quantize) = (config.dropout, seed, config.quantize);
        open.halve(config, specs)?;
        Ok(open)
    }

    /// Compares the config with the adapter that training starts from: values that are not the
    /// defaults must be equal.
    fn check_config(
        &self,
        config: &AdapterConfig,
        specs: &[ParamSpec],
    ) -> std::result::Result<(), AdapterError> {
        let default = AdapterConfig::default();
        let differs = |is_default: bool, key, found: String, expected: String| {
            if is_default || found == expected {
                return Ok(());
            }
            Err(AdapterError::StartFrom { key, found, expected })
        };
        let PeftConfig { r, lora_alpha, use_dora, use_rslora, .. } = &self.peft;
        let kind = if *use_dora { AdapterKind::Dora } else { AdapterKind::Lora };
        let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        differs(config.kind == default.kind, "adapter.kind", name(&config.kind), name(&kind))?;
        differs(
            config.rank == default.rank,
            "adapter.rank",
            config.rank.to_string(),
            r.to_string(),
        )?;
        let alpha = (config.alpha.to_string(), lora_alpha.to_string());
        differs(config.alpha == default.alpha, "adapter.alpha", alpha.0, alpha.1)?;
        let rslora = (config.rslora.to_string(), use_rslora.to_string());
        differs(!config.rslora, "adapter.rslora", rslora.0, rslora.1)?;
        let is_default = config.target == default.target && config.parts == default.parts;
        let layers = |modules: &[AdapterModule]| {
            let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
            format!("{} layers: {}", names.len(), names.join(", "))
        };
        let chosen = if is_default { Vec::new() } else { targets::modules(config, specs)? };
        differs(is_default, "adapter.target", layers(&chosen), layers(&self.modules))?;
        let also = |indexes: &[usize]| {
            let names = indexes.iter().map(|index| specs[*index].name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        let also_trained = targets::also_trained(config, specs, &self.modules)?;
        let is_default = config.train_also.is_empty();
        differs(is_default, "adapter.train_also", also(&also_trained), also(&self.also_trained))?;
        let is_default = config.init == default.init;
        differs(is_default, "adapter.init", name(&config.init), "trained values".to_owned())
    }

    /// How the model computes with the adapter; `base` are the model's parameters.
    pub(super) fn adapters(&self, base: &[ParamSpec]) -> Adapters {
        Adapters::new(&self.modules, base, self.dropout, self.seed)
    }

    /// Whether the parameter `index` of the model with its adapter keeps its value.
    pub(super) fn is_frozen(&self, index: usize) -> bool {
        index < self.num_base && self.also_trained.binary_search(&index).is_err()
    }

    /// Whether the values of the parameter `index` follow from the seed and the model.
    pub(super) fn is_drawn(&self, index: usize) -> bool {
        index >= self.num_base && !matches!(self.source, Source::Files { .. })
    }

    /// The name of the parameter `index` in checkpoints; `None` if they do not contain it.
    fn saved_name(&self, index: usize, spec: &ParamSpec) -> Option<String> {
        if index >= self.num_base {
            return Some(spec.name.clone());
        }
        (!self.is_frozen(index)).then(|| peft_name(&spec.name))
    }

    /// How checkpoints contain the parameter `index`; `None` if they do not.
    pub(super) fn saved_as(
        &self,
        index: usize,
        spec: &ParamSpec,
        dtype: DType,
    ) -> candle_core::Result<Option<SavedAs>> {
        let Some(name) = self.saved_name(index, spec) else { return Ok(None) };
        let joined = if index < self.num_base { None } else { self.joined(spec, dtype)? };
        let pieces = Vec::new(); // PEFT has the parameters of the modules
        let is_tied = self.peft.ensure_weight_tying && spec.name.ends_with("embed_tokens.weight");
        let twin = is_tied.then(|| peft_name(HEAD));
        Ok(Some(SavedAs { name, pieces, twin, joined, in_f32: false, original: None }))
    }

    /// Whether parameter `index` was quantised to NF4.
    pub(super) fn rounds(&self, index: usize, spec: &ParamSpec) -> bool {
        let is_of_base = index < self.num_base && spec.can_be_stored_elsewhere();
        self.quantize == Quantize::Nf4 && is_of_base && self.is_frozen(index)
    }

    /// Whether the adapter starts from a part of the weight `spec`.
    pub(super) fn splits(&self, spec: &ParamSpec) -> bool {
        let of = self.split.as_ref().zip(spec.linear_layer());
        of.is_some_and(|(split, layer)| split.values(AdapterTensor::A, layer).is_some())
    }

    /// Subtracts this part from `values`, the `f32` elements from `start` of the flat weight.
    fn subtract_start(
        &self,
        spec: &ParamSpec,
        start: usize,
        values: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let mut rest = values.to_vec1()?;
        if let Some((split, layer)) = self.split.as_ref().zip(spec.linear_layer()) {
            split.subtract(layer, start, &mut rest, spec.shape[1]);
        }
        Tensor::from_vec(rest, values.shape(), &Device::Cpu)
    }

    /// Elements of the flat parameter `index` of the model with its adapter; `None` if the model
    /// has them.
    pub(super) fn load_part(
        &self,
        model: &OpenModel,
        index: usize,
        elements: &Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> std::result::Result<Option<Tensor>, super::SetupError> {
        let spec = &model.specs[index];
        match &self.source {
            Source::Files { folder, files, exchanged } => {
                let Some(name) = self.saved_name(index, spec) else { return Ok(None) };
                let is_matrix = index >= self.num_base && spec.shape.len() == 2;
                let part = if is_matrix && self.split.is_some() {
                    load_half(files, spec, Half::Trained, elements, (dtype, device))
                } else {
                    exchanged.load_part(files, &name, elements.clone(), dtype, device)
                };
                Ok(Some(part.map_err(|source| {
                    let folder = folder.clone();
                    AdapterError::Files { folder, source: Box::new(source) }
                })?))
            }
            Source::New(_) | Source::Weights if index < self.num_base => Ok(None),
            Source::Weights => {
                let of = AdapterTensor::of(&spec.name);
                let start = self.split.as_ref().zip(of);
                let start = start.and_then(|(split, (tensor, layer))| split.values(tensor, layer));
                let part = match start {
                    Some(values) => {
                        Tensor::from_slice(&values[elements.clone()], elements.len(), device)?
                    }
                    None => {
                        self.new_part(model, AdapterDraw::Uniform, spec, elements.clone(), device)?
                    }
                };
                Ok(Some(part.to_dtype(dtype)?))
            }
            Source::New(draw) => {
                let part = self.new_part(model, *draw, spec, elements.clone(), device)?;
                Ok(Some(part.to_dtype(dtype)?))
            }
        }
    }

    /// The initial values of a tensor.
    fn new_part(
        &self,
        model: &OpenModel,
        draw: AdapterDraw,
        spec: &ParamSpec,
        elements: Range<usize>,
        device: &Device,
    ) -> std::result::Result<Tensor, super::SetupError> {
        let zeros = || Tensor::zeros(elements.len(), DType::F32, device);
        match (AdapterTensor::of(&spec.name), &spec.shape[..]) {
            (Some((AdapterTensor::A, module)), [ranks, inputs]) => {
                let module = self.modules.iter().find(|of| of.name == module);
                let rank = module.map_or(*ranks, |of| of.rank); // of each expert
                let of = (spec.name.as_str(), [rank, *inputs]);
                Ok(random_adapter_part(draw, of, self.seed, elements, device)?)
            }
            (Some((AdapterTensor::Magnitude, module)), _) => {
                let weight = format!("{module}.weight");
                let position = model.specs.iter().position(|of| of.name == weight);
                let index = position.ok_or(WeightError::Missing { name: weight })?;
                let columns = model.specs[index].shape[1];
                let rows = elements.start * columns..elements.end * columns;
                // the norms of the weights that the model computes with
                let rows = match self.quantize {
                    Quantize::None => model.original_part(index, rows, model.dtype(), device)?,
                    Quantize::Nf4 => {
                        let rows = model.nf4_again(index)?.part(rows)?.to_dtype(model.dtype())?;
                        rows.to_device(device)?
                    }
                };
                let rows = rows.to_dtype(DType::F32)?.reshape((elements.len(), columns))?;
                Ok(norms(&rows)?)
            }
            _ => Ok(zeros()?),
        }
    }
}

fn norms(rows: &Tensor) -> candle_core::Result<Tensor> {
    rows.sqr()?.sum(D::Minus1)?.sqrt()
}

impl OpenAdapter {
    pub(super) fn change(&self, name: &str) -> Option<WeightChange> {
        if self.module(name).is_some() {
            return Some(WeightChange::Merge);
        }
        let Source::Files { files, .. } = &self.source else { return None };
        files.shape(&peft_name(name)).map(|_| WeightChange::Replace)
    }

    fn module(&self, weight: &str) -> Option<&AdapterModule> {
        self.modules.iter().find(|module| module.weight == weight)
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor, CheckpointError> {
        let Source::Files { files, exchanged, .. } = &self.source else {
            return Err(CheckpointError::NoTensor {
                place: "memory".into(),
                tensor: name.to_owned(),
            });
        };
        exchanged.load(files, name, dtype)
    }

    /// The value of a parameter of the model that was trained besides the adapter.
    pub(super) fn replacement(&self, name: &str, dtype: DType) -> Result<Tensor, CheckpointError> {
        self.load(&peft_name(name), dtype)
    }

    /// `W + scale B A`, with the row norms of DoRA's magnitude, in `f32`. `weight` is `W [M, K]`, or
    /// has such a matrix for each expert.
    pub(super) fn merged(&self, name: &str, weight: &Tensor) -> Result<Tensor, CheckpointError> {
        let Some(module) = self.module(name) else { return Ok(weight.clone()) };
        let fault = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        if let Some(layout) = module.experts {
            return self.factors(module, layout)?.add_to(weight).map_err(fault);
        }
        let tensor = |tensor: AdapterTensor| self.load(&tensor.name(&module.name), DType::F32);
        let (a, b) = (tensor(AdapterTensor::A)?, tensor(AdapterTensor::B)?);
        let sum = || weight + (b.matmul(&a)? * module.scale)?;
        let sum = sum().map_err(fault)?;
        if !module.is_dora {
            return Ok(sum);
        }
        let magnitude = tensor(AdapterTensor::Magnitude)?;
        let scaled =
            || sum.broadcast_mul(&(magnitude / norms(&sum)?.maximum(1e-15f32)?)?.unsqueeze(1)?);
        scaled().map_err(fault)
    }

    /// The same for `rows`, rows of the matrix of one expert of the weight `name`. `start` is the
    /// position of their first element in the weight.
    pub(super) fn merged_rows(
        &self,
        name: &str,
        start: usize,
        rows: &Tensor,
    ) -> Result<Tensor, CheckpointError> {
        let Some((module, layout)) = self.module(name).and_then(|of| Some((of, of.experts?)))
        else {
            return Ok(rows.clone());
        };
        let factors = self.factors(module, layout)?;
        let sum = || {
            let (count, columns) = rows.dims2()?;
            let (expert, first) = factors.place(start / columns)?;
            rows + factors.rows(expert, first..first + count)?
        };
        sum().map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    fn factors(
        &self,
        module: &AdapterModule,
        layout: ExpertLayout,
    ) -> Result<ExpertFactors, CheckpointError> {
        let tensor = |of: AdapterTensor| self.load(&of.name(&module.name), DType::F32);
        let [a, b] = [tensor(AdapterTensor::A)?, tensor(AdapterTensor::B)?];
        Ok(ExpertFactors { a, b, rank: module.rank, scale: module.scale, layout })
    }
}
