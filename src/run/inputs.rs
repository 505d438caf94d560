//! The inputs of a run, from its config: encoder, data sets, order of rows, model.

use super::contradictions::check_model_folder;
use super::error::RunError;
use super::load_model::OpenModel;
use super::observer::{SetupObserver, SetupWork};
use super::setup_error::SetupError;
use crate::batch::PaddingSide;
use crate::checkpoint::CheckpointError;
use crate::config::RunConfig;
use crate::data::{
    Corpus, CorpusOptions, DataSet, DatasetConfig, DatasetInfo, DatasetShare, Encoder, ImageConfig,
    JsonlRows, LoaderOptions, Mixture, ModelFolderError, Order, Purpose, Rmpad, SourceError,
    StepPacks,
};
use crate::net::UrlImages;
use crate::optim::{GroupError, ParamGroups};
use crate::train::ModelSection;
use candle_core::Device;
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// `data.train` or `data.eval`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataList {
    Train,
    Eval,
}

/// Checks the rules that the types of a config cannot express.
pub(crate) fn check(config: &RunConfig) -> Result<(), RunError> {
    Ok(config.check()?)
}

/// Reads tokenizer, template, image and video settings of the model folder, whose files must agree.
pub(crate) fn encoder(config: &RunConfig) -> Result<Arc<Encoder>, RunError> {
    check_model_folder(&config.model.path)?;
    let data = &config.data;
    let ImageConfig { min_pixels, max_pixels, max_tokens } = data.image;
    let encoder = Encoder::with_video(&config.model.path, &data.image, &data.video);
    let encoder = encoder.map(|encoder| {
        encoder.with_loss_scale(data.loss_scale).with_empty_thoughts(data.train_empty_think)
    });
    let encoder = encoder.map_err(|error| match error {
        problem @ ModelFolderError::ImagePixels { .. }
            if min_pixels.or(max_pixels).is_some() || max_tokens.is_some() =>
        {
            let key = match (min_pixels, max_pixels) {
                (Some(_), _) => "data.image.min_pixels",
                (None, Some(_)) => "data.image.max_pixels",
                (None, None) => "data.image.max_tokens",
            };
            RunError::Setting { key: key.to_owned(), problem }
        }
        problem @ ModelFolderError::VideoSetting { key, .. } => {
            RunError::Setting { key: format!("data.video.{key}"), problem }
        }
        error => error.into(),
    })?;
    let Some(limits) = data.url.limits().filter(|_| data.allow_urls) else {
        return Ok(Arc::new(encoder));
    };
    let images = UrlImages::new(&config.cache_dir().join("images"), limits);
    Ok(Arc::new(encoder.with_urls(Arc::new(images.map_err(RunError::Urls)?))))
}

/// Opens the data sets of a list. A corpus is tokenised unless its tokens are cached.
pub(crate) fn open_data(
    config: &RunConfig,
    list: DataList,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<JsonlRows, RunError> {
    let data = &config.data;
    let (name, datasets, purpose, cut) = match list {
        DataList::Train => {
            ("train", &data.train, Purpose::Train(config.train.batch_size), data.truncation_rule())
        }
        // Evaluation scores whole samples.
        DataList::Eval => ("eval", &data.eval, Purpose::Eval, None),
    };
    let options = CorpusOptions {
        purpose,
        split_at: data.split_at(),
        cut,
        // Only a run and `cache` create folders: `inspect` and `eval` must not leave one behind.
        cache: Some(config.cache_dir())
            .filter(|cache| cache.is_dir() || config.output_dir.is_dir()),
        unknown_keys: data.unknown_keys,
        on_error: data.on_error,
        max_rejected: data.max_rejected,
    };
    let report = RefCell::new(None);
    let progress = |done, total| {
        let mut report = report.borrow_mut();
        report.get_or_insert_with(|| observer.begin(SetupWork::TokeniseBytes, total))(done);
        if done == total {
            *report = None; // the next corpus starts a new report
        }
    };
    let rows = JsonlRows::open_with(datasets, encoder.clone(), &options, &progress);
    rows.map(|rows| rows.truncated(cut)).map_err(|problem| of_data_set(name, datasets, problem))
}

/// An error of the list `name`, with the config key that it is about.
pub(super) fn of_data_set(
    name: &'static str,
    datasets: &[DatasetConfig],
    problem: SourceError,
) -> RunError {
    // of a file in a folder or pattern, the first data set
    let index = |path: &Path| {
        let named = |set: &DatasetConfig| {
            let info =
                set.dataset_info.as_deref().and_then(|info| DatasetInfo::of(info.to_str()?).ok());
            info.is_some_and(|info| path.starts_with(info.path()))
        };
        let has = |set: &DatasetConfig| {
            set.path.paths().iter().any(|of| path.starts_with(of)) || named(set)
        };
        datasets.iter().position(has).unwrap_or(0)
    };
    let (index, key) = match &problem {
        SourceError::Read { path, .. }
        | SourceError::NoFiles { path, .. }
        | SourceError::Mixed { path, .. }
        | SourceError::Splits { path, .. } => (index(path), "path".to_owned()),
        SourceError::DatasetInfo { entry, .. } => {
            let has = |set: &DatasetConfig| set.dataset_info.as_deref() == Some(Path::new(entry));
            (datasets.iter().position(has).unwrap_or(0), "dataset_info".to_owned())
        }
        SourceError::UnknownToken { path, key, .. } => (index(path), format!("corpus.{key}")),
        // The file can be read, but its content is wrong: no config key is the cause.
        _ => return problem.into(),
    };
    RunError::DataSet { list: name, index, key, problem: Box::new(problem) }
}

/// The order of the rows in each epoch.
pub(crate) fn order(config: &RunConfig, rows: &JsonlRows) -> Result<Order, RunError> {
    let data = &config.data;
    let share = |(config, set): (&DatasetConfig, &DataSet)| {
        let rows = set.len() as u64;
        // With `mixture: share` weights are shares, whatever the number of rows.
        let part = match data.mixture {
            Mixture::Repeat => set.num_samples() as f64 / rows as f64,
            Mixture::Share => 1.0,
        };
        DatasetShare { rows, weight: config.weight * part }
    };
    let shares: Vec<DatasetShare> = data.train.iter().zip(rows.sets()).map(share).collect();
    let mut order = Order::new(&shares, data.row_order(), config.seed, rows.fingerprint())?;
    for (dataset, set) in rows.sets().iter().enumerate() {
        if let Some(windows) = set.corpus().and_then(Corpus::windows) {
            order = order.with_windows(dataset, windows)?;
        }
    }
    Ok(order.mixed(data.mixture, data.stopping_strategy)?)
}

/// How rows become the steps of a run.
pub(crate) fn loader_options(config: &RunConfig, encoder: &Encoder) -> LoaderOptions {
    let (data, train) = (&config.data, &config.train);
    let step = StepPacks {
        micro_batches: train.gradient_accumulation_steps,
        batch_size: train.batch_size,
    };
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
        slow_row: slow_row(config),
    }
}

/// Time to read one row after which the log names the row: before the run is ended for it.
fn slow_row(config: &RunConfig) -> Duration {
    let alone = match config.train.timeout_s {
        0 => Duration::MAX, // never
        seconds => Duration::from_secs(seconds),
    };
    (alone.min(config.distributed.timeout()) / 2).min(Duration::from_secs(10))
}

/// Opens the model folder of a run.
pub(crate) fn open_for_run(
    section: &ModelSection,
    seed: u64,
    device: &Device,
) -> Result<OpenModel, RunError> {
    OpenModel::open(section, seed, device).map_err(|error| match error {
        SetupError::Files { source, .. }
            if matches!(*source, CheckpointError::NoWeights { .. }) =>
        {
            RunError::NoWeights { problem: *source }
        }
        error => error.into(),
    })
}

/// Applies `model.freeze` and `optim.lr_multipliers`.
pub(crate) fn param_groups(config: &RunConfig, open: &OpenModel) -> Result<ParamGroups, RunError> {
    let groups = open.groups(&config.model.freeze, &config.optim.lr_multipliers);
    let groups = groups.and_then(|groups| groups.check_kind(config.optim.kind).map(|()| groups));
    groups.map_err(|problem| of_pattern(config, problem))
}

/// An error of a pattern, with the config key that it is about.
pub(super) fn of_pattern(config: &RunConfig, problem: GroupError) -> RunError {
    let (key, pattern) = problem.origin();
    let mut keys: Vec<String> = key.split('.').map(str::to_owned).collect();
    match config.model.freeze.iter().position(|entry| Some(entry.as_str()) == pattern) {
        Some(index) if key == "model.freeze" => keys.push(index.to_string()),
        _ => keys.extend(pattern.map(str::to_owned)),
    }
    RunError::Groups { keys, problem }
}
