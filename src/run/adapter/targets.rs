//! The layers of a model that receive an adapter.

use super::error::AdapterError;
use crate::nn::{AdapterModule, AdapterTensor, Init, ParamSpec, Stored};
use crate::optim::{Named, matches};
use crate::train::{AdapterConfig, AdapterKind, Targets};
use std::collections::BTreeSet;

/// A linear layer of the model, or one of all experts of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) name: &'a str,
    pub(super) weight: &'a ParamSpec,
}

/// All linear layers, in the order of the model. Those of experts have the names of their weights.
pub(super) fn layers(specs: &[ParamSpec]) -> impl Iterator<Item = Layer<'_>> {
    specs.iter().filter_map(|weight| {
        let experts = weight.is_experts().then_some(weight.name.as_str());
        Some(Layer { name: weight.linear_layer().or(experts)?, weight })
    })
}

pub(super) fn modules(
    config: &AdapterConfig,
    specs: &[ParamSpec],
) -> Result<Vec<AdapterModule>, AdapterError> {
    let components: BTreeSet<&str> = specs.iter().map(|spec| spec.component.name).collect();
    let unknown = config.parts.iter().find(|part| !components.contains(part.as_str()));
    if let Some(part) = unknown {
        let components = components.into_iter().map(str::to_owned).collect();
        return Err(AdapterError::Part { part: part.clone(), components });
    }
    let is_in_parts =
        |layer: &Layer<'_>| config.parts.iter().any(|part| part == layer.weight.component.name);
    let layers: Vec<Layer<'_>> = layers(specs).filter(is_in_parts).collect();
    let parts: Vec<String> = config.parts.iter().map(|part| format!("`{part}`")).collect();
    let parts = parts.join(", ");
    if layers.is_empty() {
        return Err(AdapterError::NoLayer { parts });
    }
    let (rank, scale) = (config.rank.get(), config.scale());
    let is_dora = config.kind == AdapterKind::Dora;
    let modules = |chosen: &[&ParamSpec]| -> Vec<AdapterModule> {
        let module = |spec: &&ParamSpec| AdapterModule {
            name: module_name(spec, chosen),
            weight: spec.name.clone(),
            experts: spec.expert_layout(),
            rank,
            scale,
            is_dora,
        };
        chosen.iter().map(module).collect()
    };
    let Targets::Globs(globs) = &config.target else {
        let linear = layers.iter().map(|layer| layer.weight).filter(|spec| !spec.is_experts());
        return Ok(modules(&linear.collect::<Vec<_>>()));
    };
    let named = |layer: &Layer<'_>| (layer.name.to_owned(), layer.weight.component.name);
    let names: Vec<(String, &str)> = layers.iter().map(named).collect();
    let named: Vec<Named<'_>> =
        names.iter().map(|(name, component)| Named { name, component, rank: 2 }).collect();
    let mut chosen = BTreeSet::new();
    for pattern in globs {
        let found = matches("adapter.target", pattern, &named).or_else(|error| {
            matches("adapter.target", &format!("*.{pattern}"), &named).map_err(|_| error)
        });
        chosen.extend(found.map_err(|error| match error {
            crate::optim::GroupError::NoMatch { nearest, .. } => {
                AdapterError::Target { pattern: pattern.clone(), parts: parts.clone(), nearest }
            }
            error => AdapterError::Pattern(error),
        })?);
    }
    if chosen.is_empty() {
        return Err(AdapterError::NoTarget);
    }
    let chosen: Vec<&ParamSpec> = chosen.into_iter().map(|index| layers[index].weight).collect();
    if let Some(experts) = chosen.iter().find(|spec| spec.is_experts()) {
        check_experts(config, &experts.name)?;
    }
    Ok(modules(&chosen))
}

/// Fails if PEFT has no adapter of experts with these settings.
pub(super) fn check_experts(config: &AdapterConfig, experts: &str) -> Result<(), AdapterError> {
    let default = AdapterConfig::default();
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    let (key, found) = if config.dropout != 0.0 {
        ("adapter.dropout", config.dropout.to_string())
    } else if config.kind != default.kind {
        ("adapter.kind", name(&config.kind))
    } else if config.init.is_part() {
        ("adapter.init", name(&config.init))
    } else {
        return Ok(());
    };
    Err(AdapterError::OfExperts { key, found, experts: experts.to_owned() })
}

/// The name that PEFT gives to the module with the adapter of the weight `spec`. It wraps the
/// module of the experts in one module for each adapted parameter, in the order of the parameters;
/// the last of them has the name of the module.
pub(super) fn module_name(spec: &ParamSpec, adapted: &[&ParamSpec]) -> String {
    let module = module_of(&spec.name);
    if !spec.is_experts() {
        return module.to_owned();
    }
    let later = adapted.iter().skip_while(|other| other.name != spec.name).skip(1);
    let depth = later.filter(|other| module_of(&other.name) == module).count();
    format!("{module}{}", ".base_layer".repeat(depth))
}

/// Indexes of the parameters of the model that are trained besides the adapter: those of the
/// modules that the globs of `adapter.train_also` name.
pub(super) fn also_trained(
    config: &AdapterConfig,
    specs: &[ParamSpec],
    modules: &[AdapterModule],
) -> Result<Vec<usize>, AdapterError> {
    let name = |spec: &ParamSpec| spec.component.name;
    let named: Vec<Named<'_>> = specs
        .iter()
        .map(|spec| Named { name: &spec.name, component: name(spec), rank: spec.shape.len() })
        .collect();
    let mut chosen = BTreeSet::new();
    for pattern in &config.train_also {
        for index in matches("adapter.train_also", pattern, &named)? {
            if specs[index].is_experts() {
                let experts = specs[index].name.clone();
                return Err(AdapterError::Experts { pattern: pattern.clone(), experts });
            }
            let module = module_of(&specs[index].name);
            let has_adapter = |of: &&AdapterModule| module_of(&of.weight) == module;
            if let Some(both) = modules.iter().find(has_adapter) {
                let layer = both.name.clone();
                return Err(AdapterError::Both { pattern: pattern.clone(), layer });
            }
            // PEFT stores whole modules.
            let parts = (0..specs.len()).filter(|other| module_of(&specs[*other].name) == module);
            chosen.extend(parts);
        }
    }
    Ok(chosen.into_iter().collect())
}

/// The module of a parameter.
pub(super) fn module_of(param: &str) -> &str {
    param.rsplit_once('.').map_or(param, |(module, _)| module)
}

/// The parameters of the adapters of `modules`, in the order of the model.
pub(super) fn adapter_specs(modules: &[AdapterModule], specs: &[ParamSpec]) -> Vec<ParamSpec> {
    let mut all = Vec::new();
    for module in modules {
        let Some(weight) = specs.iter().find(|spec| spec.name == module.weight) else { continue };
        let [experts, outputs, inputs] =
            weight.expert_sizes().unwrap_or([1, weight.shape[0], weight.shape[1]]);
        let ranks = experts * module.rank;
        let mut tensors =
            vec![(AdapterTensor::A, vec![ranks, inputs]), (AdapterTensor::B, vec![outputs, ranks])];
        if module.is_dora {
            tensors.push((AdapterTensor::Magnitude, vec![outputs]));
        }
        all.extend(tensors.into_iter().map(|(tensor, shape)| ParamSpec {
            name: tensor.name(&module.name),
            init: if shape.len() == 1 { Init::One } else { Init::Normal },
            shape,
            component: weight.component,
            stored: Stored::Whole,
        }));
    }
    all
}

/// `target_modules` of `adapter_config.json`: last parts of names if these select the same layers,
/// otherwise full names. A last part that is a number would also select the layer of this number.
pub(super) fn target_modules(modules: &[AdapterModule], specs: &[ParamSpec]) -> Vec<String> {
    let linear = modules.iter().filter(|module| module.experts.is_none());
    let chosen: BTreeSet<&str> = linear.map(|module| module.name.as_str()).collect();
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let ends: BTreeSet<String> = chosen.iter().map(|name| last(name)).collect();
    // Also the patch convolution and the embeddings, which PEFT finds by their names.
    let others = specs.iter().filter_map(|spec| spec.name.strip_suffix(".weight"));
    let same = others.filter(|name| ends.contains(&last(name))).all(|name| chosen.contains(name));
    let is_number = |end: &String| end.bytes().all(|byte| byte.is_ascii_digit());
    if same && !ends.iter().any(is_number) {
        ends.into_iter().collect()
    } else {
        chosen.into_iter().map(str::to_owned).collect()
    }
}

/// `target_parameters` of `adapter_config.json`: last parts of names if these select the same
/// experts, otherwise full names.
pub(super) fn target_parameters(modules: &[AdapterModule], specs: &[ParamSpec]) -> Vec<String> {
    let with_experts = modules.iter().filter(|module| module.experts.is_some());
    let chosen: Vec<&str> = with_experts.map(|module| module.weight.as_str()).collect();
    // such as `mlp.experts.down_proj`
    let end = |name: &str| {
        let parts: Vec<&str> = name.split('.').collect();
        parts[parts.len().saturating_sub(3)..].join(".")
    };
    let ends: BTreeSet<String> = chosen.iter().map(|name| end(name)).collect();
    let same = specs.iter().filter(|spec| spec.is_experts() && ends.contains(&end(&spec.name)));
    if same.count() == chosen.len() {
        return ends.into_iter().collect();
    }
    chosen.into_iter().map(str::to_owned).collect()
}
