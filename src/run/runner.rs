//! Model, gradients and optimizer of a rank, the places of weights and gradients of a single
//! process in the memory of a GPU, and the names of the stages of a model.

use super::error::RunError;
use super::load_model::{LoadedModel, OpenModel, trainable};
use super::load_shares::{RankModel, RankPlace, load_shares, whole_model};
use super::stored_weights::{install, load_stored, visitors, weight_storage};
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::models::Model;
use crate::nn::AdapterTensor;
use crate::ops;
use crate::optim::{MASTER, Optimizer, ParamGroups};
use crate::tape::{Gradients, Layout, Param, StageBuckets, Trainable};
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
    let visit = visitors(&open, &trainable, storage);
    let shard = config.distributed.shard;
    let Some(collective) = ranks.collective() else {
        let loaded = load_stored(open, &visit, storage, device)?;
        place_weights(&loaded, &trainable, &visit, device)?;
        return Ok(whole_model(loaded));
    };
    let model = load_shares(open, groups, (shard, &visit), ranks, collective, device)?;
    install(&model.loaded, &visit, storage, model.place.as_ref(), device)?;
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
        dropout: loaded.dropout,
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
        let zeros = || zeroed_gradients(loaded, &trainable(groups), device);
        let buffers = (0..num_buffers).map(|_| zeros()).collect::<candle_core::Result<_>>()?;
        return Ok(GradientSums::Alone(buffers));
    };
    let how = (config.distributed.shard, exact);
    let early = layout.tied_head(loaded.model.lm_head());
    let rounds = slots / num_groups;
    let sums = SharedSums::new(layout, collective, member, how, rounds, early, device)?;
    Ok(GradientSums::Shared(sums))
}

fn layout(loaded: &LoadedModel, trainable: &[Trainable]) -> Layout {
    Layout::new(&loaded.model.stages(), &loaded.params, trainable, 1)
}

/// Moves the weights, except those of `visit`, which are kept elsewhere. Needs the memory of one
/// more stage for a moment.
pub(super) fn place_weights(
    loaded: &LoadedModel,
    trainable: &[Trainable],
    visit: &[bool],
    device: &Device,
) -> candle_core::Result<()> {
    if !ops::joins_products(device) {
        return Ok(());
    }
    let layout = layout(loaded, trainable).without(visit);
    for bucket in layout.stages().iter().flat_map(StageBuckets::buckets) {
        if bucket.places().count() == 1 {
            continue; // such as the embedding, which is large
        }
        let flat = Tensor::zeros(bucket.len(), loaded.open.dtype(), device)?;
        for (param, view) in layout.views(bucket, &flat)? {
            let param = &loaded.params[param];
            view.flatten_all()?.slice_set(&param.tensor().flatten_all()?, 0, 0)?;
            param.set_tensor(view)?;
        }
    }
    Ok(())
}

/// Zeroed buffers for the gradients of the trained parameters.
fn zeroed_gradients(
    loaded: &LoadedModel,
    trainable: &[Trainable],
    device: &Device,
) -> candle_core::Result<Gradients> {
    if !ops::joins_products(device) {
        return Gradients::zeros(&loaded.params, trainable, device);
    }
    let layout = layout(loaded, trainable);
    let flat = layout.stages().iter().map(|stage| {
        let is_trained = !stage.trained.is_empty();
        is_trained.then(|| Tensor::zeros(stage.trained.len(), DType::F32, device)).transpose()
    });
    Gradients::in_buckets(&layout, &flat.collect::<candle_core::Result<Vec<_>>>()?)
}

/// Name of each stage in the order of forward, and the indices of its parameters.
pub(super) fn stages(model: &dyn Model) -> Vec<(String, Vec<usize>)> {
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
    use super::super::load_model::{OpenModel, trainable};
    use super::super::load_shares::whole_model;
    use super::super::{encoder, loader_options, order, step_runner};
    use super::*;
    use crate::config::{RunConfig, load};
    use crate::data::{DataState, DatasetRows, Loader};
    use crate::ops;
    use crate::train::Ranks;
    use candle_core::{DType, Device, Tensor};
    use std::path::Path;
    use std::sync::Arc;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum WeightPlacement {
        Placed,
        Apart,
    }

    struct FirstStep {
        loss: f64,
        gradients: Vec<Option<Tensor>>,
        /// Number of matrix products.
        products: usize,
    }

    /// The first step of a run of the quickstart's model, in which all linear layers of the decoder have
    /// whole blocks of a bucket.
    fn first_step(settings: &[&str], places: WeightPlacement) -> FirstStep {
        let own = ["device=cpu", "data.packing_length=26"];
        let all = own.iter().chain(settings).map(|setting| (*setting).to_owned());
        let config: RunConfig =
            load(Path::new("configs/quickstart.yaml"), &all.collect::<Vec<_>>()).unwrap();
        let encoder = encoder(&config).unwrap();
        let rows = Arc::new(DatasetRows::open(&config.data.train, encoder.clone()).unwrap());
        let order = order(&config, &rows).unwrap();
        let options = loader_options(&config, &encoder);
        let mut loader = Loader::start(rows, order, options, DataState::default());
        let open = OpenModel::open(&config.model, config.seed, &Device::Cpu).unwrap();
        let groups = open.groups(&config.model.freeze, &config.optim.lr_multipliers).unwrap();
        let model = match places {
            WeightPlacement::Placed => {
                rank_model(&config, open, &groups, &Ranks::alone(), &Device::Cpu).unwrap()
            }
            WeightPlacement::Apart => whole_model(open.load(&Device::Cpu).unwrap()),
        };
        let runner = step_runner(&config, model, &groups, None, &Device::Cpu).unwrap();
        let batches = loader.next_step().unwrap().unwrap().micro_batches;
        let before = ops::products_of_this_thread();
        let loss = runner.run(batches, 1e-3, 1).unwrap().loss;
        let products = ops::products_of_this_thread() - before;
        let kinds = trainable(&groups);
        assert_eq!(kinds.len(), runner.params.len());
        let buffers = runner.gradients.buffers();
        let gradients = (0..kinds.len()).map(|index| buffers.get(index).cloned()).collect();
        FirstStep { loss, gradients, products }
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    /// The largest difference, relative to the largest value.
    fn difference(found: &Tensor, want: &Tensor) -> f32 {
        let (found, want) = (values(found), values(want));
        let scale = want.iter().fold(f32::MIN_POSITIVE, |scale, x| scale.max(x.abs()));
        let worst = found.iter().zip(&want).map(|(x, y)| (x - y).abs());
        worst.fold(0.0, f32::max) / scale
    }

    /// Compares a step with placed weights and one with weights that are apart. Returns how many
    /// products fewer it has.
    fn fewer_products(settings: &[&str], tolerance: f32) -> usize {
        let (placed, apart) = (
            first_step(settings, WeightPlacement::Placed),
            first_step(settings, WeightPlacement::Apart),
        );
        let relative = (placed.loss - apart.loss).abs() / apart.loss;
        assert!(relative < 1e-6, "{settings:?}: loss {} and {}", placed.loss, apart.loss);
        for (index, (found, want)) in placed.gradients.iter().zip(&apart.gradients).enumerate() {
            assert_eq!(found.is_some(), want.is_some(), "{settings:?}: parameter {index}");
            if let (Some(found), Some(want)) = (found, want) {
                let error = difference(found, want);
                assert!(error <= tolerance, "{settings:?}: gradient {index} differs by {error}");
            }
        }
        apart.products - placed.products
    }

    /// Number of decoder layers, and of products that a layer saves in each pass if q, k and v are one
    /// product, and gate and up are one.
    const LAYERS: usize = 4;
    const SAVED: usize = 2 + 1;

    #[test]
    fn a_step_on_a_gpu_has_one_product_for_q_k_v_and_one_for_gate_and_up() {
        let joins = usize::from(ops::joins_products(&Device::Cpu));
        // forward, and the gradients of inputs and weights
        let all = 3 * SAVED * LAYERS * joins;
        assert_eq!(fewer_products(&[], 2e-5), all);
        // with a second forward
        let again = ["model.precision=bf16", "model.recompute=full"];
        assert_eq!(fewer_products(&again, 3e-2), all + SAVED * LAYERS * joins);
    }

    #[test]
    fn a_frozen_layer_of_a_group_is_computed_as_before() {
        let joins = usize::from(ops::joins_products(&Device::Cpu));
        // gate and up only
        let keys = ["model.freeze=['*language_model*.k_proj.weight']"];
        assert_eq!(fewer_products(&keys, 2e-5), 3 * LAYERS * joins);
        // Without gradients of weights, in all layers but the first.
        let layers = ["model.freeze=['model.language_model.layers.[123].*_proj.weight']"];
        assert_eq!(fewer_products(&layers, 2e-5), (3 + 2 * (LAYERS - 1)) * SAVED * joins);
    }

    #[test]
    fn a_step_in_fp8_has_a_product_for_each_layer() {
        assert_eq!(fewer_products(&["model.matmul=fp8"], 2e-5), 0);
    }

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
