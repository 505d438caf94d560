//! The size of a sample, computed without decoding its media.
//!
//! The first part, [`Measured`], can be stored. It depends on the row, the headers of its media and
//! the settings that [`Encoder::text_key`] hashes. The second part is arithmetic with the limits on
//! the pixels and tokens of images.
//!
//! Qwen2.5-VL writes boxes in pixels of the resized image, so with it the first part also depends
//! on the limits on the pixels of images.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use super::Encoder;
use super::encoded_text::kept_text;
use super::media::{MediumGrid, MediumHeader};
use crate::encode::truncate::{
    DroppedTokens, TokenCounts, TruncationError, TruncationRule, check_tokens, dropped, kept_tokens,
};
use crate::media::BoxForm;
use crate::media::image::{ImageGrid, ImageSize};
use crate::row::Length;
use crate::source::{AtRow, SampleError, SampleFault};
use batch::Sample;

/// The size of a row, without the visual tokens of its images. The limits on the pixels of images
/// are not applied, except to the boxes of Qwen2.5-VL, which are text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured<'a> {
    /// Its `media_tokens` are those of videos, and the start and end tokens of images.
    pub text: TokenCounts,
    /// The size of each image, in order.
    pub sizes: Cow<'a, [ImageSize]>,
    /// Patches of all videos.
    pub video_patches: u32,
}

impl Encoder {
    /// Measures a row from its text and the headers of its media. No pixel is decoded.
    ///
    /// It fails where [`Encoder::encode`] fails, except for errors that only decoding finds.
    pub fn measure(&self, sample: &Sample) -> Result<Measured<'static>, SampleError> {
        let id = &sample.id;
        let (text, supervision) = self.render_targets(sample).at(id)?;
        let headers = self.media.headers(&sample.media).at(id)?;
        let merge = self.media.images.merge_size();
        let (mut sizes, mut video_patches) = (Vec::new(), 0);
        let grids = |headers| match headers {
            // The tokens around visual tokens do not depend on the number of visual tokens, because
            // these are special tokens: one is enough. The limits decide the slices.
            MediumHeader::Image(size) => {
                sizes.push(size);
                MediumGrid::Image(ImageGrid { whole: [1, merge, merge], slices: None })
            }
            MediumHeader::Video(clip) => {
                // too many for this number are too many tokens
                let patches = u32::try_from(clip.num_patches()).unwrap_or(u32::MAX);
                video_patches = u32::saturating_add(video_patches, patches);
                MediumGrid::Video(clip)
            }
        };
        let grids: Vec<MediumGrid> = headers.into_iter().map(grids).collect();
        let text = self.tokenise(&text, supervision, &grids).at(id)?;
        let mut text = TokenCounts::of(&text.labels, &text.spans);
        text.media_tokens -= sizes.len();
        let measured = Measured { text, sizes: sizes.into(), video_patches };
        if text.num_targets == 0 {
            let num_tokens = self.token_counts(&measured).num_tokens();
            return Err(SampleFault::NoSupervisedToken { num_tokens }.at(id));
        }
        Ok(measured)
    }

    /// [`Measured::text`] with the visual tokens of the images, and the tokens around their slices,
    /// under the current limits.
    pub fn token_counts(&self, measured: &Measured) -> TokenCounts {
        let tokens = |grid: ImageGrid| {
            self.media.images.num_tokens(grid.whole) + self.media.slice_tokens(&grid)
        };
        let visual = self.grids_of(&measured.sizes).map(tokens).sum::<usize>();
        TokenCounts { media_tokens: measured.text.media_tokens + visual, ..measured.text }
    }

    /// Number of visual tokens under the current limits.
    pub(crate) fn visual_tokens(&self, measured: &Measured) -> usize {
        let images = self.grids_of(&measured.sizes).map(|grid| grid.num_patches());
        let patches = images.sum::<usize>() + measured.video_patches as usize;
        patches / (self.media.images.merge_size() as usize).pow(2)
    }

    /// The size of a row after truncation by `cut`, from the result of [`Encoder::measure`].
    pub fn length_under(
        &self,
        measured: &Measured,
        cut: Option<TruncationRule>,
    ) -> Result<Length, TruncationError> {
        let token_counts = self.token_counts(measured);
        check_tokens(token_counts.num_tokens())?;
        let kept = token_counts.kept_text(cut)?.len();
        let grids = self.grids_of(&measured.sizes);
        let patches = grids.map(|grid| grid.num_patches()).sum::<usize>();
        let patches = patches + measured.video_patches as usize;
        Ok(self.length_of(kept + token_counts.media_tokens, patches))
    }

    /// The size and the checks of [`Encoder::encode`], from text and media headers only.
    pub fn length(&self, sample: &Sample) -> Result<Length, SampleError> {
        self.length_truncated(sample, None)
    }

    /// The size and the checks of [`Encoder::encode_truncated`], from text and media headers only.
    pub fn length_truncated(
        &self,
        sample: &Sample,
        cut: Option<TruncationRule>,
    ) -> Result<Length, SampleError> {
        self.length_under(&self.measure(sample)?, cut).at(&sample.id)
    }

    /// The text tokens that `cut` removes, with their positions in the result of
    /// [`Encoder::encode_truncated`].
    pub fn dropped(
        &self,
        sample: &Sample,
        cut: TruncationRule,
    ) -> Result<Vec<DroppedTokens>, SampleError> {
        let id = &sample.id;
        let (text, supervision) = self.render_targets(sample).at(id)?;
        let grids = self.media.grids(&sample.media).at(id)?;
        let tokens = self.tokenise(&text, supervision, &grids).at(id)?;
        let token_counts = TokenCounts::of(&tokens.labels, &tokens.spans);
        let kept = kept_text(&token_counts, Some(cut)).at(id)?;
        let kept = kept_tokens(tokens.input_ids.len(), &tokens.spans, &kept);
        Ok(dropped(&tokens.input_ids, &kept))
    }

    /// Hash of everything that [`Encoder::measure`] depends on, except the row and its media files.
    /// With Qwen2.5-VL it includes the limits on the pixels of images, whether or not the rows have
    /// boxes.
    pub(crate) fn text_key(&self) -> [u8; 32] {
        let mut key = Sha256::new_with_prefix(self.text.key);
        key.update(self.media.videos.limits());
        match self.media.videos.family().boxes {
            None | Some(BoxForm::Thousandths) => {}
            Some(BoxForm::Pixels) => key.update(self.media.images.limits()),
            Some(BoxForm::MarkedThousandths) => key.update("marked boxes"),
            Some(BoxForm::TaggedThousandths) => key.update("tagged boxes"),
        }
        // Other families have no such marks; without them, their keys are those of earlier versions.
        if let Some(marks) = self.media.videos.family().image_marks {
            key.update(format!("{marks:?}"));
        }
        if self.media.images.numbers_images() {
            key.update("numbers of images and videos");
        }
        key.update(format!("{:?}", self.loss_scale));
        if self.train_empty_think {
            key.update("train_empty_think");
        }
        key.finalize().into()
    }

    fn grids_of(&self, sizes: &[ImageSize]) -> impl Iterator<Item = ImageGrid> {
        // `ImageProcessor::size` rejects images that are too elongated
        sizes.iter().filter_map(|size| self.media.images.grid_of_size(*size))
    }
}
