//! Predicts the peak memory of a run from its config and the shape of its model, and finds the
//! settings that reduce it.

use super::adapter::open_run_model;
use super::error::RunError;
use super::inputs::check;
use super::load_model::{LoadedModel, check_world, trainable};
use super::load_shares::without_weights;
use super::stored_weights::{storage_on_gpu, stored_elsewhere, weight_storage};
use crate::config::RunConfig;
use crate::data::Plan;
use crate::dist::Shard;
use crate::metrics::{Division, MemoryModel, MemoryParts, MicroBatchSizes, memory_text};
use crate::models::{Model, RecomputePolicy};
use crate::ops::{GPU_DELTA_BYTES, GPU_LOGITS_BYTES, LOGITS_BYTES, Store};
use crate::optim::{Kind, Master, Moments, ParamGroups, state_bytes_per_weight};
use crate::tape::{GradSink, Layout, Param, Trainable};
use crate::train::{
    AdapterConfig, DeviceChoice, MatmulChoice, Offload, Precision, Quantize, RecomputeChoice,
    StoredMemory, Weights, division, stored_memory,
};
use candle_core::{DType, Device, Tensor};
use std::num::{NonZeroU32, NonZeroUsize};

/// Memory of a GPU that CUDA, the libraries and NCCL use: an assumption.
pub const RESERVED: f64 = 1_073_741_824.0;
/// Settings that save less than this fraction of the peak are left out.
const LEAST_SAVING: f64 = 0.02;
const NUM_SETTINGS: usize = 3;
/// Of several settings of one kind, the cheapest that saves this fraction of the most is named.
const ENOUGH: f64 = 0.75;

/// The sizes of the micro-batches of a run that can need the most memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Load(Vec<MicroBatchSizes>);

impl Load {
    /// Full packs, of whose tokens the fraction `images` are of images, and `targets` are
    /// supervised.
    pub fn full(shape: &ModelShape, config: &RunConfig, fractions: (f64, f64)) -> Self {
        Self(vec![shape.full_micro_batch(config, fractions)])
    }

    /// The largest micro-batches of a plan, of whose tokens the fraction `targets` are supervised.
    pub fn of(shape: &ModelShape, plan: &Plan, targets: f64) -> Result<Self, RunError> {
        let patch_bytes = 4.0 * shape.patch_values()?;
        let patches = |bytes: u64| if patch_bytes > 0.0 { bytes as f64 / patch_bytes } else { 0.0 };
        let step_patches = patches(plan.step_pixel_bytes);
        let samples = plan.samples as f64 / plan.steps.max(1) as f64;
        Ok(Self(Vec::from(plan.largest.map(|size| MicroBatchSizes {
            tokens: size.tokens as f64,
            targets: size.tokens as f64 * targets,
            patches: patches(size.pixel_bytes),
            step_patches,
            sample_patches: step_patches / samples.max(1.0),
        }))))
    }

    /// These micro-batches with `factor` times as many tokens and patches.
    fn scaled(&self, factor: f64) -> Self {
        let scale = |sizes: &MicroBatchSizes| MicroBatchSizes {
            tokens: factor * sizes.tokens,
            targets: factor * sizes.targets,
            patches: factor * sizes.patches,
            step_patches: factor * sizes.step_patches,
            ..*sizes
        };
        Self(self.0.iter().map(scale).collect())
    }

    pub fn sizes(&self) -> &[MicroBatchSizes] {
        &self.0
    }

    pub fn tokens(&self) -> f64 {
        self.0.iter().map(|sizes| sizes.tokens).fold(0.0, f64::max)
    }

    pub fn patches(&self) -> f64 {
        self.0.iter().map(|sizes| sizes.patches).fold(0.0, f64::max)
    }
}

/// A run whose memory is predicted. `device` of the config is the CPU or a GPU, and is not `auto`.
#[derive(Debug, Clone)]
pub struct RunMemory {
    pub config: RunConfig,
    /// Its largest micro-batches.
    pub load: Load,
    pub world: usize,
}

impl RunMemory {
    /// The parts of the peak memory of a rank.
    pub fn parts(&self, shape: &ModelShape) -> Result<MemoryParts, RunError> {
        let distributed = &self.config.distributed;
        let shard = if self.world == 1 { Shard::None } else { distributed.shard };
        let exact = distributed.exact.holds(self.on_cpu());
        let mut most = MemoryParts::default();
        for sizes in &self.load.0 {
            let choice = (shard, self.world);
            let estimate = shape.estimate(&self.config, self.world, choice, sizes, exact)?;
            if self.bytes_of(&estimate.parts) > self.bytes_of(&most) {
                most = estimate.parts;
            }
        }
        Ok(most)
    }

    /// The peak memory of a rank: of its process, or of its GPU with what CUDA needs.
    pub fn bytes(&self, shape: &ModelShape) -> Result<f64, RunError> {
        self.parts(shape).map(|parts| self.bytes_of(&parts))
    }

    pub fn bytes_of(&self, parts: &MemoryParts) -> f64 {
        if self.on_cpu() { parts.process() } else { parts.device() + RESERVED }
    }

    fn on_cpu(&self) -> bool {
        self.config.device == DeviceChoice::Cpu
    }

    /// The settings that reduce the memory most, in the order of their cost.
    pub fn savings(&self) -> Result<Vec<Saving>, RunError> {
        let now = self.bytes(&ModelShape::read(&self.config)?)?;
        let mut found: Vec<(usize, Saving)> = Vec::new();
        for (cost, settings) in self.settings().into_iter().enumerate() {
            let tried: Vec<Saving> =
                settings.into_iter().filter_map(|setting| saving(setting, now)).collect();
            let most = tried.iter().map(|saving| saving.bytes).fold(0.0, f64::max);
            let enough = |saving: &Saving| saving.bytes >= ENOUGH * most;
            let chosen = tried.into_iter().find(|saving| enough(saving));
            found.extend(chosen.map(|saving| (cost, saving)));
        }
        found.retain(|(_, saving)| saving.bytes >= LEAST_SAVING * now);
        found.sort_by(|(_, one), (_, other)| other.bytes.total_cmp(&one.bytes));
        found.truncate(NUM_SETTINGS);
        found.sort_by_key(|(cost, _)| *cost);
        Ok(found.into_iter().map(|(_, saving)| saving).collect())
    }

    fn with(&self, setting: impl Into<String>, change: impl FnOnce(&mut Self)) -> (String, Self) {
        let mut changed = self.clone();
        change(&mut changed);
        (setting.into(), changed)
    }

    /// Settings with which the run may need less memory, the cheapest first. Those that are similar
    /// are in one list.
    fn settings(&self) -> Vec<Vec<(String, Self)>> {
        let mut all = self.exact_settings();
        let config = &self.config;
        let optim = &config.optim;
        let mut moments = Vec::new();
        if optim.kind == Kind::Adamw && optim.moments == Moments::F32 {
            moments.push(
                self.with("optim.moments=bf16", |to| to.config.optim.moments = Moments::Bf16),
            );
            moments.push(
                self.with("optim.kind=adamw_8bit", |to| to.config.optim.kind = Kind::Adamw8bit),
            );
        }
        all.push(moments);
        if config.model.precision == Precision::Bf16 && optim.master == Master::F32 {
            let setting =
                self.with("optim.master=none", |to| to.config.optim.master = Master::None);
            all.push(vec![setting]);
        }
        if config.data.packing && config.data.packing_length.get() >= 512 {
            let half = config.data.packing_length.get() / 2;
            all.push(vec![self.with(format!("data.packing_length={half}"), |to| {
                to.config.data.packing_length = NonZeroU32::MIN.saturating_add(half - 1);
                // packs that are shorter than this stay as they are
                let most = f64::from(half) * to.config.train.batch_size.get() as f64;
                to.load = to.load.scaled((most / to.load.tokens()).min(1.0));
            })]);
        }
        if config.model.precision == Precision::F32 {
            all.push(vec![self.with("model.precision=bf16", |to| {
                to.config.model.precision = Precision::Bf16;
            })]);
        }
        if optim.kind != Kind::Adafactor {
            all.push(vec![self.with("optim.kind=adafactor", |to| {
                to.config.optim.kind = Kind::Adafactor;
                to.config.optim.moments = Moments::F32;
            })]);
        }
        all.push(match &config.adapter {
            None => vec![self.with("adapter={}", |to| {
                to.config.adapter = Some(AdapterConfig::default());
            })],
            Some(adapter) if adapter.quantize == Quantize::None => {
                vec![self.with("adapter.quantize=nf4", |to| {
                    let adapter = to.config.adapter.iter_mut();
                    adapter.for_each(|adapter| adapter.quantize = Quantize::Nf4);
                })]
            }
            Some(_) => Vec::new(),
        });
        all
    }

    /// Settings that change only the time of a step, and rounding.
    fn exact_settings(&self) -> Vec<Vec<(String, Self)>> {
        let config = &self.config;
        let mut all = Vec::new();
        let (rows, slots) =
            (config.train.batch_size.get(), config.train.gradient_accumulation_steps.get());
        if rows.is_multiple_of(2) {
            let text = format!(
                "train.batch_size={}`, `train.gradient_accumulation_steps={}",
                rows / 2,
                slots * 2
            );
            all.push(vec![self.with(text, |to| {
                let number = |n: usize| NonZeroUsize::MIN.saturating_add(n - 1);
                to.config.train.batch_size = number(rows / 2);
                to.config.train.gradient_accumulation_steps = number(slots * 2);
                to.load = to.load.scaled(0.5);
            })]);
        }
        let shards = [Shard::Optimizer, Shard::Gradients, Shard::Full];
        let more = shards.into_iter().filter(|shard| {
            self.world > 1 && config.optim.kind.divides_state() && *shard > config.distributed.shard
        });
        let with_shard = |shard: Shard| {
            self.with(format!("distributed.shard={}", shard.name()), |to| {
                to.config.distributed.shard = shard;
            })
        };
        all.push(more.map(with_shard).collect());
        if !self.on_cpu() && config.model.offload == Offload::None {
            all.push(vec![self.with("model.offload=frozen", |to| {
                to.config.model.offload = Offload::Frozen;
            })]);
        }
        all.push(self.with_recompute());
        if !self.on_cpu() && config.optim.moments == Moments::F32 {
            all.push(vec![self.with("optim.moments=host", |to| {
                to.config.optim.moments = Moments::Host;
            })]);
        }
        all
    }

    /// This run with each value of `model.recompute` that recomputes more, the cheapest first.
    pub(super) fn with_recompute(&self) -> Vec<(String, Self)> {
        let with = |choice: &RecomputeChoice| {
            self.with(format!("model.recompute={}", choice.name()), |to| {
                to.config.model.recompute = *choice;
            })
        };
        self.config.model.recompute.more().iter().map(with).collect()
    }

    /// This run on `world` ranks that divide `shard`.
    pub(super) fn on_ranks(&self, world: usize, shard: Shard) -> Self {
        let mut changed = self.clone();
        changed.world = world;
        changed.config.distributed.shard = shard;
        changed
    }

    /// This run with another `packing_length`.
    fn with_packing_length(&self, length: u32) -> Self {
        let mut changed = self.clone();
        let now = f64::from(self.config.data.packing_length.get());
        let length = NonZeroU32::MIN.saturating_add(length.saturating_sub(1));
        changed.config.data.packing_length = length;
        changed.load = self.load.scaled(f64::from(length.get()) / now);
        changed
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Saving {
    /// The key and its value: `model.recompute=full`.
    pub setting: String,
    pub bytes: f64,
}

/// What a setting saves; `None` if the config does not allow it.
fn saving((setting, changed): (String, RunMemory), now: f64) -> Option<Saving> {
    check(&changed.config).ok()?;
    let bytes = changed.bytes(&ModelShape::read(&changed.config).ok()?).ok()?;
    Some(Saving { setting, bytes: now - bytes })
}

/// The settings as a sentence; `None` if there are none.
pub fn advice(savings: &[Saving]) -> Option<String> {
    let each = savings.iter().enumerate().map(|(index, saving)| {
        let saves = if index == 0 { "saves about" } else { "about" };
        format!("`{}` ({saves} {})", saving.setting, memory_text(saving.bytes))
    });
    let each: Vec<String> = each.collect();
    let (last, first) = each.split_last()?;
    let list = match first {
        [] => last.clone(),
        first => format!("{} or {last}", first.join(", ")),
    };
    Some(format!("set {list}"))
}

/// The shape of a model, without its weights.
pub struct ModelShape {
    loaded: LoadedModel,
    groups: ParamGroups,
    trainable: Vec<Trainable>,
}

/// The prediction for one way to divide the training state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The parts of the state that ranks divide.
    pub shard: Shard,
    /// Number of ranks of a shard group.
    pub group: usize,
    pub parts: MemoryParts,
}

/// Measured: the shared libraries of FFmpeg and MPI.
const LIBRARIES: f64 = if cfg!(feature = "video") { 24.5e6 } else { 0.0 }
    + if cfg!(feature = "mpi") { 1e6 } else { 0.0 };

/// The sizes of a model that decide the memory of its training. `state` is the mean number of bytes
/// of the optimizer state of a trained weight.
pub(crate) fn memory_model(
    model: &Model,
    division: Division,
    (compute, state): (DType, f64),
    recompute: RecomputePolicy,
    grads: &dyn GradSink,
    workers: NonZeroUsize,
) -> candle_core::Result<MemoryModel> {
    let element = compute.size_in_bytes() as f64;
    let (vocabulary, hidden) = model.lm_head().shape().dims2()?;
    Ok(MemoryModel {
        division,
        element,
        state,
        master: 0.0,
        hidden: hidden as f64,
        vocabulary: vocabulary as f64,
        logits: LOGITS_BYTES as f64,
        delta_limit: 0.0,
        libraries: LIBRARIES,
        workers: workers.get() as f64,
        activations: model.activation_memory(element, recompute, grads),
    })
}

/// The part of a micro-batch that each of `ranks` ranks computes.
fn part(sizes: MicroBatchSizes, ranks: f64) -> MicroBatchSizes {
    MicroBatchSizes {
        tokens: sizes.tokens / ranks,
        targets: sizes.targets / ranks,
        patches: sizes.patches / ranks,
        ..sizes
    }
}

/// Which parameters are trained.
struct Trained<'a>(&'a [Trainable], Tensor);

impl GradSink for Trained<'_> {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        (self.0[param.index()] == Trainable::Yes).then_some(&self.1)
    }

    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, Store)> {
        self.buffer(param).map(|buffer| (buffer, Store::Add))
    }
}

impl ModelShape {
    /// Reads `config.json` of the model; the weights need not exist.
    pub fn read(config: &RunConfig) -> Result<Self, RunError> {
        let mut config = config.clone();
        config.model.weights = Weights::Random;
        let config = &config;
        let (open, _) = open_run_model(config, None, &Device::Cpu)?;
        let groups = super::inputs::param_groups(config, &open)?;
        let trainable = trainable(&groups);
        Ok(Self { loaded: without_weights(open, &Device::Cpu)?, groups, trainable })
    }

    /// Number of parameters that compute a token; `None`: all, without experts.
    pub fn num_active(&self) -> Option<f64> {
        let idle = self.loaded.open.text().idle_weights() as f64;
        (idle > 0.0).then(|| self.num_parameters()[0] - idle)
    }

    /// Number of parameters, and of trained ones.
    pub fn num_parameters(&self) -> [f64; 2] {
        let count = |only_trained: bool| -> usize {
            let params = self.loaded.params.iter().zip(&self.trainable);
            let counted = params.filter(|(_, kind)| !only_trained || **kind == Trainable::Yes);
            counted.map(|(param, _)| param.shape().elem_count()).sum()
        };
        [count(false) as f64, count(true) as f64]
    }

    /// The prediction for ranks that divide `shard` in groups of `group`, and micro-batches of
    /// `whole` before a sequence group divides them.
    pub fn estimate(
        &self,
        config: &RunConfig,
        world: usize,
        (shard, group): (Shard, usize),
        whole: &MicroBatchSizes,
        exact: bool,
    ) -> candle_core::Result<Estimate> {
        let model = &self.loaded.model;
        let layout = Layout::new(&model.stages(), &self.loaded.params, &self.trainable, group);
        let sequence = config.distributed.sequence.get();
        let groups = (world / sequence).max(1);
        let rounds = (config.train.gradient_accumulation_steps.get() / groups).max(1);
        let early = layout.tied_head(model.lm_head());
        let held = if world == 1 {
            let [parameters, trained] = self.num_parameters();
            let buffers = crate::train::buffers_of_tree(if exact { rounds } else { 1 });
            Division::alone(parameters, trained, buffers as f64)
        } else {
            division(&layout, (shard, exact), rounds, early)
        };
        let held = self.stored(config).of(held);
        let step_patches = whole.step_patches / groups as f64;
        let micro_batch = part(MicroBatchSizes { step_patches, ..*whole }, sequence as f64);
        let memory = self.memory(config, held)?;
        Ok(Estimate { shard, group, parts: memory.parts(&micro_batch) })
    }

    /// The memory of weights that are stored elsewhere.
    fn stored(&self, config: &RunConfig) -> StoredMemory {
        let storage = match config.device {
            DeviceChoice::Cpu => weight_storage(config, &Device::Cpu),
            _ => storage_on_gpu(config),
        };
        let LoadedModel { model, open, .. } = &self.loaded;
        let is_stored = stored_elsewhere(open, &self.trainable, storage);
        stored_memory(&model.stages(), &is_stored, storage)
    }

    /// A full micro-batch, of whose tokens the fraction `images` are of images, and the fraction
    /// `targets` are supervised.
    pub fn full_micro_batch(
        &self,
        config: &RunConfig,
        (images, targets): (f64, f64),
    ) -> MicroBatchSizes {
        let tokens =
            f64::from(config.data.packing_length.get()) * config.train.batch_size.get() as f64;
        let merge = f64::from(self.loaded.model.merge_size().get());
        // a text-only model has a merge size of 1
        let patches = if merge > 1.0 { tokens * images * merge * merge } else { 0.0 };
        MicroBatchSizes {
            tokens,
            targets: tokens * targets,
            patches,
            step_patches: patches * config.train.gradient_accumulation_steps.get() as f64,
            sample_patches: patches / 8.0,
        }
    }

    fn memory(&self, config: &RunConfig, mut held: Division) -> candle_core::Result<MemoryModel> {
        if config.optim.moments == Moments::Host && config.device != DeviceChoice::Cpu {
            held.optimizer = 0.0; // not on the GPU
        }
        let state = self.state_bytes(config);
        let bytes = (config.model.precision.dtype(), state);
        let sink = Trained(&self.trainable, Tensor::zeros((), DType::F32, &Device::Cpu)?);
        let recompute = config.model.recompute.policy();
        let workers = config.data.workers;
        let mut memory = memory_model(&self.loaded.model, held, bytes, recompute, &sink, workers)?;
        if config.model.precision == Precision::Bf16 && config.optim.master == Master::F32 {
            memory.master = 4.0;
        }
        if config.device != DeviceChoice::Cpu {
            memory.logits = GPU_LOGITS_BYTES as f64;
            memory.delta_limit = GPU_DELTA_BYTES as f64;
            if config.model.matmul != MatmulChoice::Native {
                let all = config.model.matmul == MatmulChoice::Fp8All;
                let [token, layer] = self.loaded.open.text().fp8_bytes(all);
                memory.activations.token_backward += token;
                memory.activations.layer_backward += layer;
            }
        }
        Ok(memory)
    }

    /// Number of patches that are merged into one token.
    pub(super) fn patches_per_token(&self) -> f64 {
        f64::from(self.loaded.model.merge_size().get()).powi(2)
    }

    /// Number of values of a patch; 0 without a vision encoder.
    fn patch_values(&self) -> candle_core::Result<f64> {
        let sink = Trained(&self.trainable, Tensor::zeros((), DType::F32, &Device::Cpu)?);
        let policy = RecomputeChoice::None.policy();
        Ok(self.loaded.model.activation_memory(4.0, policy, &sink).patch_values)
    }

    /// Mean bytes of the optimizer state of a trained weight.
    pub(super) fn state_bytes(&self, config: &RunConfig) -> f64 {
        state_bytes_per_weight(&config.optim, &self.loaded.params, &self.groups)
    }
}

/// Lengths of packs are multiples of this number of tokens.
const STEP: u32 = 256;
const MAX_LENGTH: u32 = 1 << 20;

/// A change of the config with which the run fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// What was searched.
    pub name: &'static str,
    /// Values for `--set`, and the predicted bytes; `None` if no value suffices.
    pub found: Option<(Vec<String>, f64)>,
}

/// The largest `packing_length`, the cheapest `recompute` and the fewest ranks with which the run
/// needs at most `memory` bytes, each with the other settings of the config; if one of them does
/// not suffice, also all of them together. There are at most `ranks` ranks.
pub fn search(need: &RunMemory, memory: f64, ranks: usize) -> Result<Vec<Fit>, RunError> {
    let search = Search { need, shape: &ModelShape::read(&need.config)?, memory };
    let mut fits = Vec::new();
    let packs = need.config.data.packing;
    if packs {
        let found = search.longest(need)?;
        let found = found.map(|(length, bytes)| (vec![packing(length)], bytes));
        fits.push(Fit { name: "largest packing_length", found });
    }
    let found = search.recompute()?;
    fits.push(Fit { name: "cheapest recompute", found });
    if ranks > 1 {
        let found = search.shards(ranks)?;
        fits.push(Fit { name: "fewest shards", found });
    }
    if packs && fits.iter().any(|fit| fit.found.is_none()) {
        fits.push(Fit { name: "all together", found: search.together(ranks)? });
    }
    Ok(fits)
}

struct Search<'a> {
    need: &'a RunMemory,
    shape: &'a ModelShape,
    memory: f64,
}

impl Search<'_> {
    /// Its bytes; `None` if it does not fit.
    fn fits(&self, need: &RunMemory) -> Result<Option<f64>, RunError> {
        let bytes = need.bytes(self.shape)?;
        Ok((bytes <= self.memory).then_some(bytes))
    }

    /// The longest pack, by bisection: memory grows with the length.
    fn longest(&self, need: &RunMemory) -> Result<Option<(u32, f64)>, RunError> {
        let (mut low, mut high, mut found) = (0, MAX_LENGTH / STEP + 1, None);
        while high - low > 1 {
            let middle = u32::midpoint(low, high);
            match self.fits(&need.with_packing_length(middle * STEP))? {
                Some(bytes) => (low, found) = (middle, Some((middle * STEP, bytes))),
                None => high = middle,
            }
        }
        Ok(found)
    }

    fn recompute(&self) -> Result<Option<(Vec<String>, f64)>, RunError> {
        if let Some(bytes) = self.fits(self.need)? {
            return Ok(Some((Vec::new(), bytes)));
        }
        for (setting, changed) in self.need.with_recompute() {
            if let Some(bytes) = self.fits(&changed)? {
                return Ok(Some((vec![setting], bytes)));
            }
        }
        Ok(None)
    }

    /// Numbers of ranks that share a step evenly, and what they divide; the fewest first.
    fn divisions(&self, ranks: usize) -> impl Iterator<Item = (usize, Shard)> {
        let config = &self.need.config;
        let worlds = (1..=ranks).filter(|world| check_world(config, *world).is_ok());
        let divides = config.optim.kind.divides_state();
        worlds.flat_map(move |world| {
            let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Full];
            let shards = shards
                .into_iter()
                .filter(move |shard| *shard == Shard::None || (divides && world > 1));
            shards.map(move |shard| (world, shard))
        })
    }

    fn shards(&self, ranks: usize) -> Result<Option<(Vec<String>, f64)>, RunError> {
        for (world, shard) in self.divisions(ranks) {
            if let Some(bytes) = self.fits(&self.need.on_ranks(world, shard))? {
                return Ok(Some((processes(world, shard), bytes)));
            }
        }
        Ok(None)
    }

    /// The longest pack with the most recomputation and the most shards.
    fn together(&self, ranks: usize) -> Result<Option<(Vec<String>, f64)>, RunError> {
        let (world, shard) = self.divisions(ranks).last().unwrap_or((1, Shard::None));
        let mut settings = if world > 1 { processes(world, shard) } else { Vec::new() };
        let mut need = self.need.on_ranks(world, shard);
        if let Some((setting, changed)) = need.with_recompute().pop() {
            settings.push(setting);
            need = changed;
        }
        Ok(self.longest(&need)?.map(|(length, bytes)| {
            settings.push(packing(length));
            (settings, bytes)
        }))
    }
}

fn packing(length: u32) -> String {
    format!("data.packing_length={length}")
}

fn processes(world: usize, shard: Shard) -> Vec<String> {
    vec![format!("distributed.processes={world}"), format!("distributed.shard={}", shard.name())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_settings_and_what_they_save() {
        let saving = |setting: &str, bytes| Saving { setting: setting.to_owned(), bytes };
        let savings = [saving("model.recompute=full", 3.0 * RESERVED), saving("adapter={}", 3e6)];
        let text =
            "set `model.recompute=full` (saves about 3.00 GiB) or `adapter={}` (about 3 MiB)";
        assert_eq!(advice(&savings).as_deref(), Some(text));
        assert_eq!(advice(&[]), None);
    }
}
