//! The `data` section of the config, the entries of `data.train` and `data.eval`, and their `path`:
//! one text or a list of texts.

#[cfg(test)]
mod tests;

use std::fmt::{self, Display};
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use settings::{Choice, Kind, Setting, ValueError, above, section};

use crate::dataset::corpus::windows::{CorpusConfig, Sampling};
use crate::dataset::order::{Mixture, RowOrder, StoppingStrategy};
use crate::dataset::split::{EvalGroup, EvalSplit, SplitSize};
use crate::encode::LossScale;
use crate::encode::truncate::{KeptEnd, TruncationRule};
use crate::media::image::{ImageConfig, UrlConfig};
use crate::media::video::VideoConfig;
use crate::packing::{Overlong, PackRules, Packing, PackingStrategy, StepPacks, WINDOW_SAMPLES};
use crate::source::files::without_compression;
use crate::source::{ColumnNames, UnknownKeys};

/// The data sets, and how their rows become batches.
#[section]
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the config")]
pub struct DataConfig {
    /// Data sets to train on; at least one
    pub train: Vec<DatasetConfig>,
    /// Data sets to evaluate on, with the same keys as `data.train`
    #[key(default, neutral)]
    pub eval: Vec<DatasetConfig>,
    /// Instead of `eval`: share of the rows of each data set that is held out to evaluate on
    #[valid(
        range = (Bound::Excluded(0.0), Bound::Excluded(1.0)),
        expected = "a share above 0 and below 1",
        hint = "0.01 holds out 1 % of the rows; `data.eval_rows` is a number of rows"
    )]
    pub eval_share: Option<f64>,
    /// Instead of `eval_share`: number of rows of all data sets together, in proportion to their rows
    pub eval_rows: Option<NonZeroU64>,
    /// Which rows stay together when rows are held out
    #[key(default)]
    pub eval_group: EvalGroup,
    /// System turn of chats that have none; `null`: what the chat template writes then
    pub system: Option<String>,
    /// What the weights of data sets mean
    #[key(default)]
    pub mixture: Mixture,
    /// When an epoch ends with `mixture: share`
    #[key(default)]
    pub stopping_strategy: StoppingStrategy,
    /// `true`: several samples share one row of the batch (a pack). `false`: one sample per row
    #[key(default = true)]
    pub packing: bool,
    /// Maximum tokens of a pack, image tokens included
    #[key(default = const { NonZeroU32::new(8192).unwrap() })]
    pub packing_length: NonZeroU32,
    /// How samples are assigned to packs
    #[key(default)]
    pub packing_strategy: PackingStrategy,
    /// Number of samples from which `best_fit` makes packs at a time
    #[key(default = const { NonZeroUsize::new(WINDOW_SAMPLES).unwrap() })]
    pub packing_window: NonZeroUsize,
    /// Maximum image and video patches of a pack; `null`: no limit
    pub max_patches_per_pack: Option<NonZeroU32>,
    /// `cost`: the packs of one step have similar cost. `none`: packs keep their order
    #[key(default)]
    pub balance: Balance,
    /// When packing, reject samples longer than `packing_length`
    #[key(default = true)]
    pub filter_overlong: bool,
    /// Maximum tokens of one sample, with or without packing; `null`: no limit
    pub max_length: Option<NonZeroU32>,
    /// What happens to a sample longer than `max_length`
    #[key(default)]
    pub truncation: Truncation,
    /// Which tokens of a chat are supervised
    #[key(default)]
    pub loss_scale: LossScale,
    /// Whether an empty `<think>` block that the chat template writes before an answer is supervised
    /// with it
    #[key(default)]
    pub train_empty_think: bool,
    /// `true`: a new order in each epoch. `false`: the order of the files
    #[key(default = true)]
    pub shuffle: bool,
    /// Limits on the size of images
    #[key(default)]
    pub image: ImageConfig,
    /// `true`: rows may name images by `http` or `https` address. `false`: such rows are rejected
    #[key(default)]
    pub allow_urls: bool,
    /// Limits on images by URL
    #[key(default)]
    pub url: UrlConfig,
    /// Sampling of video frames and limits on their size
    #[key(default)]
    pub video: VideoConfig,
    /// `complete`: all rows are measured before the first step. `off`: rows are packed as they arrive,
    /// which needs `train.max_steps`
    #[key(default, neutral)]
    pub length_cache: LengthCaching,
    /// Folder of the [length caches](length-cache.md), tokens of corpora, unpacked data files and
    /// images by URL, which runs may share; `null`: `cache` in `output_dir`
    #[key(neutral)]
    pub cache_dir: Option<PathBuf>,
    /// Number of loader threads that measure rows, and as many again that read samples
    #[key(default = const { NonZeroUsize::new(2).unwrap() }, neutral)]
    #[valid(
        range = 1.0..=Self::MAX_WORKERS.get() as f64,
        expected = "a number from 1 to 1024",
        hint = "one worker per core is enough"
    )]
    pub workers: NonZeroUsize,
    /// Unknown keys of rows: `warn` reports each once, `error` rejects the row
    #[key(default)]
    pub unknown_keys: UnknownKeys,
    /// A row that cannot be used is rejected (`skip`) or stops the run (`stop`)
    #[key(default, neutral)]
    pub on_error: OnError,
    /// Maximum share of rejected rows; above it the run stops
    #[key(default = 0.01, neutral)]
    #[valid(
        range = 0.0..=1.0,
        expected = "a share from 0 to 1",
        hint = "0.01 stops the run above 1 % of the rows; 1.0 never stops it"
    )]
    pub max_rejected: f64,
}

/// Whether the lengths of all rows are known before the first step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum LengthCaching {
    /// All rows are measured before the first step, and the length cache keeps their lengths.
    #[default]
    Complete,
    /// No row is measured: packs are made from the rows as they arrive.
    Off,
}

/// Whether packs are ordered so that the packs of a step have similar costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// Packs are ordered by the arrival of their longest samples.
    #[default]
    None,
    /// Packs are ordered by cost: tokens, attention and images.
    Cost,
}

/// How a sample longer than `max_length` is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The sample is rejected as `too_long`.
    #[default]
    Delete,
    /// The first text tokens are removed; media stay.
    Left,
    /// The last text tokens are removed; media stay.
    Right,
    /// The run stops with an error that names file and line.
    Error,
    /// A document of a corpus is split into several samples.
    Split,
}

/// How a rejected row is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The row is counted by reason and listed in `rejects.jsonl`. The run continues.
    #[default]
    Skip,
    /// The run stops with an error that names file and line.
    Stop,
}

impl DataConfig {
    /// Maximum of `workers`.
    pub const MAX_WORKERS: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

    /// The rules between values that are broken.
    pub fn problems(&self) -> Vec<ValueError> {
        const ENTRY: &str = "docs/corpora.md and docs/config.md list the valid combinations";
        let mut problems = Vec::new();
        let mut rule = |problem: Option<ValueError>| {
            if let Some(problem) = problem.filter(|problem| !problems.contains(problem)) {
                problems.push(problem);
            }
        };
        let none = ValueError::contradiction(
            "data.train",
            "is an empty list, expected at least one data set",
        )
        .with_hint("add an entry such as `{path: data/train.jsonl}`");
        rule(self.train.is_empty().then_some(none));
        for (list, datasets) in [("train", &self.train), ("eval", &self.eval)] {
            for index in 0..datasets.len() {
                rule(self.check_set(list, datasets, index).map(|problem| problem.with_hint(ENTRY)));
            }
        }
        rule(self.check_split().map(|problem| problem.with_hint(ENTRY)));
        rule(self.check_held_out());
        let share = self.mixture == Mixture::Share;
        let without_share = ValueError::new(
            "data.stopping_strategy",
            self.stopping_strategy.name(),
            "no value unless `data.mixture` is `share`",
        );
        let stops = self.stopping_strategy != StoppingStrategy::default();
        rule((stops && !share).then(|| without_share.with_hint(ENTRY)));
        let best_fit = self.packing && self.packing_strategy == PackingStrategy::BestFit;
        let unbalanced = ValueError::contradiction(
            "data.balance",
            "is `cost`, which requires `packing: true` and `packing_strategy: best_fit`",
        );
        let unbalanced = unbalanced.with_hint("remove `data.balance`, or set both packing keys");
        rule((self.balance == Balance::Cost && !best_fit).then_some(unbalanced));
        let empty_think = self.train_empty_think && self.loss_scale == LossScale::IgnoreEmptyThink;
        let problem = "is true, but `data.loss_scale` is `ignore_empty_think`";
        let problem = ValueError::contradiction("data.train_empty_think", problem);
        rule(empty_think.then(|| problem.with_hint("remove one of the two")));
        let cuts = matches!(self.truncation, Truncation::Left | Truncation::Right);
        let name = self.truncation.name();
        let problem = format!("is `{name}`, and `data.max_length` is not set");
        let problem = ValueError::contradiction("data.truncation", problem)
            .with_hint("set `data.max_length` to the maximum number of tokens of a sample");
        rule((cuts && self.max_length.is_none()).then_some(problem));
        problems
    }

    /// The rule for samples longer than `max_length`; `None` if they are not truncated.
    pub fn truncation_rule(&self) -> Option<TruncationRule> {
        let keep = match self.truncation {
            Truncation::Left => KeptEnd::End,
            Truncation::Right => KeptEnd::Beginning,
            Truncation::Delete | Truncation::Error | Truncation::Split => return None,
        };
        self.max_length.map(|max_length| TruncationRule { max_length, keep })
    }

    /// Checks the name of a data set, and keys that contradict `corpus`.
    fn check_set(
        &self,
        list: &'static str,
        datasets: &[DatasetConfig],
        index: usize,
    ) -> Option<ValueError> {
        let fault = |key: String, found: &dyn Display, expected| {
            Some(ValueError::new(key, found, expected))
        };
        let set = &datasets[index];
        let key = |key: &str| format!("data.{list}.{index}.{key}");
        if let Some((name, found, expected)) = set.source_fault() {
            return fault(key(name), &found, expected);
        }
        if let Some(name) = &set.name {
            let twice = datasets[..index].iter().any(|other| other.name == set.name);
            if twice || name.is_empty() {
                return fault(key("name"), name, "a name that no other data set has");
            }
        }
        let Some(corpus) = &set.corpus else {
            if self.truncation == Truncation::Split && list == "train" {
                return fault(
                    "data.truncation".to_owned(),
                    &"split",
                    "another value: a chat cannot be split, because its later parts would lack the question",
                );
            }
            return None;
        };
        if let Some((name, found, expected)) = corpus.fault() {
            return fault(key(&format!("corpus.{name}")), &found, expected);
        }
        if let Some(tokens) = corpus.window_tokens().filter(|_| list == "train") {
            let length = corpus.length.map_or(0, NonZeroU32::get);
            let packed = self.packing && self.filter_overlong;
            if packed && tokens > u64::from(self.packing_length.get()) {
                let expected =
                    "less than `data.packing_length`: a window has one token more, its last target";
                return fault(key("corpus.length"), &length, expected);
            }
            if self.max_length.is_some_and(|most| tokens > u64::from(most.get())) {
                let expected =
                    "less than `data.max_length`: a window has one token more, its last target";
                return fault(key("corpus.length"), &length, expected);
            }
        }
        let ordered = corpus.sampling == Sampling::Sequential && list == "train";
        if ordered && (self.packing || datasets.len() > 1 || set.weight.fract() != 0.0) {
            let expected = "another value, or `data.packing: false`, no other data set, and a whole `weight`: \
                            each row of a batch continues the same row of the previous batch";
            return fault(key("corpus.sampling"), &"sequential", expected);
        }
        None
    }

    /// Checks the keys that `truncation: split` needs.
    fn check_split(&self) -> Option<ValueError> {
        let fault = |found: &dyn Display, expected| {
            Some(ValueError::new("data.max_length", found, expected))
        };
        if self.truncation == Truncation::Split {
            let expected = "a number of tokens of 2 or more, for `truncation: split`";
            match self.max_length {
                None => return fault(&"null", expected),
                Some(NonZeroU32::MIN) => {
                    return fault(&1, expected);
                }
                Some(most)
                    if self.packing && self.filter_overlong && most > self.packing_length =>
                {
                    let expected = "at most `data.packing_length`, for `truncation: split`";
                    return fault(&most, expected);
                }
                Some(_) => {}
            }
        }
        None
    }

    /// Checks the keys of rows that are held out.
    fn check_held_out(&self) -> Option<ValueError> {
        let key = match (self.eval_share, self.eval_rows) {
            (None, None) if self.eval_group == EvalGroup::default() => return None,
            (None, None) => {
                let expected = "no value without `data.eval_share` or `data.eval_rows`";
                return Some(ValueError::new("data.eval_group", self.eval_group.name(), expected));
            }
            (Some(_), None) => "data.eval_share",
            (_, Some(_)) => "data.eval_rows",
        };
        let refuse = |problem, hint| Some(ValueError::contradiction(key, problem).with_hint(hint));
        if self.eval_share.is_some() && self.eval_rows.is_some() {
            return refuse("is set, and `data.eval_share` too", "remove one of the two");
        }
        if !self.eval.is_empty() {
            let problem = "holds out rows to evaluate on, and `data.eval` lists data sets too";
            let hint = "remove one of the two; a finished run is evaluated on other rows with \
                        `--set data.eval_share=null` or `--set data.eval_rows=null` in addition";
            return refuse(problem, hint);
        }
        if self.train.iter().any(|set| set.corpus.is_some()) {
            let problem = "holds out rows, but a data set is a corpus, whose windows overlap";
            return refuse(problem, "list a file to evaluate on under `data.eval`");
        }
        None
    }

    /// How rows of `train` are held out, drawn with this seed; `None` if all are trained on.
    pub fn eval_split(&self, seed: u64) -> Option<EvalSplit> {
        let share = self.eval_share.map(SplitSize::Share);
        let size = share.or_else(|| self.eval_rows.map(SplitSize::Rows))?;
        Some(EvalSplit { size, group: self.eval_group, seed })
    }

    /// The data sets of an evaluation: those of `eval`, or those of `train` if rows of them are held
    /// out.
    pub fn eval_sets(&self) -> &[DatasetConfig] {
        if self.eval_share.is_some() || self.eval_rows.is_some() { &self.train } else { &self.eval }
    }

    /// Number of tokens at which documents of a corpus are split.
    pub fn split_at(&self) -> Option<NonZeroU32> {
        self.max_length.filter(|_| self.truncation == Truncation::Split)
    }

    /// `packing`, `packing_length`, `packing_strategy` and `filter_overlong` as one value.
    pub fn packing(&self) -> Packing {
        if !self.packing {
            return Packing::Off;
        }
        Packing::On {
            length: self.packing_length,
            strategy: self.packing_strategy,
            overlong: if self.filter_overlong { Overlong::Reject } else { Overlong::Alone },
        }
    }

    /// The packing keys that `packing()` does not return, for these steps and for patches of
    /// `patch_bytes` bytes.
    pub fn pack_rules(&self, step: StepPacks, patch_bytes: NonZeroU64) -> PackRules {
        PackRules {
            window: self.packing_window,
            max_patches: self.max_patches_per_pack,
            patch_bytes,
            balanced_step: Some(step).filter(|_| self.balance == Balance::Cost),
        }
    }

    /// `shuffle` as a value.
    pub fn row_order(&self) -> RowOrder {
        if self.shuffle { RowOrder::Shuffled } else { RowOrder::File }
    }
}

/// A data set and how it is used.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetConfig {
    /// Data files ([formats](data-format.md#files)): a file, a folder, a pattern, an `hf://` address
    /// of the [Hub](hub.md), or a list of these; with `corpus` also a `.txt` file.
    /// Required without `dataset_info`
    #[key(default)]
    #[serde(skip_serializing_if = "DataPath::is_empty")]
    pub path: DataPath,
    /// Instead of `path`: `FILE#NAME`, an entry of LLaMA-Factory's
    /// [`dataset_info.json`](data-format.md#dataset_infojson-llama-factory)
    pub dataset_info: Option<PathBuf>,
    /// Names of the columns of rows that have [another form](data-format.md#media-with-columns-of-texts)
    pub columns: Option<ColumnNames>,
    /// Unique name in metrics and logs; `null`: the name of the first file without extension, of the
    /// folder, or of the entry of `dataset_info`
    pub name: Option<String>,
    /// Folder that image paths are relative to and must not leave; `null`: the folder of the files
    pub image_root: Option<PathBuf>,
    /// How often the data set is used; with `mixture: share`, its share of the rows
    #[key(default = 1.0)]
    #[valid(
        range = above(0.0),
        expected = "a finite number above 0",
        hint = "to leave a data set out, remove its entry"
    )]
    pub weight: f64,
    /// `true`: `<image>`, `<video>`, `<bbox>` and `<ref-object>` are plain text in rows that list no
    /// images, videos or `objects`
    #[key(default)]
    pub literal_placeholders: bool,
    /// System turn of chats that have none, instead of `data.system`; `""`: none
    pub system: Option<String>,
    /// Reads the file as plain text ([corpora](corpora.md)); `null`: chats
    pub corpus: Option<CorpusConfig>,
}

impl DatasetConfig {
    /// A data set of chats with default settings.
    pub fn new(path: impl Into<DataPath>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }
}

impl DatasetConfig {
    /// The key that names no data or contradicts another key, its value, and the values that are
    /// valid.
    fn source_fault(&self) -> Option<(&'static str, String, &'static str)> {
        if let Some(columns) = &self.columns {
            let fault = |expected| Some(("columns", "given".to_owned(), expected));
            let fault = match (&self.dataset_info, &self.corpus) {
                (Some(_), _) => fault("no `columns` in addition: the entry names the columns"),
                (_, Some(_)) => fault("no `corpus` in addition: its rows have the column `text`"),
                _ => columns.fault(),
            };
            if fault.is_some() {
                return fault;
            }
        }
        if let (Some(system), Some(_)) = (&self.system, &self.corpus) {
            let expected = "no `corpus` in addition: its rows have no turns";
            return Some(("system", system.clone(), expected));
        }
        let entry = match (&self.dataset_info, self.path.is_empty()) {
            (None, true) => {
                return Some(("path", "missing".to_owned(), "a path, or else `dataset_info`"));
            }
            (None, false) => return None,
            (Some(entry), false) => {
                let expected = "no `path` in addition: the entry names the file";
                return Some(("dataset_info", entry.display().to_string(), expected));
            }
            (Some(entry), true) => entry.display().to_string(),
        };
        let expected = "no `corpus` in addition: the entry describes chats";
        self.corpus.as_ref().map(|_| ("dataset_info", entry, expected))
    }
}

/// Returns the name of each data set: `name`, or the file name without extension. Later data sets
/// with the same name get a number.
pub fn dataset_names(datasets: &[DatasetConfig]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(datasets.len());
    for set in datasets {
        let given = datasets.iter().filter_map(|set| set.name.as_ref());
        let taken = |name: &String| names.contains(name) || given.clone().any(|n| n == name);
        let name = set.name.clone().unwrap_or_else(|| {
            let entry = set.dataset_info.as_ref().and_then(|info| info.to_str()?.rsplit_once('#'));
            let stem = entry.map_or_else(|| set.path.name(), |(_, name)| name.to_owned());
            let mut numbered = (2..).map(|number| format!("{stem}-{number}"));
            let first = Some(stem.clone()).filter(|stem| !taken(stem));
            first.or_else(|| numbered.find(|name| !taken(name))).unwrap_or(stem)
        });
        names.push(name);
    }
    names
}

/// The files of a data set: paths of files, folders and patterns. It is empty if the config has
/// `dataset_info` instead.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataPath(Vec<PathBuf>);

impl DataPath {
    /// All paths, in the order of the config.
    pub fn paths(&self) -> &[PathBuf] {
        &self.0
    }

    /// All paths, to replace addresses of the hub by files.
    pub fn paths_mut(&mut self) -> &mut [PathBuf] {
        &mut self.0
    }

    /// The first path; an empty one if there is none.
    pub fn first(&self) -> &Path {
        self.0.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Whether the config has no path.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The default name of the data set: the first path without folders and extensions. For a
    /// pattern, the name of its folder.
    pub(crate) fn name(&self) -> String {
        let is_fixed = |path: &&Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.is_empty() && !name.contains(['*', '?', '['])
        };
        let fixed = self.first().ancestors().find(is_fixed).unwrap_or(Path::new("data"));
        let name = without_compression(fixed);
        name.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl<P: Into<PathBuf>> From<P> for DataPath {
    fn from(path: P) -> Self {
        Self(vec![path.into()])
    }
}

impl Setting for DataPath {
    fn kind() -> Kind {
        Kind::OneOf(vec![Kind::Path, Kind::List(Kind::Path.into())])
    }

    fn paths(&mut self, key: &str, visit: &mut dyn FnMut(&str, &mut PathBuf)) {
        self.0.iter_mut().for_each(|path| visit(key, path));
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self.0.iter().map(|path| path.display().to_string()).collect();
        f.write_str(&paths.join(", "))
    }
}

impl Serialize for DataPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [path] => path.serialize(serializer),
            paths => paths.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for DataPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Paths;
        impl<'de> Visitor<'de> for Paths {
            type Value = DataPath;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a list of paths that is not empty")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<DataPath, E> {
                Ok(text.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DataPath, A::Error> {
                let mut paths = Vec::new();
                while let Some(path) = list.next_element()? {
                    paths.push(path);
                }
                if paths.is_empty() {
                    return Err(de::Error::invalid_length(0, &self));
                }
                Ok(DataPath(paths))
            }
        }
        deserializer.deserialize_any(Paths)
    }
}
