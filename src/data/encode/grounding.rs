//! Boxes of objects in the texts of a chat.
//!
//! `<ref-object>` becomes the name of the next object, and `<bbox>` the text of the next box, as
//! Qwen3-VL writes it: `[x1, y1, x2, y2]` in thousandths of the upright image before any resize. The
//! numbers are rounded half to even, as in ms-swift.

use std::borrow::Cow;

use crate::batch::{BoxRef, BoxUnit, Medium, Sample, SampleId};
use crate::data::media::image::ImageProcessor;
use crate::data::source::{
    BOX_PLACEHOLDER, GroundingError, NAME_PLACEHOLDER, SampleError, texts_mut,
};

/// The boxes of Qwen3-VL are relative to sides of this length.
const SIDE: u32 = 1000;

/// A box of a row in one of its images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageBox {
    /// Index of the image among the images of the row, from 0; videos do not count.
    pub image: usize,
    /// `[x1, y1, x2, y2]` in thousandths of the sides. The corners of a point are equal.
    pub corners: [u32; 4],
    /// Name of the object, if the row has one name for each box or one for all.
    pub name: Option<String>,
}

/// The boxes of a row. Reads the headers of images whose boxes are given in pixels.
pub fn image_boxes(
    processor: &ImageProcessor,
    sample: &Sample,
) -> Result<Vec<ImageBox>, SampleError> {
    let names = &sample.objects.names;
    let num_boxes = sample.objects.boxes.len();
    let name = |index: usize| match names.as_slice() {
        [one] => Some(one.clone()),
        names if names.len() == num_boxes => names.get(index).cloned(),
        _ => None,
    };
    let shown = |(index, relative): (usize, Vec<u32>)| {
        let corners = match relative[..] {
            [x1, y1, x2, y2] => [x1, y1, x2, y2],
            [x, y, ..] => [x, y, x, y],
            _ => [0; 4],
        };
        ImageBox { image: sample.objects.boxes[index].image, corners, name: name(index) }
    };
    Ok(relative(processor, sample)?.into_iter().enumerate().map(shown).collect())
}

/// The sample with names and boxes in place of their placeholders.
pub(super) fn grounded<'a>(
    processor: &ImageProcessor,
    sample: &'a Sample,
) -> Result<Cow<'a, Sample>, SampleError> {
    if sample.objects.names.is_empty() && sample.objects.boxes.is_empty() {
        return Ok(Cow::Borrowed(sample));
    }
    let mut boxes = relative(processor, sample)?.into_iter().map(|corners| format!("{corners:?}"));
    let mut names = sample.objects.names.iter();
    let mut sample = sample.clone();
    let objects = std::mem::take(&mut sample.objects);
    for text in texts_mut(&mut sample.messages) {
        let mut out = String::with_capacity(text.len());
        let mut rest = text.as_str();
        loop {
            let found = [BOX_PLACEHOLDER, NAME_PLACEHOLDER].map(|of| rest.find(of));
            let next = match found {
                [Some(at), other] if other.is_none_or(|other| at < other) => {
                    boxes.next().map(|text| (at, BOX_PLACEHOLDER, text))
                }
                [_, Some(at)] => names.next().map(|name| (at, NAME_PLACEHOLDER, name.clone())),
                _ => None,
            };
            let Some((at, placeholder, with)) = next else { break };
            out.push_str(&rest[..at]);
            out.push_str(&with);
            rest = &rest[at + placeholder.len()..];
        }
        out.push_str(rest);
        *text = out;
    }
    sample.objects = objects;
    Ok(Cow::Owned(sample))
}

/// The coordinates of each box in thousandths of the sides of its image.
fn relative(processor: &ImageProcessor, sample: &Sample) -> Result<Vec<Vec<u32>>, SampleError> {
    let images: Vec<_> = sample
        .media
        .iter()
        .filter_map(|medium| match medium {
            Medium::Image(image) => Some(image),
            Medium::Video(_) => None,
        })
        .collect();
    let id = &sample.id;
    let mut sizes: Vec<Option<[u32; 2]>> = vec![None; images.len()];
    let mut relative_of = |(index, object): (usize, &BoxRef)| {
        let BoxRef { coordinates, unit, image } = object;
        // relative boxes may be in a video
        if *image >= images.len() && (*unit == BoxUnit::Pixel || *image > 0) {
            let cause = GroundingError::NoImage { index, image: *image, images: images.len() };
            return Err(SampleError::Grounding { id: id.clone(), cause });
        }
        let [height, width] = match (unit, sizes.get(*image).copied().flatten()) {
            (BoxUnit::One, _) => [1; 2],
            (BoxUnit::Thousandth, _) => [SIDE; 2],
            (BoxUnit::Pixel, Some(size)) => size,
            (BoxUnit::Pixel, None) => {
                let size = processor.upright_size(images[*image]).map_err(|cause| {
                    SampleError::Image { id: id.clone(), index: image + 1, cause }
                })?;
                *sizes[*image].insert(size)
            }
        };
        thousandths(id, index, coordinates, [width, height])
    };
    sample.objects.boxes.iter().enumerate().map(&mut relative_of).collect()
}

/// Checks the coordinates (`x, y` of each corner) and rounds them to thousandths of the sides.
fn thousandths(
    id: &SampleId,
    index: usize,
    coordinates: &[f64],
    [width, height]: [u32; 2],
) -> Result<Vec<u32>, SampleError> {
    let fault = |cause| Err(SampleError::Grounding { id: id.clone(), cause });
    let found = || format!("{coordinates:?}");
    if let [x1, y1, x2, y2] = coordinates
        && (x1 > x2 || y1 > y2)
    {
        return fault(GroundingError::Inverted { index, found: found() });
    }
    let sides = [width, height].map(f64::from);
    let mut of_sides = coordinates.iter().zip(sides.iter().cycle());
    if of_sides.clone().any(|(value, side)| !(0.0..=*side).contains(value)) {
        return fault(GroundingError::Outside { index, found: found(), width, height });
    }
    let round =
        |(value, side): (&f64, &f64)| (value / side * f64::from(SIDE)).round_ties_even() as u32;
    Ok(of_sides.by_ref().map(round).collect())
}
