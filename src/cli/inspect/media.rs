//! The images and videos of an encoded sample, and the tokens that they fill.

use crate::batch::{EncodedSample, MediumKind, Patches};
use crate::data::Encoder;

/// An image or a video of a sample.
pub(super) struct ShownMedium<'a> {
    pub(super) kind: MediumKind,
    pub(super) patches: &'a Patches,
    /// Positions of its tokens in the sample.
    pub(super) rows: &'a [u32],
}

/// The images and videos of a sample, in order. The first token of a medium determines its kind.
pub(super) fn media_of<'a>(encoder: &Encoder, sample: &'a EncodedSample) -> Vec<ShownMedium<'a>> {
    let mut rest = sample.vision_rows.as_slice();
    let show = |patches: &'a Patches| {
        let count = encoder.image_processor().num_tokens(patches.grid_thw);
        let (rows, after) = rest.split_at(count);
        rest = after;
        let first = rows.first().map(|row| sample.input_ids[*row as usize]);
        let is_video = first.is_some_and(|id| encoder.is_video_token(id));
        let kind = if is_video { MediumKind::Video } else { MediumKind::Image };
        ShownMedium { kind, patches, rows }
    };
    sample.media.iter().map(show).collect()
}

/// Grids of the images, and grids of the videos.
pub(super) fn grids(media: &[ShownMedium]) -> (Vec<[u32; 3]>, Vec<[u32; 3]>) {
    let of = |kind| media.iter().filter(move |m| m.kind == kind).map(|m| m.patches.grid_thw);
    (of(MediumKind::Image).collect(), of(MediumKind::Video).collect())
}
