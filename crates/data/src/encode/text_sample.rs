//! An encoded sample without its pixels.

use super::media::MediumGrid;
use crate::row::Length;
use batch::{EncodedSample, MediaRef, MediaSource, Medium, VideoRef};

/// An encoded sample without the pixels of its media: 24 bytes a token, and the paths of the media.
#[derive(Debug, Clone, PartialEq)]
pub struct TextSample {
    pub(super) sample: EncodedSample, // its media have grids and no `pixel_values`
    pub(super) grids: Vec<MediumGrid>, // one per medium
    pub(super) media: Option<Vec<Medium>>, // `None` if the row holds image bytes, which are too large to keep
    length: Length,
}

impl TextSample {
    pub(super) fn new(
        sample: EncodedSample,
        length: Length,
        grids: Vec<MediumGrid>,
        media: &[Medium],
    ) -> Self {
        let is_small = !media.iter().any(|medium| images(medium).iter().any(is_inline));
        Self { sample, grids, media: is_small.then(|| media.to_vec()), length }
    }

    /// The size of the sample with its pixels.
    pub fn length(&self) -> Length {
        self.length
    }

    /// Memory in bytes, counting 200 per medium.
    pub(crate) fn bytes(&self) -> u64 {
        let media = self.media.iter().flatten();
        let images = media.map(|medium| 1 + images(medium).len() as u64).sum::<u64>();
        self.length.token_bytes() + 200 * images
    }

    /// Whether the sample is complete because it has no media.
    pub(crate) fn is_complete(&self) -> bool {
        self.grids.is_empty()
    }

    /// Returns the sample, whose media have no pixels.
    pub(crate) fn into_sample(self) -> EncodedSample {
        self.sample
    }
}

/// The image files of a medium: the image, or the frames of a video that is a list of frames.
fn images(medium: &Medium) -> &[MediaRef] {
    match medium {
        Medium::Image(image) => std::slice::from_ref(image),
        Medium::Video(VideoRef::Frames { frames, .. }) => frames,
        Medium::Video(VideoRef::File { .. }) => &[],
    }
}

fn is_inline(image: &MediaRef) -> bool {
    matches!(image.source, MediaSource::DataUri(_) | MediaSource::Bytes(_))
}
