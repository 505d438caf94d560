//! Antialiased bicubic resize of 8-bit RGB, bit for bit what Pillow computes.
//!
//! Shapes: rows of `width * 3` bytes. Width first, then height; each pass has 22-bit fixed-point
//! weights, rounds and clamps to `u8`, and is left out when its size does not change.

use super::decode::Rgb;

/// Fraction bits of a weight.
const PRECISION_BITS: u32 = 22;
/// A weight is kept as `high << SPLIT_BITS | low`: 16-bit factors multiply four to eight at a time
/// on every x86-64, 32-bit ones do not.
const SPLIT_BITS: u32 = 11;
/// Reach of the cubic kernel, in source pixels when not shrinking.
const SUPPORT: f64 = 2.0;
/// Bytes that are summed side by side: their sums stay in registers.
const LANES: usize = 16;

/// Resizes to `height` x `width`; the picture itself if it has that size.
///
/// # Panics
/// If a target side is 0.
pub(in crate::data) fn resize(image: Rgb, height: u32, width: u32) -> Rgb {
    assert!(height > 0 && width > 0, "cannot resize to nothing");
    let (height, width) = (height as usize, width as usize);
    let image = if image.width == width { image } else { resize_width(&image, width) };
    if image.height == height { image } else { resize_height(&image, height) }
}

/// Weights of one pass: for each output position a window of the input.
struct Weights {
    /// First input position of each window.
    starts: Vec<usize>,
    /// Taps of each window; the table has the longest one's, rounded up to pairs and zero-filled.
    taps: usize,
    /// Pairs of taps, `[low, low, high, high]`, `taps / 2` for each output position.
    pairs: Vec<[i16; 4]>,
}

impl Weights {
    fn new(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let windows: Vec<(usize, Vec<i32>)> = (0..output)
            .map(|position| {
                let center = (position as f64 + 0.5) * scale;
                let start = (center - support + 0.5).max(0.0) as usize;
                let end = ((center + support + 0.5) as usize).min(input);
                let weight = |x| cubic((x as f64 - center + 0.5) * (1.0 / stretch));
                let weights: Vec<f64> = (start..end).map(weight).collect();
                let sum: f64 = weights.iter().sum();
                (start, weights.iter().map(|weight| fixed_point(weight / sum)).collect())
            })
            .collect();
        let longest = windows.iter().map(|(_, weights)| weights.len()).max().unwrap_or(0);
        let taps = longest.next_multiple_of(2);
        let mut pairs = Vec::with_capacity(output * taps / 2);
        for (_, weights) in &windows {
            let tap = |i: usize| split(weights.get(i).copied().unwrap_or(0));
            pairs.extend((0..taps).step_by(2).map(|i| {
                let ((low0, high0), (low1, high1)) = (tap(i), tap(i + 1));
                [low0, low1, high0, high1]
            }));
        }
        Self { starts: windows.into_iter().map(|(start, _)| start).collect(), taps, pairs }
    }

    /// First input position and the weights of each output position.
    fn windows(&self) -> impl Iterator<Item = (usize, &[[i16; 4]])> {
        self.starts.iter().copied().zip(self.pairs.chunks_exact(self.taps / 2))
    }
}

/// Keys' cubic kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Rounds half away from zero.
fn fixed_point(weight: f64) -> i32 {
    (weight * f64::from(1 << PRECISION_BITS) + 0.5_f64.copysign(weight)) as i32
}

/// `(low, high)` with `weight == (high << SPLIT_BITS) + low`.
fn split(weight: i32) -> (i16, i16) {
    ((weight & ((1 << SPLIT_BITS) - 1)) as i16, (weight >> SPLIT_BITS) as i16)
}

/// Adds two taps, with their weights `[low, low, high, high]`, to the sums of each lane.
#[inline]
fn add_taps(
    [low, high]: &mut [[i32; LANES]; 2],
    a: &Lanes,
    b: &Lanes,
    [low0, low1, high0, high1]: [i16; 4],
) {
    for i in 0..LANES {
        let (a, b) = (i32::from(a[i]), i32::from(b[i]));
        low[i] = low[i].wrapping_add(a * i32::from(low0) + b * i32::from(low1));
        high[i] = high[i].wrapping_add(a * i32::from(high0) + b * i32::from(high1));
    }
}

/// Joins the two halves of each sum, rounds and clamps. Wraps: only the joined sum has to fit.
#[inline]
fn finish([low, high]: &[[i32; LANES]; 2]) -> Lanes {
    std::array::from_fn(|i| {
        let sum = (high[i] << SPLIT_BITS).wrapping_add(low[i]);
        (sum.wrapping_add(1 << (PRECISION_BITS - 1)) >> PRECISION_BITS).clamp(0, 255) as u8
    })
}

/// Sixteen neighbouring bytes of a row, or one byte of sixteen rows.
type Lanes = [u8; LANES];

/// Swaps rows and columns of a square of bytes: log2 rounds of pairwise interleaving, which
/// compile to byte-unpack instructions.
fn transpose(mut square: [Lanes; LANES]) -> [Lanes; LANES] {
    const HALF: usize = LANES / 2;
    for _ in 0..LANES.ilog2() {
        let mut next = [[0; LANES]; LANES];
        for i in 0..HALF {
            for j in 0..HALF {
                next[2 * i][2 * j] = square[i][j];
                next[2 * i][2 * j + 1] = square[i + HALF][j];
                next[2 * i + 1][2 * j] = square[i][j + HALF];
                next[2 * i + 1][2 * j + 1] = square[i + HALF][j + HALF];
            }
        }
        square = next;
    }
    square
}

/// Sums the windows of sixteen rows at once: the rows are transposed, so that the sums of one
/// output byte in all of them lie side by side.
fn resize_width(image: &Rgb, width: usize) -> Rgb {
    let weights = Weights::new(image.width, width);
    let (source_row, target_row) = (image.width * 3, width * 3);
    let mut data = vec![0_u8; image.height * target_row];
    // Windows at the right edge reach past the row: into columns that stay 0, with weight 0.
    let mut columns = vec![[0; LANES]; (source_row + weights.taps * 3).next_multiple_of(LANES)];
    let mut resized = vec![[0; LANES]; target_row.next_multiple_of(LANES)];
    let groups = image.data.chunks(LANES * source_row).zip(data.chunks_mut(LANES * target_row));
    for (sources, targets) in groups {
        for (block, columns) in columns.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let at = block * LANES;
            if at >= source_row {
                break;
            }
            let mut square = [[0; LANES]; LANES];
            for (lanes, row) in square.iter_mut().zip(sources.chunks_exact(source_row)) {
                match row[at..].first_chunk() {
                    Some(bytes) => *lanes = *bytes,
                    None => lanes[..source_row - at].copy_from_slice(&row[at..]),
                }
            }
            *columns = transpose(square);
        }
        for ((start, pairs), pixel) in weights.windows().zip(resized.as_chunks_mut::<3>().0) {
            for (c, target) in pixel.iter_mut().enumerate() {
                let mut sums = [[0; LANES]; 2];
                for (taps, pixels) in pairs.iter().zip(columns[start * 3..].chunks_exact(6)) {
                    add_taps(&mut sums, &pixels[c], &pixels[c + 3], *taps);
                }
                *target = finish(&sums);
            }
        }
        for (block, columns) in resized.as_chunks::<LANES>().0.iter().enumerate() {
            let at = block * LANES;
            let len = LANES.min(target_row - at);
            for (lanes, row) in transpose(*columns).iter().zip(targets.chunks_exact_mut(target_row))
            {
                match row[at..].first_chunk_mut() {
                    Some(bytes) => *bytes = *lanes,
                    None => row[at..].copy_from_slice(&lanes[..len]),
                }
            }
        }
    }
    Rgb { width, height: image.height, data }
}

/// The lanes of a row at `at`.
#[inline]
fn lanes(row: &[u8], at: usize) -> &Lanes {
    row[at..].first_chunk().expect("the target row has lanes here and the source row its length")
}

/// What is left of a row at `at`, filled up with 0.
fn tail(row: &[u8], at: usize) -> Lanes {
    let mut lanes = [0; LANES];
    lanes[..row.len() - at].copy_from_slice(&row[at..]);
    lanes
}

fn resize_height(image: &Rgb, height: usize) -> Rgb {
    let weights = Weights::new(image.height, height);
    let row = image.width * 3;
    let mut data = vec![0_u8; height * row];
    let last = image.height - 1;
    // Taps past the last row have weight 0; any row will do.
    let source = |y: usize| &image.data[y.min(last) * row..][..row];
    for ((start, pairs), target) in weights.windows().zip(data.chunks_exact_mut(row)) {
        let rows: Vec<_> = (0..pairs.len())
            .map(|pair| (source(start + 2 * pair), source(start + 2 * pair + 1)))
            .collect();
        for (block, target) in target.chunks_mut(LANES).enumerate() {
            let at = block * LANES;
            let mut sums = [[0; LANES]; 2];
            if let Some(target) = target.as_mut_array::<LANES>() {
                for ((a, b), taps) in rows.iter().zip(pairs) {
                    add_taps(&mut sums, lanes(a, at), lanes(b, at), *taps);
                }
                *target = finish(&sums);
            } else {
                for ((a, b), taps) in rows.iter().zip(pairs) {
                    add_taps(&mut sums, &tail(a, at), &tail(b, at), *taps);
                }
                target.copy_from_slice(&finish(&sums)[..target.len()]);
            }
        }
    }
    Rgb { width: image.width, height, data }
}

#[cfg(test)]
mod tests {
    use super::super::golden;
    use super::*;

    fn source(name: &str) -> Rgb {
        let pictures = golden::pictures("rgb/");
        pictures.into_iter().find(|(other, _)| other == name).unwrap().1
    }

    #[test]
    fn resized_pictures_are_the_references_to_the_bit() {
        let cases = golden::json()["resize"].as_array().unwrap().clone();
        assert!(cases.len() > 10);
        for case in cases {
            let [height, width] = ["height", "width"].map(|key| case[key].as_u64().unwrap() as u32);
            let found = resize(source(case["file"].as_str().unwrap()), height, width);
            assert_eq!((found.height, found.width), (height as usize, width as usize));
            assert_eq!(case["sha256"], golden::sha256(&found.data), "{case}");
        }
    }

    /// The same law as above, on bytes: it says where a difference is.
    #[test]
    fn small_resized_pictures_are_the_references_byte_for_byte() {
        for (name, expected) in golden::pictures("resize/") {
            let file = name.rsplit_once('/').unwrap().0;
            let found = resize(source(file), expected.height as u32, expected.width as u32);
            let wrong = (0..found.data.len()).find(|i| found.data[*i] != expected.data[*i]);
            assert_eq!(wrong.map(|i| (i, found.data[i], expected.data[i])), None, "{name}");
        }
    }

    #[test]
    fn one_colour_stays_that_colour_whatever_the_sizes() {
        for (height, width) in [(1, 1), (5, 7), (16, 33), (200, 3)] {
            let data = [7, 130, 255].repeat(height * width);
            for (new_height, new_width) in [(1, 1), (3, 2), (17, 31), (64, 96)] {
                let image = Rgb { height, width, data: data.clone() };
                let found = resize(image, new_height, new_width);
                assert!(found.data.as_chunks().0.iter().all(|pixel| *pixel == [7, 130, 255]));
            }
        }
    }

    #[test]
    fn transposing_swaps_rows_and_columns() {
        let square: [Lanes; LANES] =
            std::array::from_fn(|i| std::array::from_fn(|j| (i * 16 + j) as u8));
        let found = transpose(square);
        assert!((0..LANES).all(|i| (0..LANES).all(|j| found[i][j] == square[j][i])));
    }

    /// Sums of thousands of taps overflow in one half, and come out right when the halves join.
    #[test]
    fn a_very_long_strip_keeps_its_mean() {
        let (width, data) = (200_000, [255, 0, 1].repeat(200_000));
        let found = resize(Rgb { height: 1, width, data }, 1, 2);
        assert_eq!(found.data, [255, 0, 1, 255, 0, 1]);
    }
}
