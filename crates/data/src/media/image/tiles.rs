//! Images as square tiles of equal size.
//!
//! An image is stretched to `columns x rows` tiles, whose aspect ratio is the nearest to its own, and
//! cut row by row. If these are several, the whole image follows as one more tile, the *thumbnail*.
//! The choice and its rounding equal those of the transformers processor.

use super::decode::Rgb;
use super::patchify::{Normalise, PatchShape, patchify, resize_and_patchify};
use super::resize::resize;

/// How images are cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Side of a tile in pixels.
    pub(super) side: u32,
    /// Minimum number of tiles, without the thumbnail.
    pub(super) min: u32,
    /// Maximum number of tiles, without the thumbnail.
    pub(super) max: u32,
}

/// Number of tiles with the thumbnail.
fn with_thumbnail(tiles: u32) -> u32 {
    if tiles > 1 { tiles + 1 } else { 1 }
}

impl Tiles {
    /// Returns `[height, width]` in pixels of the tiles of an image of `height` x `width` pixels,
    /// without the thumbnail.
    ///
    /// The tiles have between `min_pixels` and `max_pixels` pixels, thumbnail included, as far as
    /// the numbers of tiles allow it; one tile is always allowed.
    pub(super) fn target(
        self,
        [height, width]: [u32; 2],
        [min_pixels, max_pixels]: [u64; 2],
    ) -> [u32; 2] {
        let tile_area = u64::from(self.side).pow(2);
        let pixels = |tiles: &u32| u64::from(with_thumbnail(*tiles)) * tile_area;
        let max = (1..=self.max).rev().find(|tiles| pixels(tiles) <= max_pixels).unwrap_or(1);
        let min = (self.min..=max).find(|tiles| pixels(tiles) >= min_pixels).unwrap_or(max);
        let of_columns = |columns| (1..=max / columns).map(move |rows| [columns, rows]);
        let mut grids: Vec<[u32; 2]> = (1..=max).flat_map(of_columns).collect();
        grids.retain(|[columns, rows]| columns * rows >= min);
        grids.sort_by_key(|[columns, rows]| columns * rows); // stable, as in the reference
        let aspect_ratio = f64::from(width) / f64::from(height);
        let area = u64::from(width) * u64::from(height);
        let (mut best, mut least) = ([1; 2], f64::INFINITY);
        for [columns, rows] in grids {
            let off = (aspect_ratio - f64::from(columns) / f64::from(rows)).abs();
            // More tiles of an equal ratio are for images of more than half their area.
            if off < least || (off == least && 2 * area > tile_area * u64::from(columns * rows)) {
                (best, least) = ([columns, rows], off);
            }
        }
        let [columns, rows] = best;
        [rows * self.side, columns * self.side]
    }

    /// Number of tiles of an image of this [`Self::target`], with the thumbnail.
    pub(super) fn count(self, target: [u32; 2]) -> u32 {
        let [rows, columns] = target.map(|pixels| pixels / self.side);
        with_thumbnail(rows * columns)
    }

    /// Returns the patches of all tiles of an image, `[count * (side / p)^2, 3 * tp * p * p]`.
    pub(super) fn patches(
        self,
        image: Rgb,
        target: [u32; 2],
        shape: PatchShape,
        normalise: &Normalise,
    ) -> Vec<f32> {
        let [height, width] = target;
        let thumbnail = (self.count(target) > 1)
            .then(|| resize_and_patchify(&image, [self.side; 2], shape, normalise));
        let tiles = pieces(&resize(image, height, width), [self.side as usize; 2]);
        let mut values = patchify(&tiles, shape, normalise);
        values.extend(thumbnail.into_iter().flatten());
        values
    }
}

/// Cuts an image row by row into pieces of `[height, width]` pixels, of which its sides are
/// multiples.
pub(super) fn pieces(image: &Rgb, [height, width]: [usize; 2]) -> Vec<Rgb> {
    let piece = |(top, left): (usize, usize)| {
        let lines = (top..top + height).map(|y| y * image.width + left);
        let data = lines.flat_map(|at| &image.data[at * 3..(at + width) * 3]).copied().collect();
        Rgb { width, height, data }
    };
    let columns = (0..image.width).step_by(width);
    let tops = (0..image.height).step_by(height);
    tops.flat_map(|top| columns.clone().map(move |left| (top, left))).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::super::resize::tests::{by_definition, noise};
    use super::*;

    const ANY: [u64; 2] = [1, u64::MAX];

    /// `[columns, rows]` of the target.
    fn grid(tiles: Tiles, size: [u32; 2], pixels: [u64; 2]) -> [u32; 2] {
        let [height, width] = tiles.target(size, pixels);
        [width / tiles.side, height / tiles.side]
    }

    #[test]
    fn the_nearest_aspect_ratio_decides_and_small_images_have_fewer_tiles_of_it() {
        let published = Tiles { side: 448, min: 1, max: 12 };
        for (size, expected) in [
            ([448, 448], [1, 1]),
            ([1, 1], [1, 1]),
            ([64, 96], [3, 2]), // the only tiles of this ratio, so the image is enlarged
            ([634, 634], [2, 2]), // 2 * 634^2 > 4 * 448^2
            ([633, 633], [1, 1]),
            ([950, 950], [2, 2]),
            ([951, 951], [3, 3]), // 2 * 951^2 > 9 * 448^2
            ([100, 201], [2, 1]),
            ([1000, 2000], [4, 2]),
            ([3000, 300], [1, 10]),
            ([1, 5000], [12, 1]),
            ([5000, 1], [1, 12]),
            ([100, 125], [4, 3]), // 5 x 4 tiles are too many
        ] {
            assert_eq!(grid(published, size, ANY), expected, "{size:?}");
        }
        let several = Tiles { side: 112, min: 3, max: 6 };
        assert_eq!(grid(several, [1, 1], ANY), [2, 2]);
        assert_eq!(several.count([224, 224]), 5);
        assert_eq!(several.count([112, 112]), 1);
    }

    #[test]
    fn all_sizes_of_the_reference_table_agree() {
        let table: serde_json::Value =
            serde_json::from_str(include_str!("../../../../../tests/golden/tiles.json")).unwrap();
        let rows = table["tiles"].as_array().unwrap();
        assert!(rows.len() > 300);
        for row in rows {
            let [height, width, side, min, max, columns, rows, count] =
                std::array::from_fn(|i| row[i].as_u64().unwrap() as u32);
            let tiles = Tiles { side, min, max };
            let target = tiles.target([height, width], ANY);
            assert_eq!(target, [rows * side, columns * side], "{row}");
            assert_eq!(tiles.count(target), count, "{row}");
        }
    }

    #[test]
    fn limits_on_pixels_count_the_thumbnail_and_leave_one_tile() {
        let tiles = Tiles { side: 10, min: 1, max: 12 };
        let of = |min, max| grid(tiles, [100, 200], [min, max]);
        assert_eq!(of(1, 1300), [4, 2]);
        assert_eq!(of(1, 899), [2, 1]); // 8 tiles and a thumbnail do not fit
        assert_eq!(of(1, 300), [2, 1]);
        assert_eq!(of(1, 299), [1, 1]);
        assert_eq!(of(1, 1), [1, 1]);
        assert_eq!(grid(tiles, [1, 2], ANY), [2, 1]);
        assert_eq!(grid(tiles, [1, 2], [400, u64::MAX]), [4, 2]);
        assert_eq!(grid(tiles, [1, 2], [400, 400]), [3, 1]);
        assert_eq!(grid(tiles, [1, 1], [101, u64::MAX]), [2, 2]);
        assert_eq!(grid(tiles, [1, 2], [9999, u64::MAX]), [4, 3]);
    }

    #[test]
    fn tiles_are_cut_from_the_stretched_image_row_by_row_and_the_thumbnail_is_last() {
        let shape = PatchShape { patch: 2, temporal: 1, merge: 2, inner: 2 };
        let normalise = Normalise::new([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], 255.0);
        let tiles = Tiles { side: 12, min: 1, max: 12 };
        for (target, count) in [([24, 36], 7), ([12, 24], 3), ([36, 12], 4), ([12, 12], 1)] {
            let image = noise([31, 50], u64::from(target[0]));
            let whole = by_definition(&image, target);
            let mut expected = Vec::new();
            for at in 0..(target[0] * target[1] / 144) as usize {
                let (row, column) = (at / (whole.width / 12), at % (whole.width / 12));
                let value = |i: usize| {
                    let (y, x) = (row * 12 + i / 36, column * 12 + i % 36 / 3);
                    whole.data[(y * whole.width + x) * 3 + i % 3]
                };
                let data = (0..12 * 12 * 3).map(value).collect();
                expected.push(Rgb { height: 12, width: 12, data });
            }
            if count > 1 {
                expected.push(by_definition(&image, [12, 12]));
            }
            assert_eq!(expected.len(), count);
            assert_eq!(tiles.count(target) as usize, count);
            let expected = patchify(&expected, shape, &normalise);
            assert!(tiles.patches(image, target, shape, &normalise) == expected, "{target:?}");
        }
    }
}
