//! Dropout whose mask is a function of a seed, the row and the column.
//!
//! The mask does not depend on the other rows of a tensor. So a step that is divided into other
//! micro-batches, or among ranks, drops the same elements.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::blocks::{Full, Scratch, Slots, elementwise};
use super::cpu::in_place::change;
use super::cpu::simd::kernels;
use super::cpu::{compute_dtype, distinct, expect_shape, read};
use super::launch::{Launch, Long, THREADS, empty, launch, on_gpu, vectors, version};
use super::stochastic_rounding::mix;
use candle_core::{Result, Tensor};

/// The elements that are set to zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    /// Decides, together with row and column, which elements are dropped.
    pub seed: u32,
    /// Number of the first row of the tensor.
    pub first_row: u32,
    /// Probability with which an element is dropped; from 0 to below 1. It is rounded to a multiple
    /// of 1/65536.
    pub probability: f64,
}

impl DropoutMask {
    /// A seed that depends on all of `parts`.
    pub fn seed_of(parts: impl IntoIterator<Item = u64>) -> u32 {
        let add = |seed: u32, part: u64| mix(mix(seed ^ part as u32) ^ (part >> 32) as u32);
        parts.into_iter().fold(0x9e37_79b9, add)
    }

    /// An element is dropped if its 16 random bits are below this number.
    pub(super) fn threshold(&self) -> u32 {
        (self.probability * 65536.0).round().min(65535.0) as u32
    }

    /// Factor of the elements that are kept: 1 by the share of the random bits that keep an
    /// element.
    pub(super) fn scale(&self) -> f32 {
        (65536.0 / f64::from(65536 - self.threshold())) as f32
    }

    pub(super) fn drops(&self) -> Drops {
        Drops { seed: self.seed, first_row: self.first_row, threshold: self.threshold() }
    }
}

/// Number of columns that share random numbers: the two halves of a number decide on a column and
/// on the one [`HALF`] columns after it.
const SHARED: usize = 32;
/// Number of random numbers of [`SHARED`] columns.
const HALF: usize = SHARED / 2;

/// Decides which elements are dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drops {
    seed: u32,
    first_row: u32,
    threshold: u32,
}

impl Drops {
    #[inline(always)]
    fn row_seed(self, row: usize) -> u32 {
        mix(self.seed ^ self.first_row.wrapping_add(row as u32))
    }

    /// Whether `random` drops the first of its two elements.
    #[inline(always)]
    fn drops_low(self, random: u32) -> bool {
        random & 0xffff < self.threshold
    }

    /// Whether `random` drops the second of its two elements.
    #[inline(always)]
    fn drops_high(self, random: u32) -> bool {
        random >> 16 < self.threshold
    }

    /// Whether an element of the row with the seed `row_seed` is dropped.
    #[inline(always)]
    fn drops(self, row_seed: u32, column: usize) -> bool {
        let number = (column / SHARED * HALF + column % HALF) as u32;
        (mix(row_seed ^ number) >> (column & HALF)) & 0xffff < self.threshold
    }
}

kernels! {
    /// Writes the factor, 0 or `scale`, of each element from `start` on of a tensor with `width`
    /// columns.
    fn factors(drops: Drops, scale: f32, start: usize, width: usize, y: &mut [f32]) {
        let (mut row, mut column, mut start_of_row) = (start / width, start % width, 0);
        while start_of_row < y.len() {
            let end = (start_of_row + width - column).min(y.len());
            let seed = drops.row_seed(row);
            for (i, y) in y[start_of_row..end].iter_mut().enumerate() {
                *y = if drops.drops(seed, column + i) { 0.0 } else { scale };
            }
            (row, column, start_of_row) = (row + 1, 0, end);
        }
    }

    /// Copies rows of `x [N, width]`, of which the first is row `first` of the tensor. Dropped
    /// elements become 0.
    pub(super) fn keep(drops: Drops, first: usize, width: usize, x: &[f32], y: &mut [f32]) {
        for (i, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
            let seed = drops.row_seed(first + i);
            let (x, rest_of_x) = x.as_chunks::<SHARED>();
            let (y, rest_of_y) = y.as_chunks_mut::<SHARED>();
            let whole = x.len() * SHARED;
            for (block, (x, y)) in x.iter().zip(y).enumerate() {
                for c in 0..HALF {
                    let random = mix(seed ^ (block * HALF + c) as u32);
                    y[c] = if drops.drops_low(random) { 0.0 } else { x[c] };
                    y[c + HALF] = if drops.drops_high(random) { 0.0 } else { x[c + HALF] };
                }
            }
            for (c, (x, y)) in rest_of_x.iter().zip(rest_of_y).enumerate() {
                *y = if drops.drops(seed, whole + c) { 0.0 } else { *x };
            }
        }
    }

    /// Adds the elements of rows of `x [N, width]` that are not dropped to `y`.
    pub(super) fn add_kept(drops: Drops, first: usize, width: usize, x: &[f32], y: &mut [f32]) {
        for (i, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
            let seed = drops.row_seed(first + i);
            let (x, rest_of_x) = x.as_chunks::<SHARED>();
            let (y, rest_of_y) = y.as_chunks_mut::<SHARED>();
            let whole = x.len() * SHARED;
            for (block, (x, y)) in x.iter().zip(y).enumerate() {
                for c in 0..HALF {
                    let random = mix(seed ^ (block * HALF + c) as u32);
                    y[c] += if drops.drops_low(random) { 0.0 } else { x[c] };
                    y[c + HALF] += if drops.drops_high(random) { 0.0 } else { x[c + HALF] };
                }
            }
            for (c, (x, y)) in rest_of_x.iter().zip(rest_of_y).enumerate() {
                *y += if drops.drops(seed, whole + c) { 0.0 } else { *x };
            }
        }
    }

    fn multiply<'b>(factors: &[f32], x: &[f32], y: Slots<'_, 'b>) -> Full<'b> {
        let n = y.len();
        let (factors, x) = (&factors[..n], &x[..n]);
        y.fill(|i| x[i] * factors[i])
    }

    fn multiply_add(factors: &[f32], x: &[f32], y: &mut [f32]) {
        let n = y.len();
        let (factors, x) = (&factors[..n], &x[..n]);
        for i in 0..n {
            y[i] += x[i] * factors[i];
        }
    }
}

/// Launches the kernel `op` with `x [N, K]` and the destination `y`.
fn launch_masked(op: &str, x: &Tensor, mask: DropoutMask, y: &Tensor) -> Result<()> {
    let (n, width) = (x.elem_count(), x.dim(candle_core::D::Minus1)?);
    if n == 0 {
        return Ok(());
    }
    let elements = if vectors(width, &[x, y])? { 16 / x.dtype().size_in_bytes() } else { 1 };
    let launch = Launch::new(&version(op, width, &[x, y])?, x.dtype());
    let launch = launch.grid(n.div_ceil(elements * THREADS as usize)).threads(THREADS);
    let [seed, first] = [mask.seed, mask.first_row].map(|n| Long(n as usize));
    let threshold = Long(mask.threshold() as usize);
    launch!(op, launch; x, y, width, Long(n), seed, first, threshold, mask.scale())
}

/// Returns the kept elements of `x [N, K]`, divided by the probability of keeping them. The others
/// are zero.
pub fn dropout(x: &Tensor, mask: DropoutMask) -> Result<Tensor> {
    let op = "dropout";
    let dtype = compute_dtype(op, &[("x", x)])?;
    let width = x.dim(candle_core::D::Minus1)?;
    if on_gpu(x) {
        let y = empty(x.shape(), dtype, x)?;
        launch_masked(op, x, mask, &y)?;
        return Ok(y);
    }
    let shape = x.shape().clone();
    let x = read(op, "x", x)?;
    let x = x.values()?;
    let y = elementwise(shape.elem_count(), dtype, |at, y| {
        let mut wide = Scratch::of(at.len());
        factors(mask.drops(), mask.scale(), at.start, width, wide.all());
        multiply(wide.all(), &x.view(at), y)
    });
    y.tensor(shape)
}

/// Adds the kept elements of `x [N, K]`, divided by the probability of keeping them, to `y` in
/// place: the backward of [`dropout`].
pub fn dropout_add(x: &Tensor, mask: DropoutMask, y: &Tensor) -> Result<()> {
    let op = "dropout_add";
    compute_dtype(op, &[("x", x), ("y", y)])?;
    expect_shape(op, "y", y, x.dims())?;
    distinct(op, "y", y, &[("x", x)])?;
    let width = x.dim(candle_core::D::Minus1)?;
    if on_gpu(x) {
        return launch_masked(op, x, mask, y);
    }
    let x = read(op, "x", x)?;
    let x = x.values()?;
    change(op, [("y", y)], |at, [y]| {
        let mut wide = Scratch::of(at.len());
        factors(mask.drops(), mask.scale(), at.start, width, wide.all());
        multiply_add(wide.all(), &x.view(at), y);
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, random, values};
    use super::*;
    use candle_core::DType;

    fn mask(probability: f64) -> DropoutMask {
        DropoutMask { seed: 7, first_row: 3, probability }
    }

    #[test]
    fn the_share_of_dropped_elements_is_the_probability_and_the_mean_stays() {
        let x = Tensor::ones((700, 300), DType::F32, &candle_core::Device::Cpu).unwrap();
        for probability in [0.0, 0.05, 0.5, 0.9] {
            let y = values(&dropout(&x, mask(probability)).unwrap());
            let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
            assert!((dropped - probability).abs() < 0.005, "{probability}: {dropped}");
            let mean = y.iter().sum::<f64>() / y.len() as f64;
            assert!((mean - 1.0).abs() < 0.03, "{probability}: {mean}");
        }
    }

    #[test]
    fn a_part_of_the_rows_drops_the_same_elements() {
        for width in [1, 5, 300, 5000] {
            let x = random(1, &[40, width]);
            let whole = dropout(&x, mask(0.3)).unwrap();
            let part = x.narrow(0, 11, 20).unwrap();
            let part = dropout(&part, DropoutMask { first_row: 14, ..mask(0.3) }).unwrap();
            assert_eq!(bits(&part), bits(&whole.narrow(0, 11, 20).unwrap()), "{width}");
        }
    }

    #[test]
    fn the_gradient_passes_where_the_element_was_kept() {
        for dtype in [DType::F32, DType::BF16] {
            let x = random(1, &[9, 1100]).to_dtype(dtype).unwrap();
            let y = x.zeros_like().unwrap();
            dropout_add(&x, mask(0.4), &y).unwrap();
            assert_eq!(values(&y), values(&dropout(&x, mask(0.4)).unwrap()));
            dropout_add(&x, mask(0.4), &y).unwrap();
            let twice = dropout(&x, mask(0.4)).unwrap().affine(2.0, 0.0).unwrap();
            assert_eq!(values(&y), values(&twice));
        }
    }

    /// The two halves of a random number decide on columns that are [`HALF`] apart.
    #[test]
    fn elements_are_dropped_independently_of_others_in_the_row_and_in_the_column() {
        let (n, k) = (2000, 192);
        let x = Tensor::ones((n, k), DType::F32, &candle_core::Device::Cpu).unwrap();
        let y = values(&dropout(&x, mask(0.3)).unwrap());
        for (rows, columns) in [(0, 1), (0, HALF), (0, SHARED), (1, 0), (16, 0), (1, HALF)] {
            let (mut both, mut count) = (0.0, 0.0);
            for row in 0..n - rows {
                for column in 0..k - columns {
                    let (first, second) = (row * k + column, (row + rows) * k + column + columns);
                    both += f64::from(u8::from(y[first] == 0.0 && y[second] == 0.0));
                    count += 1.0;
                }
            }
            let share = both / count;
            assert!((share - 0.09).abs() < 0.003, "{rows} rows, {columns} columns: {share}");
        }
    }

    #[test]
    fn seeds_and_neighbouring_rows_have_different_masks() {
        let x = Tensor::ones((2, 4000), DType::F32, &candle_core::Device::Cpu).unwrap();
        let same = |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        let first = values(&dropout(&x, mask(0.5)).unwrap());
        let other = values(&dropout(&x, DropoutMask { seed: 8, ..mask(0.5) }).unwrap());
        for count in [same(&first[..4000], &first[4000..]), same(&first, &other) / 2] {
            assert!((1850..2150).contains(&count), "{count} of 4000");
        }
    }
}
