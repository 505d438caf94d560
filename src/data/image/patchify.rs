//! Pixels to rows of normalised patches, in merge-block order.
//!
//! Shapes: `m` merge size, `p` patch size, `tp` temporal patch size, `gh`, `gw` patches a side.
//! Rows: `(gh/m, gw/m, m, m)`, so that the patches that merge into one token are neighbours;
//! columns: `(3, tp, p, p)`. A picture is one frame, repeated `tp` times.

use super::decode::Rgb;
use super::simd::for_each_level;

/// Rescaling and normalising fused as `(x - 255 mean) / (255 std)` in f32, exactly as the reference
/// computes it: the 255 times mean and std of each channel.
#[derive(Debug, Clone)]
pub(super) struct Normalise([[f32; 2]; 3]);

impl Normalise {
    /// `scale` is the largest pixel value: 1 / `rescale_factor`.
    pub(super) fn new(mean: [f32; 3], std: [f32; 3], scale: f32) -> Self {
        Self(std::array::from_fn(|c| [mean[c] * scale, std[c] * scale]))
    }
}

/// Sides of a patch: in pixels, frames, and patches a merge block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PatchShape {
    pub(super) patch: usize,
    pub(super) temporal: usize,
    pub(super) merge: usize,
}

/// `[gh * gw, 3 * tp * p * p]`.
///
/// # Panics
/// If a side is not a multiple of `p * m`.
pub(super) fn patchify(image: &Rgb, shape: PatchShape, normalise: &Normalise) -> Vec<f32> {
    let PatchShape { patch, temporal, merge } = shape;
    let block = patch * merge;
    assert!(
        image.width.is_multiple_of(block) && image.height.is_multiple_of(block),
        "smart_resize makes both sides multiples of the merge block"
    );
    let mut values = Vec::with_capacity(image.width * image.height * 3 * temporal);
    let mut frame = vec![0.0; 3 * patch * patch]; // [3, p, p]
    for top in (0..image.height).step_by(block) {
        for left in (0..image.width).step_by(block) {
            for y in (top..top + block).step_by(patch) {
                for x in (left..left + block).step_by(patch) {
                    cut_patch(image, y, x, patch, normalise, &mut frame);
                    for channel in frame.chunks_exact(patch * patch) {
                        for _ in 0..temporal {
                            values.extend_from_slice(channel);
                        }
                    }
                }
            }
        }
    }
    values
}

for_each_level! {
/// The values `[3, p, p]` of the patch whose first pixel is at row `y` and column `x`.
fn cut_patch(
    image: &Rgb,
    y: usize,
    x: usize,
    patch: usize,
    normalise: &Normalise,
    values: &mut [f32],
) {
    let [[mean0, std0], [mean1, std1], [mean2, std2]] = normalise.0;
    let (red, rest) = values.split_at_mut(patch * patch);
    let (green, blue) = rest.split_at_mut(patch * patch);
    let channels = red.chunks_exact_mut(patch).zip(green.chunks_exact_mut(patch));
    for (row, ((red, green), blue)) in channels.zip(blue.chunks_exact_mut(patch)).enumerate() {
        let from = ((y + row) * image.width + x) * 3;
        let pixels = image.data[from..from + patch * 3].as_chunks::<3>().0;
        for (((pixel, red), green), blue) in pixels.iter().zip(red).zip(green).zip(blue) {
            *red = (f32::from(pixel[0]) - mean0) / std0;
            *green = (f32::from(pixel[1]) - mean1) / std1;
            *blue = (f32::from(pixel[2]) - mean2) / std2;
        }
    }
}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One pixel a patch, so that a patch's values name the pixel: red is 10 * row + column.
    #[test]
    fn rows_walk_merge_blocks_and_columns_walk_channels_then_frames() {
        let (height, width) = (4, 6);
        let data = (0..height)
            .flat_map(|y| (0..width).flat_map(move |x| [10 * y + x, 100 + 10 * y + x, 200]))
            .map(|value: u32| value as u8)
            .collect();
        let image = Rgb { width: 6, height: 4, data };
        let shape = PatchShape { patch: 1, temporal: 2, merge: 2 };
        let identity = Normalise::new([0.0; 3], [1.0; 3], 1.0);
        let values = patchify(&image, shape, &identity);
        assert_eq!(values[..6], [0.0, 0.0, 100.0, 100.0, 200.0, 200.0]);
        let red: Vec<f32> = values.iter().step_by(6).copied().collect();
        let expected = [
            0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15, //
            20, 21, 30, 31, 22, 23, 32, 33, 24, 25, 34, 35,
        ];
        assert_eq!(red, expected.map(|value| value as f32));
    }

    #[test]
    fn half_mean_and_std_map_bytes_to_minus_one_to_one() {
        let half = Normalise::new([0.5; 3], [0.5; 3], 255.0);
        let data = (0..=255).flat_map(|x| [x; 3]).collect();
        let image = Rgb { width: 16, height: 16, data };
        let shape = PatchShape { patch: 16, temporal: 1, merge: 1 };
        let values = patchify(&image, shape, &half);
        for (x, value) in values[256..512].iter().enumerate() {
            assert_eq!(*value, (x as f32 - 127.5) / 127.5);
        }
        assert_eq!((values[0], values[767]), (-1.0, 1.0));
    }
}
