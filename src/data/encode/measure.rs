//! The size of a sample before its pictures are decoded, in two halves: what depends on the row alone,
//! and the arithmetic under limits on pixels and tokens.

use std::ops::Range;

use super::super::row::Length;
use super::super::source::SampleError;
use super::super::truncate::{Cut, CutError, Outline};
use super::{Encoder, per_image};
use crate::batch::{Sample, SampleId};

/// What a row is before any limit: its tokens without the visual ones, and the sizes of its pictures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured {
    /// Its `media_tokens` are the marks of the media alone.
    pub text: Outline,
    /// Upright `[height, width]` in pixels of each picture, in order.
    pub sizes: Vec<[u32; 2]>,
}

impl Encoder {
    /// Text and headers of pictures: no pixel is decoded.
    ///
    /// It refuses what [`Encoder::encode`] refuses, except what only decoding can find out.
    pub fn measure(&self, sample: &Sample) -> Result<Measured, SampleError> {
        let id = &sample.id;
        let (text, targets) = self.render_targets(sample)?;
        let sizes = per_image(id, &sample.media, |media| self.images.size(media))?;
        // a visual token is a special one, so how many there are changes nothing around them
        let text = self.tokenise(id, &text, targets, &vec![1; sizes.len()])?;
        let mut outline = Outline::of(&text.labels, &text.spans);
        outline.media_tokens -= sizes.len();
        if outline.num_targets == 0 {
            let num_tokens = self.outline(outline, &sizes).num_tokens();
            return Err(SampleError::NoSupervisedToken { id: id.clone(), num_tokens });
        }
        Ok(Measured { text: outline, sizes })
    }

    /// [`Measured::text`] with the visual tokens of pictures of these sizes.
    pub fn outline(&self, text: Outline, sizes: &[[u32; 2]]) -> Outline {
        let visual = self.grids_of(sizes).map(|grid| self.images.num_tokens(grid)).sum::<usize>();
        Outline { media_tokens: text.media_tokens + visual, ..text }
    }

    /// The size under `cut` of a row that [`Encoder::measure`] has found to be this.
    pub fn length_under(
        &self,
        text: Outline,
        sizes: &[[u32; 2]],
        cut: Option<Cut>,
    ) -> Result<Length, CutError> {
        let outline = self.outline(text, sizes);
        let kept = outline.kept_text(cut)?.len();
        Ok(self.length_of(kept + outline.media_tokens, self.grids_of(sizes)))
    }

    /// The size that [`Encoder::encode`] would give, with its checks, from headers of images only.
    pub fn length(&self, sample: &Sample) -> Result<Length, SampleError> {
        self.length_cut(sample, None)
    }

    /// The size that [`Encoder::encode_cut`] would give, with its checks, from headers of images only.
    pub fn length_cut(&self, sample: &Sample, cut: Option<Cut>) -> Result<Length, SampleError> {
        let Measured { text, sizes } = self.measure(sample)?;
        let length = self.length_under(text, &sizes, cut);
        length.map_err(|cause| SampleError::Cut { id: sample.id.clone(), cause })
    }

    /// Hash of all that [`Encoder::measure`] depends on beside the row and its pictures.
    pub(in crate::data) fn text_key(&self) -> [u8; 32] {
        self.text.key
    }

    fn grids_of(&self, sizes: &[[u32; 2]]) -> impl Iterator<Item = [u32; 3]> {
        // `ImageProcessor::size` has refused those that are too elongated
        sizes.iter().filter_map(|size| self.images.grid_of_size(*size))
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
