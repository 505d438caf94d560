//! Images as a whole and, if they are large, as slices of equal size too.
//!
//! The whole image is scaled, up or down, to about the area of a slice. If the image is larger than
//! that, it is also scaled to `rows x columns` slices of about this area, whose aspect ratio is the
//! nearest to its own, and cut row by row. All sides are multiples of a merge block. The choice and
//! its rounding equal those of the transformers processor.

use super::Target;
use super::decode::Rgb;
use super::patchify::{Normalise, PatchShape, patchify};
use super::resize::resize;
use super::tiles::pieces;

/// How images are cut into slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slices {
    /// Side in pixels of a square with the area of a slice.
    pub(super) side: u32,
    /// Side of a patch in pixels.
    pub(super) patch: u32,
    /// Side of a merge block in patches.
    pub(super) merge: u32,
    /// Maximum number of slices; an image never has a single one.
    pub(super) max: u32,
    /// Whether the text has the number of each image in front of it.
    pub(super) is_numbered: bool,
}

/// The slices of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceGrid {
    /// Number of rows of slices.
    pub rows: u32,
    /// Number of slices in a row.
    pub columns: u32,
    /// Number of patches along the height and width of a slice.
    pub patches: [u32; 2],
}

impl SliceGrid {
    /// Number of slices, and of patches along the height and width of a slice.
    pub fn grid(self) -> [u32; 3] {
        let [height, width] = self.patches;
        [self.rows * self.columns, height, width]
    }

    /// Returns the patches of all slices of an image, `[rows * columns * gh * gw, 3 * tp * p * p]`.
    pub(super) fn pixel_values(
        self,
        image: Rgb,
        shape: PatchShape,
        normalise: &Normalise,
    ) -> Vec<f32> {
        let Self { rows, columns, patches } = self;
        let [height, width] = patches.map(|side| side * shape.patch as u32);
        let image = resize(image, rows * height, columns * width);
        patchify(&pieces(&image, [height, width].map(|side| side as usize)), shape, normalise)
    }
}

/// The multiple of `unit` that is nearest to a side, at least one; halves become even multiples.
fn to_multiple(side: f64, unit: u32) -> f64 {
    let unit = f64::from(unit);
    ((side / unit).round_ties_even() * unit).max(unit)
}

impl Slices {
    /// Returns the size of an image of `height` x `width` pixels, and its slices if it has any.
    ///
    /// It has the most slices with which it has at most `max_pixels`, the whole image included. The
    /// whole image alone is always allowed.
    pub(super) fn target(self, [height, width]: [u32; 2], max_pixels: u64) -> Target {
        let sides = [height, width].map(f64::from);
        let whole = self.scaled(sides);
        let pixels = |[height, width]: [u32; 2]| u64::from(height) * u64::from(width);
        let fits = |slices: &SliceGrid| {
            let [count, height, width] = slices.grid();
            let slice = pixels([height * self.patch, width * self.patch]);
            pixels(whole) + u64::from(count) * slice <= max_pixels
        };
        let slice = f64::from(self.side).powi(2);
        let wanted = (pixels([height, width]) as f64 / slice).ceil() as u32;
        // A maximum above `wanted + 1` changes nothing.
        let most = if wanted > 1 { self.max.min(wanted.saturating_add(1)) } else { 1 };
        let of = |max: u32| self.slices(sides, wanted.min(max), max);
        Target { whole, slices: (2..=most).rev().map(of).find(fits) }
    }

    /// The slices of an image of about `wanted` slices, `max` at most.
    fn slices(self, [height, width]: [f64; 2], wanted: u32, max: u32) -> SliceGrid {
        let aspect_ratio = (width / height).ln();
        let of_count = |count| (1..=count).filter(move |rows| count % rows == 0);
        let counts = (wanted - 1..=wanted + 1).filter(|count| *count > 1 && *count <= max);
        let (mut best, mut least) = ([1; 2], f64::INFINITY);
        for [rows, columns] in
            counts.flat_map(|count| of_count(count).map(move |rows| [rows, count / rows]))
        {
            let off = (aspect_ratio - (f64::from(columns) / f64::from(rows)).ln()).abs();
            if off < least || (off == least && rows > best[0]) {
                (best, least) = ([rows, columns], off);
            }
        }
        let [rows, columns] = best;
        let side = |side, count| to_multiple(side, count) / f64::from(count);
        let patches = self.scaled([side(height, rows), side(width, columns)]);
        SliceGrid { rows, columns, patches: patches.map(|side| side / self.patch) }
    }

    /// Returns `[height, width]` in pixels of an image of these sides, scaled to the area of a slice.
    fn scaled(self, [height, width]: [f64; 2]) -> [u32; 2] {
        let aspect_ratio = width / height;
        let height = (f64::from(self.side) / aspect_ratio.sqrt()).trunc();
        let width = (height * aspect_ratio).trunc(); // of the height without its fraction
        [height, width].map(|side| to_multiple(side, self.patch * self.merge) as u32)
    }
}
