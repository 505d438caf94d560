//! The `data` section of the config.

mod data_set;
mod path;

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::dataset::corpus::config::Sampling;
use crate::dataset::mixture::{Mixture, StoppingStrategy};
use crate::dataset::order::RowOrder;
use crate::encode::LossScale;
use crate::encode::truncate::{KeptEnd, TruncationRule};
use crate::media::image::{ImageConfig, UrlConfig};
use crate::media::video::VideoConfig;
use crate::packing::{Overlong, PackRules, Packing, PackingStrategy, StepPacks, WINDOW_SAMPLES};
use crate::source::UnknownKeys;

pub use data_set::{DatasetConfig, dataset_names};
pub use path::DataPath;

/// The data sets, and how their rows become batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the config")]
pub struct DataConfig {
    /// Training data sets; at least one.
    pub train: Vec<DatasetConfig>,
    /// Evaluation data sets; none by default.
    #[serde(default)]
    pub eval: Vec<DatasetConfig>,
    /// Meaning of the weights of `train`; `repeat` by default.
    #[serde(default)]
    pub mixture: Mixture,
    /// When an epoch ends, with `mixture: share`; `all_exhausted` by default.
    #[serde(default)]
    pub stopping_strategy: StoppingStrategy,
    /// Whether samples are joined into packs of at most `packing_length` tokens (the default);
    /// false: one sample per row.
    #[serde(default = "default_true")]
    pub packing: bool,
    /// Maximum length of a pack in tokens, vision tokens included; 8192 by default.
    #[serde(default = "default_packing_length")]
    pub packing_length: NonZeroU32,
    /// How samples are assigned to packs; `best_fit` by default.
    #[serde(default)]
    pub packing_strategy: PackingStrategy,
    /// Number of samples that `packing_strategy: best_fit` packs together; 1000 by default.
    #[serde(default = "default_packing_window")]
    pub packing_window: NonZeroUsize,
    /// Maximum number of visual patches of a pack, before merging; null (the default): no limit.
    #[serde(default)]
    pub max_patches_per_pack: Option<NonZeroU32>,
    /// Whether packs are ordered so that the packs of a step have similar costs; `none` by default.
    #[serde(default)]
    pub balance: Balance,
    /// Whether packing rejects samples longer than `packing_length` (the default); false: each of
    /// them is a pack of its own.
    #[serde(default = "default_true")]
    pub filter_overlong: bool,
    /// Maximum length of a sample in tokens, with and without packing; null (the default): no
    /// limit.
    #[serde(default)]
    pub max_length: Option<NonZeroU32>,
    /// How a sample longer than `max_length` is handled; `delete` by default.
    #[serde(default)]
    pub truncation: Truncation,
    /// Which tokens of a chat are supervised; `default` by default.
    #[serde(default)]
    pub loss_scale: LossScale,
    /// Whether an empty `<think>` block that the chat template writes before an answer is
    /// supervised with it; false by default.
    #[serde(default)]
    pub train_empty_think: bool,
    /// Whether each epoch has a new random order (the default); false: the order of the files.
    #[serde(default = "default_true")]
    pub shuffle: bool,
    /// Limits on the size of images.
    #[serde(default)]
    pub image: ImageConfig,
    /// Whether rows may name images by URL, which are downloaded once and kept in the cache folder;
    /// false by default: such rows are rejected.
    #[serde(default)]
    pub allow_urls: bool,
    /// Limits on images by URL.
    #[serde(default)]
    pub url: UrlConfig,
    /// Sampling of video frames and limits on their size.
    #[serde(default)]
    pub video: VideoConfig,
    /// Folder of the length caches and of images by URL, which runs may share; null: `cache` in
    /// `output_dir`.
    #[serde(default)]
    pub cache_dir: Option<PathBuf>,
    /// Number of threads that prefetch rows, and of threads that read pixels; 2 by default. It
    /// affects the speed only.
    #[serde(default = "default_workers")]
    pub workers: NonZeroUsize,
    /// How keys of rows that the trainer does not know are handled; `warn` by default.
    #[serde(default)]
    pub unknown_keys: UnknownKeys,
    /// How a rejected row is handled; `skip` by default.
    #[serde(default)]
    pub on_error: OnError,
    /// Maximum share of rejected rows, from 0 to 1; 0.01 by default.
    #[serde(default = "default_max_rejected")]
    pub max_rejected: f64,
}

/// Whether packs are ordered so that the packs of a step have similar costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// Packs are ordered by the arrival of their longest samples.
    #[default]
    None,
    /// Packs are ordered by cost: tokens, attention and images.
    Cost,
}

/// How a sample longer than `max_length` is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The row is counted by reason and listed in `rejects.jsonl`. The run continues.
    #[default]
    Skip,
    /// The run stops with an error that names file and line.
    Stop,
}

/// An invalid value in the `data` section.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum DataConfigError {
    #[error("`data.train` is an empty list, expected at least one data set")]
    #[fault(hint = "add an entry such as `{{path: data/train.jsonl}}`")]
    NoTrainData,
    #[error("`data.{list}.{index}.weight` is `{weight}`, expected a finite number above 0")]
    #[fault(hint = "to leave a data set out, remove its entry")]
    Weight {
        /// `train` or `eval`.
        list: &'static str,
        index: usize,
        weight: f64,
    },
    #[error(
        "`data.balance` is `cost`, which requires `packing: true` and `packing_strategy: best_fit`"
    )]
    #[fault(hint = "remove `data.balance`, or set both packing keys")]
    Balance,
    #[error("`{key}` is `{found}`, expected {expected}")]
    #[fault(hint = "docs/corpora.md and docs/config.md list the valid combinations")]
    Entry {
        /// The key, with dots.
        key: String,
        found: String,
        expected: &'static str,
    },
    #[error("`data.train_empty_think` is true, but `data.loss_scale` is `ignore_empty_think`")]
    #[fault(hint = "remove one of the two")]
    EmptyThink,
    #[error("`data.max_rejected` is `{max_rejected}`, expected a share from 0 to 1")]
    #[fault(hint = "0.01 stops the run above 1 % of the rows; 1.0 never stops it")]
    MaxRejected { max_rejected: f64 },
    #[error("`data.url.timeout_s` is `{timeout_s}`, expected a number of seconds above 0")]
    #[fault(hint = "remove it for the default of 30 seconds")]
    UrlTimeout { timeout_s: f64 },
    #[error("`data.truncation` is `{truncation}`, and `data.max_length` is not set")]
    #[fault(hint = "set `data.max_length` to the maximum number of tokens of a sample")]
    NoLimit { truncation: &'static str },
}

impl DataConfigError {
    /// The key of the value, with dots.
    pub fn key(&self) -> String {
        match self {
            Self::NoTrainData => "data.train".to_owned(),
            Self::Weight { list, index, .. } => format!("data.{list}.{index}.weight"),
            Self::Balance => "data.balance".to_owned(),
            Self::Entry { key, .. } => key.clone(),
            Self::EmptyThink => "data.train_empty_think".to_owned(),
            Self::MaxRejected { .. } => "data.max_rejected".to_owned(),
            Self::UrlTimeout { .. } => "data.url.timeout_s".to_owned(),
            Self::NoLimit { .. } => "data.truncation".to_owned(),
        }
    }
}

impl DataConfig {
    /// Checks the values and the rules between them; returns the first problem.
    pub fn validate(&self) -> Result<(), DataConfigError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// All values that are out of range or contradict each other.
    pub fn problems(&self) -> Vec<DataConfigError> {
        let mut problems = Vec::new();
        let mut rule = |holds: bool, problem: DataConfigError| {
            if !holds && !problems.contains(&problem) {
                problems.push(problem);
            }
        };
        rule(!self.train.is_empty(), DataConfigError::NoTrainData);
        for (list, datasets) in [("train", &self.train), ("eval", &self.eval)] {
            for (index, DatasetConfig { weight, .. }) in datasets.iter().enumerate() {
                let valid = weight.is_finite() && *weight > 0.0;
                rule(valid, DataConfigError::Weight { list, index, weight: *weight });
                if let Err(problem) = self.check_set(list, datasets, index) {
                    rule(false, problem);
                }
            }
        }
        if let Err(problem) = self.check_split() {
            rule(false, problem);
        }
        let stops = self.mixture == Mixture::Share;
        let key = "data.stopping_strategy".to_owned();
        let (found, expected) =
            ("first_exhausted".to_owned(), "no value unless `data.mixture` is `share`");
        let is_default = self.stopping_strategy == StoppingStrategy::default();
        rule(stops || is_default, DataConfigError::Entry { key, found, expected });
        let best_fit = self.packing && self.packing_strategy == PackingStrategy::BestFit;
        rule(self.balance != Balance::Cost || best_fit, DataConfigError::Balance);
        let without_thoughts = self.loss_scale == LossScale::IgnoreEmptyThink;
        rule(!self.train_empty_think || !without_thoughts, DataConfigError::EmptyThink);
        let max_rejected = self.max_rejected;
        rule((0.0..=1.0).contains(&max_rejected), DataConfigError::MaxRejected { max_rejected });
        let timeout_s = self.url.timeout_s;
        rule(self.url.limits().is_some(), DataConfigError::UrlTimeout { timeout_s });
        let has_limit = self.max_length.is_some();
        match self.truncation {
            Truncation::Left => rule(has_limit, DataConfigError::NoLimit { truncation: "left" }),
            Truncation::Right => rule(has_limit, DataConfigError::NoLimit { truncation: "right" }),
            Truncation::Delete | Truncation::Error | Truncation::Split => {}
        }
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
    ) -> Result<(), DataConfigError> {
        let fault = |key: String, found: &dyn ToString, expected| {
            Err(DataConfigError::Entry { key, found: found.to_string(), expected })
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
            return Ok(());
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
        Ok(())
    }

    /// Checks the keys that `truncation: split` needs.
    fn check_split(&self) -> Result<(), DataConfigError> {
        let fault = |found: &dyn ToString, expected| {
            let (key, found) = ("data.max_length".to_owned(), found.to_string());
            Err(DataConfigError::Entry { key, found, expected })
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
        Ok(())
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

fn default_true() -> bool {
    true
}

fn default_packing_length() -> NonZeroU32 {
    const { NonZeroU32::new(8192).expect("not zero") }
}

fn default_packing_window() -> NonZeroUsize {
    const { NonZeroUsize::new(WINDOW_SAMPLES).expect("not zero") }
}

fn default_workers() -> NonZeroUsize {
    const { NonZeroUsize::new(2).expect("not zero") }
}

fn default_max_rejected() -> f64 {
    0.01
}

#[cfg(test)]
mod tests;
