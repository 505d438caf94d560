//! Predicts the memory of a run from its config and the shape of its model.

use super::adapter::open_run_model;
use super::error::RunError;
use super::load_model::{LoadedModel, trainable};
use super::load_shares::without_weights;
use super::stored_weights::{storage_on_gpu, visitors, weight_storage};
use crate::config::RunConfig;
use crate::dist::Shard;
use crate::metrics::{Division, MemoryModel, MemoryParts, MicroBatchSizes};
use crate::models::{Model, RecomputePolicy};
use crate::ops::{GPU_DELTA_BYTES, GPU_LOGITS_BYTES, GradWrite, LOGITS_BYTES};
use crate::optim::{Master, Moments, ParamGroups, state_bytes_per_weight};
use crate::tape::{GradSink, Layout, Param, Trainable};
use crate::train::{
    DeviceChoice, MatmulChoice, Precision, RecomputeChoice, VisitingMemory, Weights, division,
    visiting_memory,
};
use candle_core::{DType, Device, Tensor};

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
    /// The parts of the memory at its peak.
    pub parts: MemoryParts,
}

/// Measured: the shared libraries of FFmpeg and MPI.
const LIBRARIES: f64 = if cfg!(feature = "video") { 24.5e6 } else { 0.0 }
    + if cfg!(feature = "mpi") { 1e6 } else { 0.0 };

/// The sizes of a model that decide the memory of its training. `state` is the mean number of bytes
/// of the optimizer state of a trained weight.
pub(crate) fn memory_model(
    model: &dyn Model,
    division: Division,
    (compute, state): (DType, f64),
    recompute: RecomputePolicy,
    grads: &dyn GradSink,
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

    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, GradWrite)> {
        self.buffer(param).map(|buffer| (buffer, GradWrite::Add))
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
    fn stored(&self, config: &RunConfig) -> VisitingMemory {
        let storage = match config.device {
            DeviceChoice::Cpu => weight_storage(config, &Device::Cpu),
            _ => storage_on_gpu(config),
        };
        let LoadedModel { model, open, .. } = &self.loaded;
        let visit = visitors(open, &self.trainable, storage);
        visiting_memory(&model.stages(), &visit, storage)
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
        let mut memory = memory_model(&*self.loaded.model, held, bytes, recompute, &sink)?;
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
    pub(super) fn patch_values(&self) -> candle_core::Result<f64> {
        let sink = Trained(&self.trainable, Tensor::zeros((), DType::F32, &Device::Cpu)?);
        let policy = RecomputeChoice::None.policy();
        Ok(self.loaded.model.activation_memory(4.0, policy, &sink).patch_values)
    }

    /// Mean bytes of the optimizer state of a trained weight.
    pub(super) fn state_bytes(&self, config: &RunConfig) -> f64 {
        state_bytes_per_weight(&config.optim, &self.loaded.params, &self.groups)
    }
}
