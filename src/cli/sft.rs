//! `trainer sft`: puts a run together, watches it, and shows what came of it.

use super::ConfigArgs;
use super::answers::{say_next_steps, show_answers};
use super::foresight::{Foresight, foresee};
use super::logging::Logging;
use super::output_dir::{WRITABLE, lock, take_over};
use super::progress::Progress;
use super::report::{Exit, Failure};
use crate::batch::PaddingSide;
use crate::checkpoint::{CarriedFiles, Checkpointer, Found};
use crate::config::RunConfig;
use crate::data::BackgroundCacheWriter;
use crate::data::{Corpus, DataState, DatasetShare, Encoder, Loader, LoaderOptions, Order, Rmpad};
use crate::metrics::{EvalMetrics, JsonlSink, StepMetrics};
use crate::ops::simd_level;
use crate::optim::{AdamW, Groups, Schedule, Warmup};
use crate::tape::{Gradients, Param};
use crate::train::{
    DataSet, JsonlRows, LoadedModel, Observer, Outcome, Rejected, StepRunner, TrainState, Trainer,
    TrainerParts, Weights, device_name, trainable, write_rejects,
};
use anyhow::Context as _;
use candle_core::{DType, Device};
use clap::Args;
use sha2::digest::generic_array::GenericArray;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Arguments of `sft`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer sft --config configs/quickstart.yaml\n  \
    trainer sft --config configs/quickstart.yaml --set optim.lr=5e-4 --resume never")]
pub(super) struct SftArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// `auto`: go on from the newest good checkpoint of this run, else start; `never`: start;
    /// DIR: go on from this checkpoint
    #[arg(long, value_name = "auto|never|DIR", default_value = "auto")]
    resume: String,
}

/// Trains.
pub(super) fn run(args: &SftArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = args.config.load()?;
    let output_dir = config.output_dir.as_path();
    std::fs::create_dir_all(output_dir).map_err(|error| {
        let problem =
            format!("`output_dir`: cannot make folder `{}`: {error}", output_dir.display());
        let error = args.config.refuse(&["output_dir"], problem, WRITABLE);
        Failure::of(Exit::CannotWrite, error)
    })?;
    let _lock = lock(output_dir)?;
    let checkpointer = Checkpointer::new(output_dir, &config.checkpoint);
    checkpointer.recover()?;
    let found = find_checkpoint(args, &config, &checkpointer)?;
    let stop = stop_on_signals()?;
    let (mut trainer, beside) =
        assemble(&args.config, &config, checkpointer, found.as_ref(), logging, stop)?;
    let mut watch = Watch::new(logging, &config, &trainer);
    let outcome = trainer.run(&mut watch);
    drop((watch, beside));
    match outcome? {
        Outcome::Stopped { folder } => Err(Failure::new(
            Exit::Stopped,
            format!("stopped by a signal; the run is saved in `{}`", folder.display()),
        )
        .hint(match args.resume.as_str() {
            "auto" => "run the same command again to go on",
            _ => "run the same command with `--resume auto` to go on",
        })
        .into()),
        Outcome::Finished { eval, folder } => {
            tracing::info!(folder = %folder.display(), "done: a model folder for transformers and vLLM");
            if let Some(eval) = eval {
                // The run is done and saved: what cannot be shown is no failure of it.
                if let Err(error) = show_answers(&config, &trainer, &eval) {
                    tracing::warn!("the answers cannot be shown: {error:#}");
                }
            }
            say_next_steps(&args.config.config, &folder);
            Ok(())
        }
    }
}

/// The checkpoint to go on from.
fn find_checkpoint(
    args: &SftArgs,
    config: &RunConfig,
    checkpointer: &Checkpointer,
) -> anyhow::Result<Option<Found>> {
    let fingerprint = config.fingerprint();
    let same_run = |state: &serde_json::Value| state["fingerprint"] == fingerprint.as_str();
    match args.resume.as_str() {
        "never" => Ok(None),
        "auto" => Ok(checkpointer.newest_good(same_run)?),
        folder => {
            super::check_folder("--resume", Path::new(folder))?;
            let found = Checkpointer::open(Path::new(folder))?;
            if same_run(&found.state) {
                // Before anything is moved: a model folder is not enough to go on from.
                found.optimizer().map_err(|error| {
                    Failure::of(Exit::Data, error).hint(
                        "name a folder below `checkpoints/`; to start from weights alone, set `model.path` to this folder",
                    )
                })?;
                return Ok(Some(found));
            }
            Err(Failure::new(
                Exit::Usage,
                format!("`{folder}` is a checkpoint of another config than this one"),
            )
            .hint("only the length of the run, layout, attention, recompute, eval, log and checkpoint settings may change; to start from its weights, set `model.path` to it")
            .into())
        }
    }
}

/// The first SIGINT or SIGTERM asks for an orderly stop; a second SIGINT ends the process.
fn stop_on_signals() -> anyhow::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let stop = Arc::new(AtomicBool::new(false));
    // Registered first, so that it looks at the flag before this signal sets it.
    flag::register_conditional_shutdown(SIGINT, Exit::Interrupted as i32, stop.clone())?;
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// Model, data and state of the run, from the beginning or from a checkpoint, and what goes on beside it.
fn assemble(
    args: &ConfigArgs,
    config: &RunConfig,
    checkpointer: Checkpointer,
    found: Option<&Found>,
    logging: &Logging,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<(Trainer, Option<BackgroundCacheWriter>)> {
    let device = super::open_device(config.device)?;
    let encoder = args.encoder(config)?;
    let rows = Arc::new(open_rows(args, "train", config, &encoder, logging)?);
    let eval_rows = match config.data.eval.as_slice() {
        [] => None,
        _ => Some(open_rows(args, "eval", config, &encoder, logging)?),
    };
    let data_fingerprint = rows.fingerprint();
    let hex = format!("{:x}", GenericArray::from(data_fingerprint));
    let resumed = found.map(|found| resumed_state(found, &hex)).transpose()?;

    let mut section = config.model.clone();
    if let Some(found) = found {
        section.path.clone_from(&found.dir);
        section.weights = Weights::Pretrained;
    }
    let loaded = args.load_model(&section, config.seed, &device)?;
    let groups = args.groups(config, &loaded)?; // before the rows are measured, which takes longer
    let carried = CarriedFiles::read(&config.model.path)?;
    take_over(config, &checkpointer, found, logging)?;
    let options = loader_options(config, &encoder);
    let order = order(config, &rows)?;
    let Foresight { planned, reader, beside } =
        foresee(config, &rows, &order, &options, resumed.as_ref(), logging)?;
    let max_steps = config.train.max_steps.map_or(u64::MAX, NonZeroU64::get);
    let total_steps = planned.map_or(max_steps, |plan| plan.steps.min(max_steps));
    let state = resumed.unwrap_or_else(|| TrainState {
        version: TrainState::VERSION,
        step: 0,
        total_steps,
        planned,
        targets_seen: 0,
        tokens_seen: 0,
        samples_seen: 0,
        datasets_seen: std::collections::BTreeMap::new(),
        fingerprint: config.fingerprint(),
        data_fingerprint: hex,
        data: DataState::default(),
    });
    let state = TrainState { total_steps, planned, ..state };
    let (runner, config_json) = runner(config, loaded, &groups, found, &device)?;
    describe(config, &runner, &rows, &state);

    let warmup = match (config.optim.warmup_steps, config.optim.warmup_ratio) {
        (_, Some(ratio)) => Warmup::Ratio(ratio),
        (steps, None) => Warmup::Steps(steps.unwrap_or(0)),
    };
    let optim = &config.optim;
    let all_done = state.step > 0 && state.step >= total_steps;
    if all_done {
        tracing::info!(
            step = state.step,
            "all steps of this run are done: there is nothing to train"
        );
    }
    let sink = |name: &str| {
        let path = config.output_dir.join(name);
        match state.step {
            0 => JsonlSink::open(&path),
            // The last evaluation is done again, and its row written again.
            step if all_done => JsonlSink::open_keeping(&path, |row| {
                let found = row["step"].as_u64().unwrap_or(0);
                found < step || (found == step && row["eval"] != true)
            }),
            step => JsonlSink::open_truncated_after(&path, step),
        }
    };
    let config_json = config.model.precision.stamp(&config_json);
    let mut rejects = sink("rejects.jsonl")?;
    if state.step == 0 {
        write_rejects(&mut rejects, 1, rows.rejected_texts())?;
    }
    let dataset_names = rows.names().to_vec();
    let rejected_texts = Rejected::of_texts(rows.rejected_texts());
    let trainer = Trainer::new(TrainerParts {
        loader: Loader::start(reader, order, options, state.data.clone()),
        schedule: Schedule::new(optim.schedule, optim.lr, optim.min_lr, warmup, total_steps),
        checkpointer,
        max_steps,
        checkpoint_every: config.checkpoint.every_steps,
        carried,
        config_json,
        eval_rows,
        eval: config.eval.clone(),
        eval_max_tokens: config.data.packing_length.get() as usize,
        metrics: sink("metrics.jsonl")?,
        rejects,
        dataset_names,
        rejected_texts,
        stop,
        runner,
        state,
    });
    Ok((trainer, beside))
}

fn open_rows(
    args: &ConfigArgs,
    list: &str,
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    logging: &Logging,
) -> anyhow::Result<JsonlRows> {
    let rows = args.open_rows(list, config, encoder, logging)?;
    for set in rows.sets() {
        let file = set.path().display();
        match set {
            DataSet::Chats(chats) => {
                tracing::info!(%file, rows = chats.len(), form = %chats.form(), "data");
            }
            DataSet::Corpus(corpus) => {
                let (tokens, documents) = (corpus.num_tokens(), corpus.num_documents());
                let (samples, truncated) = (corpus.len(), corpus.num_truncated());
                tracing::info!(%file, samples, tokens, documents, truncated, "corpus");
                for rejection in corpus.rejected() {
                    tracing::warn!(row = %rejection, "a text of the corpus cannot be used");
                }
            }
        }
    }
    Ok(rows)
}

/// The state of a checkpoint, if the training files are still the same.
fn resumed_state(found: &Found, data_fingerprint: &str) -> anyhow::Result<TrainState> {
    let state: TrainState = serde_json::from_value(found.state.clone())
        .map_err(|error| Failure::of(Exit::Data, error))
        .with_context(|| format!("`{}`: trainer_state.json", found.dir.display()))?;
    if state.data_fingerprint != data_fingerprint {
        let message = format!("the training files changed since `{}`", found.dir.display());
        return Err(Failure::new(Exit::Data, message)
            .hint("restore them, or start anew with `--resume never` (for example with `model.path` set to that checkpoint)")
            .into());
    }
    Ok(state)
}

/// The order in which epochs visit the rows.
pub(super) fn order(config: &RunConfig, rows: &JsonlRows) -> anyhow::Result<Order> {
    let shares = config
        .data
        .train
        .iter()
        .zip(rows.sets())
        .map(|(config, set)| DatasetShare { rows: set.len() as u64, weight: config.weight });
    let shares: Vec<DatasetShare> = shares.collect();
    let data = &config.data;
    let mut order = Order::new(&shares, data.row_order(), config.seed, rows.fingerprint())?;
    for (dataset, set) in rows.sets().iter().enumerate() {
        if let Some(windows) = set.corpus().and_then(Corpus::windows) {
            order = order.with_windows(dataset, windows)?;
        }
    }
    Ok(order.mixed(data.mixture, data.stopping_strategy)?)
}

/// How rows become steps.
pub(super) fn loader_options(config: &RunConfig, encoder: &Encoder) -> LoaderOptions {
    let (data, train) = (&config.data, &config.train);
    let step = train.batch_size.saturating_mul(train.gradient_accumulation_steps);
    LoaderOptions {
        packing: data.packing(),
        pack_rules: data.pack_rules(step, encoder.image_processor().patch_bytes()),
        max_length: data.max_length,
        truncation: data.truncation,
        batch_size: train.batch_size,
        gradient_accumulation_steps: train.gradient_accumulation_steps,
        workers: data.workers,
        pad_id: encoder.pad_id(),
        merge_size: encoder.merge_size(),
        rmpad: if config.model.use_rmpad { Rmpad::Unpad } else { Rmpad::KeepPadding },
        side: PaddingSide::Right,
        epochs: train.epoch_limit().and_then(NonZeroU64::new),
        on_error: data.on_error,
        max_rejected: data.max_rejected,
    }
}

/// Model, gradients and optimizer, with the state of `found`.
pub(super) fn runner(
    config: &RunConfig,
    loaded: LoadedModel,
    groups: &Groups,
    found: Option<&Found>,
    device: &Device,
) -> anyhow::Result<(StepRunner, serde_json::Value)> {
    let saved = found.map(Found::optimizer).transpose()?;
    let load = |kind: &str, param: &Param, dtype: DType, device: &Device| {
        let name = format!("{kind}.{}", param.name());
        saved.as_ref().map(|saved| saved.load(&name, dtype, device)).transpose()
    };
    let master = |param: &Param, device: &Device| {
        let saved = load("master", param, DType::F32, device).map_err(candle_core::Error::wrap)?;
        saved.map_or_else(|| loaded.master(param, device), Ok)
    };
    let max_norm = config.train.max_grad_norm;
    let mut optimizer =
        AdamW::new(&config.optim, max_norm, &loaded.params, groups, master, device)?;
    for slot in optimizer.slots_mut() {
        for (kind, moment) in [("exp_avg", &mut slot.exp_avg), ("exp_avg_sq", &mut slot.exp_avg_sq)]
        {
            let (dtype, device) = (moment.dtype(), moment.device().clone());
            if let Some(saved) = load(kind, &slot.param, dtype, &device)? {
                *moment = saved;
            }
        }
    }
    let grads = Gradients::zeros(&loaded.params, &trainable(groups), device)?;
    let runner = StepRunner {
        grads,
        model: loaded.model,
        params: loaded.params,
        optimizer,
        recompute: config.model.recompute.policy(),
        dtype: config.model.precision.dtype(),
        device: device.clone(),
    };
    Ok((runner, loaded.config_json))
}

/// What is trained on what, in a few log lines.
fn describe(config: &RunConfig, runner: &StepRunner, rows: &JsonlRows, state: &TrainState) {
    let count = |params: &mut dyn Iterator<Item = &Param>| {
        params.map(|param| param.tensor().elem_count()).sum::<usize>()
    };
    tracing::info!(
        path = %config.model.path.display(),
        parameters = count(&mut runner.params.iter()),
        trained = count(&mut runner.optimizer.slots().iter().map(|slot| &slot.param)),
        precision = config.model.precision.hf_name(),
        attention = attention_kernels(config, runner),
        device = device_name(&runner.device),
        threads = rayon::current_num_threads(),
        simd = simd_level().ok().map(tracing::field::display),
        "model"
    );
    let num_rows = rows.num_rows();
    tracing::info!(
        from_step = state.step,
        steps = state.total_steps,
        rows = num_rows,
        fingerprint = state.fingerprint,
        "{}",
        if state.step == 0 { "start" } else { "resume" }
    );
}

/// What computes attention: in the decoder, and in the vision encoder if that differs.
fn attention_kernels(config: &RunConfig, runner: &StepRunner) -> String {
    let (backend, model) = (config.model.attention.backend(), runner.model.config());
    let kernel = |head_dim| backend.kernel(&runner.device, runner.dtype, head_dim);
    let text = kernel(model.text.head_dim);
    let vision = kernel(model.vision.hidden_size / model.vision.num_heads);
    if text == vision { text.to_owned() } else { format!("{text}; vision: {vision}") }
}

/// Shows a run: a bar on a terminal, log lines everywhere.
struct Watch<'a> {
    logging: &'a Logging,
    log_every: u64,
    steps: Progress,
    rows: Option<Progress>,
}

impl<'a> Watch<'a> {
    fn new(logging: &'a Logging, config: &RunConfig, trainer: &Trainer) -> Self {
        let state = trainer.state();
        let steps = Progress::steps(logging.bars(), state.total_steps, state.step);
        Self { logging, log_every: config.log.every_steps.get(), steps, rows: None }
    }
}

impl Observer for Watch<'_> {
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64) {
        self.steps.step(metrics);
        if metrics.step.is_multiple_of(self.log_every) || metrics.step == total_steps {
            metrics.log();
        }
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        let bars = self.logging.bars();
        let bar =
            self.rows.get_or_insert_with(|| Progress::items(bars, "rows scored", total as u64));
        bar.set(done as u64);
    }

    fn evaluated(&mut self, metrics: &EvalMetrics) {
        self.rows = None;
        metrics.log();
    }
}
