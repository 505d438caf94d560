//! Reads and describes adapters in PEFT's layout. PEFT has one `A [E r, K]` and one `B [M, E r]`
//! for all experts of a parameter.
//!
//! PEFT takes the last dim of a parameter as its inputs. That is so with transformers 5, where a
//! parameter is `[E, M, K]`. With transformers 4.57, the experts of Qwen3-VL are `[E, K, M]`, so an
//! adapter of them has the sides exchanged: its `A` has the values of each `B_e^T`, and its `B`
//! those of each `A_e^T`. Both are read.

use super::super::model_files::{HEAD, is_tied, same_values};
use super::error::AdapterError;
use super::targets::{layers, module_name, module_of, target_modules, target_parameters};
use crate::checkpoint::{CheckpointError, PeftConfig, WeightFiles, adapter_weights};
use crate::nn::{
    AdapterModule, AdapterTensor, ParamSpec, TensorNames, peft_name, peft_name_of_file,
};
use crate::ops::ExpertLayout;
use crate::train::{AdapterConfig, AdapterInit, AdapterKind};
use candle_core::{DType, Device, Tensor};
use indexmap::IndexMap;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The `adapter_config.json` of a new adapter.
pub(super) fn config(
    config: &AdapterConfig,
    modules: &[AdapterModule],
    also_trained: &[usize],
    specs: &[ParamSpec],
) -> PeftConfig {
    let mut saved: Vec<String> =
        also_trained.iter().map(|index| module_of(&specs[*index].name).to_owned()).collect();
    saved.dedup();
    let ensure_weight_tying =
        is_tied(specs) && saved.iter().any(|name| name.ends_with("embed_tokens"));
    // Checkpoints have twice the rank, with the same factor.
    let joined = config.init.is_part();
    let alpha = match (joined, config.rslora) {
        (false, _) => 1.0,
        (true, false) => 2.0,
        (true, true) => std::f64::consts::SQRT_2,
    };
    PeftConfig {
        peft_type: "LORA".to_owned(),
        task_type: Some("CAUSAL_LM".to_owned()),
        base_model_name_or_path: None,
        r: config.rank.get() * if joined { 2 } else { 1 },
        lora_alpha: config.alpha * alpha,
        lora_dropout: config.dropout,
        target_modules: target_modules(modules, specs).into(),
        target_parameters: Some(target_parameters(modules, specs))
            .filter(|parameters| !parameters.is_empty()),
        modules_to_save: Some(saved).filter(|saved| !saved.is_empty()),
        ensure_weight_tying,
        bias: "none".to_owned(),
        use_dora: config.kind == AdapterKind::Dora,
        use_rslora: config.rslora,
        init_lora_weights: match config.init {
            AdapterInit::Gaussian => "gaussian".into(),
            _ => Value::Bool(true),
        },
        inference_mode: true,
        fan_in_fan_out: false,
        rank_pattern: IndexMap::new(),
        alpha_pattern: IndexMap::new(),
        other: Map::new(),
    }
}

/// Opens the files of a folder of an adapter of a model with the parameters `specs`. transformers
/// before 4.52 named the modules of vision-language models in the flat spelling; such names become
/// those of the modules.
pub(super) fn open(
    folder: &Path,
    specs: &[ParamSpec],
) -> Result<(PeftConfig, WeightFiles), AdapterError> {
    let error = of_files(folder);
    let mut peft = PeftConfig::read(folder).map_err(&error)?;
    if let Some(field) = peft.unsupported() {
        return Err(unsupported(folder)(field));
    }
    let files = adapter_weights(folder).map_err(&error)?;
    let has_modules = specs.iter().any(|spec| spec.name.starts_with("model.visual."));
    let names = if has_modules { TensorNames::Flat } else { TensorNames::Modules };
    if files.names().all(|name| peft_name_of_file(names, name) == name) {
        return Ok((peft, files));
    }
    let files = files.renamed(|name| peft_name_of_file(names, name)).map_err(&error)?;
    let layers = modules(folder, &peft, &files, specs, names)?;
    let module = |name: &String| names.of_file(name.trim_start_matches('^'));
    peft.target_modules = target_modules(&layers, specs).into();
    // The patterns match the older names.
    let patterns = peft.patterns().map_err(unsupported(folder))?;
    (peft.rank_pattern, peft.alpha_pattern) = Default::default();
    for layer in layers {
        let name = if layer.experts.is_some() { layer.weight } else { layer.name };
        let (rank, alpha) = patterns.of(&names.in_file(&name));
        if rank != peft.r {
            peft.rank_pattern.insert(name.clone(), rank);
        }
        if alpha != peft.lora_alpha {
            peft.alpha_pattern.insert(name, alpha);
        }
    }
    peft.modules_to_save = peft.modules_to_save.map(|saved| saved.iter().map(module).collect());
    Ok((peft, files))
}

fn of_files(folder: &Path) -> impl Fn(CheckpointError) -> AdapterError {
    |source| AdapterError::Files { folder: folder.to_owned(), source: Box::new(source) }
}

fn unsupported(folder: &Path) -> impl Fn((String, String)) -> AdapterError {
    move |(field, found)| AdapterError::Unsupported { folder: folder.to_owned(), field, found }
}

/// The modules that have tensors in the file. `names` are those of the modules in
/// `adapter_config.json`.
pub(super) fn modules(
    folder: &Path,
    peft: &PeftConfig,
    files: &WeightFiles,
    specs: &[ParamSpec],
    names: TensorNames,
) -> Result<Vec<AdapterModule>, AdapterError> {
    let patterns = peft.patterns().map_err(unsupported(folder))?;
    let mut ranks = BTreeMap::new();
    for name in files.names() {
        if let Some((AdapterTensor::A, module)) = AdapterTensor::of(name) {
            let shape = files.shape(name).unwrap_or_default();
            ranks.insert(module.to_owned(), shape.first().copied().unwrap_or(0));
        }
    }
    let is_adapted = |spec: &&ParamSpec| !spec.is_experts() || peft.has_parameter(&spec.name);
    let adapted: Vec<&ParamSpec> =
        layers(specs).map(|layer| layer.weight).filter(is_adapted).collect();
    let mut modules = Vec::new();
    for layer in layers(specs) {
        let name = module_name(layer.weight, &adapted);
        let experts = layer.weight.expert_sizes().map_or(1, |[experts, ..]| experts);
        let is_whole = |ranks: &usize| *ranks > 0 && ranks.is_multiple_of(experts);
        let own = adapted.iter().any(|spec| spec.name == layer.weight.name);
        let found = if own { ranks.remove(&name) } else { None };
        let Some(rank) = found.filter(is_whole).map(|ranks| ranks / experts) else { continue };
        let of_config = names.in_file(layer.name);
        let (expected, alpha) = patterns.of(&of_config);
        let is_named = layer.weight.is_experts() || peft.has_module(&of_config);
        let problem = if !is_named {
            "belongs to a layer that `target_modules` of adapter_config.json does not name, or that \
             its `exclude_modules` or `layers_to_transform` leaves out"
                .to_owned()
        } else if rank != expected {
            format!(
                "has rank {rank}, but `r` and `rank_pattern` of adapter_config.json give {expected}"
            )
        } else {
            modules.push(AdapterModule {
                name,
                weight: layer.weight.name.clone(),
                experts: layer.weight.expert_layout(),
                rank,
                scale: peft.scale(alpha, rank),
                is_dora: peft.use_dora && !layer.weight.is_experts(),
            });
            continue;
        };
        let (folder, tensor) = (folder.to_owned(), AdapterTensor::A.name(&name));
        return Err(AdapterError::Tensor { folder, tensor, problem });
    }
    let unknown = ranks.into_keys().next();
    match unknown {
        None => Ok(modules),
        Some(module) => Err(AdapterError::Tensor {
            folder: folder.to_owned(),
            tensor: AdapterTensor::A.name(&module),
            problem: "belongs to a layer that the model does not have".to_owned(),
        }),
    }
}

/// Checks names and shapes of all tensors; `ties`: whether a head that is the embedding stays so.
/// Returns the parameters of the model that the file has.
pub(super) fn check(
    folder: &Path,
    (files, exchanged, ties): (&WeightFiles, &Exchanged, bool),
    adapter: &[ParamSpec],
    base: &[ParamSpec],
) -> Result<Vec<usize>, AdapterError> {
    let wrong = |tensor: &str, problem: String| {
        Err(AdapterError::Tensor { folder: folder.to_owned(), tensor: tensor.to_owned(), problem })
    };
    let mut expected: BTreeMap<String, (Vec<usize>, Option<usize>)> = BTreeMap::new();
    for (index, spec) in base.iter().enumerate() {
        expected.insert(peft_name(&spec.name), (spec.shape.clone(), Some(index)));
    }
    for spec in adapter {
        expected.insert(spec.name.clone(), (exchanged.shape(files, spec), None));
        if files.shape(&spec.name).is_none() {
            return wrong(&spec.name, "is missing".to_owned());
        }
    }
    let mut also_trained = Vec::new();
    // PEFT writes an embedding that is also the head under both names
    let (is_tied, head) = (is_tied(base), peft_name(HEAD));
    let embedding = base.iter().find(|spec| is_tied && spec.name.contains("embed_tokens"));
    for name in files.names() {
        if let Some(embedding) = embedding.filter(|_| ties && *name == *head) {
            if same_values(files, [name, &peft_name(&embedding.name)]).map_err(of_files(folder))? {
                continue;
            }
            return wrong(name, "differs from the embedding, with which it is tied".to_owned());
        }
        let Some((shape, index)) = expected.get(name) else {
            return wrong(name, "does not belong to the model".to_owned());
        };
        let found = files.shape(name).unwrap_or_default();
        if found != *shape {
            return wrong(name, format!("has shape {found:?}, expected {shape:?} for this model"));
        }
        if index.is_some_and(|index| base[index].is_experts()) {
            return wrong(name, "has experts, which are not read from an adapter".to_owned());
        }
        if is_tied && !ties && name.contains("embed_tokens") {
            let problem = "is the embedding, which is also the head of this model, and \
                           `ensure_weight_tying` in adapter_config.json is not set";
            return wrong(name, problem.to_owned());
        }
        also_trained.extend(*index);
    }
    also_trained.sort_unstable();
    Ok(also_trained)
}

/// The tensors of a file whose sides are exchanged.
#[derive(Debug, Default)]
pub(in crate::run) struct Exchanged {
    /// Name of the tensor with the values, and rank, by name.
    tensors: BTreeMap<String, (String, usize)>,
}

impl Exchanged {
    /// Finds them by their shapes; `adapter` has the tensors of `modules`. If a parameter has as many
    /// inputs as outputs, both layouts have the same shapes, and the file is read as one of
    /// transformers 5.
    pub(super) fn find(
        files: &WeightFiles,
        modules: &[AdapterModule],
        adapter: &[ParamSpec],
    ) -> Self {
        let mut tensors = BTreeMap::new();
        for module in modules.iter().filter(|module| module.experts.is_some()) {
            let names = [AdapterTensor::A, AdapterTensor::B].map(|of| of.name(&module.name));
            let spec = |name: &String| adapter.iter().find(|spec| spec.name == *name);
            let [Some(a), Some(b)] = names.each_ref().map(spec) else { continue };
            let [[ranks, inputs], [outputs, _]] = [&a.shape, &b.shape].map(|of| [of[0], of[1]]);
            let exchanged = [[ranks, outputs], [inputs, ranks]];
            let found = names.each_ref().map(|name| files.shape(name).unwrap_or_default());
            if inputs != outputs && found == exchanged.map(|shape| shape.to_vec()) {
                let [a, b] = names;
                tensors.insert(a.clone(), (b.clone(), module.rank));
                tensors.insert(b, (a, module.rank));
            }
        }
        Self { tensors }
    }

    /// Shape in the file of a tensor with the shape `shape`.
    pub(super) fn shape(&self, files: &WeightFiles, spec: &ParamSpec) -> Vec<usize> {
        let is_exchanged = self.tensors.contains_key(&spec.name);
        let found = || files.shape(&spec.name).unwrap_or_default();
        if is_exchanged { found() } else { spec.shape.clone() }
    }

    /// Elements of the flat tensor `name`.
    pub(super) fn load_part(
        &self,
        files: &WeightFiles,
        name: &str,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> std::result::Result<Tensor, CheckpointError> {
        if !self.tensors.contains_key(name) {
            return files.load_part(name, elements, dtype, device);
        }
        let whole = self.load(files, name, dtype)?;
        let part = || {
            let part = whole.flatten_all()?.narrow(0, elements.start, elements.len())?;
            part.copy()?.to_device(device)
        };
        part().map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }

    pub(in crate::run) fn load(
        &self,
        files: &WeightFiles,
        name: &str,
        dtype: DType,
    ) -> std::result::Result<Tensor, CheckpointError> {
        let Some((other, rank)) = self.tensors.get(name) else {
            return files.load(name, dtype, &Device::Cpu);
        };
        let other = files.load(other, dtype, &Device::Cpu)?;
        let is_a = matches!(AdapterTensor::of(name), Some((AdapterTensor::A, _)));
        let exchanged = exchange(&other, *rank, is_a);
        exchanged.map_err(|source| CheckpointError::Tensor { tensor: name.to_owned(), source })
    }
}

/// The adapters of experts in a folder, with their sides exchanged.
pub(in crate::run) fn exchange_experts(
    folder: &Path,
    files: &WeightFiles,
) -> std::result::Result<Exchanged, AdapterError> {
    let peft = PeftConfig::read(folder).map_err(of_files(folder))?;
    let mut tensors = BTreeMap::new();
    for name in files.names() {
        let Some((AdapterTensor::A, module)) = AdapterTensor::of(name) else { continue };
        if !module.trim_end_matches(".base_layer").ends_with(".mlp.experts") {
            continue;
        }
        // the experts of text-only models are modules of their own there
        if !module.contains(".language_model.") || !peft.rank_pattern.is_empty() {
            return Err(AdapterError::NoExchange { folder: folder.to_owned() });
        }
        let (a, b) = (name.to_owned(), AdapterTensor::B.name(module));
        tensors.insert(a.clone(), (b.clone(), peft.r));
        tensors.insert(b, (a, peft.r));
    }
    if tensors.is_empty() {
        return Err(AdapterError::NoExchange { folder: folder.to_owned() });
    }
    Ok(Exchanged { tensors })
}

/// The tensor that has the values of `other` if the sides are exchanged: `A` if `is_a`, of `B`, or
/// the reverse.
fn exchange(other: &Tensor, rank: usize, is_a: bool) -> candle_core::Result<Tensor> {
    let (rows, columns) = other.dims2()?;
    if is_a {
        let ranks = columns;
        let of_b = other.reshape((rows, rank, ranks / rank))?; // [K, r, E]
        of_b.permute((2, 1, 0))?.contiguous()?.reshape((ranks, rows))
    } else {
        let ranks = rows;
        let of_a = other.reshape((ranks / rank, rank, columns))?; // [E, r, M]
        of_a.permute((2, 1, 0))?.contiguous()?.reshape((columns, ranks))
    }
}

/// `A` and `B` of the experts of a parameter, in `f32`.
pub(super) struct ExpertFactors {
    pub(super) a: Tensor, // [E r, K]
    pub(super) b: Tensor, // [M, E r]
    pub(super) rank: usize,
    pub(super) scale: f64,
    pub(super) layout: ExpertLayout,
}

impl ExpertFactors {
    /// Adds `scale B_e A_e` to the weight of each expert.
    pub(super) fn add_to(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        let experts = weight.dim(0)?;
        let sum = |expert: usize| {
            let rows = 0..weight.dim(1)?;
            weight.get(expert)? + self.rows(expert, rows)?
        };
        Tensor::stack(&(0..experts).map(sum).collect::<candle_core::Result<Vec<_>>>()?, 0)
    }

    /// The expert and the row of its matrix that row `row` of the matrices below each other is.
    pub(super) fn place(&self, row: usize) -> candle_core::Result<(usize, usize)> {
        let rows = match self.layout {
            ExpertLayout::OutIn => self.b.dim(0)?,
            ExpertLayout::InOut => self.a.dim(1)?,
        };
        Ok((row / rows, row % rows))
    }

    /// Rows of `scale B_e A_e`, in the layout of the weight.
    pub(super) fn rows(&self, expert: usize, rows: Range<usize>) -> candle_core::Result<Tensor> {
        let (rank, experts) = (self.rank, self.a.dim(0)? / self.rank);
        let a = self.a.narrow(0, expert * rank, rank)?; // [r, K]
        let outputs = self.b.dim(0)?;
        let b = self.b.reshape((outputs, rank, experts))?;
        let b = b.narrow(2, expert, 1)?.squeeze(2)?.contiguous()?; // [M, r]
        let (left, right) = match self.layout {
            ExpertLayout::OutIn => (b, a),
            ExpertLayout::InOut => (a.t()?.contiguous()?, b.t()?.contiguous()?),
        };
        left.narrow(0, rows.start, rows.len())?.matmul(&right)? * self.scale
    }
}
