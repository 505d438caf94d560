//! Images as a whole and, if they are large, as slices of equal size too.
//!
//! The whole image is scaled, up or down, to about the area of a slice. If the image is larger than
//! that, it is also scaled to `rows x columns` slices of about this area, whose aspect ratio is the
//! nearest to its own, and cut row by row. All sides are multiples of a merge block. The choice and
//! its rounding equal those of the transformers processor.

use super::TargetSize;
use super::decode::Rgb;
use super::patchify::{Normalise, PatchShape, patchify};
use super::resize::resize;
use super::tiles::pieces;

/// How images are cut into slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slices {
    /// Side in pixels of a square with the area of a slice.
    pub(super) side: u32,
    /// Side of a patch in pixels.
    pub(super) patch: u32,
    /// Side of a merge block in patches.
    pub(super) merge: u32,
    /// Maximum number of slices; with 1, images have none.
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
        patchify(&self.cut(image, shape.patch as u32), shape, normalise)
    }

    /// Returns the slices of an image, row by row. A patch has this side in pixels.
    pub(crate) fn cut(self, image: Rgb, patch: u32) -> Vec<Rgb> {
        let [height, width] = self.patches.map(|side| side * patch);
        let image = resize(image, self.rows * height, self.columns * width);
        pieces(&image, [height, width].map(|side| side as usize))
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
    pub(crate) fn target(self, [height, width]: [u32; 2], max_pixels: u64) -> TargetSize {
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
        let choose = |max: u32| self.slices(sides, wanted.min(max), max);
        TargetSize { whole, slices: (2..=most).rev().map(choose).find(fits) }
    }

    /// The slices of an image of about `wanted` slices, `max` at most.
    fn slices(self, [height, width]: [f64; 2], wanted: u32, max: u32) -> SliceGrid {
        let aspect_ratio = (width / height).ln();
        let factors = |count| (1..=count).filter(move |rows| count % rows == 0);
        let counts = (wanted - 1..=wanted + 1).filter(|count| *count > 1 && *count <= max);
        let (mut best, mut least) = ([1; 2], f64::INFINITY);
        for [rows, columns] in
            counts.flat_map(|count| factors(count).map(move |rows| [rows, count / rows]))
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::resize::tests::{by_definition, noise};
    use super::*;

    const PUBLISHED: Slices = Slices { side: 448, patch: 14, merge: 4, max: 9, is_numbered: true };

    /// Number of pixels of the whole image and its slices.
    fn area(target: &TargetSize) -> u64 {
        let slices = target.slices.map_or([0; 3], SliceGrid::grid);
        let patches = slices.map(u64::from).iter().product::<u64>();
        let [height, width] = target.whole.map(u64::from);
        height * width + patches * 14 * 14
    }

    #[test]
    fn all_sizes_of_the_reference_table_agree() {
        let table: Value =
            serde_json::from_str(include_str!("../../../../../tests/golden/slices.json")).unwrap();
        let rows = table["slices"].as_array().unwrap();
        assert!(rows.len() > 500);
        for row in rows {
            let [height, width, side, max] = [0, 1, 2, 3].map(|i| row[i].as_u64().unwrap() as u32);
            let merge = if row[4] == "4x" { 2 } else { 4 };
            let slices = Slices { side, merge, max, ..PUBLISHED };
            let TargetSize { whole, slices } = slices.target([height, width], u64::MAX);
            let slices = slices.map_or([0; 4], |SliceGrid { rows, columns, patches: [h, w] }| {
                [rows, columns, h * 14, w * 14]
            });
            let found = [slices[0], slices[1], whole[0], whole[1], slices[2], slices[3]];
            let expected: [u32; 6] = std::array::from_fn(|i| row[5 + i].as_u64().unwrap() as u32);
            assert_eq!(found, expected, "{row}");
        }
    }

    #[test]
    fn an_image_has_the_most_slices_with_which_it_has_at_most_this_many_pixels() {
        for size in [[300, 400], [448, 449], [700, 900], [1000, 2000], [3000, 400], [8000, 8000]] {
            let limited = |max| Slices { max, ..PUBLISHED }.target(size, u64::MAX);
            for max_pixels in (0..14).map(|count| 14 * 14 * 1000 * count + 1).chain([u64::MAX]) {
                let found = PUBLISHED.target(size, max_pixels);
                let fits = |target: &TargetSize| area(target) <= max_pixels;
                let expected = (1..=9).rev().map(limited).find(fits).unwrap_or_else(|| limited(1));
                assert_eq!((found.whole, found.slices), (expected.whole, expected.slices));
            }
        }
        assert_eq!(PUBLISHED.target([8000, 8000], u64::MAX).slices.unwrap().grid()[0], 9);
        assert_eq!(PUBLISHED.target([8000, 8000], 1).slices, None);
    }

    #[test]
    fn slices_are_cut_from_the_scaled_image_row_by_row() {
        let shape = PatchShape { patch: 2, temporal: 1, merge: 4, inner: 2 };
        let normalise = Normalise::new([0.5; 3], [0.5; 3], 255.0);
        let slices = SliceGrid { rows: 2, columns: 3, patches: [4, 8] };
        let image = noise([31, 50], 7);
        let whole = by_definition(&image, [16, 48]);
        let slice = |at: usize| {
            let value = |i: usize| {
                let (y, x) = (at / 3 * 8 + i / 48, at % 3 * 16 + i % 48 / 3);
                whole.data[(y * 48 + x) * 3 + i % 3]
            };
            Rgb { height: 8, width: 16, data: (0..8 * 16 * 3).map(value).collect() }
        };
        let expected: Vec<Rgb> = (0..6).map(slice).collect();
        let expected = patchify(&expected, shape, &normalise);
        assert!(slices.pixel_values(image, shape, &normalise) == expected);
        assert_eq!(slices.grid(), [6, 4, 8]);
    }
}
