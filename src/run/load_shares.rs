//! Loads a model of which each rank reads a share. Together the ranks read each byte once, also of
//! tensors that every rank needs whole.

use super::error::RunError;
use super::load_model::{LoadedModel, OpenModel, trainable};
use crate::dist::{Collective, Gather, Shard};
use crate::ops::copy_to_host;
use crate::optim::{OwnedPart, ParamGroups};
use crate::tape::{Bucket, Layout, Param};
use crate::train::{
    RankWeights, Ranks, ShardTensors, ShardedWeights, StoredWeights, WeightDivision,
};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

pub(crate) struct RankModel {
    pub(super) loaded: LoadedModel,
    /// `None`: in a single process.
    pub(super) place: Option<RankPlace>,
    pub(super) weights: RankWeights,
    /// The parts that this rank updates; `None`: all.
    pub(super) owned: Option<Vec<OwnedPart>>,
}

pub(super) struct RankPlace {
    pub(super) layout: Arc<Layout>,
    pub(super) collective: Arc<dyn Collective>,
    pub(super) member: usize,
    /// Number of sequence groups, which share the micro-batches of a step.
    pub(super) groups: usize,
}

/// A model that is not divided. `stored` are the weights that are stored elsewhere.
pub(crate) fn whole_model(loaded: LoadedModel, stored: Option<StoredWeights>) -> RankModel {
    let weights = RankWeights { stored, ..RankWeights::default() };
    RankModel { loaded, place: None, weights, owned: None }
}

/// Loads the model, except for the weights of `is_stored`, which every rank stores elsewhere.
/// `collective` connects the ranks.
pub(super) fn load_shares(
    open: OpenModel,
    groups: &ParamGroups,
    (shard, is_stored): (Shard, &[bool]),
    ranks: &Ranks,
    collective: Arc<dyn Collective>,
    device: &Device,
) -> Result<RankModel, RunError> {
    let (member, num_shares) = ranks.shard();
    let dtype = open.dtype();
    let loaded = without_weights(open, device)?;
    let (model, params) = (&loaded.model, &loaded.params);
    let layout = Layout::new(&model.stages(), params, &trainable(groups), num_shares);
    let layout = layout.without(is_stored);
    let (division, owned) = if shard == Shard::Full {
        let tensors = ShardTensors::new(&layout, params, dtype, device)?;
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
            WeightDivision::Sharded(ShardedWeights::new(
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
            (WeightDivision::Whole, None)
        } else {
            let owned = owned.collect::<candle_core::Result<Vec<_>>>()?.concat();
            (WeightDivision::Gathered(flat, Arc::clone(&collective)), Some(owned))
        }
    };
    let groups = ranks.sequence_group().world;
    let place = RankPlace { layout: Arc::new(layout), collective, member, groups };
    let weights = RankWeights { division, stored: None };
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

/// Number of elements that all ranks together read at once.
const CHUNK: usize = if cfg!(test) { 1 << 14 } else { 1 << 22 };
/// Number of elements that one task reads.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 18 };

impl RankPlace {
    /// Fills `into`, a flat tensor on any device. `read` returns elements on `device`, in the dtype
    /// of `into`. The ranks exchange tensors on `device`. All ranks make the same calls.
    pub(super) fn read_together(
        &self,
        into: &Tensor,
        device: &Device,
        read: impl Fn(Range<usize>) -> Result<Tensor, RunError> + Sync,
    ) -> Result<(), RunError> {
        let (len, num_shares) = (into.elem_count(), self.layout.num_shares());
        let share = len.min(CHUNK).div_ceil(num_shares);
        let all = Tensor::zeros(num_shares * share, into.dtype(), device)?;
        for start in (0..len).step_by(all.elem_count().max(1)) {
            let own = (start + self.member * share).min(len);
            let parts = (own..(own + share).min(len)).into_par_iter().step_by(PART);
            parts.try_for_each(|first| -> Result<(), RunError> {
                let values = read(first..(first + PART).min(own + share).min(len))?;
                Ok(all.slice_set(&values, 0, first - start)?)
            })?;
            let ticket = self.collective.start_gather(Gather { own: None, all: all.clone() })?;
            self.collective.wait_for(ticket)?;
            let arrived = all.narrow(0, 0, (len - start).min(all.elem_count()))?;
            let is_elsewhere = into.device().is_cpu() && !device.is_cpu();
            let arrived = if is_elsewhere { copy_to_host(&arrived)? } else { arrived };
            into.slice_set(&arrived, 0, start)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::build::{Run, RunOptions};
    use super::super::load_model::{OpenModel, trainable};
    use super::super::stored_weights::{install, load_stored, stored_elsewhere};
    use super::load_shares;
    use crate::checkpoint::{READS, WeightFiles};
    use crate::config::{RunConfig, load};
    use crate::dist::{Group, Shard, threads, threads_in_groups};
    use crate::metrics::{EvalMetrics, StepMetrics};
    use crate::tape::Param;
    use crate::train::{Observer, Ranks, StoredWeights, WeightStorage};
    use candle_core::{DType, Device};
    use std::fs;
    use std::ops::Range;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    fn config(output_dir: &Path, settings: &[&str]) -> RunConfig {
        let output_dir = format!("output_dir={}", output_dir.display());
        let own = [
            output_dir.as_str(),
            "device=cpu",
            "data.eval=[]",
            "data.packing_length=104",
            "train.gradient_accumulation_steps=4",
            "train.max_steps=4",
        ];
        let all = own.iter().chain(settings).map(|setting| (*setting).to_owned());
        load(Path::new("configs/quickstart.yaml"), &all.collect::<Vec<_>>()).unwrap()
    }

    fn on_ranks<T: Send>(groups: Vec<Group>, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let f = &f;
            let ranks = groups.into_iter().map(|group| scope.spawn(move || f(group)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Ends a run after its first step.
    struct StopAfterStep(Arc<AtomicBool>);

    impl Observer for StopAfterStep {
        fn step(&mut self, _: &StepMetrics, _: u64) {
            self.0.store(true, Ordering::Relaxed);
        }

        fn evaluating(&mut self, _: usize, _: usize) {}

        fn evaluated(&mut self, _: &EvalMetrics) {}
    }

    /// Writes a checkpoint of step 1.
    fn saved(config: &RunConfig) {
        let stop = Arc::new(AtomicBool::new(false));
        let options = RunOptions { stop: stop.clone(), ..RunOptions::default() };
        Run::with_options(config, &options).unwrap().train(&mut StopAfterStep(stop)).unwrap();
    }

    /// Bytes that the reads of a file cover, and their sum.
    fn read_of(file: &Path) -> (usize, usize) {
        let reads = READS.lock().unwrap();
        let of_file = reads.iter().filter(|(path, _)| path == file);
        let mut ranges: Vec<Range<usize>> = of_file.map(|(_, range)| range.clone()).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let (mut covered, mut end) = (0, 0);
        for range in &ranges {
            covered += range.end.saturating_sub(range.start.max(end));
            end = end.max(range.end);
        }
        (covered, ranges.iter().map(ExactSizeIterator::len).sum())
    }

    /// Bytes of all tensors of a file, and of the values of them that every rank compares with rank 0.
    fn bytes_of(file: &Path) -> (usize, usize) {
        let files = WeightFiles::open_file(file).unwrap();
        let sizes = files.names().map(|name| {
            let len: usize = files.shape(name).unwrap().iter().product();
            let size = files.dtype(name).map_or(1, |dtype| dtype.size_in_bytes()); // codes have none
            (len * size, 3 * len.min(16) * size)
        });
        sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
    }

    #[test]
    fn ranks_that_resume_load_each_byte_of_a_checkpoint_once_after_its_comparison() {
        for settings in [
            vec!["model.precision=bf16"],
            vec!["model.precision=bf16", "optim.kind=adamw_8bit"],
            vec!["optim.kind=adafactor"],
        ] {
            let folder = tempfile::tempdir().unwrap();
            let config = config(folder.path(), &settings);
            saved(&config);
            let checkpoint = folder.path().join("checkpoints/step-00000001");
            let mut cases = vec![("none", 2, 2), ("none", 4, 4)];
            if settings != ["optim.kind=adafactor"] {
                cases.extend([("optimizer", 2, 2), ("gradients", 4, 4), ("full", 4, 4)]);
            }
            // On two nodes of two ranks each, every node reads its copy.
            cases.push(("none", 4, 2));
            for (shard, world, per_node) in cases {
                let shard = format!("distributed.shard={shard}");
                let settings = [&settings[..], &[shard.as_str()]].concat();
                let config = self::config(folder.path(), &settings);
                READS.lock().unwrap().retain(|(path, _)| !path.starts_with(folder.path()));
                on_ranks(threads_in_groups(world, per_node).unwrap(), |group| {
                    drop(Run::with_group(&config, &RunOptions::default(), Some(group)).unwrap());
                });
                let nodes = world / per_node;
                for (file, is_compared) in [("model", true), ("optimizer", false)] {
                    let file = checkpoint.join(file).with_extension("safetensors");
                    let (all, compared) = bytes_of(&file);
                    let compared = if is_compared { world * compared } else { 0 };
                    let case = format!("{file:?} {settings:?}, {world} ranks, {nodes} nodes");
                    assert_eq!(read_of(&file), (all, nodes * all + compared), "{case}");
                }
            }
            assert_eq!(fs::read_dir(folder.path().join("checkpoints")).unwrap().count(), 1);
        }
    }

    #[test]
    fn weights_that_are_stored_elsewhere_are_read_once_and_have_the_bits_of_a_single_process() {
        let folder = tempfile::tempdir().unwrap();
        saved(&config(folder.path(), &["model.precision=bf16"]));
        let model = folder.path().join("checkpoints/step-00000001");
        let path = format!("model.path={}", model.display());
        let freeze = "model.freeze=[merger, '*visual.blocks.*']";
        let settings = [path.as_str(), "model.weights=pretrained", "model.precision=bf16", freeze];
        let config = config(&folder.path().join("then"), &settings);
        let file = model.join("model.safetensors");
        let (all, _) = bytes_of(&file);
        for storage in [WeightStorage::Host, WeightStorage::Nf4] {
            let prepared = || {
                let open = OpenModel::open(&config.model, config.seed, &Device::Cpu).unwrap();
                let groups =
                    open.groups(&config.model.freeze, &config.optim.lr_multipliers).unwrap();
                let is_stored = stored_elsewhere(&open, &trainable(&groups), storage);
                (open, groups, is_stored)
            };
            let bits = |param: &Param, stored: &Option<StoredWeights>| {
                let weight = stored.as_ref().unwrap().saved(param).unwrap();
                let weight = weight.unwrap_or_else(|| param.tensor().unwrap());
                let weight = weight.flatten_all().unwrap();
                weight.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
            };
            // A single process reads each tensor alone.
            let (open, _, is_stored) = prepared();
            let (alone, stored) = load_stored(open, &is_stored, storage, &Device::Cpu).unwrap();
            let expected: Vec<_> = alone.params.iter().map(|param| bits(param, &stored)).collect();
            for world in [1, 2] {
                READS.lock().unwrap().retain(|(path, _)| *path != file);
                let of_ranks = on_ranks(threads(world).unwrap(), |group| {
                    let device = Device::Cpu;
                    let Group { rank, step, shard_group, sums, monitor, .. } = group;
                    let ranks = Ranks::new(rank, step, shard_group, sums, monitor);
                    let (open, groups, is_stored) = prepared();
                    let how = (Shard::None, &is_stored[..]);
                    let collective = ranks.collective().unwrap();
                    let model =
                        load_shares(open, &groups, how, &ranks, collective, &device).unwrap();
                    let place = model.place.as_ref();
                    let stored =
                        install(&model.loaded, &is_stored, storage, place, &device).unwrap();
                    let params = model.loaded.params.iter();
                    params.map(|param| bits(param, &stored)).collect::<Vec<_>>()
                });
                assert_eq!(read_of(&file), (all, all), "{storage:?}, {world} ranks");
                assert!(
                    of_ranks.iter().all(|found| *found == expected),
                    "{storage:?}, {world} ranks"
                );
            }
        }
    }
}
