//! A row of the data, what is known of it before it is read, and why it may be refused.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::batch::{EncodedSample, SampleId};
use crate::data::source::SampleError;

/// A row of one of the data sets of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// Index of the data set, in the order of the config.
    pub dataset: u32,
    /// Index of the row in it, blank lines not counted.
    pub row: u32,
}

/// The size of a sample: all that packing looks at, known without decoding an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Length {
    /// Length in tokens, vision tokens included.
    pub tokens: usize,
    /// Bytes of all `pixel_values`: four a value.
    pub pixel_bytes: u64,
}

impl Length {
    /// The size of an encoded sample.
    pub fn of(sample: &EncodedSample) -> Self {
        let values: usize = sample.media.iter().map(|patches| patches.pixel_values.len()).sum();
        Self { tokens: sample.len(), pixel_bytes: (values * size_of::<f32>()) as u64 }
    }

    /// Memory of the encoded sample in bytes, within a few dozen.
    pub(super) fn bytes(self) -> u64 {
        self.pixel_bytes + self.token_bytes()
    }

    /// Memory of the sample without its pixels.
    pub(super) fn token_bytes(self) -> u64 {
        // input_ids, labels and position_ids: 4 + 8 + 12 bytes a token
        24 * self.tokens as u64
    }

    /// Rejects a row whose size is `now` another than the one that it was packed with; `id` names it.
    pub(super) fn check_unchanged(
        self,
        now: Self,
        id: impl FnOnce() -> SampleId,
    ) -> Result<(), Rejection> {
        if now == self {
            return Ok(());
        }
        let size = |length: Self| {
            format!("{} tokens and {} bytes of pixels", length.tokens, length.pixel_bytes)
        };
        let message = format!(
            "the row has {}, and had {} when it was measured: it or a file that it names has been changed since",
            size(now),
            size(self)
        );
        Err(Rejection::new(&id(), "changed", message))
    }
}

/// What a step's numbers by data set need of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSize {
    /// Index of the data set that it is of.
    pub dataset: u32,
    /// Length in tokens.
    pub num_tokens: u32,
    /// Supervised targets.
    pub num_targets: u32,
}

impl SampleSize {
    /// Of an encoded sample.
    pub fn of(dataset: u32, sample: &EncodedSample) -> Self {
        let num_targets = sample.num_targets() as u32;
        Self { dataset, num_tokens: sample.len() as u32, num_targets }
    }
}

/// A row that does not train, and why: a line of `rejects.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// The data file, as the config names it.
    pub file: String,
    /// Line in that file, starting at 1.
    pub row: u64,
    /// Short snake_case key under which rejections are counted.
    pub reason: String,
    /// What is wrong, in words.
    pub message: String,
}

impl Rejection {
    /// Refuses the row that `id` names.
    pub fn new(id: &SampleId, reason: &str, message: String) -> Self {
        let file = id.file.display().to_string();
        Self { file, row: id.line, reason: reason.to_owned(), message }
    }

    /// As the log and `rejects.jsonl` say it.
    pub fn of(error: &SampleError) -> Self {
        let hint = error.hint().map_or_else(String::new, |hint| format!("; hint: {hint}"));
        Self::new(error.id(), error.reason(), format!("{error}{hint}"))
    }
}

impl From<SampleError> for Rejection {
    fn from(error: SampleError) -> Self {
        Self::of(&error)
    }
}

impl fmt::Display for Rejection {
    /// The message, with the place before it unless it begins with that already.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = format!("{}:{}: ", self.file, self.row);
        let place = if self.message.starts_with(&place) { "" } else { &place };
        write!(f, "{place}{}", self.message)
    }
}
