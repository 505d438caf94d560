//! The inputs of a run, from its config: encoder, data sets, order of rows, model; and the files in
//! the hub's cache that hub ids name.

use super::error::{RunError, SetupError};
use super::load_model::OpenModel;
use super::model_files::check_model_folder;
use super::new_tokens::{NewVocabulary, check_rows};
use crate::batch::PaddingSide;
use crate::checkpoint::{CheckpointError, is_model_file};
use crate::config::RunConfig;
use crate::data::{
    Corpus, CorpusOptions, DataSet, DatasetConfig, DatasetInfo, DatasetRows, DatasetShare, Encoder,
    EvalSplit, ImageConfig, LoaderOptions, Mixture, ModelFolderError, Order, Purpose, Rmpad,
    SourceError, StepPacks,
};
use crate::files;
use crate::net::UrlImages;
use crate::net::hub::{Hub, HubError, Repo, Selection};
use crate::optim::{GroupError, ParamGroups};
use crate::train::{ModelSection, Weights};
use candle_core::Device;
use std::cell::RefCell;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The data sets to train on, or those to evaluate on.
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
    let vocabulary = NewVocabulary::of(&config.model)?;
    vocabulary.iter().for_each(NewVocabulary::log);
    let encoder = Encoder::with_vocabulary(
        &config.model.path,
        &data.image,
        &data.video,
        vocabulary.as_ref().map(NewVocabulary::of_encoder),
    );
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

/// Opens the data sets to train on, and those to evaluate on if there are any.
pub(crate) fn open_both(
    config: &RunConfig,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<(DatasetRows, Option<DatasetRows>), RunError> {
    if let Some(split) = config.data.eval_split(config.seed) {
        let [train, eval] = open_split(config, split, encoder, observer)?;
        return Ok((train, Some(eval)));
    }
    let train = open_list(config, DataList::Train, encoder, observer)?;
    let eval = (!config.data.eval.is_empty())
        .then(|| open_list(config, DataList::Eval, encoder, observer))
        .transpose()?;
    Ok((train, eval))
}

/// Opens the data sets to train on, or those to evaluate on.
pub(crate) fn open_data(
    config: &RunConfig,
    list: DataList,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<DatasetRows, RunError> {
    let Some(split) = config.data.eval_split(config.seed) else {
        return open_list(config, list, encoder, observer);
    };
    let [train, eval] = open_split(config, split, encoder, observer)?;
    Ok(match list {
        DataList::Train => train,
        DataList::Eval => eval,
    })
}

/// The rows of `data.train` to train on, and those that are held out. Rows that are too long to
/// train on are rejected on both sides.
fn open_split(
    config: &RunConfig,
    split: EvalSplit,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<[DatasetRows; 2], RunError> {
    let [train, eval] = open_list(config, DataList::Train, encoder, observer)?.split(split)?;
    let mut limits = loader_options(config, encoder);
    if config.data.truncation_rule().is_some() {
        limits.max_length = None; // longer rows are truncated, and not rejected
    }
    Ok([train, eval.limited(limits)])
}

/// Opens the data sets of `data.train` or `data.eval`, with all their rows. A corpus is tokenised
/// unless its tokens are cached.
fn open_list(
    config: &RunConfig,
    list: DataList,
    encoder: &Arc<Encoder>,
    observer: &dyn SetupObserver,
) -> Result<DatasetRows, RunError> {
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
        system: data.system.clone(),
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
    let rows = DatasetRows::open_with(datasets, encoder.clone(), &options, &progress);
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
pub(crate) fn order(config: &RunConfig, rows: &DatasetRows) -> Result<Order, RunError> {
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
    let groups = pattern_groups(config, open).map_err(|problem| of_pattern(config, problem))?;
    check_rows(config, open, &groups)?;
    Ok(groups)
}

/// As [`param_groups`], with an error that names no config key.
pub(super) fn pattern_groups(
    config: &RunConfig,
    open: &OpenModel,
) -> Result<ParamGroups, GroupError> {
    let groups = open.groups(&config.model.freeze, &config.optim.lr_multipliers)?;
    groups.check_kind(config.optim.kind)?;
    Ok(groups)
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

/// Returns the config with local paths. Downloads the model if `model.path` is a hub id, and data
/// files whose path starts with `hf://`, unless they are in the hub's cache.
///
/// [`Run`](super::Run) calls this itself; a config with local paths is unchanged.
pub fn download(config: &RunConfig, observer: &dyn SetupObserver) -> Result<RunConfig, RunError> {
    let mut config = config.clone();
    let model = &mut config.model;
    model.path = model_folder(&model.path, model.weights, observer).map_err(|problem| {
        RunError::Hub { key: "model.path".to_owned(), problem: Box::new(problem) }
    })?;
    let data = &mut config.data;
    for (list, sets) in [("train", &mut data.train), ("eval", &mut data.eval)] {
        for (index, set) in sets.iter_mut().enumerate() {
            for path in set.path.paths_mut() {
                *path = data_path(path, observer).map_err(|problem| RunError::Hub {
                    key: format!("data.{list}.{index}.path"),
                    problem: Box::new(problem),
                })?;
            }
        }
    }
    Ok(config)
}

/// Returns `path` if it is a folder. Otherwise takes it for a hub id, downloads what the hub's
/// cache lacks, and returns the folder in the cache.
pub fn model_folder(
    path: &Path,
    weights: Weights,
    observer: &dyn SetupObserver,
) -> Result<PathBuf, HubError> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let text = path.to_string_lossy();
    let not_an_id = |found| HubError::NotAnId { text: text.clone().into_owned(), found };
    if path.exists() {
        return Err(not_an_id("a file"));
    }
    let repo = Repo::model(&text).ok_or_else(|| not_an_id("nothing"))?;
    tracing::info!("there is no folder `{text}`: it is taken for an id of the Hugging Face Hub");
    let begin = |total| observer.begin(SetupWork::DownloadBytes, total);
    Hub::from_env()?.fetch(&repo, &ModelFiles(weights), &begin)
}

/// Returns `path`, or the path in the cache of what `hf://datasets/owner/name/path` names: a file,
/// a folder or a pattern.
fn data_path(path: &Path, observer: &dyn SetupObserver) -> Result<PathBuf, HubError> {
    let Some(text) = path.to_str().filter(|text| text.starts_with("hf://")) else {
        return Ok(path.to_owned());
    };
    let (repo, inside) =
        Repo::dataset_file(text).ok_or_else(|| HubError::NotADataFile { text: text.to_owned() })?;
    let begin = |total| observer.begin(SetupWork::DownloadBytes, total);
    let folder = Hub::from_env()?.fetch(&repo, &DataFiles { path: inside.clone() }, &begin)?;
    Ok(folder.join(inside))
}

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The files of a model folder.
struct ModelFiles(Weights);

impl Selection for ModelFiles {
    fn choose(&self, repo: &Repo, all: &[String]) -> Result<Vec<String>, HubError> {
        let with_weights = self.0 == Weights::Pretrained;
        let has_weights = all.iter().any(|name| name == SINGLE || name == INDEX);
        if !all.iter().any(|name| name == "config.json") || (with_weights && !has_weights) {
            let what = "`config.json` with `model.safetensors` or `model.safetensors.index.json`";
            return Err(HubError::NoFiles { repo: repo.clone(), what });
        }
        let is_needed = |name: &&String| {
            is_model_file(name) && (with_weights || !name.contains(".safetensors"))
        };
        Ok(all.iter().filter(is_needed).cloned().collect())
    }

    fn lacks(&self, folder: &Path) -> Option<String> {
        let is_there = |name: &str| folder.join(name).exists();
        let lacking = |name: &str| Some(format!("`{name}`"));
        if !is_there("config.json") {
            return lacking("config.json");
        }
        if self.0 == Weights::Random || is_there(SINGLE) {
            return None;
        }
        let Ok(index) = files::read(folder.join(INDEX)) else { return lacking(SINGLE) };
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
        let mut shards = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
        let missing = shards.find_map(|shard| shard.as_str().filter(|name| !is_there(name)))?;
        lacking(missing)
    }
}

/// The data files that a path inside a repository names.
struct DataFiles {
    /// A file, a folder, or a pattern with `*`.
    path: String,
}

impl DataFiles {
    fn names(&self, name: &str) -> bool {
        let path = self.path.as_str();
        if path.contains(['*', '?', '[']) {
            let separate =
                glob::MatchOptions { require_literal_separator: true, ..Default::default() };
            return glob::Pattern::new(path).is_ok_and(|it| it.matches_with(name, separate));
        }
        let in_folder = match path {
            "" => Some(name),
            _ => name.strip_prefix(path).and_then(|rest| rest.strip_prefix('/')),
        };
        // A folder has no hidden files, no files in folders, and not the page of the data set.
        let is_data =
            |name: &str| !name.contains('/') && !name.starts_with('.') && name != "README.md";
        name == path || in_folder.is_some_and(is_data)
    }
}

impl Selection for DataFiles {
    fn choose(&self, repo: &Repo, all: &[String]) -> Result<Vec<String>, HubError> {
        let found: Vec<String> = all.iter().filter(|name| self.names(name)).cloned().collect();
        if !found.is_empty() {
            return Ok(found);
        }
        let mut others: Vec<&String> = all.iter().collect();
        let distance = |name: &&String| strsim::damerau_levenshtein(name, &self.path);
        others.sort_by_key(distance);
        others.truncate(3);
        let others: Vec<String> = others.into_iter().map(|name| format!("`{name}`")).collect();
        Err(HubError::NotFound {
            what: format!("file `{}` in `{repo}`", self.path),
            others: Some(others.join(", ")).filter(|others| !others.is_empty()),
        })
    }

    /// Without the list of files, only a single file is known to be complete.
    fn lacks(&self, folder: &Path) -> Option<String> {
        let is_file = folder.join(&self.path).is_file();
        (!is_file).then(|| format!("`{}`", self.path))
    }
}

/// Work whose progress is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetupWork {
    /// Downloading files from the hub; counted in bytes.
    DownloadBytes,
    /// Tokenising the text of a corpus; counted in bytes.
    TokeniseBytes,
    /// Measuring rows for the length cache; counted in rows.
    MeasureRows,
}

/// Observes how a run is assembled. Every method does nothing by default; `()` is an observer.
pub trait SetupObserver {
    /// Called when work on `total` items begins. The returned function receives the number of items
    /// done, and is dropped when the work ends or fails.
    fn begin(&self, _work: SetupWork, _total: u64) -> Box<dyn Fn(u64) + '_> {
        Box::new(|_| ())
    }

    /// Called when the files of an earlier run have been moved. From then on, log lines may be
    /// appended to `log_file`.
    fn log_to(&self, _log_file: &Path) -> io::Result<()> {
        Ok(())
    }
}

impl SetupObserver for () {}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(path: &str, all: &[&str]) -> Vec<String> {
        let all: Vec<String> = all.iter().copied().map(str::to_owned).collect();
        let repo = Repo::model("o/n").unwrap();
        DataFiles { path: path.to_owned() }.choose(&repo, &all).unwrap_or_default()
    }

    #[test]
    fn a_path_in_a_repository_names_a_file_a_folder_or_files_by_pattern() {
        let all = [
            ".gitattributes",
            "README.md",
            "a.jsonl",
            "d/t-0.parquet",
            "d/t-1.parquet",
            "d/e/v.parquet",
        ];
        assert_eq!(chosen("a.jsonl", &all), ["a.jsonl"]);
        assert_eq!(chosen("", &all), ["a.jsonl"]);
        assert_eq!(chosen("d", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(chosen("d/t-*.parquet", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(chosen("d/*.parquet", &all), ["d/t-0.parquet", "d/t-1.parquet"]);
        assert_eq!(
            chosen("**/*.parquet", &all),
            ["d/t-0.parquet", "d/t-1.parquet", "d/e/v.parquet"]
        );
        assert_eq!(chosen("d/t", &all), [""; 0]);
    }

    #[test]
    fn a_model_needs_its_weights_only_if_they_are_used() {
        let all = [
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "README.md",
            "onnx/model.onnx",
            "original/model.safetensors",
            "pytorch_model.bin",
        ]
        .map(str::to_owned);
        let repo = Repo::model("o/n").unwrap();
        let choose = |weights, all: &[String]| ModelFiles(weights).choose(&repo, all);
        let used = ["config.json", "tokenizer.json", "model.safetensors"];
        assert_eq!(choose(Weights::Pretrained, &all).unwrap(), used);
        assert_eq!(choose(Weights::Random, &all).unwrap(), used[..2]);
        assert!(choose(Weights::Pretrained, &all[..2]).is_err());
    }
}
