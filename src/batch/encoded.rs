//! A sample in numbers: token ids, labels, three-axis positions and patches.

use super::SampleId;

/// What the model will see of one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedSample {
    /// Origin of the row.
    pub id: SampleId,
    /// Token ids, placeholders expanded; `[T]`.
    pub input_ids: Vec<u32>,
    /// `input_ids` where supervised, [`super::IGNORE_INDEX`] elsewhere; unshifted; `[T]`.
    pub labels: Vec<i64>,
    /// Temporal, height and width position of each token, starting at 0; `[T]`.
    pub position_ids: Vec<[u32; 3]>,
    /// Rows of `input_ids` that visual features fill, in the order of `media`; `[M]`.
    pub vision_rows: Vec<u32>,
    /// One entry an image or video, in the order of the text.
    pub media: Vec<Patches>,
}

impl EncodedSample {
    /// Length in tokens, vision tokens included.
    pub fn len(&self) -> usize {
        self.input_ids.len()
    }

    /// True for a sample without tokens; the encoder never makes one.
    pub fn is_empty(&self) -> bool {
        self.input_ids.is_empty()
    }

    /// Supervised targets after the shift: the first token of a sample is never a target.
    pub fn num_targets(&self) -> usize {
        self.labels.iter().skip(1).filter(|label| **label != super::IGNORE_INDEX).count()
    }
}

/// Flattened patches of one image or video: time by time, each in merge-block order.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// `[t * h * w, channels * temporal_patch_size * patch_size * patch_size]`, normalised.
    pub pixel_values: Vec<f32>,
    /// Patches per axis (time, height, width), before merging.
    pub grid_thw: [u32; 3],
}

impl Patches {
    /// `t * h * w`.
    pub fn num_patches(&self) -> usize {
        self.grid_thw.iter().map(|n| *n as usize).product()
    }
}
