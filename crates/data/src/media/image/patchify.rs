//! Cuts pixels into normalised patches, in merge-block order.
//!
//! Shapes: `m` merge size, `p` patch size, `tp` temporal patch size, `gh`, `gw` number of patches
//! along the height and width of a frame. Each row of the result is a patch. Rows are ordered `(t,
//! gh/m, gw/m, m, m)`, so that the patches that are merged into one token are adjacent; the columns
//! are `(3, tp, p, p)`. If a model merges in two steps, the patches of a block are ordered by inner
//! blocks of `i x i` patches, `(m/i, m/i, i, i)`, so that those of the first step are adjacent too.
//! An image is one frame repeated `tp` times; the last frame of a video is repeated until the number
//! of frames is a multiple of `tp`.

use super::decode::Rgb;
use super::resize::Resized;
use batch::{Patches, merge_block_order};
use simd::kernels;

/// Number of pixels that are normalised at once.
const LANES: usize = 16;

/// Rescales and normalises each channel in one step, `(x - 255 mean) / (255 std)` in `f32`. The
/// result equals that of the transformers processor bit for bit.
#[derive(Debug, Clone)]
pub(crate) struct Normalise([Channel; 3]);

#[derive(Debug, Clone, Copy)]
struct Channel {
    mean: f32,
    std: f32,
    /// Two numbers whose sum is `1 / std` and whose products equal the division exactly for every
    /// byte; `None` if they do not.
    inverse: Option<[f32; 2]>,
}

impl Normalise {
    /// `mean` and `std` are per channel; `scale` is the largest pixel value, `1 / rescale_factor`.
    pub(crate) fn new(mean: [f32; 3], std: [f32; 3], scale: f32) -> Self {
        Self(std::array::from_fn(|c| Channel::new(mean[c] * scale, std[c] * scale)))
    }

    /// Mean and standard deviation of each channel, in units of bytes.
    pub(super) fn mean_and_std(&self) -> [[f32; 3]; 2] {
        [
            self.0.each_ref().map(|channel| channel.mean),
            self.0.each_ref().map(|channel| channel.std),
        ]
    }
}

impl Channel {
    fn new(mean: f32, std: f32) -> Self {
        // Division is slow. If a byte minus the mean has few bits, its product with the first 12
        // bits of 1 / std is exact. Adding the product with the rest then rounds once, like a
        // division.
        let high = f32::from_bits((1.0 / std).to_bits() & !0xfff);
        let low = (1.0 / f64::from(std) - f64::from(high)) as f32;
        let is_exact = |x: u8| {
            let d = f32::from(x) - mean;
            (d * high + d * low).to_bits() == (d / std).to_bits()
        };
        let inverse = (0..=u8::MAX).all(is_exact).then_some([high, low]);
        Self { mean, std, inverse }
    }

    /// Normalises the values of one channel for adjacent pixels.
    #[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
    #[inline(always)]
    fn scale(&self, pixels: &[u8; LANES]) -> [f32; LANES] {
        let mut values = [0.0; LANES];
        for (value, pixel) in values.iter_mut().zip(pixels) {
            let d = f32::from(*pixel) - self.mean;
            *value = match self.inverse {
                Some([high, low]) => d * high + d * low,
                None => d / self.std,
            };
        }
        values
    }
}

/// Size of a patch and of a merge block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PatchShape {
    /// Side of a patch in pixels, `p`.
    pub(crate) patch: usize,
    /// Number of frames in a patch, `tp`.
    pub(crate) temporal: usize,
    /// Side of a merge block in patches, `m`.
    pub(crate) merge: usize,
    /// Side of the blocks that are merged first, in patches, `i`; `m` if there is one step.
    pub(crate) inner: usize,
}

impl PatchShape {
    /// Row and column of each patch of a frame of `sides` patches, in order.
    fn order(self, sides: [usize; 2]) -> impl Iterator<Item = [usize; 2]> {
        let order =
            merge_block_order(sides.map(|side| side as u32), self.merge as u32, self.inner as u32);
        order.map(|(row, column)| [row as usize, column as usize])
    }
}

/// Returns the patches of `frames` of equal size, `[t * gh * gw, 3 * tp * p * p]`, where `t` is
/// the number of frames divided by `tp`, rounded up.
///
/// # Panics
/// If `frames` is empty, or if a side is not a multiple of `p * m`.
pub(crate) fn patchify(frames: &[Rgb], shape: PatchShape, normalise: &Normalise) -> Vec<f32> {
    let (height, width) = (frames[0].height, frames[0].width);
    let times = frames.len().div_ceil(shape.temporal);
    let mut values = Vec::with_capacity(width * height * 3 * shape.temporal * times);
    for frames in frames.chunks(shape.temporal) {
        let frames = frames.iter().map(|frame| Resized::new(frame, height, width)).collect();
        cut(frames, shape, normalise, &mut values);
    }
    values
}

/// Resizes an image and returns its patches, `[gh * gw, 3 * tp * p * p]`.
///
/// Equals [`resize`](super::resize::resize) followed by [`patchify`], without storing the resized
/// image.
///
/// # Panics
/// If a target side is 0 or not a multiple of `p * m`.
pub(super) fn resize_and_patchify(
    image: &Rgb,
    [height, width]: [u32; 2],
    shape: PatchShape,
    normalise: &Normalise,
) -> Vec<f32> {
    let resized = Resized::new(image, height as usize, width as usize);
    let num_values = resized.height() * resized.width() * 3 * shape.temporal;
    let mut values = Vec::with_capacity(num_values);
    cut(vec![resized], shape, normalise, &mut values);
    values
}

/// Appends the patches of at most `tp` frames: `[gh * gw, 3 * tp * p * p]`.
fn cut(mut frames: Vec<Resized>, shape: PatchShape, normalise: &Normalise, values: &mut Vec<f32>) {
    let PatchShape { patch, temporal, merge, .. } = shape;
    let block = patch * merge;
    let (width, height) = (frames[0].width(), frames[0].height());
    assert!(
        width.is_multiple_of(block) && height.is_multiple_of(block),
        "both sides must be multiples of the merge block; `smart_resize` returns such sides"
    );
    let size = patch * patch;
    // [frames, 3, p, p]: values are appended from this buffer in order, which is faster than
    // writing repeated frames to their places.
    let mut cut = vec![0.0; frames.len() * 3 * size];
    for top in (0..height).step_by(block) {
        let bands: Vec<_> = frames.iter_mut().map(|frame| frame.band(top..top + block)).collect();
        for left in (0..width).step_by(block) {
            for [y, x] in shape.order([merge; 2]) {
                let at = [y * patch, left + x * patch];
                for (band, cut) in bands.iter().zip(cut.chunks_exact_mut(3 * size)) {
                    cut_patch(band, width, at, patch, normalise, cut);
                }
                for channel in 0..3 {
                    for time in 0..temporal {
                        let frame = time.min(bands.len() - 1);
                        let from = (frame * 3 + channel) * size;
                        values.extend_from_slice(&cut[from..from + size]);
                    }
                }
            }
        }
    }
}

kernels! {
/// Writes the values `[3, p, p]` of the patch at row and column `at` of a band `[rows, 3, width]`.
fn cut_patch(
    band: &[u8],
    width: usize,
    at: [usize; 2],
    patch: usize,
    normalise: &Normalise,
    values: &mut [f32],
) {
    let [y, x] = at;
    let channels = normalise.0.iter().zip(values.chunks_exact_mut(patch * patch));
    for (c, (channel, values)) in channels.enumerate() {
        let rows = band[(y * 3 + c) * width + x..].chunks(3 * width);
        if patch == LANES {
            for (values, row) in values.as_chunks_mut().0.iter_mut().zip(rows) {
                *values = channel.scale(row.first_chunk().expect("patches lie inside their band"));
            }
            continue;
        }
        for (values, row) in values.chunks_exact_mut(patch).zip(rows) {
            for (values, pixels) in values.chunks_mut(LANES).zip(row[..patch].chunks(LANES)) {
                let mut lanes = [0; LANES];
                lanes[..pixels.len()].copy_from_slice(pixels);
                values.copy_from_slice(&channel.scale(&lanes)[..values.len()]);
            }
        }
    }
}
}

/// Inverse of [`patchify`]: returns the frames of patches `[t * gh * gw, 3 * tp * p * p]`,
/// including repeated frames.
pub(crate) fn unpatchify(patches: &Patches, shape: PatchShape, normalise: &Normalise) -> Vec<Rgb> {
    let PatchShape { patch, temporal, .. } = shape;
    let [times, rows, columns] = patches.grid_thw.map(|n| n as usize);
    let (width, height) = (columns * patch, rows * patch);
    let blank = Rgb { width, height, data: vec![0; width * height * 3] };
    let mut frames = vec![blank; times * temporal];
    let mut values = patches.pixel_values.iter();
    for frames in frames.chunks_mut(temporal) {
        for [y, x] in shape.order([rows, columns]) {
            for (c, Channel { mean, std, .. }) in normalise.0.iter().enumerate() {
                for frame in frames.iter_mut() {
                    for (at, value) in values.by_ref().take(patch * patch).enumerate() {
                        let (row, column) = (y * patch + at / patch, x * patch + at % patch);
                        frame.data[(row * width + column) * 3 + c] =
                            (*value * std + mean).round() as u8;
                    }
                }
            }
        }
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::super::resize::resize;
    use super::super::resize::tests::{by_definition, noise};
    use super::*;
    use proptest::prelude::*;
    use simd::at_each_level;

    /// Reference for [`patchify`]: computes each value from the order of rows and columns.
    fn patches(frames: &[Rgb], shape: PatchShape, normalise: &Normalise) -> Vec<f32> {
        let PatchShape { patch: p, temporal, merge: m, inner } = shape;
        let (rows, columns) = (frames[0].height / p, frames[0].width / p);
        let mut values = Vec::new();
        for first in (0..frames.len()).step_by(temporal) {
            for at in 0..rows * columns {
                // index into (gh / m, gw / m, m / i, m / i, i, i), from the last axis to the first
                let (at, dx) = (at / inner, at % inner);
                let (at, dy) = (at / inner, at % inner);
                let (at, outer_x) = (at / (m / inner), at % (m / inner));
                let (at, outer_y) = (at / (m / inner), at % (m / inner));
                let (dy, dx) = (outer_y * inner + dy, outer_x * inner + dx);
                let (y, x) = (at / (columns / m) * m + dy, at % (columns / m) * m + dx);
                for value in 0..3 * temporal * p * p {
                    let (value, column) = (value / p, value % p);
                    let (value, row) = (value / p, value % p);
                    let (c, time) = (value / temporal, value % temporal);
                    let frame = &frames[(first + time).min(frames.len() - 1)];
                    let pixel = (y * p + row) * frame.width + x * p + column;
                    let Channel { mean, std, .. } = normalise.0[c];
                    values.push((f32::from(frame.data[pixel * 3 + c]) - mean) / std);
                }
            }
        }
        values
    }

    /// Sides of merge blocks and of the blocks inside of them.
    const BLOCKS: [[usize; 2]; 5] = [[1, 1], [2, 2], [4, 2], [4, 4], [4, 1]];

    /// Each patch is one pixel whose values identify it: red is 10 * row + column.
    #[test]
    fn rows_are_in_merge_block_order_and_columns_are_channels_then_frames() {
        let (height, width) = (4, 6);
        let data = (0..height)
            .flat_map(|y| (0..width).flat_map(move |x| [10 * y + x, 100 + 10 * y + x, 200]))
            .map(|value: u32| value as u8)
            .collect();
        let image = Rgb { width: 6, height: 4, data };
        let shape = PatchShape { patch: 1, temporal: 2, merge: 2, inner: 2 };
        let identity = Normalise::new([0.0; 3], [1.0; 3], 1.0);
        let values = patchify(&[image], shape, &identity);
        assert_eq!(values[..6], [0.0, 0.0, 100.0, 100.0, 200.0, 200.0]);
        let red: Vec<f32> = values.iter().step_by(6).copied().collect();
        let expected = [
            0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15, //
            20, 21, 30, 31, 22, 23, 32, 33, 24, 25, 34, 35,
        ];
        assert_eq!(red, expected.map(|value| value as f32));
    }

    #[test]
    fn patches_of_an_inner_block_are_adjacent() {
        let data = (0..16).flat_map(|at| [10 * (at / 4) + at % 4; 3]).collect();
        let image = Rgb { width: 4, height: 4, data };
        let shape = PatchShape { patch: 1, temporal: 1, merge: 4, inner: 2 };
        let values = patchify(&[image], shape, &Normalise::new([0.0; 3], [1.0; 3], 1.0));
        let red: Vec<f32> = values.iter().step_by(3).copied().collect();
        let expected = [0, 1, 10, 11, 2, 3, 12, 13, 20, 21, 30, 31, 22, 23, 32, 33];
        assert_eq!(red, expected.map(|value: u8| f32::from(value)));
    }

    /// The reference divides in `f32`. Products replace the division only where they are equal.
    #[test]
    fn products_equal_the_quotients_of_all_bytes_or_are_not_used() {
        for std in (1..2000).map(|std| std as f32 / 1000.0) {
            for mean in [0.5, 0.0, 0.48145466, 0.4578275, 0.40821073] {
                let channel = Channel::new(mean * 255.0, std * 255.0);
                for bytes in (0..=u8::MAX).collect::<Vec<_>>().as_chunks().0 {
                    let expected = bytes.map(|x| (f32::from(x) - mean * 255.0) / (std * 255.0));
                    assert_eq!(channel.scale(bytes), expected, "mean {mean}, std {std}");
                }
            }
        }
        assert!(Channel::new(127.5, 127.5).inverse.is_some());
    }

    proptest! {
        /// Tests the fused function and the two separate ones, with sides that are not multiples
        /// of a vector, at each SIMD level.
        #[test]
        fn fused_resize_and_patchify_equals_the_reference(
            sides in [1..90_usize, 1..90_usize],
            blocks in [1..5_u32, 1..5_u32],
            patch in prop::sample::select(vec![1_usize, 2, 5, 14, 16, 17]),
            [merge, inner] in prop::sample::select(BLOCKS.to_vec()),
            temporal in 1..4_usize,
            seed: u64,
        ) {
            let image = noise(sides, seed);
            let shape = PatchShape { patch, temporal, merge, inner };
            let normalise = Normalise::new([0.5, 0.48, 0.41], [0.5, 0.26, 0.28], 255.0);
            let target = blocks.map(|blocks| blocks * (patch * merge) as u32);
            let expected = patches(&[by_definition(&image, target)], shape, &normalise);
            for (level, found) in at_each_level(|| resize_and_patchify(&image, target, shape, &normalise)) {
                prop_assert!(found == expected, "{level:?}");
            }
            for (level, found) in at_each_level(|| {
                patchify(&[resize(image.clone(), target[0], target[1])], shape, &normalise)
            }) {
                prop_assert!(found == expected, "{level:?}");
            }
        }

        #[test]
        fn patches_of_frames_equal_the_reference(
            grid in [1..4_usize, 1..4_usize],
            frames in 1..6_u64,
            patch in prop::sample::select(vec![1_usize, 3, 14, 16]),
            [merge, inner] in prop::sample::select(BLOCKS.to_vec()),
            temporal in 1..4_usize,
            seed: u64,
        ) {
            let sides = grid.map(|blocks| blocks * patch * merge);
            let frames: Vec<_> = (0..frames).map(|frame| noise(sides, seed ^ frame)).collect();
            let shape = PatchShape { patch, temporal, merge, inner };
            let normalise = Normalise::new([0.5, 0.48, 0.41], [0.5, 0.26, 0.28], 255.0);
            let expected = patches(&frames, shape, &normalise);
            for (level, found) in at_each_level(|| patchify(&frames, shape, &normalise)) {
                prop_assert!(found == expected, "{level:?}");
            }
        }
    }

    #[test]
    fn an_odd_last_frame_is_repeated_and_frames_of_a_patch_are_adjacent() {
        let frame = |first: u8| {
            let data = (0..4).flat_map(|pixel| [first + pixel, 100 + first, 200]).collect();
            Rgb { width: 2, height: 2, data }
        };
        let shape = PatchShape { patch: 1, temporal: 2, merge: 2, inner: 2 };
        let identity = Normalise::new([0.0; 3], [1.0; 3], 1.0);
        let values = patchify(&[frame(0), frame(10), frame(20)], shape, &identity);
        assert_eq!(values.len(), 2 * 4 * 6);
        assert_eq!(values[..8], [0.0, 10.0, 100.0, 110.0, 200.0, 200.0, 1.0, 11.0]);
        assert_eq!(values[24..32], [20.0, 20.0, 120.0, 120.0, 200.0, 200.0, 21.0, 21.0]);
    }

    #[test]
    fn unpatchify_undoes_patchify_for_every_byte() {
        let frame = |seed: usize| {
            let data = (0..8 * 12 * 3).map(|at| (at * seed % 256) as u8).collect();
            Rgb { width: 12, height: 8, data }
        };
        let shape = PatchShape { patch: 2, temporal: 2, merge: 2, inner: 2 };
        let normalise = Normalise::new([0.48, 0.46, 0.41], [0.27, 0.26, 0.28], 255.0);
        let frames = [frame(1), frame(7), frame(13)];
        let pixel_values = patchify(&frames, shape, &normalise);
        let of = |pixel_values, grid_thw| {
            let kind = batch::MediumKind::Image;
            Patches { pixel_values, grid_thw, kind, continues_medium: false }
        };
        let patches = of(pixel_values, [2, 4, 6]);
        let [first, second, third, repeated] =
            unpatchify(&patches, shape, &normalise).try_into().unwrap();
        assert_eq!(repeated, third);
        assert_eq!([first, second, third], frames);
        let nested = PatchShape { patch: 1, temporal: 1, merge: 4, inner: 2 };
        let patches = of(patchify(&frames, nested, &normalise), [3, 8, 12]);
        assert_eq!(unpatchify(&patches, nested, &normalise), frames);
    }

    #[test]
    fn half_mean_and_std_map_bytes_to_minus_one_to_one() {
        let half = Normalise::new([0.5; 3], [0.5; 3], 255.0);
        let data = (0..=255).flat_map(|x| [x; 3]).collect();
        let image = Rgb { width: 16, height: 16, data };
        let shape = PatchShape { patch: 16, temporal: 1, merge: 1, inner: 1 };
        let values = patchify(&[image], shape, &half);
        for (x, value) in values[256..512].iter().enumerate() {
            assert_eq!(*value, (x as f32 - 127.5) / 127.5);
        }
        assert_eq!((values[0], values[767]), (-1.0, 1.0));
    }
}
