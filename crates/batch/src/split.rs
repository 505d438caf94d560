//! Parts of a token stream, for ranks that compute one micro-batch together.

use super::{CuSeqlens, IGNORE_INDEX, Patches, VarlenBatch};
use std::num::NonZeroU32;
use std::ops::Range;

/// What a part of a micro-batch has of its images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPart {
    /// The merged tokens of `media` whose features `vision_rows` receive. The others belong to
    /// frames that begin before the part or end after it.
    pub features: Range<usize>,
    /// The first merged token of `media`, counted in the whole micro-batch.
    pub first_feature: usize,
    /// Whether any part of the micro-batch has images.
    pub has_media: bool,
}

impl VarlenBatch {
    /// The part with the tokens `tokens` of a whole micro-batch: their ids, labels, weights and
    /// positions, the frames with a merged token among them, and all segment boundaries.
    /// `merge_size` is the number of patches on a side of a merged token.
    ///
    /// Targets must be computed from the whole: the target of the last token is in the next part.
    #[must_use]
    pub fn part(mut self, tokens: Range<usize>, merge_size: NonZeroU32) -> Self {
        let has_media = !self.media.is_empty();
        let place = |row: usize| self.vision_rows.partition_point(|of| (*of as usize) < row);
        let visible = place(tokens.start)..place(tokens.end);
        let mut first = None; // merged token of the first frame that is kept
        let mut start = 0;
        let mut media = Vec::new();
        for patches in self.media {
            let merged = frame_patches(&patches) / (merge_size.get() as usize).pow(2);
            let frames = patches.grid_thw[0] as usize;
            let seen = |frame: usize| start + frame * merged..start + (frame + 1) * merged;
            let is_seen = |frame: &usize| {
                let frame = seen(*frame);
                frame.start < visible.end && visible.start < frame.end
            };
            let kept = (0..frames).filter(is_seen);
            if let (Some(begin), Some(last)) = (kept.clone().next(), kept.clone().next_back()) {
                first.get_or_insert(seen(begin).start);
                media.push(frames_of(patches, begin..last + 1));
            }
            start += frames * merged;
        }
        let first = first.unwrap_or(visible.start);
        self.vision_rows.truncate(visible.end);
        self.vision_rows.drain(..visible.start);
        self.vision_rows.iter_mut().for_each(|row| *row -= tokens.start as u32);
        let features = visible.start - first..visible.end - first;
        Self {
            input_ids: self.input_ids[tokens.clone()].to_vec(),
            labels: self.labels[tokens.clone()].to_vec(),
            weights: self.weights.map(|weights| weights[tokens.clone()].to_vec()),
            position_ids: self.position_ids[tokens].to_vec(),
            media,
            part: Some(BatchPart { features, first_feature: first, has_media }),
            ..self
        }
    }

    /// Appends a segment of padding if there are fewer than `tokens` tokens.
    #[must_use]
    pub fn at_least(mut self, tokens: usize) -> Self {
        let missing = tokens.saturating_sub(self.input_ids.len());
        if missing > 0 {
            self.input_ids.resize(tokens, 0);
            self.labels.resize(tokens, IGNORE_INDEX);
            self.weights.iter_mut().for_each(|weights| weights.resize(tokens, 1.0));
            self.position_ids.extend((0..missing as u32).map(|position| [position; 3]));
            for boundaries in [&mut self.cu_seqlens, &mut self.mask_boundaries] {
                let lengths = boundaries.segments().map(|segment| segment.len() as u32);
                let lengths: Vec<u32> = lengths.chain([missing as u32]).collect();
                *boundaries = CuSeqlens::from_lengths(&lengths).expect("few tokens, none empty");
            }
        }
        self
    }
}

fn frame_patches(patches: &Patches) -> usize {
    let [_, height, width] = patches.grid_thw;
    height as usize * width as usize
}

/// The frames `frames` of an image or a video.
fn frames_of(mut patches: Patches, frames: Range<usize>) -> Patches {
    let [all, height, width] = patches.grid_thw;
    if frames.len() < all as usize {
        let values = patches.pixel_values.len() / all as usize;
        patches.pixel_values =
            patches.pixel_values[frames.start * values..frames.end * values].to_vec();
        patches.grid_thw = [frames.len() as u32, height, width];
    }
    patches
}

#[cfg(test)]
mod tests {
    use super::super::MediumKind;
    use super::*;

    /// 3 tokens of text, a video of 3 frames with 2 merged tokens each, 2 tokens, an image of 4
    /// merged tokens, and a token. The pixels of a frame are its number.
    fn batch() -> VarlenBatch {
        let medium = |frames: std::ops::Range<u32>, width| Patches {
            grid_thw: [frames.len() as u32, 2, width],
            pixel_values: frames.flat_map(|at| vec![at as f32; 2 * width as usize]).collect(),
            kind: MediumKind::Image,
            continues_medium: false,
        };
        let cu_seqlens = CuSeqlens::from_lengths(&[9, 7]).unwrap();
        VarlenBatch {
            input_ids: (0..16).collect(),
            labels: (0..16).collect(),
            weights: None,
            position_ids: (0..16).map(|at| [at; 3]).collect(),
            mask_boundaries: CuSeqlens::from_lengths(&[16]).unwrap(),
            cu_seqlens,
            vision_rows: (3..9).chain(11..15).collect(),
            media: vec![medium(0..3, 4), medium(3..4, 8)],
            padding: vec![],
            num_tokens: 16,
            num_samples: 2,
            part: None,
        }
    }

    fn part(tokens: Range<usize>) -> VarlenBatch {
        batch().part(tokens, NonZeroU32::new(2).unwrap())
    }

    #[test]
    fn a_part_has_the_frames_of_its_tokens_and_the_range_of_its_features() {
        for (tokens, rows, grids, pixels, features, first_feature) in [
            (0..3, vec![], vec![], vec![], 0..0, 0),
            (0..4, vec![3], vec![[1, 2, 4]], vec![0.0], 0..1, 0),
            (4..7, vec![0, 1, 2], vec![[2, 2, 4]], vec![0.0, 1.0], 1..4, 0),
            (8..13, vec![0, 3, 4], vec![[1, 2, 4], [1, 2, 8]], vec![2.0, 3.0], 1..4, 4),
            (9..11, vec![], vec![], vec![], 0..0, 6),
            (14..16, vec![0], vec![[1, 2, 8]], vec![3.0], 3..4, 6),
        ] {
            let found = part(tokens.clone());
            let frames: Vec<f32> = found
                .media
                .iter()
                .flat_map(|medium| medium.pixel_values.chunks(frame_patches(medium)))
                .map(|frame| frame[0])
                .collect();
            let found_grids: Vec<_> = found.media.iter().map(|medium| medium.grid_thw).collect();
            assert_eq!(
                (found.vision_rows, found_grids, frames),
                (rows, grids, pixels),
                "{tokens:?}"
            );
            let found_part = found.part.unwrap();
            assert_eq!((found_part.features, found_part.has_media), (features, true));
            assert_eq!(found_part.first_feature, first_feature, "{tokens:?}");
            assert_eq!(found.input_ids, tokens.map(|at| at as u32).collect::<Vec<_>>());
            assert_eq!(found.cu_seqlens.num_tokens(), 16);
        }
    }

    #[test]
    fn a_short_stream_is_filled_with_a_segment_of_padding() {
        assert_eq!(batch().at_least(16), batch());
        let filled = batch().at_least(18);
        assert_eq!(filled.cu_seqlens.as_slice(), [0, 9, 16, 18]);
        assert_eq!(filled.mask_boundaries.as_slice(), [0, 16, 18]);
        assert_eq!((filled.input_ids.len(), filled.labels[17]), (18, IGNORE_INDEX));
        assert_eq!(filled.num_tokens, 16);
    }
}
