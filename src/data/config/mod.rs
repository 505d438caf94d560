//! The `data` section of the config.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::data::dataset::corpus::{CorpusConfig, Sampling};
use crate::data::dataset::mixture::{Mixture, StoppingStrategy};
use crate::data::dataset::order::RowOrder;
use crate::data::encode::truncate::{Cut, Keep};
use crate::data::media::image::ImageConfig;
use crate::data::media::video::VideoConfig;
use crate::data::packing::{Overlong, PackRules, Packing, WINDOW_SAMPLES};

/// What is trained on, and how it becomes batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Data sets to train on.
    pub train: Vec<DatasetConfig>,
    /// Data sets to evaluate on.
    #[serde(default)]
    pub eval: Vec<DatasetConfig>,
    /// What the weights of `train` mean.
    #[serde(default)]
    pub mixture: Mixture,
    /// When an epoch ends, with `mixture: share`.
    #[serde(default)]
    pub stopping_strategy: StoppingStrategy,
    /// Join samples into packs of at most `packing_length` tokens; false: one sample a row.
    #[serde(default = "default_true")]
    pub packing: bool,
    /// Upper bound on one pack, in tokens, vision tokens included.
    #[serde(default = "default_packing_length")]
    pub packing_length: NonZeroU32,
    /// Which samples share a pack.
    #[serde(default)]
    pub packing_strategy: PackingStrategy,
    /// Samples that `packing_strategy: best_fit` looks at together, or fewer where images are large.
    #[serde(default = "default_packing_window")]
    pub packing_window: NonZeroUsize,
    /// Upper bound on the visual patches of one pack, before merging; null: none.
    #[serde(default)]
    pub max_patches_per_pack: Option<NonZeroU32>,
    /// Whether packs are ordered so that those of a step cost alike.
    #[serde(default)]
    pub balance: Balance,
    /// When packing, reject samples longer than `packing_length`; false: each goes alone.
    #[serde(default = "default_true")]
    pub filter_overlong: bool,
    /// Upper bound on one sample, in tokens, packing or not; null: none.
    #[serde(default)]
    pub max_length: Option<NonZeroU32>,
    /// What becomes of a sample longer than `max_length`.
    #[serde(default)]
    pub truncation: Truncation,
    /// Draw a new order for each epoch from the seed; false: the order of the files.
    #[serde(default = "default_true")]
    pub shuffle: bool,
    /// Sizes to which images are brought.
    #[serde(default)]
    pub image: ImageConfig,
    /// Which frames of videos are taken, and to which size they are brought.
    #[serde(default)]
    pub video: VideoConfig,
    /// Folder of the length caches, for several runs to share; null: `cache` in `output_dir`.
    #[serde(default)]
    pub cache_dir: Option<PathBuf>,
    /// Threads that look at rows, and as many that read those of the next steps; they change the speed and nothing else.
    #[serde(default = "default_workers")]
    pub workers: NonZeroUsize,
    /// What becomes of the run when a row cannot be used.
    #[serde(default)]
    pub on_error: OnError,
    /// Share of the rows read that may be rejected before the run stops; 1.0: all of them.
    #[serde(default = "default_max_rejected")]
    pub max_rejected: f64,
}

/// One data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetConfig {
    /// A JSONL file, or with `corpus` also a `.txt` file.
    pub path: PathBuf,
    /// What metrics call it; null: the name of the file without its ending.
    #[serde(default)]
    pub name: Option<String>,
    /// Folder that image paths are relative to and must stay inside of; null: that of the file.
    #[serde(default)]
    pub image_root: Option<PathBuf>,
    /// How often the data set is seen in an epoch: 2.5 is each row twice and half of them again. With
    /// `mixture: share` its share of the rows, in parts of the sum of all weights.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Plain text instead of chats; null: chats.
    #[serde(default)]
    pub corpus: Option<CorpusConfig>,
}

impl DatasetConfig {
    /// A data set of chats with the defaults.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let (image_root, name, corpus) = (None, None, None);
        Self { path: path.into(), name, image_root, weight: default_weight(), corpus }
    }
}

/// A name for each data set: its own, or that of its file. Where files share one, the later ones get
/// a number.
pub fn dataset_names(datasets: &[DatasetConfig]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(datasets.len());
    for set in datasets {
        let stem = || set.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let given = datasets.iter().filter_map(|set| set.name.as_ref());
        let taken = |name: &String| names.contains(name) || given.clone().any(|n| n == name);
        let name = set.name.clone().unwrap_or_else(|| {
            let stem = stem();
            let mut numbered = (2..).map(|number| format!("{stem}-{number}"));
            let first = Some(stem.clone()).filter(|stem| !taken(stem));
            first.or_else(|| numbered.find(|name| !taken(name))).unwrap_or(stem)
        });
        names.push(name);
    }
    names
}

/// Which samples share a pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackingStrategy {
    /// Neighbours: a pack is closed when the next sample does not fit.
    Sequential,
    /// Those that leave the least room unused, out of `packing_window` neighbours.
    #[default]
    BestFit,
}

/// Whether packs are ordered so that those of a step cost alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// No: by the arrival of their longest samples.
    #[default]
    None,
    /// Yes: tokens, attention and images are weighed.
    Cost,
}

/// What becomes of a sample longer than `max_length`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// It is rejected and counted as `too_long`.
    #[default]
    Delete,
    /// Its first text tokens are cut off; media stay.
    Left,
    /// Its last text tokens are cut off; media stay.
    Right,
    /// The run stops and names its file and line.
    Error,
    /// A document of a corpus becomes several samples.
    Split,
}

/// What becomes of the run when a row cannot be used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The row is counted by reason and listed in `rejects.jsonl`; the run goes on.
    #[default]
    Skip,
    /// The run stops and names the file and line.
    Stop,
}

/// A value of the `data` section that no run can work with.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DataConfigError {
    /// Nothing to train on.
    #[error("`data.train` is an empty list, expected at least one data set")]
    NoTrainData,
    /// A weight that is no positive number.
    #[error("`data.{list}.{index}.weight` is `{weight}`, expected a finite number above 0")]
    Weight {
        /// `train` or `eval`.
        list: &'static str,
        /// Index in the list.
        index: usize,
        /// What the config says.
        weight: f64,
    },
    /// Steps can only be balanced where packs are chosen in windows.
    #[error("`data.balance` is `cost`, but packs are not chosen by `packing_strategy: best_fit`")]
    Balance,
    /// Another value of a data set that contradicts the rest.
    #[error("`{key}` is `{found}`, expected {expected}")]
    Entry {
        /// The dotted key.
        key: String,
        /// What the config says.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A share outside of 0 to 1.
    #[error("`data.max_rejected` is `{max_rejected}`, expected a share from 0 to 1")]
    MaxRejected {
        /// What the config says.
        max_rejected: f64,
    },
    /// A way to cut, and no length to cut to.
    #[error("`data.truncation` is `{truncation}`, and `data.max_length` is not set")]
    NoLimit {
        /// What the config says.
        truncation: &'static str,
    },
}

impl DataConfigError {
    /// The dotted key that holds the value.
    pub fn key(&self) -> String {
        match self {
            Self::NoTrainData => "data.train".to_owned(),
            Self::Weight { list, index, .. } => format!("data.{list}.{index}.weight"),
            Self::Balance => "data.balance".to_owned(),
            Self::Entry { key, .. } => key.clone(),
            Self::MaxRejected { .. } => "data.max_rejected".to_owned(),
            Self::NoLimit { .. } => "data.truncation".to_owned(),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoTrainData => "add an entry such as `{path: data/train.jsonl}`",
            Self::Weight { .. } => "to leave a data set out, remove its entry",
            Self::Balance => "leave `balance` out, or pack with `packing_strategy: best_fit`",
            Self::Entry { .. } => "docs/corpora.md says what goes together",
            Self::MaxRejected { .. } => "0.01 stops above 1 % of the rows, 1.0 never does",
            Self::NoLimit { .. } => {
                "set `data.max_length` to the most tokens that a sample may have"
            }
        }
    }
}

impl DataConfig {
    /// Checks what the types do not.
    pub fn validate(&self) -> Result<(), DataConfigError> {
        if self.train.is_empty() {
            return Err(DataConfigError::NoTrainData);
        }
        for (list, datasets) in [("train", &self.train), ("eval", &self.eval)] {
            for (index, DatasetConfig { weight, .. }) in datasets.iter().enumerate() {
                if !(weight.is_finite() && *weight > 0.0) {
                    return Err(DataConfigError::Weight { list, index, weight: *weight });
                }
            }
            self.validate_sets(list, datasets)?;
        }
        let best_fit = self.packing && self.packing_strategy == PackingStrategy::BestFit;
        if self.balance == Balance::Cost && !best_fit {
            return Err(DataConfigError::Balance);
        }
        if !(0.0..=1.0).contains(&self.max_rejected) {
            return Err(DataConfigError::MaxRejected { max_rejected: self.max_rejected });
        }
        let truncation = match self.truncation {
            Truncation::Left => "left",
            Truncation::Right => "right",
            Truncation::Delete | Truncation::Error | Truncation::Split => return Ok(()),
        };
        self.max_length.map(|_| ()).ok_or(DataConfigError::NoLimit { truncation })
    }

    /// How samples longer than `max_length` are cut; `None` if they are not.
    pub fn cut(&self) -> Option<Cut> {
        let keep = match self.truncation {
            Truncation::Left => Keep::End,
            Truncation::Right => Keep::Beginning,
            Truncation::Delete | Truncation::Error | Truncation::Split => return None,
        };
        self.max_length.map(|max_length| Cut { max_length, keep })
    }

    /// Names that are there twice, and what a corpus contradicts.
    fn validate_sets(
        &self,
        list: &'static str,
        datasets: &[DatasetConfig],
    ) -> Result<(), DataConfigError> {
        let fault = |key: String, found: &dyn ToString, expected| {
            Err(DataConfigError::Entry { key, found: found.to_string(), expected })
        };
        for (index, set) in datasets.iter().enumerate() {
            let key = |key: &str| format!("data.{list}.{index}.{key}");
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
                        "another value: a chat cannot be split, its later parts would lack what they answer",
                    );
                }
                continue;
            };
            if let Some((name, found, expected)) = corpus.fault() {
                return fault(key(&format!("corpus.{name}")), &found, expected);
            }
            if let Some(tokens) = corpus.window_tokens().filter(|_| list == "train") {
                let length = corpus.length.map_or(0, NonZeroU32::get);
                let packed = self.packing && self.filter_overlong;
                if packed && tokens > u64::from(self.packing_length.get()) {
                    let expected = "less than `data.packing_length`: a window has one token more, its last target";
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
                                each row of a batch goes on where that of the batch before ended";
                return fault(key("corpus.sampling"), &"sequential", expected);
            }
        }
        if self.truncation == Truncation::Split {
            let expected = "the most tokens of a sample, 2 or more, for `truncation: split`";
            match self.max_length {
                None => return fault("data.max_length".to_owned(), &"null", expected),
                Some(NonZeroU32::MIN) => {
                    return fault("data.max_length".to_owned(), &1, expected);
                }
                Some(most)
                    if self.packing && self.filter_overlong && most > self.packing_length =>
                {
                    let expected = "at most `data.packing_length`, for `truncation: split`";
                    return fault("data.max_length".to_owned(), &most, expected);
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Tokens at which documents of a corpus are split.
    pub fn split_at(&self) -> Option<NonZeroU32> {
        self.max_length.filter(|_| self.truncation == Truncation::Split)
    }

    /// The packing keys as one value.
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

    /// The other keys about packs, for steps of `step` packs and patches of `patch_bytes` bytes.
    pub fn pack_rules(&self, step: NonZeroUsize, patch_bytes: NonZeroU64) -> PackRules {
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

fn default_weight() -> f64 {
    1.0
}

#[cfg(test)]
mod tests;
