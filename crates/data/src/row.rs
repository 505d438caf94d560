//! The index, the size and the rejection of a row.

use std::fmt;

use fault::Fault;
use serde::{Deserialize, Serialize};

use crate::source::sample_error::SampleError;
use crate::source::{TransientFailure, retry};
use batch::{EncodedSample, MediumKind, SampleId};

/// A row of one of the data sets of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleIndex {
    /// Index of the data set, in the order of the config.
    pub dataset: u32,
    /// Index of the row in it, blank lines not counted.
    pub row: u32,
}

/// The size of a sample, which packing depends on. It is computed without decoding an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Length {
    /// Length in tokens, vision tokens included.
    pub tokens: usize,
    /// Bytes of all `pixel_values` (f32).
    pub pixel_bytes: u64,
}

impl Length {
    /// The size of an encoded sample.
    pub fn of(sample: &EncodedSample) -> Self {
        let values: usize = sample.media.iter().map(|patches| patches.pixel_values.len()).sum();
        Self { tokens: sample.len(), pixel_bytes: (values * size_of::<f32>()) as u64 }
    }

    /// Memory of the encoded sample in bytes, accurate to a few dozen bytes, and four for each
    /// document of a window.
    pub(super) fn bytes(self) -> u64 {
        self.pixel_bytes + self.token_bytes()
    }

    /// Memory of the sample without its pixels.
    pub(super) fn token_bytes(self) -> u64 {
        // input_ids, labels and position_ids: 4 + 8 + 12 bytes a token
        24 * self.tokens as u64
    }

    /// Returns the rejection `changed` if the size of the row is `now` different. `self` is the
    /// size that it was packed with.
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

/// Counts of one sample, for the metrics per data set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// Index of its data set.
    pub dataset: u32,
    /// Index of its row in the data set.
    pub row: u32,
    /// Length in tokens.
    pub num_tokens: u32,
    /// Number of supervised targets.
    pub num_targets: u32,
    /// Number of images.
    pub num_images: u32,
    /// Number of videos.
    pub num_videos: u32,
}

impl SampleCounts {
    /// The row of the sample.
    pub fn index(&self) -> SampleIndex {
        SampleIndex { dataset: self.dataset, row: self.row }
    }

    /// The counts of an encoded sample.
    pub fn of(row: SampleIndex, sample: &EncodedSample) -> Self {
        let of_kind = |kind| {
            sample.media.iter().filter(|of| of.kind == kind && !of.continues_medium).count() as u32
        };
        Self {
            dataset: row.dataset,
            row: row.row,
            num_tokens: sample.len() as u32,
            num_targets: sample.num_targets() as u32,
            num_images: of_kind(MediumKind::Image),
            num_videos: of_kind(MediumKind::Video),
        }
    }
}

/// A row that cannot be trained on, with the reason. One line of `rejects.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// The data file, as the config names it.
    pub file: String,
    /// Line in that file, starting at 1.
    pub row: u64,
    /// Short snake_case key under which rejections are counted.
    pub reason: String,
    /// The error message with its hint.
    pub message: String,
}

impl Rejection {
    /// Creates the rejection of row `id`.
    pub fn new(id: &SampleId, reason: &str, message: String) -> Self {
        let file = id.file.display().to_string();
        Self { file, row: id.line, reason: reason.to_owned(), message }
    }

    /// The rejection for an error of a row, with its hint.
    pub fn of(error: &SampleError) -> Self {
        let hint = error.hint().map_or_else(String::new, |hint| format!("; hint: {hint}"));
        let reason = TransientFailure::of(error).map_or(error.reason(), |failure| failure.reason());
        Self::new(&error.id, reason, format!("{error}{hint}"))
    }

    /// The failure of the process or of a disk that the row was not the cause of.
    pub fn transient_failure(&self) -> Option<TransientFailure> {
        TransientFailure::with_reason(&self.reason)
    }
}

/// The process or a disk failed while a row was read, also when it was read again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Fault)]
#[error("the process or a disk failed, not the row: {rejection}")]
#[fault(from = failure)]
pub struct TransientRowError {
    /// The row and the cause.
    pub rejection: Rejection,
    /// What failed.
    pub failure: TransientFailure,
}

impl TransientRowError {
    /// Calls `read`, again after a wait while the process or a disk fails. Returns the result of a
    /// row that could be read, or that is rejected for a fault of its own.
    pub fn or_read<T, E>(
        rejection: impl Fn(&E) -> Rejection,
        read: impl FnMut() -> Result<T, E>,
    ) -> Result<Result<T, E>, Self> {
        let result = retry(|error| rejection(error).transient_failure(), read);
        match &result {
            Ok(_) => Ok(result),
            Err(error) => Self::check(rejection(error)).map(|_| result),
        }
    }

    /// Returns `rejection`, unless the process or a disk was its cause.
    pub(crate) fn check(rejection: Rejection) -> Result<Rejection, Self> {
        match rejection.transient_failure() {
            Some(failure) => Err(Self { rejection, failure }),
            None => Ok(rejection),
        }
    }
}

impl From<SampleError> for Rejection {
    fn from(error: SampleError) -> Self {
        Self::of(&error)
    }
}

impl fmt::Display for Rejection {
    /// Writes `file:row: message`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = format!("{}:{}: ", self.file, self.row);
        let place = if self.message.starts_with(&place) { "" } else { &place };
        write!(f, "{place}{}", self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::SampleFault;
    use rustix::io::Errno;
    use std::path::Path;

    #[test]
    fn a_row_is_read_again_while_the_process_or_a_disk_fails() {
        let id = SampleId { file: Path::new("a.jsonl").into(), line: 3 };
        let failing = |code: Errno| SampleFault::Read(code.into()).at(&id);
        // One failure, then the row.
        let mut results = [Err(failing(Errno::MFILE)), Ok(1)].into_iter();
        let read = TransientRowError::or_read(Rejection::of, || results.next().unwrap());
        assert_eq!(read.unwrap().unwrap(), 1);
        // A fault of the row is found once.
        let mut reads = 0;
        let read: Result<Result<(), SampleError>, _> =
            TransientRowError::or_read(Rejection::of, || {
                reads += 1;
                Err(failing(Errno::ACCESS))
            });
        assert!(read.unwrap().is_err());
        assert_eq!(reads, 1);
        // A disk that stays broken.
        let read: Result<Result<(), SampleError>, _> =
            TransientRowError::or_read(Rejection::of, || Err(failing(Errno::IO)));
        let failure = read.unwrap_err();
        assert_eq!(failure.failure, TransientFailure::Disk);
        assert!(failure.to_string().contains("a.jsonl:3"), "{failure}");
    }
}
