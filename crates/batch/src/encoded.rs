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
    /// The first token of each segment but the first one, ascending; see
    /// [`EncodedSample::segment_lengths`]. A position does not show it: several tokens of an image
    /// at the start may have the position 0.
    pub segment_starts: Vec<u32>,
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
        self.media.iter().filter(|patches| !patches.continues_medium).count()
    }

    /// Number of supervised targets after the shift. The first token of a segment is never a
    /// target.
    pub fn num_targets(&self) -> usize {
        let starts = self.segment_starts.iter().map(|start| *start as usize);
        let is_target = |at: usize| self.labels[at] != super::IGNORE_INDEX;
        let supervised = (1..self.len()).filter(|at| is_target(*at)).count();
        supervised - starts.filter(|at| is_target(*at)).count()
    }

    /// Lengths of the segments in tokens. A token attends only to its own segment, and each segment
    /// starts at position 0. A chat is one segment; a window of a corpus has one segment per
    /// document.
    pub fn segment_lengths(&self) -> Vec<u32> {
        let ends = self.segment_starts.iter().copied().chain([self.len() as u32]);
        let starts = [0].into_iter().chain(self.segment_starts.iter().copied());
        starts.zip(ends).map(|(start, end)| end - start).collect()
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
    pub continues_medium: bool,
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
    fn the_first_tokens_of_segments_are_not_targets() {
        let at = |tokens: usize, starts: &[u32]| EncodedSample {
            id: super::super::SampleId { file: std::path::Path::new("a").into(), line: 1 },
            input_ids: vec![7; tokens],
            labels: vec![7; tokens],
            weights: None,
            // several tokens of an image at the start have the position 0
            position_ids: vec![[0; 3]; tokens],
            segment_starts: starts.to_vec(),
            vision_rows: Vec::new(),
            media: Vec::new(),
        };
        for (starts, lengths) in
            [(&[][..], &[3][..]), (&[2, 3], &[2, 1, 2]), (&[1], &[1, 1]), (&[], &[1])]
        {
            let tokens = lengths.iter().sum::<u32>() as usize;
            let mut sample = at(tokens, starts);
            assert_eq!(sample.segment_lengths(), lengths);
            assert_eq!(sample.num_targets(), tokens - lengths.len());
            sample.labels[0] = IGNORE_INDEX;
            assert_eq!(sample.num_targets(), tokens - lengths.len());
            for start in starts {
                sample.labels[*start as usize] = IGNORE_INDEX;
            }
            assert_eq!(sample.num_targets(), tokens - lengths.len());
        }
    }
}
