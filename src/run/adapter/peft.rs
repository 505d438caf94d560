//! Reads and describes adapters in PEFT's layout.

use super::error::AdapterError;
use super::experts::Exchanged;
use super::targets::{layers, module_name, module_of, target_modules, target_parameters};
use crate::checkpoint::{CheckpointError, PeftConfig, WeightFiles, adapter_weights};
use crate::nn::{
    AdapterModule, AdapterTensor, ParamSpec, TensorNames, peft_name, peft_name_of_file,
};
use crate::train::{AdapterConfig, AdapterInit, AdapterKind};
use indexmap::IndexMap;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
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
    let error = |source: CheckpointError| AdapterError::Files {
        folder: folder.to_owned(),
        source: Box::new(source),
    };
    let mut peft = PeftConfig::read(folder).map_err(error)?;
    if let Some(field) = peft.unsupported() {
        return Err(unsupported(folder)(field));
    }
    let files = adapter_weights(folder).map_err(error)?;
    let has_modules = specs.iter().any(|spec| spec.name.starts_with("model.language_model."));
    let names = if has_modules { TensorNames::Flat } else { TensorNames::Modules };
    if files.names().all(|name| peft_name_of_file(names, name) == name) {
        return Ok((peft, files));
    }
    let files = files.renamed(|name| peft_name_of_file(names, name)).map_err(error)?;
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

/// Checks names and shapes of all tensors. Returns the parameters of the model that the file has.
pub(super) fn check(
    folder: &Path,
    (files, exchanged): (&WeightFiles, &Exchanged),
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
    for name in files.names() {
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
        if name.contains("embed_tokens") && !base.iter().any(|spec| spec.name.contains("lm_head")) {
            return wrong(
                name,
                "is the embedding, which is also the head of this model".to_owned(),
            );
        }
        also_trained.extend(*index);
    }
    also_trained.sort_unstable();
    Ok(also_trained)
}
