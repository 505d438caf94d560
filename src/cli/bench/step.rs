//! `bench --step`: whole optimizer steps of a config, on its own rows.

use super::{Clock, Table};
use crate::batch::{IGNORE_INDEX, VarlenBatch};
use crate::config::RunConfig;
use crate::data::{DataState, DatasetRows, Loader, StepData};
use crate::metrics::{
    Division, MemoryModel, MicroBatchSizes, ModelWork, StepSizes, cpu_seconds, peak_memory_bytes,
    vendor_peak_flops,
};
use crate::ops::{GPU_LOGITS_BYTES, gpu_memory, gpu_properties};
use crate::optim::state_bytes_per_weight;
use crate::run::{
    RESERVED, encoder, load_with_adapter, loader_options, memory_model, order, step_runner,
    weight_storage, whole_model,
};
use crate::train::{PreparedStep, StepRunner, WeightStorage, stored_memory};
use candle_core::{DType, Device};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

/// Sizes that decide the number of operations of a step.
fn sizes(data: &StepData, merge: f64) -> StepSizes {
    let mut sizes = StepSizes { tokens: data.num_tokens as f64, ..StepSizes::default() };
    for batch in &data.micro_batches {
        for segment in batch.cu_seqlens.segments() {
            sizes.samples.push(segment.len());
        }
        for [t, h, w] in batch.media.iter().map(|patches| patches.grid_thw.map(f64::from)) {
            sizes.patches += t * h * w;
            sizes.patch_squares += t * (h * w).powi(2);
        }
    }
    sizes.merged = sizes.patches / (merge * merge);
    sizes
}

/// Sizes that decide the memory of a micro-batch; `step_patches` and `samples` are of the whole
/// step.
fn micro_batch_sizes(batch: &VarlenBatch, step_patches: f64, samples: usize) -> MicroBatchSizes {
    let patches: usize = batch.media.iter().map(crate::batch::Patches::num_patches).sum();
    MicroBatchSizes {
        tokens: batch.input_ids.len() as f64,
        targets: batch.labels.iter().filter(|label| **label != IGNORE_INDEX).count() as f64,
        patches: patches as f64,
        step_patches,
        sample_patches: step_patches / samples.max(1) as f64,
    }
}

/// The memory of a single process whose frozen weights are kept as `storage` says. `state` is the
/// number of bytes of the optimizer state of a weight.
fn memory_of(
    runner: &StepRunner,
    state: f64,
    storage: WeightStorage,
    workers: NonZeroUsize,
) -> anyhow::Result<MemoryModel> {
    let (mut parameters, mut trained) = (0, 0);
    for (param, grad) in runner.params.iter().zip(runner.grads().iter()) {
        let count = param.shape().elem_count();
        parameters += count;
        trained += if grad.is_some() { count } else { 0 };
    }
    let buffers = runner.gradients.num_buffers() as f64;
    let division = Division::alone(parameters as f64, trained as f64, buffers);
    let is_stored: Vec<bool> = runner.params.iter().map(|param| !param.is_resident()).collect();
    let division = stored_memory(&runner.model.stages(), &is_stored, storage).of(division);
    let bytes = (runner.dtype, state);
    let model = &runner.model;
    let mut memory =
        memory_model(model, division, bytes, runner.recompute, runner.grads(), workers)?;
    if !runner.device.is_cpu() {
        memory.logits = GPU_LOGITS_BYTES as f64;
    }
    Ok(memory)
}

/// A step whose upload has started, and its sizes.
struct Ready {
    prepared: PreparedStep,
    sizes: StepSizes,
    /// Tokens in the forward pass, padding included if the model computes it.
    computed: f64,
    predicted_bytes: f64,
}

impl Ready {
    fn new(runner: &StepRunner, memory: &MemoryModel, data: StepData) -> anyhow::Result<Self> {
        let merge = f64::from(runner.model.merge_size().get());
        let sizes = sizes(&data, merge);
        let micro_batches = data.micro_batches.iter();
        let predicted = micro_batches.map(|batch| {
            let parts = memory.parts(&micro_batch_sizes(batch, sizes.patches, data.num_samples));
            if runner.device.is_cpu() { parts.process() } else { parts.device() + RESERVED }
        });
        let predicted_bytes = predicted.fold(0.0, f64::max);
        let computed: usize = data.micro_batches.iter().map(|batch| batch.input_ids.len()).sum();
        let prepared = runner.prepare(data.micro_batches)?;
        Ok(Self { prepared, sizes, computed: computed as f64, predicted_bytes })
    }
}

#[derive(Default)]
struct StepTotals {
    seconds: f64,
    waited: f64,
    sizes: StepSizes,
    computed: f64,
    model_flops: f64,
    lmms_engine_flops: f64,
}

/// The model of a config, and its steps of data.
struct StepBench {
    pub(super) runner: StepRunner,
    loader: Loader,
    memory: MemoryModel,
    work: ModelWork,
    passes: Vec<f64>, // operations per weight and row of each part of the model
}

impl StepBench {
    pub(super) fn new(config: &RunConfig, device: &Device) -> anyhow::Result<Self> {
        let data = &config.data;
        let encoder = encoder(config)?;
        let rows = Arc::new(DatasetRows::open(&data.train, encoder.clone())?);
        let order = order(config, &rows)?;
        let mut options = loader_options(config, &encoder);
        options.epochs = None;
        let (loaded, stored) = load_with_adapter(config, device)?;
        let groups = loaded.open.groups(&config.model.freeze, &config.optim.lr_multipliers)?;
        let state = state_bytes_per_weight(&config.optim, &loaded.params, &groups);
        let runner = step_runner(config, whole_model(loaded, stored), &groups, None, device)?;
        let work = ModelWork(runner.model.work());
        let passes = work.passes(|index| runner.grads().get(index).is_some());
        let memory = memory_of(&runner, state, weight_storage(config, device), options.workers)?;
        let loader = Loader::start(rows, order, options, DataState::default());
        Ok(Self { runner, loader, memory, work, passes })
    }

    fn next(&mut self) -> anyhow::Result<Option<Ready>> {
        let Some(data) = self.loader.next_step() else { return Ok(None) };
        Ready::new(&self.runner, &self.memory, data?).map(Some)
    }
}

/// Times `steps` steps after a first one that is not timed. On a GPU the next step is read and
/// uploaded while the current one is computed, as in training.
pub(super) fn run(config: &RunConfig, steps: u64, table: &mut Table) -> anyhow::Result<()> {
    let started = Instant::now();
    let device = config.device.open()?;
    let mut bench = StepBench::new(config, &device)?;
    let (mut ahead, mut predicted, mut totals) = (None, 0f64, StepTotals::default());
    let (mut cpu_before, mut first, mut first_step_s, mut loss) = (0.0, (0.0, 0.0), 0.0, 0.0);
    for step in 1..=steps + 1 {
        let asked = Instant::now();
        let ready = match ahead.take() {
            Some(ready) => Some(ready),
            None => bench.next()?,
        };
        let Some(Ready { prepared, mut sizes, computed, predicted_bytes }) = ready else { break };
        let wait = asked.elapsed().as_secs_f64();
        predicted = predicted.max(predicted_bytes);
        let launched = bench.runner.launch(prepared, config.optim.lr, step)?;
        if !device.is_cpu() && step <= steps && bench.loader.is_ready() {
            ahead = bench.next()?;
        }
        let result = bench.runner.finish(&launched, &[])?;
        loss = result.loss;
        if step == 1 {
            first = (result.loss, result.grad_norm);
            first_step_s = started.elapsed().as_secs_f64();
            cpu_before = cpu_seconds();
            continue;
        }
        sizes.targets = result.counts.num_targets as f64;
        totals.seconds += asked.elapsed().as_secs_f64();
        totals.waited += wait;
        totals.model_flops += bench.work.model_flops(&sizes, &bench.passes);
        totals.lmms_engine_flops += bench.work.lmms_engine(&sizes);
        totals.computed += computed;
        totals.sizes.tokens += sizes.tokens;
        totals.sizes.merged += sizes.merged;
        totals.sizes.targets += sizes.targets;
    }
    let cpu = cpu_seconds() - cpu_before;
    let device_memory = gpu_memory(&device);
    let peak = peak_flops(&device, bench.runner.dtype)?;
    let gib = f64::from(1 << 30);
    let StepTotals { seconds, waited, sizes, computed, model_flops, lmms_engine_flops } = totals;
    let mut figures = vec![
        ("tokens", sizes.tokens),
        ("computed_tokens", computed),
        ("tokens/s", sizes.tokens / seconds),
        ("tokens/cpu_s", sizes.tokens / cpu),
        ("step_s", seconds / steps as f64),
        ("data_wait", waited / seconds),
        ("GFLOP/s", model_flops / seconds / 1e9),
        ("mfu", model_flops / seconds / peak),
        ("mfu_lmms_engine", lmms_engine_flops / (seconds - waited) / peak),
        ("peak_GFLOP/s", peak / 1e9),
        ("peak_memory_gib", peak_memory_bytes() as f64 / gib),
        ("vision_tokens", sizes.merged),
        ("targets", sizes.targets),
        ("first_step_s", first_step_s),
        ("first_loss", first.0),
        ("first_grad_norm", first.1),
        ("loss", loss),
    ];
    // The memory of the GPU, if there is one, otherwise of the process.
    let name = if device.is_cpu() { "predicted_memory_gib" } else { "predicted_device_memory_gib" };
    figures.push((name, predicted / gib));
    figures
        .extend(device_memory.map(|memory| ("peak_device_memory_gib", memory.peak as f64 / gib)));
    if bench.runner.dtype == DType::BF16
        && let Some(vendor) = gpu_properties(&device).and_then(|gpu| vendor_peak_flops(&gpu.name))
    {
        figures.push(("vendor_peak_GFLOP/s", vendor / 1e9));
        figures.push(("mfu_vendor", model_flops / seconds / vendor));
    }
    table.row("step", &figures)
}

/// Peak matmul rate of the device, in the dtype of the run; of a CPU, in `f32`.
fn peak_flops(device: &Device, dtype: DType) -> anyhow::Result<f64> {
    let (side, dtype) = if device.is_cpu() { (2048, DType::F32) } else { (8192, dtype) };
    Ok(Clock::new(device).matmul_flops(side, dtype)?)
}
