//! The lengths in memory: 32 bytes per row and 16 per image.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::rows::Rows;
use crate::encode::Encoder;
use crate::encode::measure::Measured;
use crate::encode::truncate::{TokenCounts, TruncationRule};
use crate::media::image::ImageSize;
use crate::row::{Length, Rejection};
use crate::source::SampleFault;
use batch::SampleId;

/// The lengths of all rows of one data file.
#[derive(Debug)]
pub struct LengthCache {
    path: PathBuf,
    counts: Vec<Counts>,                         // [rows]
    sizes: Vec<ImageSize>,                       // of all images, in the order of the rows
    rejected: BTreeMap<usize, (String, String)>, // reason and message without file and line
}

/// The [`TokenCounts`] of a row in 32 bits each.
#[derive(Debug, Clone, Copy)]
struct Counts {
    text_tokens: u32,
    mark_tokens: u32,
    text_before_media: u32,
    num_targets: u32,
    video_patches: u32,
    ends: [u32; 2], // `NONE` without a target
    sizes_end: u32,
}

const NONE: u32 = u32::MAX;

impl LengthCache {
    /// An empty table with capacity for `rows` rows.
    pub(super) fn with_capacity(path: PathBuf, rows: usize) -> Self {
        let (sizes, rejected) = (Vec::new(), BTreeMap::new());
        Self { path, counts: Vec::with_capacity(rows), sizes, rejected }
    }

    pub(super) fn push(&mut self, rows: &Rows) {
        for row in 0..rows.len() {
            let Measured { text, sizes, video_patches } = match rows.measured(row) {
                Ok(measured) => measured,
                Err((reason, message)) => {
                    let rejected = (reason.to_owned(), message.to_owned());
                    self.rejected.insert(self.counts.len(), rejected);
                    Measured::default()
                }
            };
            self.sizes.extend(sizes);
            self.counts.push(Counts {
                text_tokens: text.text_tokens as u32,
                mark_tokens: text.media_tokens as u32,
                text_before_media: text.text_before_media as u32,
                num_targets: text.num_targets as u32,
                video_patches,
                ends: text.ends.map_or([NONE; 2], |(first, last)| [first as u32, last as u32]),
                sizes_end: self.sizes.len() as u32,
            });
        }
    }

    /// Path of the cache file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// The size of row `row < len()` under the limits of `encoder` and `cut`, or its rejection.
    /// `id` returns its file and line.
    pub fn length(
        &self,
        row: usize,
        encoder: &Encoder,
        cut: Option<TruncationRule>,
        id: impl FnOnce() -> SampleId,
    ) -> Result<Length, Rejection> {
        if let Some((reason, message)) = self.rejected.get(&row) {
            let id = id();
            return Err(Rejection::new(&id, reason, format!("{id}{message}")));
        }
        let (text, sizes) = self.measured(row);
        let video_patches = self.counts[row].video_patches;
        let length = encoder.length_under(text, sizes, video_patches, cut);
        length.map_err(|cause| SampleFault::from(cause).at(&id()).into())
    }

    /// The counts of row `row < len()` before truncation; `None` if it is rejected.
    pub fn token_counts(&self, row: usize, encoder: &Encoder) -> Option<TokenCounts> {
        if self.rejected.contains_key(&row) {
            return None;
        }
        let (text, sizes) = self.measured(row);
        Some(encoder.token_counts(text, sizes))
    }

    fn measured(&self, row: usize) -> (TokenCounts, &[ImageSize]) {
        let Counts { ends, sizes_end, .. } = self.counts[row];
        let first = row.checked_sub(1).map_or(0, |before| self.counts[before].sizes_end as usize);
        let text = TokenCounts {
            text_tokens: self.counts[row].text_tokens as usize,
            media_tokens: self.counts[row].mark_tokens as usize,
            text_before_media: self.counts[row].text_before_media as usize,
            num_targets: self.counts[row].num_targets as usize,
            ends: (ends != [NONE; 2]).then(|| (ends[0] as usize, ends[1] as usize)),
        };
        (text, &self.sizes[first..sizes_end as usize])
    }
}
