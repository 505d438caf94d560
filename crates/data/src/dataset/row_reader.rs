//! The interface between the loader and the data sets: a row is prefetched, packed, then completed.

use crate::encode::TextSample;
use crate::row::{Length, Rejection, RowTrouble, SampleIndex};
use batch::{EncodedSample, SampleId};

/// A row before its pixels are read: its length for packing, and the results computed so far.
#[derive(Debug, Clone, PartialEq)]
pub enum Prefetched {
    /// The whole sample: it has no media.
    Sample(EncodedSample),
    /// The sample without the pixels of its media.
    Text(TextSample),
    /// The length alone, from a cache; the row has not been read.
    Length(Length),
}

impl Prefetched {
    /// The size of the whole sample.
    pub fn length(&self) -> Length {
        match self {
            Self::Sample(sample) => Length::of(sample),
            Self::Text(text) => text.length(),
            Self::Length(length) => *length,
        }
    }

    /// Memory in bytes, accurate to a few dozen bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Sample(sample) => Length::of(sample).bytes(),
            Self::Text(text) => text.bytes(),
            Self::Length(_) => 0,
        }
    }
}

impl From<TextSample> for Prefetched {
    fn from(text: TextSample) -> Self {
        if text.is_complete() { Self::Sample(text.into_sample()) } else { Self::Text(text) }
    }
}

/// Reads and encodes single rows. The same row gives the same result each time.
pub trait RowReader: Send + Sync {
    /// The encoded sample of a row.
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection>;

    /// [`RowReader::read`], again after a wait while the process or a disk fails.
    fn read_patiently(
        &self,
        row: SampleIndex,
    ) -> Result<Result<EncodedSample, Rejection>, RowTrouble> {
        RowTrouble::or_read(Rejection::clone, || self.read(row))
    }

    /// [`Length::of`] the sample that [`RowReader::read`] would return, from text and media headers
    /// alone.
    ///
    /// It rejects the rows that `read` rejects, unless only decoding an image finds the error.
    fn length(&self, row: SampleIndex) -> Result<Length, Rejection>;

    /// The part of [`RowReader::read`] that needs no pixels. It rejects the rows that
    /// [`RowReader::length`] rejects.
    fn prefetch(&self, row: SampleIndex) -> Result<Prefetched, Rejection> {
        self.length(row).map(Prefetched::Length)
    }

    /// The rest of [`RowReader::read`], given the result of [`RowReader::prefetch`] for this row.
    fn load_pixels(
        &self,
        row: SampleIndex,
        prefetched: Prefetched,
    ) -> Result<EncodedSample, Rejection> {
        match prefetched {
            Prefetched::Sample(sample) => Ok(sample),
            Prefetched::Text(_) | Prefetched::Length(_) => self.read(row),
        }
    }

    /// The length of every row of a data set whose rows all have the same, as windows of a corpus
    /// do.
    fn uniform_length(&self, _dataset: u32) -> Option<Length> {
        None
    }

    /// File and line of a row, for messages.
    fn id(&self, row: SampleIndex) -> SampleId;
}
