//! The size of a sample before its media are decoded, in two halves: what depends on the row alone, and
//! the arithmetic under limits on the pixels and tokens of images.

use std::ops::Range;

use sha2::{Digest, Sha256};

use super::Encoder;
use super::media::{Seen, Shown};
use crate::batch::{Sample, SampleId};
use crate::data::encode::truncate::{Cut, CutError, Dropped, Outline, dropped, kept_tokens};
use crate::data::row::Length;
use crate::data::source::SampleError;

/// What a row is before any limit on images: its tokens without those of images, and their sizes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured {
    /// Its `media_tokens` are those of videos and the marks of images.
    pub text: Outline,
    /// Upright `[height, width]` in pixels of each image, in order.
    pub sizes: Vec<[u32; 2]>,
    /// Patches of all videos.
    pub video_patches: u32,
}

impl Encoder {
    /// Text and headers of media: no pixel is decoded.
    ///
    /// It refuses what [`Encoder::encode`] refuses, except what only decoding can find out.
    pub fn measure(&self, sample: &Sample) -> Result<Measured, SampleError> {
        let id = &sample.id;
        let (text, targets) = self.render_targets(sample)?;
        let seen = self.media.see(id, &sample.media, &self.text.media)?;
        let merge = self.media.images.merge_size();
        let (mut sizes, mut video_patches) = (Vec::new(), 0);
        let shown = |seen| match seen {
            // a visual token is a special one, so how many there are changes nothing around them: one is enough
            Seen::Image(size) => {
                sizes.push(size);
                Shown::Image([1, merge, merge])
            }
            Seen::Video(clip) => {
                video_patches += clip.grid_thw.iter().product::<u32>();
                Shown::Video(clip)
            }
        };
        let shown: Vec<Shown> = seen.into_iter().map(shown).collect();
        let text = self.tokenise(id, &text, targets, &shown)?;
        let mut text = Outline::of(&text.labels, &text.spans);
        text.media_tokens -= sizes.len();
        if text.num_targets == 0 {
            let num_tokens = self.outline(text, &sizes).num_tokens();
            return Err(SampleError::NoSupervisedToken { id: id.clone(), num_tokens });
        }
        Ok(Measured { text, sizes, video_patches })
    }

    /// [`Measured::text`] with the visual tokens of images of these sizes.
    pub fn outline(&self, text: Outline, sizes: &[[u32; 2]]) -> Outline {
        let images = &self.media.images;
        let visual = self.grids_of(sizes).map(|grid| images.num_tokens(grid)).sum::<usize>();
        Outline { media_tokens: text.media_tokens + visual, ..text }
    }

    /// The size under `cut` of a row that [`Encoder::measure`] has found to be this.
    pub fn length_under(
        &self,
        text: Outline,
        sizes: &[[u32; 2]],
        video_patches: u32,
        cut: Option<Cut>,
    ) -> Result<Length, CutError> {
        let outline = self.outline(text, sizes);
        let kept = outline.kept_text(cut)?.len();
        let patches = self.grids_of(sizes).map(|grid| grid.map(u64::from).iter().product::<u64>());
        let patches = patches.sum::<u64>() + u64::from(video_patches);
        Ok(self.length_of_patches(kept + outline.media_tokens, patches))
    }

    /// The size that [`Encoder::encode`] would give, with its checks, from headers of media only.
    pub fn length(&self, sample: &Sample) -> Result<Length, SampleError> {
        self.length_cut(sample, None)
    }

    /// The size that [`Encoder::encode_cut`] would give, with its checks, from headers of media only.
    pub fn length_cut(&self, sample: &Sample, cut: Option<Cut>) -> Result<Length, SampleError> {
        let Measured { text, sizes, video_patches } = self.measure(sample)?;
        let length = self.length_under(text, &sizes, video_patches, cut);
        length.map_err(|cause| SampleError::Cut { id: sample.id.clone(), cause })
    }

    /// The text tokens that `cut` takes from a sample, by their places in what [`Encoder::encode_cut`]
    /// leaves.
    pub fn dropped(&self, sample: &Sample, cut: Cut) -> Result<Vec<Dropped>, SampleError> {
        let id = &sample.id;
        let (text, targets) = self.render_targets(sample)?;
        let shown = self.media.look(id, &sample.media, &self.text.media)?;
        let tokens = self.tokenise(id, &text, targets, &shown)?;
        let outline = Outline::of(&tokens.labels, &tokens.spans);
        let kept = kept_text(id, &outline, Some(cut))?;
        let kept = kept_tokens(tokens.input_ids.len(), &tokens.spans, &kept);
        Ok(dropped(&tokens.input_ids, &kept))
    }

    /// Hash of all that [`Encoder::measure`] depends on beside the row and the files of its media.
    pub(in crate::data) fn text_key(&self) -> [u8; 32] {
        let mut key = Sha256::new_with_prefix(self.text.key);
        key.update(self.media.videos.limits());
        key.finalize().into()
    }

    fn grids_of(&self, sizes: &[[u32; 2]]) -> impl Iterator<Item = [u32; 3]> {
        // `ImageProcessor::size` has refused those that are too elongated
        sizes.iter().filter_map(|size| self.media.images.grid_of_size(*size))
    }
}

/// The text tokens of a sample that stay, if it has something to learn from.
pub(super) fn kept_text(
    id: &SampleId,
    outline: &Outline,
    cut: Option<Cut>,
) -> Result<Range<usize>, SampleError> {
    if outline.num_targets == 0 {
        let num_tokens = outline.num_tokens();
        return Err(SampleError::NoSupervisedToken { id: id.clone(), num_tokens });
    }
    outline.kept_text(cut).map_err(|cause| SampleError::Cut { id: id.clone(), cause })
}
