//! NF4: matrices as 4-bit codes with a scale for each block of 64 elements, equal to bitsandbytes
//! with double quantisation.
//!
//! An element is `CODES[code] * scale`. The scale of a block is its largest absolute value. It is
//! stored in 8 bits: `scale = map[code] * range + offset`, with the mean of all scales as `offset`
//! and a `range` for each 256 blocks, the largest distance of their scales from the mean. The map
//! has the same relative precision at all magnitudes down to 1e-6. Together this takes 4.13 bits an
//! element.
//!
//! Shapes, for `n` elements in row-major order: `codes: [n / 2]` (`u8`; the first of two elements
//! in the upper half of a byte), `scales: [n / 64]` (`u8`), `ranges: [n / 16384]` (`f32`), all
//! rounded up.

#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::cpu::simd::kernels;
use super::cpu::{self, Element, compute_dtype, read};
use super::launch::{Arrays, ELEMENTS, Launch, THREADS, address, launch, on_gpu, version};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::LazyLock;

/// Number of elements with one scale.
const BLOCK: usize = 64;
/// Number of scales with one range.
const SCALES: usize = 256;
/// Number of elements that are quantised or dequantised by one task: whole blocks.
const TASK: usize = 1 << 15;
/// Number of elements that are read at one time for quantisation: whole blocks.
const PART: usize = 1 << 20;
/// Number of matrices of a launch, as in `nf4.cu`.
const MOST_MATRICES: usize = 16;
/// Smallest divisor of a block: smaller elements become 0.
const LEAST: f32 = 1e-38;

/// The values of the 4-bit codes: quantiles of the normal distribution, and 0.
#[expect(clippy::excessive_precision, clippy::unreadable_literal, reason = "as published")]
pub(super) const CODES: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];
/// The code of 0, which fills the last byte of an odd number of elements.
const ZERO: u8 = 7;
/// Middle between each code and the next one.
const MIDDLES: [f32; 15] = {
    let (mut middles, mut i) = ([0.0; 15], 0);
    while i < 15 {
        middles[i] = f32::midpoint(CODES[i], CODES[i + 1]);
        i += 1;
    }
    middles
};

/// The values of the 8-bit codes of scales, ascending: 0, 1, and for each `i` in `0..7` the middles
/// of `2^i` equal parts of 0.1 to 1, times `10^(i - 6)`, with both signs.
pub(super) static MAP: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut map = vec![0.0, 1.0];
    for i in 0..7 {
        let parts = 1u32 << i;
        // With the roundings of `torch.linspace`.
        let step = (1.0 - 0.1f32) / parts as f32;
        let bound = |k: u32| match k {
            k if k < parts.div_ceil(2) => step.mul_add(k as f32, 0.1),
            k => (-step).mul_add((parts - k) as f32, 1.0),
        };
        let power = 10f64.powi(i - 6) as f32;
        let middles = (0..parts).map(|k| power * f32::midpoint(bound(k), bound(k + 1)));
        map.extend(middles.flat_map(|x| [x, -x]));
    }
    map.sort_by(f32::total_cmp);
    map.try_into().expect("2 + 2 * 127 values")
});

/// A matrix in NF4. All tensors are on one device.
#[derive(Debug, Clone)]
pub struct Nf4 {
    shape: Shape,
    codes: Tensor,
    scales: Tensor,
    ranges: Tensor,
    offset: f32,
}

/// The parts of an [`Nf4`] in host memory, as bitsandbytes stores them.
#[derive(Debug, Clone, PartialEq)]
pub struct Nf4Parts {
    /// Shape of the matrix.
    pub shape: Vec<usize>,
    /// Two codes in a byte.
    pub codes: Vec<u8>,
    /// 8-bit code of the scale of each block (`absmax`).
    pub scales: Vec<u8>,
    /// The range of each 256 scales (`nested_absmax`).
    pub ranges: Vec<f32>,
    /// Mean of the scales (`nested_offset`).
    pub offset: f32,
}

/// Bytes of a matrix of this many elements in NF4.
pub fn nf4_bytes(elements: usize) -> usize {
    let [codes, scales, ranges] = lens(elements);
    codes + scales + 4 * ranges
}

/// Whether `map` is the map of 8-bit codes, and `codes` are the values of 4-bit codes.
pub fn is_nf4_map(codes: &[f32], map: &[f32]) -> bool {
    codes == CODES && map == *MAP
}

/// The values of the 4-bit codes, and of the 8-bit codes of scales.
pub fn nf4_maps() -> (&'static [f32], &'static [f32]) {
    (&CODES, &*MAP)
}

/// The elements that share ranges with those of `range`, of `elements` in all. The parts of such a
/// span are adjacent, and are a matrix of their own.
pub fn nf4_span(range: &Range<usize>, elements: usize) -> Range<usize> {
    const STEP: usize = BLOCK * SCALES;
    range.start / STEP * STEP..elements.min(range.end.next_multiple_of(STEP))
}

/// The places of the parts of a span: in codes, scales and ranges.
pub fn nf4_places(span: &Range<usize>) -> [Range<usize>; 3] {
    let lens = lens(span.len());
    let starts = [span.start / 2, span.start / BLOCK, span.start / (BLOCK * SCALES)];
    [0, 1, 2].map(|part| starts[part]..starts[part] + lens[part])
}

/// Number of elements of `codes`, `scales` and `ranges`.
fn lens(elements: usize) -> [usize; 3] {
    let scales = elements.div_ceil(BLOCK);
    [elements.div_ceil(2), scales, scales.div_ceil(SCALES)]
}

/// The value of a code. The compiler makes vector instructions of this tree of selections; of a
/// table it would make a load for each element.
#[inline(always)]
fn value(code: u8) -> f32 {
    #[inline(always)]
    fn pair(bit: bool, at: usize) -> f32 {
        if bit { CODES[at + 1] } else { CODES[at] }
    }
    #[inline(always)]
    fn quad(code: u8, at: usize) -> f32 {
        let bit = code & 1 != 0;
        let (low, high) = (pair(bit, at), pair(bit, at + 2));
        if code & 2 != 0 { high } else { low }
    }
    #[inline(always)]
    fn half(code: u8, at: usize) -> f32 {
        let (low, high) = (quad(code, at), quad(code, at + 4));
        if code & 4 != 0 { high } else { low }
    }
    let (low, high) = (half(code, 0), half(code, 8));
    if code & 8 != 0 { high } else { low }
}

kernels! {
    /// `codes` of whole blocks, with their scales.
    fn dequantize_f32(codes: &[[u8; 32]], scales: &[f32], y: &mut [[[f32; 2]; 32]]) {
        for ((codes, scale), y) in codes.iter().zip(scales).zip(y) {
            for i in 0..32 {
                y[i] = [value(codes[i] >> 4) * scale, value(codes[i] & 15) * scale];
            }
        }
    }

    fn dequantize_bf16(codes: &[[u8; 32]], scales: &[f32], y: &mut [[[bf16; 2]; 32]]) {
        for ((codes, scale), y) in codes.iter().zip(scales).zip(y) {
            for i in 0..32 {
                let (first, second) = (value(codes[i] >> 4) * scale, value(codes[i] & 15) * scale);
                y[i] = [bf16::narrow(first), bf16::narrow(second)];
            }
        }
    }

    fn quantize_blocks(x: &[[f32; 64]], codes: &mut [[u8; 32]], scales: &mut [f32]) {
        for ((x, codes), scale) in x.iter().zip(codes).zip(scales) {
            let mut largest = 0u32;
            for x in x {
                // bits of positive floats have their order
                largest = largest.max(x.to_bits() & 0x7fff_ffff);
            }
            *scale = f32::from_bits(largest);
            let factor = 1.0 / scale.max(LEAST);
            let mut each = [0u8; 64];
            for i in 0..64 {
                each[i] = code_of(x[i] * factor);
            }
            for i in 0..32 {
                codes[i] = each[2 * i] << 4 | each[2 * i + 1];
            }
        }
    }
}

/// The code of the nearest value; of two that are equally near the lower one.
#[inline(always)]
fn code_of(x: f32) -> u8 {
    let mut code = 0;
    for middle in MIDDLES {
        code += u8::from(x > middle);
    }
    code
}

/// Codes and scales of `x`, which begins with a block. Only the last block may be incomplete.
fn quantize_part(x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let [len, num_scales, _] = lens(x.len());
    let (mut codes, mut scales) = (vec![0; len], vec![0.0; num_scales]);
    let (whole, rest) = x.as_chunks::<BLOCK>();
    let (of_whole, of_rest) = codes.split_at_mut(whole.len() * (BLOCK / 2));
    quantize_blocks(whole, of_whole.as_chunks_mut().0, &mut scales[..whole.len()]);
    if !rest.is_empty() {
        // As in bitsandbytes, with a division, and a scale above 0. NaN makes a scale of NaN.
        let larger = |scale: f32, x: &f32| if x.abs() <= scale { scale } else { x.abs() };
        let scale = rest.iter().fold(
            LEAST,
            |scale, x| {
                if scale.is_nan() { scale } else { larger(scale, x) }
            },
        );
        scales[whole.len()] = scale;
        let code = |x: &f32| code_of(x / scale);
        for (byte, pair) in of_rest.iter_mut().zip(rest.chunks(2)) {
            *byte = code(&pair[0]) << 4 | pair.get(1).map_or(ZERO, code);
        }
    }
    (codes, scales)
}

/// 8-bit codes and ranges of scales, and their mean.
fn quantize_scales(scales: &[f32]) -> (Vec<u8>, Vec<f32>, f32) {
    let sum: f64 = scales.iter().map(|scale| f64::from(*scale)).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let middles: Vec<f32> = MAP.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
    let (mut codes, mut ranges) = (Vec::with_capacity(scales.len()), Vec::new());
    for scales in scales.chunks(SCALES) {
        let range = scales.iter().fold(0f32, |range, scale| range.max((scale - offset).abs()));
        let factor = 1.0 / range; // if all are equal, 0 * infinity: code 0, which decodes to -0
        let code = |scale: &f32| {
            let x = (scale - offset) * factor;
            middles.partition_point(|middle| *middle < x) as u8
        };
        codes.extend(scales.iter().map(code));
        ranges.push(range);
    }
    (codes, ranges, offset)
}

impl Nf4 {
    /// Quantises a matrix, on the CPU. `read` returns a range of its elements in `f32`, on the CPU.
    /// Several threads call it, each for a few megabytes.
    pub fn quantize<E: From<candle_core::Error> + Send>(
        shape: &[usize],
        read: impl Fn(Range<usize>) -> std::result::Result<Tensor, E> + Sync,
    ) -> std::result::Result<Self, E> {
        let n: usize = shape.iter().product();
        let part = |index: usize| {
            let x = read(index * PART..n.min((index + 1) * PART))?;
            let x = cpu::read("nf4", "x", &x)?;
            Ok(quantize_part(x.slice::<f32>()?))
        };
        let parts: Vec<_> = (0..n.div_ceil(PART))
            .into_par_iter()
            .map(part)
            .collect::<std::result::Result<_, E>>()?;
        let (codes, scales): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let (scales, ranges, offset) = quantize_scales(&scales.concat());
        let parts =
            Nf4Parts { shape: shape.to_vec(), codes: codes.concat(), scales, ranges, offset };
        Ok(Self::new(parts)?)
    }

    /// A matrix whose parts were stored. Fails if their lengths do not belong together.
    pub fn new(parts: Nf4Parts) -> Result<Self> {
        let Nf4Parts { shape, codes, scales, ranges, offset } = parts;
        let shape = Shape::from(shape);
        let (found, expected) =
            ([codes.len(), scales.len(), ranges.len()], lens(shape.elem_count()));
        if found != expected {
            bail!(
                "nf4: codes, scales and ranges of {shape:?} have {found:?} elements, expected \
                 {expected:?}"
            );
        }
        let cpu = &Device::Cpu;
        let [num_codes, num_scales, num_ranges] = expected;
        Ok(Self {
            shape,
            codes: Tensor::from_vec(codes, num_codes, cpu)?,
            scales: Tensor::from_vec(scales, num_scales, cpu)?,
            ranges: Tensor::from_vec(ranges, num_ranges, cpu)?,
            offset,
        })
    }

    /// The same matrix on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            shape: self.shape.clone(),
            codes: self.codes.to_device(device)?,
            scales: self.scales.to_device(device)?,
            ranges: self.ranges.to_device(device)?,
            offset: self.offset,
        })
    }

    /// Shape of the matrix.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Copies the parts to the host.
    pub fn parts(&self) -> Result<Nf4Parts> {
        Ok(Nf4Parts {
            shape: self.shape.dims().to_vec(),
            codes: self.codes.to_vec1()?,
            scales: self.scales.to_vec1()?,
            ranges: self.ranges.to_vec1()?,
            offset: self.offset,
        })
    }

    /// Writes the elements to `y`, a tensor of their number on the same device, `f32` or `bf16`
    /// (rounded to nearest).
    pub fn dequantize_into(&self, y: &Tensor) -> Result<()> {
        Self::dequantize_all(&[(self, y)])
    }

    /// As [`Self::dequantize_into`], for several matrices with tensors of one dtype. A GPU does it in
    /// one launch.
    pub fn dequantize_all(all: &[(&Self, &Tensor)]) -> Result<()> {
        let op = "nf4";
        for (of, y) in all {
            if y.elem_count() != of.shape.elem_count() {
                bail!("{op}: `y` is {:?}, expected the elements of {:?}", y.dims(), of.shape);
            }
        }
        if all.first().is_some_and(|(_, y)| on_gpu(y)) {
            return all.chunks(MOST_MATRICES).try_for_each(|all| dequantize_on_gpu(op, all));
        }
        all.iter().try_for_each(|(of, y)| of.dequantize_on_cpu(op, y))
    }

    fn dequantize_on_cpu(&self, op: &'static str, y: &Tensor) -> Result<()> {
        let (codes, scales) = (read(op, "codes", &self.codes)?, read(op, "scales", &self.scales)?);
        let ranges = read(op, "ranges", &self.ranges)?;
        let parts = Parts {
            codes: codes.slice()?,
            scales: scales.slice()?,
            ranges: ranges.slice()?,
            offset: self.offset,
        };
        match compute_dtype(op, &[("y", y)])? {
            DType::BF16 => {
                cpu::write(op, "y", y, |y: &mut [bf16]| parts.dequantize(dequantize_bf16, y))
            }
            _ => cpu::write(op, "y", y, |y: &mut [f32]| parts.dequantize(dequantize_f32, y)),
        }
    }

    /// The elements of a range, in `f32`, on the CPU. The matrix must be there as well.
    pub fn part(&self, range: Range<usize>) -> Result<Tensor> {
        let n = self.shape.elem_count();
        if range.start > range.end || range.end > n {
            bail!("nf4: the matrix has {n} elements, but the elements {range:?} are needed");
        }
        let span = nf4_span(&range, n);
        let [codes, scales, ranges] = nf4_places(&span);
        let part = Self {
            shape: Shape::from(span.len()),
            codes: self.codes.narrow(0, codes.start, codes.len())?,
            scales: self.scales.narrow(0, scales.start, scales.len())?,
            ranges: self.ranges.narrow(0, ranges.start, ranges.len())?,
            offset: self.offset,
        };
        let y = Tensor::zeros(span.len(), DType::F32, &Device::Cpu)?;
        part.dequantize_into(&y)?;
        y.narrow(0, range.start - span.start, range.len())?.copy()
    }
}

/// Dequantises at most [`MOST_MATRICES`] in one launch.
fn dequantize_on_gpu(op: &str, all: &[(&Nf4, &Tensor)]) -> Result<()> {
    let dtype = compute_dtype(op, &all.iter().map(|(_, y)| ("y", *y)).collect::<Vec<_>>())?;
    let accessed: Vec<&Tensor> = all.iter().flat_map(|(of, y)| [&of.codes, *y]).collect();
    let mut list = Arrays::new(MOST_MATRICES);
    list.halves(MAP.len() + CODES.len(), MAP.iter().chain(&CODES).map(|value| value.to_bits()));
    let at = |name: &str, t: &Tensor| address(op, name, t).map(|at| at.0);
    list.longs(all.iter().map(|(of, _)| at("codes", &of.codes)))?;
    list.longs(all.iter().map(|(of, _)| at("scales", &of.scales)))?;
    list.longs(all.iter().map(|(of, _)| at("ranges", &of.ranges)))?;
    list.longs(all.iter().map(|(_, y)| at("y", y)))?;
    list.longs(all.iter().map(|(_, y)| Ok(y.elem_count() as u64)))?;
    list.halves(MOST_MATRICES, all.iter().map(|(of, _)| of.offset.to_bits()));
    let blocks = all.iter().map(|(_, y)| y.elem_count().div_ceil(ELEMENTS));
    let (list, blocks) = list.with_blocks(blocks);
    let launch = Launch::new(&version("nf4_dequantize", 0, &accessed)?, dtype);
    launch!(op, launch.grid(blocks).threads(THREADS).on(all[0].1); list, all.len())
}

/// The parts of a matrix on the CPU.
struct Parts<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    ranges: &'a [f32],
    offset: f32,
}

/// Dequantises whole blocks.
type DequantizeBlocks<T> = fn(&[[u8; 32]], &[f32], &mut [[[T; 2]; 32]]);

impl Parts<'_> {
    fn dequantize<T: Element>(&self, kernel: DequantizeBlocks<T>, y: &mut [T]) {
        let blocks = y.par_chunks_mut(TASK).enumerate();
        blocks.for_each(|(task, y)| self.dequantize_task(kernel, task, y));
    }

    /// The elements from `task * TASK`.
    fn dequantize_task<T: Element>(&self, kernel: DequantizeBlocks<T>, task: usize, y: &mut [T]) {
        let first = task * (TASK / BLOCK);
        let (mut scales, map) = ([0f32; TASK / BLOCK], &*MAP);
        for (at, (scale, code)) in scales.iter_mut().zip(&self.scales[first..]).enumerate() {
            *scale = map[*code as usize] * self.ranges[(first + at) / SCALES] + self.offset;
        }
        let (pairs, last) = y.as_chunks_mut::<2>();
        let (blocks, rest) = pairs.as_chunks_mut::<32>();
        let codes = &self.codes[task * (TASK / 2)..];
        let whole = blocks.len();
        kernel(&codes.as_chunks().0[..whole], &scales[..whole], blocks);
        if rest.is_empty() && last.is_empty() {
            return;
        }
        let mut padded = [0; 32];
        let len = rest.len() + last.len();
        padded[..len].copy_from_slice(&codes[32 * whole..32 * whole + len]);
        let mut block = [[[T::from_f64(0.0); 2]; 32]];
        kernel(&[padded], &scales[whole..=whole], &mut block);
        rest.copy_from_slice(&block[0][..rest.len()]);
        if let [last] = last {
            *last = block[0][rest.len()][0];
        }
    }
}

#[cfg(test)]
mod tests;
