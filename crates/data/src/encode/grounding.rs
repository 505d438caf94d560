//! Boxes of objects in the texts of a chat.
//!
//! `<ref-object>` becomes the name of the next object, and `<bbox>` the text of the next box, in the
//! form of the model's family. Boxes in thousandths are those of the upright image before any resize,
//! boxes in pixels those of the image that the vision encoder receives. The numbers are rounded half
//! to even, and the forms are those of ms-swift.

use std::borrow::Cow;
use std::collections::HashMap;

use super::media::MediaReader;
use crate::media::BoxForm;
use crate::media::image::ImageProcessor;
use crate::source::{BOX_PLACEHOLDER, GroundingError, NAME_PLACEHOLDER, SampleFault, texts_mut};
use batch::{BoxRef, BoxUnit, Medium, Sample};

/// Sides of an image in thousandths.
pub(super) const SIDE: u32 = 1000;
/// The special tokens around a box of [`BoxForm::MarkedThousandths`].
pub(super) const BOX_MARKS: [&str; 2] = ["<|box_start|>", "<|box_end|>"];
/// The texts around the boxes of [`BoxForm::TaggedThousandths`].
pub(super) const BOX_TAGS: [&str; 2] = ["<box>", "</box>"];

impl BoxForm {
    fn name(self, name: &str) -> String {
        match self {
            Self::Thousandths | Self::Pixels => name.to_owned(),
            Self::MarkedThousandths => format!("<|object_ref_start|>{name}<|object_ref_end|>"),
            Self::TaggedThousandths => format!("<ref>{name}</ref>"),
        }
    }

    fn of_box(self, corners: &[u32]) -> String {
        match self {
            Self::Thousandths | Self::Pixels => format!("{corners:?}"),
            Self::MarkedThousandths => {
                let points = corners.chunks(2).map(|of| format!("({},{})", of[0], of[1]));
                let points: Vec<String> = points.collect();
                let [start, end] = BOX_MARKS;
                format!("{start}{}{end}", points.join(","))
            }
            Self::TaggedThousandths => {
                let [start, end] = BOX_TAGS;
                format!("{start}[{corners:?}]{end}")
            }
        }
    }
}

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
) -> Result<Vec<ImageBox>, SampleFault> {
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
    Ok(converted(processor, sample, BoxForm::Thousandths)?
        .into_iter()
        .enumerate()
        .map(shown)
        .collect())
}

/// The sample with names and boxes in place of their placeholders.
pub(super) fn grounded<'a>(
    media: &MediaReader,
    sample: &'a Sample,
) -> Result<Cow<'a, Sample>, SampleFault> {
    if sample.objects.names.is_empty() && sample.objects.boxes.is_empty() {
        return Ok(Cow::Borrowed(sample));
    }
    let Some(form) = media.videos.family().boxes else {
        let (at, what) = ("objects".to_owned(), "names and boxes of objects for this model are");
        return Err(SampleFault::NotSupported { at, what });
    };
    let boxes = converted(&media.images, sample, form)?;
    let mut boxes = boxes.iter().map(|corners| form.of_box(corners));
    let mut names = sample.objects.names.iter().map(|name| form.name(name));
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
                [_, Some(at)] => names.next().map(|name| (at, NAME_PLACEHOLDER, name)),
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

/// The coordinates of each box in the unit of `form`.
fn converted(
    processor: &ImageProcessor,
    sample: &Sample,
    form: BoxForm,
) -> Result<Vec<Vec<u32>>, SampleFault> {
    let images: Vec<_> = sample
        .media
        .iter()
        .filter_map(|medium| match medium {
            Medium::Image(image) => Some(image),
            Medium::Video(_) => None,
        })
        .collect();
    let mut sizes: HashMap<(usize, bool), [u32; 2]> = HashMap::new();
    // `[height, width]` of an image before or after it is resized
    let mut size_of = |image: usize, is_resized: bool| -> Result<[u32; 2], SampleFault> {
        if let Some(size) = sizes.get(&(image, is_resized)) {
            return Ok(*size);
        }
        let size = if is_resized {
            let side = |patches: u32| patches * processor.patch_size();
            let grid = processor.grid(images[image]).map(|grid| grid.whole);
            grid.map(|[_, height, width]| [height, width].map(side))
        } else {
            processor.upright_size(images[image]).map(|(size, _)| size)
        };
        let size = size.map_err(|cause| SampleFault::Image { index: image + 1, cause })?;
        sizes.insert((image, is_resized), size);
        Ok(size)
    };
    let mut convert = |(index, object): (usize, &BoxRef)| -> Result<Vec<u32>, SampleFault> {
        let BoxRef { coordinates, unit, image } = object;
        // a box without pixels may be in a video
        let has_pixels = *unit == BoxUnit::Pixel || form == BoxForm::Pixels;
        if *image >= images.len() && (has_pixels || *image > 0) {
            let images = images.len();
            return Err(GroundingError::NoImage { index, image: *image, images }.into());
        }
        let from = match unit {
            BoxUnit::One => [1; 2],
            BoxUnit::Thousandth => [SIDE; 2],
            BoxUnit::Pixel => size_of(*image, false)?,
        };
        let to = match form {
            BoxForm::Thousandths | BoxForm::MarkedThousandths | BoxForm::TaggedThousandths => {
                [SIDE; 2]
            }
            BoxForm::Pixels => size_of(*image, true)?,
        };
        Ok(scaled(index, coordinates, from, to)?)
    };
    sample.objects.boxes.iter().enumerate().map(&mut convert).collect()
}

/// Checks the coordinates (`x, y` of each corner) in an image with the `[height, width]` `from`,
/// and scales them to one with the size `to`.
fn scaled(
    index: usize,
    coordinates: &[f64],
    from: [u32; 2],
    to: [u32; 2],
) -> Result<Vec<u32>, GroundingError> {
    let found = || format!("{coordinates:?}");
    if let [x1, y1, x2, y2] = coordinates
        && (x1 > x2 || y1 > y2)
    {
        return Err(GroundingError::Inverted { index, found: found() });
    }
    let [height, width] = from;
    let sides =
        [(width, to[1]), (height, to[0])].map(|(from, to)| (f64::from(from), f64::from(to)));
    let of_sides = || coordinates.iter().zip(sides.iter().cycle());
    if of_sides().any(|(value, (side, _))| !(0.0..=*side).contains(value)) {
        return Err(GroundingError::Outside { index, found: found(), width, height });
    }
    let round =
        |(value, (from, to)): (&f64, &(f64, f64))| (value / from * to).round_ties_even() as u32;
    Ok(of_sides().map(round).collect())
}
