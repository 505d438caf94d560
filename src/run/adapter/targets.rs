//! The layers of a model that receive an adapter.

use super::error::AdapterError;
use crate::nn::{AdapterModule, AdapterTensor, Init, ParamSpec, Stored};
use crate::optim::{Named, matches};
use crate::train::{AdapterConfig, AdapterKind, Targets};
use std::collections::BTreeSet;

/// A linear layer of the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) name: &'a str,
    pub(super) weight: &'a ParamSpec,
}

/// All linear layers, in the order of the model.
pub(super) fn linear_layers(specs: &[ParamSpec]) -> Vec<Layer<'_>> {
    let layer = |weight| Some(Layer { name: ParamSpec::linear_layer(weight)?, weight });
    specs.iter().filter_map(layer).collect()
}

/// The modules with an adapter.
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
    let layers: Vec<Layer<'_>> = linear_layers(specs).into_iter().filter(is_in_parts).collect();
    let parts: Vec<String> = config.parts.iter().map(|part| format!("`{part}`")).collect();
    let parts = parts.join(", ");
    if layers.is_empty() {
        return Err(AdapterError::NoLayer { parts });
    }
    let module = |layer: &Layer<'_>| AdapterModule {
        name: layer.name.to_owned(),
        rank: config.rank.get(),
        scale: config.scale(),
        is_dora: config.kind == AdapterKind::Dora,
    };
    let Targets::Globs(globs) = &config.target else {
        return Ok(layers.iter().map(module).collect());
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
    Ok(chosen.into_iter().map(|index| module(&layers[index])).collect())
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
            let is_tied = !specs.iter().any(|spec| spec.name.starts_with("lm_head."));
            if is_tied && module.ends_with("embed_tokens") {
                return Err(AdapterError::Tied { pattern: pattern.clone() });
            }
            if let Some(both) = modules.iter().find(|of| of.name == module) {
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
    let layers = linear_layers(specs);
    let mut all = Vec::new();
    for module in modules {
        let Some(layer) = layers.iter().find(|layer| layer.name == module.name) else { continue };
        let (outputs, inputs) = (layer.weight.shape[0], layer.weight.shape[1]);
        let mut tensors = vec![
            (AdapterTensor::A, vec![module.rank, inputs]),
            (AdapterTensor::B, vec![outputs, module.rank]),
        ];
        if module.is_dora {
            tensors.push((AdapterTensor::Magnitude, vec![outputs]));
        }
        all.extend(tensors.into_iter().map(|(tensor, shape)| ParamSpec {
            name: tensor.name(&module.name),
            init: if shape.len() == 1 { Init::One } else { Init::Normal },
            shape,
            component: layer.weight.component,
            stored: Stored::Whole,
        }));
    }
    all
}

/// `target_modules` of `adapter_config.json`: last parts of names if these select the same layers,
/// otherwise full names. A last part that is a number would also select the layer of this number.
pub(super) fn target_modules(modules: &[AdapterModule], specs: &[ParamSpec]) -> Vec<String> {
    let chosen: BTreeSet<&str> = modules.iter().map(|module| module.name.as_str()).collect();
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
