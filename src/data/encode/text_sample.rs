//! An encoded sample that lacks its pixels.

use super::media::Shown;
use crate::batch::{EncodedSample, MediaRef, MediaSource, Medium, VideoRef};
use crate::data::row::Length;

/// An encoded sample without the pixels of its media: 24 bytes a token, and the paths of the media.
#[derive(Debug, Clone, PartialEq)]
pub struct TextSample {
    pub(super) sample: EncodedSample, // its media have grids and no `pixel_values`
    pub(super) shown: Vec<Shown>,     // one a medium
    pub(super) media: Option<Vec<Medium>>, // `None` if the row itself holds image bytes: too much to keep
    length: Length,
}

impl TextSample {
    pub(super) fn new(
        sample: EncodedSample,
        length: Length,
        shown: Vec<Shown>,
        media: &[Medium],
    ) -> Self {
        let is_small = !media.iter().any(|medium| images(medium).iter().any(is_inline));
        Self { sample, shown, media: is_small.then(|| media.to_vec()), length }
    }

    /// The size of the sample with its pixels.
    pub fn length(&self) -> Length {
        self.length
    }

    /// Memory in bytes, within some two hundred a medium.
    pub(in crate::data) fn bytes(&self) -> u64 {
        let media = self.media.iter().flatten();
        let images = media.map(|medium| 1 + images(medium).len() as u64).sum::<u64>();
        self.length.token_bytes() + 200 * images
    }

    /// The whole sample if it has no media.
    pub(in crate::data) fn into_complete(self) -> Result<EncodedSample, Self> {
        if self.shown.is_empty() { Ok(self.sample) } else { Err(self) }
    }
}

/// The images that the row names: of a video its frames, if it lists them.
fn images(medium: &Medium) -> &[MediaRef] {
    match medium {
        Medium::Image(image) => std::slice::from_ref(image),
        Medium::Video(VideoRef::Frames { frames, .. }) => frames,
        Medium::Video(VideoRef::File { .. }) => &[],
    }
}

fn is_inline(image: &MediaRef) -> bool {
    matches!(image.source, MediaSource::DataUri(_))
}
