//! Whole optimizer steps of a config, on its own rows.

use super::Table;
use crate::cli::sft;
use crate::config::RunConfig;
use crate::data::{DataState, Encoder, Loader, StepData};
use crate::metrics::{StepSizes, cpu_seconds, peak_memory_bytes};
use crate::train::{JsonlRows, load_model};
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

/// Times `steps` steps after one that is not timed.
pub(super) fn run(config: &RunConfig, steps: u64, table: &mut Table) -> anyhow::Result<()> {
    let device = Device::Cpu;
    let encoder = Arc::new(Encoder::from_folder(&config.model.path, &config.data.image)?);
    let rows = Arc::new(JsonlRows::open(&config.data.train, encoder.clone())?);
    let order = sft::order(config, &rows)?;
    let mut options = sft::loader_options(config, &encoder);
    options.epochs = None;
    let loaded = load_model(&config.model, config.seed, &device)?;
    let merge = f64::from(loaded.model.config().merge_size().get());
    let groups = loaded.groups(&config.model.freeze, &config.optim.lr_multipliers)?;
    let (work, passes) = (loaded.work(), loaded.passes(&groups));
    let (runner, _) = sft::runner(config, loaded, &groups, None, &device)?;
    let mut loader = Loader::start(rows, order, options, DataState::default());
    let (mut seconds, mut waited, mut total) = (0.0, 0.0, StepSizes::default());
    let (mut honest, mut theirs, mut loss) = (0.0, 0.0, 0.0);
    let (mut cpu_before, mut first) = (0.0, (0.0, 0.0));
    for step in 1..=steps + 1 {
        let asked = Instant::now();
        let Some(data) = loader.next_step() else { break };
        let data = data?;
        let wait = asked.elapsed().as_secs_f64();
        let mut sizes = sizes(&data, merge);
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
        total.merged += sizes.merged;
        total.targets += sizes.targets;
    }
    let cpu = cpu_seconds() - cpu_before;
    let peak = peak_flops()?;
    table.row(
        "step",
        &[
            ("tokens/s", total.tokens / seconds),
            ("tokens/cpu_s", total.tokens / cpu),
            ("step_s", seconds / steps as f64),
            ("data_wait", waited / seconds),
            ("GFLOP/s", honest / seconds / 1e9),
            ("mfu", honest / seconds / peak),
            ("mfu_lmms_engine", theirs / (seconds - waited) / peak),
            ("peak_memory_gib", peak_memory_bytes() as f64 / f64::from(1 << 30)),
            ("tokens", total.tokens),
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
