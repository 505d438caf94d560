//! Encoded samples: token ids, labels, three-axis positions and image patches.

use super::{MediumKind, SampleId};

/// Model input for one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedSample {
    /// File and line of the row.
    pub id: SampleId,
    /// Token ids with placeholders expanded, `[T]`.
    pub input_ids: Vec<u32>,
    /// `input_ids` at supervised tokens, [`super::IGNORE_INDEX`] elsewhere. Unshifted, `[T]`.
    pub labels: Vec<i64>,
    /// Factor of the loss of each supervised token, above 0, unshifted like `labels`, `[T]`;
    /// `None`: 1 for all tokens.
    pub weights: Option<Vec<f32>>,
    /// Temporal, height and width position of each token, starting at 0; `[T]`.
    pub position_ids: Vec<[u32; 3]>,
    /// Indices into `input_ids` of the tokens that receive visual features, in the order of
    /// `media`; `[M]`.
    pub vision_rows: Vec<u32>,
    /// Patches of each image or video, in the order of the text. An image with slices has two
    /// entries, and so has each frame with slices.
    pub media: Vec<Patches>,
}

impl EncodedSample {
    /// Number of tokens, including vision tokens.
    pub fn len(&self) -> usize {
        self.input_ids.len()
    }

    /// Whether the sample has no tokens. The encoder never produces such a sample.
    pub fn is_empty(&self) -> bool {
        self.input_ids.is_empty()
    }

    /// Number of images and videos.
    pub fn num_media(&self) -> usize {
        self.media.iter().filter(|patches| !patches.follows).count()
    }

    /// Number of supervised targets after the shift. The first token of a segment is never a
    /// target.
    pub fn num_targets(&self) -> usize {
        let tokens = self.labels.iter().zip(&self.position_ids).skip(1);
        tokens.filter(|(label, at)| **label != super::IGNORE_INDEX && **at != [0; 3]).count()
    }

    /// Lengths of the segments in tokens. A token attends only to its own segment, and each segment
    /// starts at position 0. A chat is one segment; a window of a corpus has one segment per
    /// document.
    pub fn segment_lengths(&self) -> Vec<u32> {
        let begins = (1..self.len()).filter(|at| self.position_ids[*at] == [0; 3]);
        let mut lengths = Vec::with_capacity(1);
        let mut start = 0;
        for end in begins.chain([self.len()]) {
            lengths.push((end - start) as u32);
            start = end;
        }
        lengths
    }
}

/// Flattened patches of one image or video, or of all slices of an image, ordered by time, then in
/// merge-block order.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// Normalized pixels, `[t * h * w, channels * temporal_patch_size * patch_size * patch_size]`.
    pub pixel_values: Vec<f32>,
    /// Number of patches per axis (time, height, width), before merging.
    pub grid_thw: [u32; 3],
    /// Whether this is an image or a video.
    pub kind: MediumKind,
    /// Whether these belong to the image or video of the patches before them: slices of an image or
    /// frame, which follow it, or a later frame of a video whose frames have slices.
    pub follows: bool,
}

impl Patches {
    /// Number of patches, `t * h * w`.
    pub fn num_patches(&self) -> usize {
        self.grid_thw.iter().map(|n| *n as usize).product()
    }
}

#[cfg(test)]
mod tests {
    use super::super::IGNORE_INDEX;
    use super::*;

    #[test]
    fn segments_start_where_positions_restart_and_their_first_tokens_are_not_targets() {
        let at = |positions: &[u32]| EncodedSample {
            id: super::super::SampleId { file: std::path::Path::new("a").into(), line: 1 },
            input_ids: vec![7; positions.len()],
            labels: vec![7; positions.len()],
            weights: None,
            position_ids: positions.iter().map(|position| [*position; 3]).collect(),
            vision_rows: Vec::new(),
            media: Vec::new(),
        };
        for (positions, lengths) in [
            (&[0, 1, 2][..], &[3][..]),
            (&[0, 1, 0, 0, 1], &[2, 1, 2]),
            (&[0, 0], &[1, 1]),
            (&[0], &[1]),
            (&[5, 6], &[2]), // the first position may be nonzero
        ] {
            let mut sample = at(positions);
            assert_eq!(sample.segment_lengths(), lengths, "{positions:?}");
            assert_eq!(sample.num_targets(), positions.len() - lengths.len());
            sample.labels[0] = IGNORE_INDEX;
            assert_eq!(sample.num_targets(), positions.len() - lengths.len());
        }
    }
}
