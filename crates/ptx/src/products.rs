//! Products of matrices, and the positions of their elements: registers of a warp (`mma`, `ldmatrix`,
//! `wgmma`), tiles in shared memory (descriptors of `wgmma`), and boxes of tensors (tensor maps).
//!
//! Nothing here has state or touches memory: functions return addresses, and the machine reads,
//! writes and checks them. All elements are bf16, and all sums f32.
//!
//! Matrices are slices with adjacent columns, 16 of them ([`K`]): A is `[rows, 16]`, and B is
//! `[n, 16]`, so that an element of the product is a product of a row of A and a row of B.

use crate::instruction::{LANES, Lanes};
use std::ops::Range;
use thiserror::Error;

/// Columns of A and B: the length of a sum.
pub const K: usize = 16;
/// Rows of A and of the sums that a warp has in `mma` and `wgmma`.
pub const WARP_ROWS: usize = 16;
/// Bytes that stay together when tiles are permuted: a row of a matrix of `ldmatrix`, and the unit
/// of all layouts below.
pub const PIECE: usize = 16;
/// Elements of a piece.
const ELEMENTS: usize = 8;
const ELEMENT_BYTES: u64 = 2;
/// The NaN that instructions return (PTX ISA, "Floating Point Instructions"): the payloads of
/// operands are not kept.
const NAN: u64 = 0x7fff_ffff;

/// The f32 with the value of the bf16 in the low 16 bits.
fn widened(bits: u64) -> f32 {
    f32::from_bits(((bits & 0xffff) as u32) << 16)
}

/// Row and column of a half (0 is the low one) of a register of A (PTX ISA, "Matrix Fragments for
/// `mma.m16n8k16` with floating point type"; the figures in "Matrix Fragments for
/// `wgmma.mma_async.m64nNk16`" have the same positions for the 16 rows of each warp).
fn place_in_a(register: usize, lane: usize, half: usize) -> (usize, usize) {
    (lane / 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register / 2))
}

/// Column of the product, and row of the sum, of a half of a register of B of `mma`.
fn place_in_b(register: usize, lane: usize, half: usize) -> (usize, usize) {
    (lane / 4, lane % 4 * 2 + half + 8 * register)
}

/// Row and column of a register of the sums. `wgmma` repeats the positions of `mma` for each eight
/// columns.
fn place_in_sums(register: usize, lane: usize) -> (usize, usize) {
    (lane / 4 + 8 * (register / 2 % 2), lane % 4 * 2 + register % 2 + 8 * (register / 4))
}

/// `mma.m16n8k16` with f32 sums of bf16 products, which are truncated as on an A100.
///
/// NVIDIA does not document the sums of tensor cores. By experiments (Fasi, Higham, Mikaitis and
/// Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021), products are exact, and an A100 adds
/// eight of them to the sum at a time: it shifts all nine to the exponent of the largest, drops what
/// is more than a bit below the last bit of an f32 with this exponent, adds exactly, and rounds the
/// sum toward zero. NaN and infinities behave as in IEEE 754.
pub fn mma(a: &[Lanes; 4], b: &[Lanes; 2], c: &[Lanes; 4]) -> [Lanes; 4] {
    const N: usize = 8;
    let mut columns = [0.0; K * N];
    for (register, lanes) in b.iter().enumerate() {
        for (lane, pair) in lanes.iter().enumerate() {
            for half in 0..2 {
                let (column, k) = place_in_b(register, lane, half);
                columns[k * N + column] = f64::from(widened(pair >> (16 * half)));
            }
        }
    }
    let mut d = *c;
    add_products(&a_from_registers(&[*a]), &columns, &mut d, K / 2);
    d
}

/// `wgmma` with f32 sums of bf16 products: for each warp of the warpgroup its n / 2 registers in `d`,
/// in the order of the instruction. Sums are truncated as in [`mma`], which is at least as strict as an
/// H100, but 16 products are added at a time (Khattak and Mikaitis, "Accurate models of NVIDIA tensor
/// cores", 2025).
///
/// `a` has 16 rows for each warp in `d` (64 for the four of a warpgroup), `b` has n rows. The old
/// sums count only if `adds`.
pub fn wgmma(a: &[f32], b: &[f32], d: &mut [Vec<Lanes>], adds: bool) {
    let n = b.len() / K;
    assert_eq!(a.len(), d.len() * WARP_ROWS * K, "rows of A");
    let mut columns = vec![0.0; b.len()];
    for (row, values) in b.chunks_exact(K).enumerate() {
        for (k, value) in values.iter().enumerate() {
            columns[k * n + row] = f64::from(*value);
        }
    }
    for (a, d) in a.chunks_exact(WARP_ROWS * K).zip(d) {
        if !adds {
            d.fill([0; LANES]);
        }
        add_products(a, &columns, d, K);
    }
}

/// Adds the product of 16 rows of A and of `b` (`[16, n]`) to the sums of a warp, `together` products
/// at a time. The inner loops are along the columns of the sums, so that the compiler vectorises them.
fn add_products(a: &[f32], b: &[f64], d: &mut [Lanes], together: usize) {
    let n = b.len() / K;
    assert_eq!(d.len(), n / 2, "registers of the sums");
    let mut sums = vec![0.0; WARP_ROWS * n];
    for (register, lanes) in d.iter().enumerate() {
        for (lane, bits) in lanes.iter().enumerate() {
            let (row, column) = place_in_sums(register, lane);
            sums[row * n + column] = f64::from(f32::from_bits(*bits as u32));
        }
    }
    let (mut units, mut exact) = (vec![0.0; n], vec![0.0; n]);
    for (a, sums) in a.chunks_exact(K).zip(sums.chunks_exact_mut(n)) {
        for (a, b) in a.chunks_exact(together).zip(b.chunks_exact(together * n)) {
            add_together(a, b, sums, [&mut units, &mut exact]);
        }
    }
    for (register, lanes) in d.iter_mut().enumerate() {
        for (lane, bits) in lanes.iter_mut().enumerate() {
            let (row, column) = place_in_sums(register, lane);
            let sum = sums[row * n + column] as f32;
            *bits = if sum.is_nan() { NAN } else { u64::from(sum.to_bits()) };
        }
    }
}

/// Adds products of one row of A to one row of sums, which are values of f32 before and after. The
/// buffers have the length of the row.
fn add_together(a: &[f32], b: &[f64], sums: &mut [f64], [units, exact]: [&mut [f64]; 2]) {
    const EXPONENT: u64 = 0x7ff0_0000_0000_0000;
    let n = sums.len();
    let rows = || a.iter().map(|x| f64::from(*x)).zip(b.chunks_exact(n));
    exact.copy_from_slice(sums);
    units.fill(0.0);
    for (x, b) in rows() {
        for ((unit, exact), y) in units.iter_mut().zip(&mut *exact).zip(b) {
            *unit = unit.max((x * y).abs());
            *exact += x * y;
        }
    }
    for (unit, sum) in units.iter_mut().zip(&mut *sums) {
        let largest = unit.max(sum.abs());
        // An f32 with this exponent has 23 bits after the first one.
        *unit = f64::from_bits(largest.to_bits() & EXPONENT) / f64::from(1 << 24);
        *sum = truncated(*sum, *unit);
    }
    for (x, b) in rows() {
        for ((sum, unit), y) in sums.iter_mut().zip(&*units).zip(b) {
            *sum += truncated(x * y, *unit);
        }
    }
    for (sum, exact) in sums.iter_mut().zip(exact) {
        *sum = if exact.is_finite() { toward_zero(*sum) } else { *exact };
    }
}

/// `value`, rounded toward zero to a multiple of `unit`, a power of two. `value` is at most 2^25 units.
fn truncated(value: f64, unit: f64) -> f64 {
    // An f64 of this size has steps of `unit`.
    let large = unit * 1.5 * (1_u64 << 52) as f64;
    let nearest = (value + large) - large;
    if nearest.abs() > value.abs() { nearest - unit.copysign(value) } else { nearest }
}

/// A finite value, rounded toward zero to f32. Values beyond those of f32 become infinite.
fn toward_zero(value: f64) -> f64 {
    let nearest = value as f32;
    let passed = nearest.is_finite() && f64::from(nearest.abs()) > value.abs();
    f64::from(f32::from_bits(nearest.to_bits() - u32::from(passed)))
}

/// The matrix A that warps have in four registers each: 16 rows of each warp.
pub fn a_from_registers(warps: &[[Lanes; 4]]) -> Vec<f32> {
    let mut a = vec![0.0; warps.len() * WARP_ROWS * K];
    for (registers, a) in warps.iter().zip(a.chunks_exact_mut(WARP_ROWS * K)) {
        for (register, lanes) in registers.iter().enumerate() {
            for (lane, pair) in lanes.iter().enumerate() {
                for half in 0..2 {
                    let (row, k) = place_in_a(register, lane, half);
                    a[row * K + k] = widened(pair >> (16 * half));
                }
            }
        }
    }
    a
}

/// Addresses of the rows that `ldmatrix` reads, 16 bytes each, for `count` matrices (1, 2 or 4):
/// row r of matrix i is at the address that lane 8 i + r passes. The addresses of the other lanes do
/// not count (PTX ISA, `ldmatrix`).
pub fn matrix_rows(addresses: &Lanes, count: usize) -> &[u64] {
    &addresses[..8 * count]
}

/// The registers that `ldmatrix` returns, one for each matrix, from the rows in the order of
/// [`matrix_rows`] (PTX ISA, `ldmatrix`). A lane receives the columns 2 (lane % 4) and the next of
/// row lane / 4, in the low and in the high half; if `transposed`, these rows of column lane / 4.
pub fn distribute(rows: &[[u8; PIECE]], transposed: bool) -> Vec<Lanes> {
    let element = |row: &[u8; PIECE], column: usize| {
        u64::from(u16::from_le_bytes([row[2 * column], row[2 * column + 1]]))
    };
    let of_matrix = |matrix: &[[u8; PIECE]]| {
        std::array::from_fn(|lane| {
            let (one, pair) = (lane / 4, lane % 4 * 2);
            let [low, high] = [pair, pair + 1].map(|other| {
                if transposed { element(&matrix[other], one) } else { element(&matrix[one], other) }
            });
            low | high << 16
        })
    };
    rows.chunks_exact(8).map(of_matrix).collect()
}

/// How rows of a tile in shared memory are permuted so that its columns are in different banks
/// (PTX ISA, "Swizzling Modes"): in units of 16 bytes, and the width of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// Bytes of a row; 16 without a permutation.
    pub fn width(self) -> u64 {
        match self {
            Self::None => 16,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }

    /// The address at which the byte is that would be at this address without the permutation. Bits
    /// 4 to 6 (4 to 5 of rows of 64 bytes, 4 of 32 bytes) change by those from 7 on.
    pub fn permuted(self, address: u64) -> u64 {
        let units = self.width() / PIECE as u64;
        address ^ (((address >> 7) & (units - 1)) << 4)
    }
}

/// A descriptor of `wgmma` that hardware does not define a tile for, as far as is documented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DescriptorError {
    #[error("descriptor {0:#018x} has bits outside of its fields")]
    OtherBits(u64),
    #[error("descriptor {0:#018x} has a base offset")]
    BaseOffset(u64),
    #[error("the pattern of rows of {width} bytes does not repeat at address {start:#x}")]
    Pattern { start: u64, width: u64 },
    #[error("{bytes} bytes from address {start:#x} on pass the end of a row of {width} bytes")]
    EndOfRow { start: u64, bytes: u64, width: u64 },
}

/// Where a tile of `wgmma` is in shared memory (PTX ISA, "Matrix Descriptor Format").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Address of the tile. The descriptor has 18 bits of it.
    pub start: u64,
    /// Leading dimension byte offset.
    pub leading: u64,
    /// Stride dimension byte offset.
    pub stride: u64,
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Takes a descriptor apart. A base offset is an error: it belongs to tiles whose pattern does
    /// not begin at a multiple of its size, and no kernel has them.
    pub fn decode(bits: u64) -> Result<Self, DescriptorError> {
        const FIELDS: u64 = 0xC00E_3FFF_3FFF_3FFF;
        const BASE_OFFSET: u64 = 0x000E_0000_0000_0000;
        if bits & !FIELDS != 0 {
            return Err(DescriptorError::OtherBits(bits));
        }
        if bits & BASE_OFFSET != 0 {
            return Err(DescriptorError::BaseOffset(bits));
        }
        let field = |shift: u32| ((bits >> shift) & 0x3FFF) * PIECE as u64;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        Ok(Self { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// Addresses of the pieces of a matrix `[rows, 16]`: `rows` is m or n, a multiple of 8. A piece
    /// has eight elements that are adjacent in memory.
    ///
    /// - K-major: the columns 0 .. 8 and 8 .. 16 of a row, row by row (piece `2 row + k / 8`).
    /// - `transposed` (MN-major): eight rows of a column, column by column (piece
    ///   `k rows / 8 + row / 8`).
    ///
    /// [`matrix`] takes the pieces in the same order.
    pub fn addresses(&self, rows: usize, transposed: bool) -> Result<Vec<u64>, DescriptorError> {
        assert!(rows.is_multiple_of(8), "{rows} rows");
        let (lines, pieces) = if transposed { (K, rows / 8) } else { (rows, K / 8) };
        self.check(pieces as u64)?;
        let positions =
            (0..lines as u64).flat_map(|line| (0..pieces as u64).map(move |p| (line, p)));
        Ok(positions.map(|(line, piece)| self.address(line, piece, transposed)).collect())
    }

    /// Whether the tile is where a permutation allows it. Within a row it may begin at a later
    /// column: kernels step through K by 32 bytes.
    fn check(&self, pieces: u64) -> Result<(), DescriptorError> {
        let (start, width) = (self.start, self.swizzle.width());
        if self.swizzle == Swizzle::None {
            return Ok(());
        }
        let column = start % width;
        if !(start - column).is_multiple_of(8 * width) {
            return Err(DescriptorError::Pattern { start, width });
        }
        // Pieces in the next rows are found by `leading`, from the first column on.
        let bytes = (pieces * PIECE as u64).min(width);
        if column + bytes > width {
            return Err(DescriptorError::EndOfRow { start, bytes, width });
        }
        Ok(())
    }

    /// PTX ISA, "Canonical Layouts" of `wgmma`. A line is a row of a K-major tile, or a
    /// column (one k) of a transposed one. Groups of eight lines are `stride` bytes apart. A K-major
    /// tile with a permutation is within one row of `width` bytes, so `leading` has no meaning. If
    /// it is transposed, `leading` leads from one panel of `width` bytes to the next one. Without a
    /// permutation, each eight lines of 16 bytes form a core matrix, and the transposed layout has
    /// the meanings of both distances exchanged.
    fn address(&self, line: u64, piece: u64, transposed: bool) -> u64 {
        let (width, pieces) = (self.swizzle.width(), self.swizzle.width() / PIECE as u64);
        let (of_lines, of_panels) = match (self.swizzle, transposed) {
            (Swizzle::None, true) => (self.leading, self.stride),
            _ => (self.stride, self.leading),
        };
        let panel = self.start + line / 8 * of_lines + piece / pieces * of_panels;
        self.swizzle.permuted(panel + line % 8 * width + piece % pieces * PIECE as u64)
    }
}

/// The matrix `[rows, 16]` of the pieces that are at [`Descriptor::addresses`].
pub fn matrix(pieces: &[[u8; PIECE]], transposed: bool) -> Vec<f32> {
    let rows = pieces.len() * ELEMENTS / K;
    let mut to = vec![0.0; rows * K];
    for (piece, bytes) in pieces.iter().enumerate() {
        for element in 0..ELEMENTS {
            let (row, k) = if transposed {
                (piece % (rows / 8) * 8 + element, piece / (rows / 8))
            } else {
                (piece / 2, piece % 2 * 8 + element)
            };
            let bits = u16::from_le_bytes([bytes[2 * element], bytes[2 * element + 1]]);
            to[row * K + k] = widened(u64::from(bits));
        }
    }
    to
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TensorMapError {
    #[error("these bytes are no tensor map")]
    NoMap,
    #[error("a tensor map has elements of {0} bytes instead of 2")]
    Elements(u64),
    #[error("a tensor map has rows of {0} bytes in shared memory, which is no swizzle mode")]
    Swizzle(u64),
    #[error("the address or a stride of a tensor map is not a multiple of 16 bytes")]
    Alignment,
    #[error("a tensor of a tensor map is empty or too large")]
    Sizes,
    #[error("a box of a tensor map does not have 1 to 256 elements in each dim")]
    Box,
    #[error("a row of a box has {bytes} bytes, but the swizzle mode is for {width}")]
    Row { bytes: u64, width: u64 },
    #[error("destination {0:#x} of a box is not a multiple of 128 bytes")]
    Destination(u64),
}

/// A tensor of rank 3 in global memory, and the boxes that `cp.async.bulk.tensor` copies from it.
///
/// The bytes of a CUtensorMap are known to the driver only. These are those that the stand-in of
/// the driver writes (`cuTensorMapEncodeTiled` in tests/fixtures/cuda/driver.cpp): 16 words of 64
/// bits, little endian, which are a constant, the fields of this struct in their order, the size of an
/// element, and zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    pub address: u64,
    /// Elements of each dim; those of the first dim are adjacent.
    pub sizes: [u64; 3],
    /// Bytes between elements of the second and of the third dim.
    pub strides: [u64; 2],
    /// Elements of a box in each dim.
    pub box_sizes: [u64; 3],
    /// Permutation of the boxes in shared memory.
    pub swizzle: Swizzle,
}

/// Sixteen bytes of a box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Address in shared memory.
    pub to: u64,
    /// The bytes that are inside of the tensor; the others are zeros. It is a part of a piece only
    /// if the first coordinate or the size of the first dim is not a multiple of 8.
    pub inside: Range<usize>,
    /// Global address of the first byte inside; 0 without any.
    pub from: u64,
}

impl TensorMap {
    /// Size of a map.
    pub const BYTES: usize = 128;
    const MARK: u64 = 0x7E45_09A9;

    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let ([x, y, z], [of_y, of_z], [bx, by, bz]) = (self.sizes, self.strides, self.box_sizes);
        let width = self.swizzle.width();
        let words =
            [Self::MARK, self.address, x, y, z, of_y, of_z, bx, by, bz, width, ELEMENT_BYTES];
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a map and checks it as the driver does.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self, TensorMapError> {
        let mut words = [0; Self::BYTES / 8];
        for (index, byte) in bytes.iter().enumerate() {
            words[index / 8] |= u64::from(*byte) << (index % 8 * 8);
        }
        let [mark, address, x, y, z, of_y, of_z, bx, by, bz, width, element, rest @ ..] = words;
        if mark != Self::MARK || rest != [0; 4] {
            return Err(TensorMapError::NoMap);
        }
        if element != ELEMENT_BYTES {
            return Err(TensorMapError::Elements(element));
        }
        let swizzle = match width {
            16 => Swizzle::None,
            32 => Swizzle::Bytes32,
            64 => Swizzle::Bytes64,
            128 => Swizzle::Bytes128,
            _ => return Err(TensorMapError::Swizzle(width)),
        };
        let (sizes, strides, box_sizes) = ([x, y, z], [of_y, of_z], [bx, by, bz]);
        let map = Self { address, sizes, strides, box_sizes, swizzle };
        map.check()?;
        Ok(map)
    }

    /// The driver also takes boxes with rows that are narrower than the swizzle mode. Their rows have
    /// gaps between them in shared memory, which are not modelled, so they are errors here.
    fn check(&self) -> Result<(), TensorMapError> {
        let [x, y, z] = self.sizes;
        let [of_y, of_z] = self.strides;
        if [self.address, of_y, of_z].iter().any(|bytes| !bytes.is_multiple_of(16)) {
            return Err(TensorMapError::Alignment);
        }
        let fits = |bytes: u64, most: u32| bytes <= 1 << most;
        if self.sizes.iter().any(|size| *size == 0 || !fits(*size, 32))
            || self.strides.iter().any(|stride| !fits(*stride, 40))
        {
            return Err(TensorMapError::Sizes);
        }
        let last = [(x, ELEMENT_BYTES), (y - 1, of_y), (z - 1, of_z)];
        let end = last.iter().map(|(n, bytes)| u128::from(*n) * u128::from(*bytes)).sum::<u128>();
        if end + u128::from(self.address) > u128::from(u64::MAX) {
            return Err(TensorMapError::Sizes);
        }
        if self.box_sizes.iter().any(|size| *size == 0 || *size > 256) {
            return Err(TensorMapError::Box);
        }
        let (bytes, width) = (self.box_sizes[0] * ELEMENT_BYTES, self.swizzle.width());
        let is_row = match self.swizzle {
            Swizzle::None => bytes.is_multiple_of(width),
            _ => bytes == width,
        };
        if is_row { Ok(()) } else { Err(TensorMapError::Row { bytes, width }) }
    }

    /// Bytes of a box: those that its copy adds to the count of an mbarrier, also if a part of the
    /// box is outside of the tensor.
    pub fn box_bytes(&self) -> u64 {
        self.box_sizes.iter().product::<u64>() * ELEMENT_BYTES
    }

    /// The pieces of the box whose first element is at the coordinates `at`, for a copy to the
    /// shared address `to`, in the order of their positions before the permutation: they cover
    /// [`TensorMap::box_bytes`] bytes from `to` on. Pieces that are partly or wholly outside of the
    /// tensor are filled with zeros.
    ///
    /// The permutation goes by the address (PTX ISA, "Swizzling Modes"), so a box must begin at a
    /// multiple of 128 bytes (programming guide of CUDA), and is as
    /// [`Descriptor`] expects it only at a multiple of eight of its rows.
    pub fn pieces(
        &self,
        to: u64,
        at: [i32; 3],
    ) -> Result<impl Iterator<Item = Piece> + use<>, TensorMapError> {
        if !to.is_multiple_of(128) {
            return Err(TensorMapError::Destination(to));
        }
        let map = *self;
        let count = self.box_bytes() / PIECE as u64;
        Ok((0..count).map(move |index| map.piece(to, at.map(i64::from), index)))
    }

    fn piece(&self, to: u64, at: [i64; 3], index: u64) -> Piece {
        let to = self.swizzle.permuted(to + index * PIECE as u64);
        let columns = self.box_sizes[0] / ELEMENTS as u64;
        let (row, column) = (index / columns, index % columns);
        let x = at[0] + (column * ELEMENTS as u64) as i64;
        let y = at[1] + (row % self.box_sizes[1]) as i64;
        let z = at[2] + (row / self.box_sizes[1]) as i64;
        let sizes = self.sizes.map(|size| size as i64);
        let first = (-x).clamp(0, ELEMENTS as i64);
        let end = (sizes[0] - x).clamp(0, ELEMENTS as i64);
        if first >= end || !(0..sizes[1]).contains(&y) || !(0..sizes[2]).contains(&z) {
            return Piece { to, inside: 0..0, from: 0 };
        }
        let offset = (x + first) as u64 * ELEMENT_BYTES
            + y as u64 * self.strides[0]
            + z as u64 * self.strides[1];
        let inside = first as usize * 2..end as usize * 2;
        Piece { to, inside, from: self.address + offset }
    }
}

#[cfg(test)]
mod tests;
