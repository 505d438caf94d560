//! Model, gradients and optimizer of a rank, the places of weights and gradients of a single
//! process in the memory of a GPU, and the names of the stages of a model.

use super::error::RunError;
use super::load_model::{LoadedModel, OpenModel, trainable};
use super::load_shares::{RankModel, RankPlace, load_shares, whole_model};
use super::stored_weights::{install, load_stored, stored_elsewhere, weight_storage};
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::models::Model;
use crate::nn::AdapterTensor;
use crate::optim::{MASTER, Optimizer, ParamGroups};
use crate::tape::{Gradients, Param};
use crate::train::{GradientSums, Ranks, SharedSums, StepRunner, buffers_of_tree};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// Loads the model: whole in a single process, otherwise together with the other ranks.
pub(super) fn rank_model(
    config: &RunConfig,
    open: OpenModel,
    groups: &ParamGroups,
    ranks: &Ranks,
    device: &Device,
) -> Result<RankModel, RunError> {
    if open.is_quantized() && open.adapter.is_none() {
        return Err(super::SetupError::QuantizedBase { folder: open.folder().to_owned() }.into());
    }
    let open = open.split_weights()?;
    let storage = weight_storage(config, device);
    let trainable = trainable(groups);
    let is_stored = stored_elsewhere(&open, &trainable, storage);
    let shard = config.distributed.shard;
    let Some(collective) = ranks.collective() else {
        let (loaded, stored) = load_stored(open, &is_stored, storage, device)?;
        return Ok(whole_model(loaded, stored));
    };
    let mut model = load_shares(open, groups, (shard, &is_stored), ranks, collective, device)?;
    model.weights.stored =
        install(&model.loaded, &is_stored, storage, model.place.as_ref(), device)?;
    Ok(model)
}

/// Model, gradients and optimizer, with the optimizer state of `found`.
pub(crate) fn step_runner(
    config: &RunConfig,
    model: RankModel,
    groups: &ParamGroups,
    found: Option<&Checkpoint>,
    device: &Device,
) -> Result<StepRunner, RunError> {
    let RankModel { loaded, place, weights, owned } = model;
    let saved = found.map(Checkpoint::optimizer).transpose()?;
    let load = |kind: &str, param: &Param, elements: Range<usize>, dtype, device: &Device| {
        let name = format!("{kind}.{}", param.name());
        saved.as_ref().map(|saved| saved.load_part(&name, elements, dtype, device)).transpose()
    };
    let master = |param: &Param, elements: Range<usize>, device: &Device| {
        let saved = load("master", param, elements.clone(), DType::F32, device);
        let saved = saved.map_err(candle_core::Error::wrap)?;
        saved.map_or_else(|| loaded.open.master(param, elements, device), Ok)
    };
    // Ranks that all have the whole state divide the reading of it. Each draws random weights
    // itself.
    let together = place.as_ref().filter(|_| owned.is_none());
    let is_drawn = |param: &Param| saved.is_none() && loaded.open.is_drawn(param.index());
    let first_master = |param: &Param, elements: Range<usize>, device: &Device| match together {
        Some(_) if !is_drawn(param) => Tensor::zeros(elements.len(), DType::F32, device),
        _ => master(param, elements, device),
    };
    let max_norm = config.train.max_grad_norm;
    let (params, optim) = (&loaded.params, &config.optim);
    let mut optimizer =
        Optimizer::new(optim, max_norm, params, groups, owned, first_master, device)?;
    for state in optimizer.states_mut() {
        let (param, elements) = (state.param.clone(), state.elements.clone());
        for (kind, tensor) in state.tensors_mut() {
            let is_master = kind.name == MASTER;
            match together {
                _ if !is_master && saved.is_none() => {} // zeros
                _ if is_master && is_drawn(&param) => {}
                Some(place) => place.read_together(tensor, device, |part| {
                    if is_master {
                        return Ok(master(&param, part, device)?);
                    }
                    Ok(load(kind.name, &param, part, kind.dtype, device)?.expect("it is saved"))
                })?,
                None if is_master => {}
                None => {
                    let (elements, device) = (kind.elements(&elements), tensor.device().clone());
                    if let Some(saved) = load(kind.name, &param, elements, kind.dtype, &device)? {
                        *tensor = saved;
                    }
                }
            }
        }
    }
    Ok(StepRunner {
        gradients: gradients(config, &loaded, place, groups, device)?,
        weights,
        ranks: Ranks::alone(), // set when the run is assembled
        saved_as: loaded.open.saved_as()?,
        kept: loaded.open.kept(),
        model: loaded.model,
        params: loaded.params,
        optimizer,
        recompute: config.model.recompute.policy(),
        aux_loss: config.model.aux_loss,
        dtype: config.model.precision.dtype(),
        device: device.clone(),
    })
}

fn gradients(
    config: &RunConfig,
    loaded: &LoadedModel,
    place: Option<RankPlace>,
    groups: &ParamGroups,
    device: &Device,
) -> candle_core::Result<GradientSums> {
    let slots = config.train.gradient_accumulation_steps.get();
    let exact = config.distributed.exact.holds(device.is_cpu());
    let Some(RankPlace { layout, collective, member, groups: num_groups }) = place else {
        let num_buffers = if exact { buffers_of_tree(slots) } else { 1 };
        let trainable = trainable(groups);
        let zeros = || Gradients::zeros(&loaded.params, &trainable, device);
        let buffers = (0..num_buffers).map(|_| zeros()).collect::<candle_core::Result<_>>()?;
        return Ok(GradientSums::Alone(buffers));
    };
    let how = (config.distributed.shard, exact);
    let early = layout.tied_head(loaded.model.lm_head());
    let rounds = slots / num_groups;
    let sums = SharedSums::new(layout, collective, member, how, rounds, early, device)?;
    Ok(GradientSums::Shared(sums))
}

/// Name of each stage in the order of forward, and the indices of its parameters.
pub(super) fn stages(model: &Model) -> Vec<(String, Vec<usize>)> {
    let mut stages = model.stages();
    stages.reverse();
    let stage = |params: Vec<&Param>| {
        let names: Vec<&str> = params.iter().map(|param| module(param.name())).collect();
        (stage_name(&names), params.iter().map(|param| param.index()).collect())
    };
    stages.into_iter().map(stage).collect()
}

/// The name of the layer of an adapter's tensor, or of the parameter itself.
fn module(name: &str) -> &str {
    AdapterTensor::of(name).map_or(name, |(_, module)| module)
}

/// The common beginning of the names of a stage's parameters.
fn stage_name(names: &[&str]) -> String {
    let parts: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    let Some(first) = parts.first() else { return String::new() };
    let is_common = |at: &usize| parts.iter().all(|name| name.get(*at) == first.get(*at));
    let mut common = (0..first.len()).take_while(is_common).count();
    if common < 3 {
        common = 3; // patch and position embeddings have no module in common
    }
    let name = first[..common.min(first.len())].join(".");
    name.strip_suffix(".weight").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_the_name_of_its_module() {
        for (names, expected) in [
            (
                &["model.visual.blocks.3.attn.qkv.weight", "model.visual.blocks.3.norm1.bias"][..],
                "model.visual.blocks.3",
            ),
            (
                &["model.visual.patch_embed.proj.weight", "model.visual.pos_embed.weight"],
                "model.visual.patch_embed",
            ),
            (&["lm_head.weight"], "lm_head"),
            (&["model.language_model.embed_tokens.weight"], "model.language_model.embed_tokens"),
            (&["model.language_model.norm.weight"], "model.language_model.norm"),
        ] {
            assert_eq!(stage_name(names), expected);
        }
    }
}
