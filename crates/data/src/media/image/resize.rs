//! Antialiased bicubic resize of 8-bit RGB, equal to torchvision's bit for bit.
//!
//! Shapes: images `[height, width, 3]`; bands of rows are planar, `[rows, 3, width]`.
//!
//! The first pass changes the width, the second the height. Each pass uses 16-bit fixed-point
//! weights, rounds and clamps to `u8`, and is skipped if its size does not change. The image is
//! processed in bands of rows, so that the rows between the two passes stay in the cache.

use std::ops::Range;

use simd::{LANES, Lanes, kernels, transpose};

use super::decode::Rgb;

/// Number of rows per band in [`resize`].
const BAND: usize = 32;

/// Resizes an image to `height` x `width`. Returns it unchanged if it has that size.
///
/// # Panics
/// If a target side is 0.
pub(crate) fn resize(image: Rgb, height: u32, width: u32) -> Rgb {
    let (height, width) = (height as usize, width as usize);
    if (image.height, image.width) == (height, width) {
        return image;
    }
    let mut resized = Resized::new(&image, height, width);
    let mut data = vec![0; height * width * 3];
    for (top, rows) in (0..height).step_by(BAND).zip(data.chunks_mut(BAND * width * 3)) {
        let band = resized.band(top..height.min(top + BAND));
        for (planes, row) in band.chunks_exact(width * 3).zip(rows.chunks_exact_mut(width * 3)) {
            interleave(planes, row);
        }
    }
    Rgb { width, height, data }
}

/// A resized image whose rows are computed on demand, from top to bottom.
#[derive(Debug)]
pub(super) struct Resized<'a> {
    rows: ResizedRows<'a>,
    height: usize,
    /// Weights for the height; `None` if the height does not change.
    weights: Option<Weights>,
    sums: Vec<i32>, // [3, width]
    band: Vec<u8>,  // [rows, 3, width]
}

impl<'a> Resized<'a> {
    /// Prepares the resize of `image` to `height` x `width`; computes no rows yet.
    ///
    /// # Panics
    /// If a target side is 0.
    pub(super) fn new(image: &'a Rgb, height: usize, width: usize) -> Self {
        assert!(height > 0 && width > 0, "target sides must be at least 1");
        let weights = (image.height != height).then(|| Weights::new(image.height, height));
        let sums = vec![0; width * 3];
        Self { rows: ResizedRows::new(image, width), height, weights, sums, band: Vec::new() }
    }

    pub(super) fn width(&self) -> usize {
        self.rows.width
    }

    pub(super) fn height(&self) -> usize {
        self.height
    }

    /// Returns the rows `wanted`, planar `[rows, 3, width]`.
    ///
    /// # Panics
    /// If `wanted` exceeds the height, or starts above the start of an earlier call.
    pub(super) fn band(&mut self, wanted: Range<usize>) -> &[u8] {
        let Some(weights) = &self.weights else { return self.rows.get(wanted) };
        let row = self.sums.len();
        self.band.resize(wanted.len() * row, 0);
        let sources = weights.window(wanted.start).start..weights.window(wanted.end - 1).end;
        let last = sources.len() - 1;
        let rows = self.rows.get(sources.clone());
        for (y, target) in wanted.zip(self.band.chunks_exact_mut(row)) {
            let quads = weights.quads(y);
            let first = weights.window(y).start - sources.start;
            // Taps after the last row have weight 0, so their row does not matter.
            let source = |tap: usize| &rows[(first + tap).min(last) * row..][..row];
            let rows: Vec<_> =
                (0..quads.len()).map(|i| [0, 1, 2, 3].map(|tap| source(4 * i + tap))).collect();
            sum_rows(&rows, quads, weights.precision(), &mut self.sums, target);
        }
        &self.band
    }
}

/// Rows of an image at the target width, planar, computed on demand.
#[derive(Debug)]
struct ResizedRows<'a> {
    source: &'a Rgb,
    width: usize,
    /// Weights for the width, and buffers; `None` if the width does not change.
    across: Option<(Weights, Squares)>,
    /// The rows `made`, `[rows, 3, width]`; the buffer may be longer.
    planes: Vec<u8>,
    /// Rows that `planes` holds.
    made: Range<usize>,
}

/// Buffers to change the width of sixteen rows at once, in blocks of 16 x 16 bytes.
#[derive(Debug)]
struct Squares {
    /// Copy of the source rows, `[16, 3 * source_width]`; rows are padded to whole blocks. Copying
    /// each row in one go is faster than reading the source, which is not in the cache, by columns.
    rows: Vec<Lanes>,
    /// Transposed source rows, `[source_width + 3, 3, 16]`. The last windows may extend after the
    /// row, with weight 0.
    columns: Vec<Lanes>,
    /// Transposed target rows, `[3, width, 16]`, padded to whole blocks.
    resized: Vec<Lanes>,
}

impl Squares {
    fn new(source_width: usize, width: usize) -> Self {
        let blocks = (source_width * 3).div_ceil(LANES);
        let lanes = |num: usize| vec![[0; LANES]; num.next_multiple_of(LANES)];
        Self {
            rows: lanes(blocks * LANES),
            columns: lanes((source_width + 3) * 3),
            resized: lanes(width * 3),
        }
    }
}

impl<'a> ResizedRows<'a> {
    fn new(source: &'a Rgb, width: usize) -> Self {
        let across = (source.width != width)
            .then(|| (Weights::new(source.width, width), Squares::new(source.width, width)));
        Self { source, width, across, planes: Vec::new(), made: 0..0 }
    }

    /// Returns the rows `wanted`, planar `[rows, 3, width]`, and drops the rows above them.
    fn get(&mut self, wanted: Range<usize>) -> &[u8] {
        let Self { source, width, across, planes, made } = self;
        let row = *width * 3;
        assert!(
            made.start <= wanted.start && wanted.end <= source.height,
            "rows are requested from top to bottom"
        );
        let dropped = wanted.start.min(made.end) - made.start;
        planes.copy_within(dropped * row..made.len() * row, 0);
        *made = wanted.start..made.end.max(wanted.start);
        while made.end < wanted.end {
            let rows = made.end..source.height.min(made.end + LANES);
            let targets = made.len() * row..(made.len() + rows.len()) * row;
            if planes.len() < targets.end {
                planes.resize(targets.end, 0);
            }
            let targets = &mut planes[targets];
            let sources =
                &source.data[rows.start * source.width * 3..][..rows.len() * source.width * 3];
            match across {
                Some((weights, squares)) => {
                    resize_rows(sources, source.width, weights, squares, targets, *width);
                }
                None => split_planes(sources, targets, *width),
            }
            made.end = rows.end;
        }
        &planes[..wanted.len() * row]
    }
}

/// Adds four products to a sum. Partial sums may wrap; only the final sum must fit in an `i32`.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn add_products(sum: i32, [a, b, c, d]: [u8; 4], [w0, w1, w2, w3]: [i16; 4]) -> i32 {
    let product = |value: u8, weight: i16| i32::from(value) * i32::from(weight);
    let (ab, cd) = (product(a, w0) + product(b, w1), product(c, w2) + product(d, w3));
    sum.wrapping_add(ab + cd)
}

/// One half in fixed point. Sums start with it, so that [`finish`] rounds.
const fn half(precision: u32) -> i32 {
    1 << (precision - 1)
}

/// Converts a sum that started with [`half`] to a byte.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn finish(sum: i32, precision: u32) -> u8 {
    (sum >> precision).clamp(0, 255) as u8
}

kernels! {
/// Resizes at most sixteen rows `[rows, source_width, 3]` to planes `[rows, 3, width]`.
///
/// The rows are transposed, so that one vector holds the same byte of all rows.
fn resize_rows(
    sources: &[u8],
    source_width: usize,
    weights: &Weights,
    squares: &mut Squares,
    targets: &mut [u8],
    width: usize,
) {
    let (source_row, target_row) = (source_width * 3, width * 3);
    let Squares { rows, columns, resized } = squares;
    let blocks = source_row.div_ceil(LANES);
    for (row, lanes) in sources.chunks_exact(source_row).zip(rows.chunks_exact_mut(blocks)) {
        lanes.as_flattened_mut()[..source_row].copy_from_slice(row);
    }
    for (block, columns) in columns.as_chunks_mut::<LANES>().0[..blocks].iter_mut().enumerate() {
        let rows = &rows[block..=block + (LANES - 1) * blocks];
        transpose(|row| &rows[row * blocks], |i, column| columns[i] = *column);
    }
    let pixels = columns.as_chunks::<3>().0;
    let precision = weights.precision();
    for x in 0..width {
        let quads = weights.quads(x);
        let taps = pixels[weights.window(x).start..].as_chunks::<4>().0;
        for c in 0..3 {
            let mut sums = [half(precision); LANES];
            for (weights, [p, q, r, s]) in quads.iter().zip(taps) {
                for i in 0..LANES {
                    sums[i] = add_products(sums[i], [p[c][i], q[c][i], r[c][i], s[c][i]], *weights);
                }
            }
            let target = &mut resized[c * width + x];
            for i in 0..LANES {
                target[i] = finish(sums[i], precision);
            }
        }
    }
    let height = targets.len() / target_row;
    for (block, columns) in resized.as_chunks::<LANES>().0.iter().enumerate() {
        let at = block * LANES;
        let len = LANES.min(target_row - at);
        let put = |row: usize, lanes: &Lanes| {
            if row < height {
                let target = &mut targets[row * target_row + at..][..len];
                match target.as_mut_array() {
                    Some(target) => *target = *lanes,
                    None => target.copy_from_slice(&lanes[..len]),
                }
            }
        };
        transpose(|column| &columns[column], put);
    }
}

/// Writes the weighted sum of `rows` to `target`. `sums` is scratch space; `target` and each row
/// have `[3 * width]` bytes, and `sums` has at least as many elements.
fn sum_rows(
    rows: &[[&[u8]; 4]],
    quads: &[[i16; 4]],
    precision: u32,
    sums: &mut [i32],
    target: &mut [u8],
) {
    let len = target.len();
    let [first @ .., last] = quads else { return };
    let sums = &mut sums[..len];
    let sums_before = !first.is_empty();
    if sums_before {
        sums.fill(half(precision));
    }
    for (rows, weights) in rows.iter().zip(first) {
        let [a, b, c, d] = rows.map(|row| &row[..len]);
        for i in 0..len {
            sums[i] = add_products(sums[i], [a[i], b[i], c[i], d[i]], *weights);
        }
    }
    let [a, b, c, d] = rows[quads.len() - 1].map(|row| &row[..len]);
    if sums_before {
        for i in 0..len {
            let sum = add_products(sums[i], [a[i], b[i], c[i], d[i]], *last);
            target[i] = finish(sum, precision);
        }
    } else {
        for i in 0..len {
            let sum = add_products(half(precision), [a[i], b[i], c[i], d[i]], *last);
            target[i] = finish(sum, precision);
        }
    }
}

/// Converts rows `[rows, width, 3]` to planes `[rows, 3, width]`.
fn split_planes(rows: &[u8], planes: &mut [u8], width: usize) {
    for (row, planes) in rows.chunks_exact(width * 3).zip(planes.chunks_exact_mut(width * 3)) {
        let (red, rest) = planes.split_at_mut(width);
        let (green, blue) = rest.split_at_mut(width);
        let pixels = row.as_chunks::<3>().0.iter();
        for (((pixel, red), green), blue) in pixels.zip(red).zip(green).zip(blue) {
            [*red, *green, *blue] = *pixel;
        }
    }
}

/// Converts planes `[3, width]` to a row `[width, 3]`.
fn interleave(planes: &[u8], row: &mut [u8]) {
    let (red, rest) = planes.split_at(planes.len() / 3);
    let (green, blue) = rest.split_at(red.len());
    let pixels = row.as_chunks_mut::<3>().0.iter_mut();
    for (((pixel, red), green), blue) in pixels.zip(red).zip(green).zip(blue) {
        *pixel = [*red, *green, *blue];
    }
}
}

/// Maximum number of fractional bits of a fixed-point weight.
const MAX_PRECISION: u32 = 22;
/// Half the width of the cubic kernel, in source pixels when the image is not reduced.
const SUPPORT: f64 = 2.0;

/// For each output position, a window of input positions and a weight for each of them.
#[derive(Debug)]
pub(super) struct Weights {
    /// Windows `[output]` of input positions. Neither their starts nor their ends decrease.
    windows: Vec<Range<usize>>,
    /// Boundaries `[output + 1]` of the windows in `quads`.
    firsts: Vec<usize>,
    /// Weights in groups of four, padded with 0 after the end of a window.
    quads: Vec<[i16; 4]>,
    /// Number of fractional bits of the weights: as many as the largest one leaves in 16 bits.
    precision: u32,
}

impl Weights {
    /// Computes the weights that resize `input` positions to `output`; both are at least 1.
    pub(super) fn new(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let most = 2 * support.ceil() as usize + 1;
        let (mut windows, mut taps) = (Vec::with_capacity(output), Vec::new());
        let mut largest = 0.0_f64;
        for position in 0..output {
            let center = scale * (position as f64 + 0.5);
            let start = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(input).min(start + most);
            let first = taps.len();
            let weight = |x| cubic((x as f64 - center + 0.5) * (1.0 / stretch));
            taps.extend((start..end).map(weight));
            let sum: f64 = taps[first..].iter().sum();
            for weight in &mut taps[first..] {
                *weight /= sum;
                largest = largest.max(*weight);
            }
            windows.push(start..end);
        }
        let is_last =
            |bits: &u32| (0.5 + largest * f64::from(2 << bits)) as i32 > i32::from(i16::MAX);
        let precision = (0..MAX_PRECISION).find(is_last).unwrap_or(MAX_PRECISION);
        let (mut firsts, mut quads, mut taps) = (vec![0], Vec::new(), &taps[..]);
        for window in &windows {
            let (own, rest) = taps.split_at(window.len());
            let tap = |weight: Option<&f64>| weight.map_or(0, |w| fixed_point(*w, precision));
            quads.extend(own.chunks(4).map(|own| std::array::from_fn(|i| tap(own.get(i)))));
            firsts.push(quads.len());
            taps = rest;
        }
        Self { windows, firsts, quads, precision }
    }

    /// Returns the number of fractional bits of the weights, at least 1.
    fn precision(&self) -> u32 {
        self.precision
    }

    /// Returns the input positions that contribute to an output position.
    pub(super) fn window(&self, position: usize) -> Range<usize> {
        self.windows[position].clone()
    }

    /// Returns the weights of [`Self::window`], padded with 0 to a multiple of four.
    fn quads(&self, position: usize) -> &[[i16; 4]] {
        &self.quads[self.firsts[position]..self.firsts[position + 1]]
    }
}

/// Keys' cubic kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

/// Converts a weight to fixed point; halves round away from zero.
fn fixed_point(weight: f64, precision: u32) -> i16 {
    (weight * f64::from(1 << precision) + 0.5_f64.copysign(weight)) as i16
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use simd::at_each_level;

    use super::*;
    use crate::media::image::golden;

    /// Returns random pixels. Half of the values are 0 or 255, so that sums exceed both ends of the
    /// range of a byte.
    pub(in super::super) fn noise([height, width]: [usize; 2], seed: u64) -> Rgb {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        let mut byte = || {
            let byte: u8 = rng.random();
            if rng.random() { byte } else { (byte & 1) * 255 }
        };
        let data = (0..height * width * 3).map(|_| byte()).collect();
        Rgb { width, height, data }
    }

    /// Reference resize by its definition: two passes through the whole image, one sum per value.
    pub(in super::super) fn by_definition(image: &Rgb, [height, width]: [u32; 2]) -> Rgb {
        let pass = |image: &Rgb, height: usize, width: usize| {
            let [across, down] =
                [Weights::new(image.width, width), Weights::new(image.height, height)];
            let mut data = Vec::new();
            for y in 0..height {
                for x in 0..width {
                    for c in 0..3 {
                        let pixel = |y: usize, x: usize| {
                            i64::from(image.data[(y * image.width + x) * 3 + c])
                        };
                        let at = |weights: &Weights, to, pixel: &dyn Fn(usize) -> i64| {
                            let taps = weights.window(to).zip(weights.quads(to).as_flattened());
                            let sum: i64 = taps.map(|(from, w)| pixel(from) * i64::from(*w)).sum();
                            (sum + i64::from(half(weights.precision()))) >> weights.precision()
                        };
                        let value = if width != image.width {
                            at(&across, x, &|from| pixel(y, from))
                        } else if height != image.height {
                            at(&down, y, &|from| pixel(from, x))
                        } else {
                            pixel(y, x)
                        };
                        data.push(value.clamp(0, 255) as u8);
                    }
                }
            }
            Rgb { width, height, data }
        };
        let wide = pass(image, image.height, width as usize);
        pass(&wide, height as usize, width as usize)
    }

    proptest! {
        #[test]
        fn bands_of_any_height_equal_the_rows_of_two_whole_passes(
            sides in [1..120_usize, 1..120_usize],
            target in [1..120_u32, 1..120_u32],
            heights in prop::collection::vec(1..40_usize, 120),
            seed: u64,
        ) {
            let image = noise(sides, seed);
            let expected = by_definition(&image, target);
            let [height, width] = target.map(|side| side as usize);
            for (level, found) in at_each_level(|| {
                let mut resized = Resized::new(&image, height, width);
                let (mut data, mut top) = (vec![0; expected.data.len()], 0);
                for rows in &heights {
                    let bottom = height.min(top + rows);
                    if top < bottom {
                        for (y, planes) in (top..).zip(resized.band(top..bottom).chunks(width * 3)) {
                            interleave(planes, &mut data[y * width * 3..][..width * 3]);
                        }
                    }
                    top = bottom;
                }
                data
            }) {
                prop_assert!(found == expected.data, "{level:?}");
            }
        }
    }

    fn source(name: &str) -> Rgb {
        let images = golden::images("rgb/");
        images.into_iter().find(|(other, _)| other == name).unwrap().1
    }

    #[test]
    fn resized_images_equal_the_reference_bit_for_bit() {
        let cases = golden::json()["resize"].as_array().unwrap().clone();
        assert!(cases.len() > 10);
        for case in cases {
            let [height, width] = ["height", "width"].map(|key| case[key].as_u64().unwrap() as u32);
            let source = source(case["file"].as_str().unwrap());
            for (level, found) in at_each_level(|| resize(source.clone(), height, width)) {
                assert_eq!((found.height, found.width), (height as usize, width as usize));
                assert_eq!(case["sha256"], golden::sha256(&found.data), "{case} at {level:?}");
            }
        }
    }

    /// Compares bytes instead of digests, so that a failure shows the first wrong byte.
    #[test]
    fn small_resized_images_equal_the_reference_byte_for_byte() {
        for (name, expected) in golden::images("resize/") {
            let file = name.rsplit_once('/').unwrap().0;
            let found = resize(source(file), expected.height as u32, expected.width as u32);
            let wrong = (0..found.data.len()).find(|i| found.data[*i] != expected.data[*i]);
            assert_eq!(wrong.map(|i| (i, found.data[i], expected.data[i])), None, "{name}");
        }
    }

    #[test]
    fn an_image_of_one_colour_keeps_its_colour_at_all_sizes() {
        for (height, width) in [(1, 1), (5, 7), (16, 33), (200, 3)] {
            let data = [7, 130, 255].repeat(height * width);
            for (new_height, new_width) in [(1, 1), (3, 2), (17, 31), (64, 96)] {
                let image = Rgb { height, width, data: data.clone() };
                let found = resize(image, new_height, new_width);
                assert!(found.data.as_chunks().0.iter().all(|pixel| *pixel == [7, 130, 255]));
            }
        }
    }

    /// Tests sums of 100 000 taps along both axes.
    #[test]
    fn a_very_long_strip_keeps_its_mean() {
        let length = 200_000;
        let data = [255, 0, 1].repeat(length);
        let wide = resize(Rgb { height: 1, width: length, data: data.clone() }, 1, 2);
        let tall = resize(Rgb { height: length, width: 1, data }, 2, 1);
        for found in [wide, tall] {
            assert_eq!(found.data, [255, 0, 1, 255, 0, 1]);
        }
    }

    /// The resize passes rely on this when they move from one end of the axis to the other.
    #[test]
    fn windows_advance_and_their_weights_add_up_to_one() {
        for (input, output) in [(1, 1), (1, 7), (5, 3), (1000, 992), (992, 1000), (4000, 31)] {
            let weights = Weights::new(input, output);
            let mut last = 0..0;
            for position in 0..output {
                let window = weights.window(position);
                assert!(window.start >= last.start && window.end >= last.end, "{window:?}");
                assert!(window.start <= last.end && window.start < window.end, "{window:?}");
                assert!(window.end <= input);
                let quads = weights.quads(position).as_flattened();
                assert_eq!(quads.len(), window.len().next_multiple_of(4));
                assert!(quads[window.len()..].iter().all(|weight| *weight == 0));
                let sum: i32 = quads.iter().map(|weight| i32::from(*weight)).sum();
                let off = sum - (1 << weights.precision());
                assert!(off.unsigned_abs() as usize <= window.len(), "off by {off}");
                last = window;
            }
            assert_eq!(last.end, input);
        }
    }
}
