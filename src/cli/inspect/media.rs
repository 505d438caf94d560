//! The images and videos of an encoded sample, and the tokens that they fill.

use crate::batch::{EncodedSample, MediumKind, Patches};
use crate::data::Encoder;

/// An image or a video of a sample.
pub(super) struct ShownMedium<'a> {
    pub(super) patches: &'a Patches,
    /// Positions of its tokens in the sample.
    pub(super) rows: &'a [u32],
}

/// The images and videos of a sample, in order.
pub(super) fn media_of<'a>(encoder: &Encoder, sample: &'a EncodedSample) -> Vec<ShownMedium<'a>> {
    let mut rest = sample.vision_rows.as_slice();
    let show = |patches: &'a Patches| {
        let count = encoder.image_processor().num_tokens(patches.grid_thw);
        let (rows, after) = rest.split_at(count);
        rest = after;
        ShownMedium { patches, rows }
    };
    sample.media.iter().map(show).collect()
}

/// Patches of the media of a kind.
pub(super) fn of_kind(sample: &EncodedSample, kind: MediumKind) -> impl Iterator<Item = &Patches> {
    sample.media.iter().filter(move |patches| patches.kind == kind)
}

/// Grids of the images, and grids of the videos.
pub(super) fn grids(sample: &EncodedSample) -> [Vec<[u32; 3]>; 2] {
    [MediumKind::Image, MediumKind::Video]
        .map(|kind| of_kind(sample, kind).map(|patches| patches.grid_thw).collect())
}
