//! Whole optimizer steps of a config, on its own rows.

use super::Table;
use crate::batch::{IGNORE_INDEX, VarlenBatch};
use crate::cli::sft;
use crate::config::RunConfig;
use crate::data::{DataState, Encoder, Loader, StepData};
use crate::metrics::{
    LayerTape, MemoryModel, MicroBatchSizes, StepSizes, TowerMemory, cpu_seconds, peak_memory_bytes,
};
use crate::ops::LOGITS_BYTES;
use crate::tape::Recompute;
use crate::train::{JsonlRows, StepRunner, load_model};
use candle_core::Device;
use std::sync::Arc;
use std::time::Instant;

/// Sizes of a step's work, from its host batches.
fn sizes(data: &StepData, merge: f64) -> StepSizes {
    let mut sizes = StepSizes { tokens: data.num_tokens as f64, ..StepSizes::default() };
    for batch in &data.micro_batches {
        for segment in batch.cu_seqlens.segments() {
            sizes.token_squares += (segment.len() as f64).powi(2);
        }
        for [t, h, w] in batch.media.iter().map(|patches| patches.grid_thw.map(f64::from)) {
            sizes.patches += t * h * w;
            sizes.patch_squares += t * (h * w).powi(2);
        }
    }
    sizes.merged = sizes.patches / (merge * merge);
    sizes
}

/// What decides the memory of a micro-batch, in a step of `step_patches` and `samples`.
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

/// The sizes that the prediction needs. Every layer counts as visited: the embedding or the tower is
/// trained, or the first layer.
fn memory_model(runner: &StepRunner) -> MemoryModel {
    let tape = |recompute| match recompute {
        Recompute::No => LayerTape::Whole,
        Recompute::Yes => LayerTape::Input,
    };
    let (text, vision) = (&runner.model.config().text, &runner.model.config().vision);
    let (mut parameters, mut trained, mut tower_trained) = (0, 0, false);
    for (param, grad) in runner.params.iter().zip(runner.grads.iter()) {
        parameters += param.tensor().elem_count();
        if grad.is_some() {
            trained += param.tensor().elem_count();
            tower_trained |= param.name().starts_with("model.visual.");
        }
    }
    MemoryModel {
        parameters: parameters as f64,
        trained: trained as f64,
        element: runner.dtype.size_in_bytes() as f64,
        moment: runner
            .optimizer
            .slots()
            .first()
            .map_or(4, |slot| slot.exp_avg.dtype().size_in_bytes()) as f64,
        layers: text.num_hidden_layers as f64,
        hidden: text.hidden_size as f64,
        heads: text.num_attention_heads as f64,
        kv_heads: text.num_key_value_heads as f64,
        head_dim: text.head_dim as f64,
        intermediate: text.intermediate_size as f64,
        vocabulary: text.vocab_size as f64,
        logits: LOGITS_BYTES as f64,
        layer_tape: tape(runner.recompute.llm),
        tower: TowerMemory {
            patch_values: vision.patch_values() as f64,
            blocks: if tower_trained { vision.depth as f64 } else { 0.0 },
            hidden: vision.hidden_size as f64,
            intermediate: vision.intermediate_size as f64,
            heads: vision.num_heads as f64,
            mergers: (1 + vision.deepstack_visual_indexes.len()) as f64,
            join: vision.spatial_merge_size.pow(2) as f64,
            block_tape: tape(runner.recompute.vision),
        },
    }
}

/// Times `steps` steps after one that is not timed.
pub(super) fn run(config: &RunConfig, steps: u64, table: &mut Table) -> anyhow::Result<()> {
    let device = crate::cli::open_device(config.device)?;
    let encoder = {
        let data = &config.data;
        Arc::new(Encoder::with_video(&config.model.path, &data.image, &data.video)?)
    };
    let rows = Arc::new(JsonlRows::open(&config.data.train, encoder.clone())?);
    let order = sft::order(config, &rows)?;
    let mut options = sft::loader_options(config, &encoder);
    options.epochs = None;
    let loaded = load_model(&config.model, config.seed, &device)?;
    let merge = f64::from(loaded.model.config().merge_size().get());
    let groups = loaded.groups(&config.model.freeze, &config.optim.lr_multipliers)?;
    let (work, passes) = (loaded.work(), loaded.passes(&groups));
    let (runner, _) = sft::runner(config, loaded, &groups, None, &device)?;
    let memory = memory_model(&runner);
    let mut predicted = 0f64;
    let mut loader = Loader::start(rows, order, options, DataState::default());
    let (mut seconds, mut waited, mut total) = (0.0, 0.0, StepSizes::default());
    let (mut honest, mut theirs, mut loss, mut computed) = (0.0, 0.0, 0.0, 0.0);
    let (mut cpu_before, mut first) = (0.0, (0.0, 0.0));
    for step in 1..=steps + 1 {
        let asked = Instant::now();
        let Some(data) = loader.next_step() else { break };
        let data = data?;
        let wait = asked.elapsed().as_secs_f64();
        let mut sizes = sizes(&data, merge);
        for batch in &data.micro_batches {
            let largest = micro_batch_sizes(batch, sizes.patches, data.num_samples);
            predicted = predicted.max(memory.peak_bytes(&largest));
        }
        // Padding that the model sees counts here.
        let in_stream: usize = data.micro_batches.iter().map(|batch| batch.input_ids.len()).sum();
        let outcome = runner.run(data.micro_batches, config.optim.lr, step)?;
        loss = outcome.loss;
        if step == 1 {
            first = (outcome.loss, outcome.grad_norm);
            cpu_before = cpu_seconds();
            continue;
        }
        sizes.targets = outcome.num_targets as f64;
        let elapsed = asked.elapsed().as_secs_f64();
        seconds += elapsed;
        waited += wait;
        honest += work.honest(&sizes, passes);
        theirs += work.lmms_engine(&sizes);
        total.tokens += sizes.tokens;
        computed += in_stream as f64;
        total.merged += sizes.merged;
        total.targets += sizes.targets;
    }
    let cpu = cpu_seconds() - cpu_before;
    let peak = peak_flops()?;
    table.row(
        "step",
        &[
            ("tokens", total.tokens),
            ("computed_tokens", computed),
            ("tokens/s", total.tokens / seconds),
            ("tokens/cpu_s", total.tokens / cpu),
            ("step_s", seconds / steps as f64),
            ("data_wait", waited / seconds),
            ("GFLOP/s", honest / seconds / 1e9),
            ("mfu", honest / seconds / peak),
            ("mfu_lmms_engine", theirs / (seconds - waited) / peak),
            ("peak_memory_gib", peak_memory_bytes() as f64 / f64::from(1 << 30)),
            ("predicted_memory_gib", predicted / f64::from(1 << 30)),
            ("vision_tokens", total.merged),
            ("targets", total.targets),
            ("first_loss", first.0),
            ("first_grad_norm", first.1),
            ("loss", loss),
        ],
    )
}

/// The matmul rate of this machine at its best size.
fn peak_flops() -> anyhow::Result<f64> {
    let x = candle_core::Tensor::randn(0f32, 1.0, (2048, 2048), &Device::Cpu)?;
    let seconds = super::fastest(|| crate::ops::linear(&x, &x, None).map(drop))?;
    Ok(2.0 * 2048f64.powi(3) / seconds)
}
