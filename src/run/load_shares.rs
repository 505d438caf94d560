//! Loads a model of which each rank reads a share. Together the ranks read each byte once.

use super::error::RunError;
use super::load_model::{LoadedModel, OpenModel, trainable};
use crate::dist::{Collective, Gather, Shard};
use crate::optim::{OwnedPart, ParamGroups};
use crate::tape::{Bucket, Layout, Param};
use crate::train::{RankWeights, Ranks, SlotTensors, WeightSlots};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::sync::Arc;

/// The model of a rank.
pub(crate) struct RankModel {
    pub(super) loaded: LoadedModel,
    /// `None`: in a single process.
    pub(super) place: Option<RankPlace>,
    pub(super) weights: RankWeights,
    /// The parts that this rank updates; `None`: all.
    pub(super) owned: Option<Vec<OwnedPart>>,
}

/// How the ranks divide the parameters.
pub(super) struct RankPlace {
    pub(super) layout: Arc<Layout>,
    pub(super) collective: Arc<dyn Collective>,
    /// The share of this rank.
    pub(super) member: usize,
    /// Number of sequence groups, which share the micro-batches of a step.
    pub(super) groups: usize,
}

/// A model that is not divided.
pub(crate) fn whole_model(loaded: LoadedModel) -> RankModel {
    RankModel { loaded, place: None, weights: RankWeights::Whole, owned: None }
}

/// Loads the model, except for the weights of `visit`, which every rank stores elsewhere.
/// `collective` connects the ranks.
pub(super) fn load_shares(
    open: OpenModel,
    groups: &ParamGroups,
    (shard, visit): (Shard, &[bool]),
    ranks: &Ranks,
    collective: Arc<dyn Collective>,
    device: &Device,
) -> Result<RankModel, RunError> {
    let (member, num_shares) = ranks.shard();
    let dtype = open.dtype();
    let loaded = without_weights(open, device)?;
    let (model, params) = (&loaded.model, &loaded.params);
    let layout = Layout::new(&model.stages(), params, &trainable(groups), num_shares);
    let layout = layout.without(visit);
    let (weights, owned) = if shard == Shard::Full {
        let tensors = SlotTensors::new(&layout, params, dtype, device)?;
        let mut owned = Vec::new();
        for (stage, tensors) in layout.stages().iter().zip(&tensors.buckets) {
            for ((own, _), bucket) in tensors.iter().zip(stage.buckets()) {
                read_share(&loaded.open, bucket, member, own)?;
            }
            if let Some((own, _)) = tensors.first().filter(|_| !stage.trained.is_empty()) {
                owned.extend(owned_parts(&stage.trained, member, Some(own))?);
            }
        }
        let parts = (&params[..], model.lm_head(), model.embedding());
        (
            RankWeights::Slots(WeightSlots::new(
                &layout,
                member,
                tensors,
                parts,
                Arc::clone(&collective),
            )?),
            Some(owned),
        )
    } else {
        let flat = read_all(&loaded, &layout, member, &*collective, device)?;
        let owned = layout.stages().iter().map(|stage| owned_parts(&stage.trained, member, None));
        if shard == Shard::None {
            (RankWeights::Whole, None)
        } else {
            let owned = owned.collect::<candle_core::Result<Vec<_>>>()?.concat();
            (RankWeights::Gathered(flat, Arc::clone(&collective)), Some(owned))
        }
    };
    let groups = ranks.sequence_group().world;
    let place = RankPlace { layout: Arc::new(layout), collective, member, groups };
    Ok(RankModel { loaded, place: Some(place), weights, owned })
}

/// The model with parameters that have a shape only.
pub(super) fn without_weights(open: OpenModel, device: &Device) -> Result<LoadedModel, RunError> {
    let dtype = open.dtype();
    let placeholder = |(index, spec): (usize, &crate::nn::ParamSpec)| {
        let tensor = Tensor::zeros((), dtype, device)?.broadcast_as(spec.shape.as_slice())?;
        Ok(Param::new(spec.name.as_str(), index, tensor))
    };
    let params = open.specs.iter().enumerate().map(placeholder);
    let params = params.collect::<candle_core::Result<Vec<_>>>()?;
    Ok(open.with_params(params)?)
}

/// Reads the share of this rank of all buckets and gathers the others. Returns the flat tensors
/// with trained parameters.
fn read_all(
    loaded: &LoadedModel,
    layout: &Layout,
    member: usize,
    collective: &dyn Collective,
    device: &Device,
) -> Result<Vec<Tensor>, RunError> {
    let mut trained = Vec::new();
    for stage in layout.stages() {
        for bucket in stage.buckets() {
            let all = Tensor::zeros(bucket.len(), loaded.open.dtype(), device)?;
            let own = all.narrow(0, bucket.share(member).start, bucket.share_len())?;
            read_share(&loaded.open, bucket, member, &own)?;
            for (param, view) in layout.views(bucket, &all)? {
                loaded.params[param].set_tensor(view)?;
            }
            collective.start_gather(Gather { own: None, all: all.clone() })?;
            if std::ptr::eq(bucket, &raw const stage.trained) {
                trained.push(all);
            }
        }
    }
    collective.wait()?;
    Ok(trained)
}

/// Reads a share of a bucket into `share`.
fn read_share(
    open: &OpenModel,
    bucket: &Bucket,
    member: usize,
    share: &Tensor,
) -> Result<(), RunError> {
    let parts: Vec<_> = bucket.parts(member).collect();
    let read = parts.into_par_iter().map(|part| -> Result<(), RunError> {
        let values = open.load_part(part.param, part.elements, share.dtype(), share.device())?;
        Ok(share.slice_set(&values, 0, part.at)?)
    });
    read.collect()
}

/// The trained parts of a share, with their weights in `share`.
fn owned_parts(
    bucket: &Bucket,
    member: usize,
    share: Option<&Tensor>,
) -> candle_core::Result<Vec<OwnedPart>> {
    let owned = |part: crate::tape::Part| {
        let weight = share.map(|share| share.narrow(0, part.at, part.elements.len()));
        Ok(OwnedPart { param: part.param, elements: part.elements, weight: weight.transpose()? })
    };
    bucket.parts(member).map(owned).collect()
}
