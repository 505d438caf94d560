//! Products of row-major matrices with `f32` sums.
//!
//! Computes `dst [m, n] = factor op(a) op(b) + addend + bias`. `dst` has the dtype of the operands, or
//! `f32` (for logits and weight gradients). The result is rounded once, at the end. Repeated runs
//! give the same bits: there is one stream, one workspace, and a fixed algorithm per product. Under
//! emulation the CPU computes the product on operands converted to `f32`.
//!
//! Operands of dtype `u8` are codes of e4m3; their product is `f32`.

#![cfg_attr(
    not(any(feature = "cuda", feature = "cuda-emulation")),
    allow(dead_code, reason = "no device has kernels in this build")
)]

use candle_core::{DType, Result, Tensor, bail};

/// Which operand of a product is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Transpose {
    /// `a [m, k]`, `b [n, k]`: `a b^T`.
    Nt,
    /// `a [m, k]`, `b [k, n]`: `a b`.
    Nn,
    /// `a [k, m]`, `b [k, n]`: `a^T b`.
    Tn,
}

/// An operand: its name, for errors, and the location of its elements.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GemmOperand<'a> {
    /// All elements of a contiguous tensor, with any dims.
    Whole(&'static str, &'a Tensor),
    /// `bf16` elements in the second half of each row of an `f32` tensor.
    SecondHalves(&'static str, &'a Tensor),
}

impl<'a> GemmOperand<'a> {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Whole(name, _) | Self::SecondHalves(name, _) => name,
        }
    }

    pub(crate) fn tensor(self) -> &'a Tensor {
        match self {
            Self::Whole(_, tensor) | Self::SecondHalves(_, tensor) => tensor,
        }
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Whole(_, tensor) => tensor.dtype(),
            Self::SecondHalves(..) => DType::BF16,
        }
    }
}

/// Matrix that is added to a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Addend<'a> {
    Nothing,
    /// The previous contents of the destination.
    Destination,
    /// A tensor `[m, n]` in the dtype of the destination.
    Residual(&'a Tensor),
}

pub(crate) struct Gemm<'a> {
    pub(crate) transpose: Transpose,
    /// Sizes `(m, n, k)`.
    pub(crate) shape: (usize, usize, usize),
    pub(crate) a: GemmOperand<'a>,
    pub(crate) b: GemmOperand<'a>,
    pub(crate) factor: f32,
    pub(crate) addend: Addend<'a>,
    /// Bias `[n]` in the dtype of the destination, added to each row.
    pub(crate) bias: Option<&'a Tensor>,
    /// Whether all products of a sum of e4m3 are added in the registers of the tensor cores, which
    /// keep about 14 bits.
    pub(crate) fast_sums: bool,
}

impl<'a> Gemm<'a> {
    /// The product of two whole matrices with these names.
    pub(crate) fn new(
        transpose: Transpose,
        shape: (usize, usize, usize),
        [(a_name, a), (b_name, b)]: [(&'static str, &'a Tensor); 2],
    ) -> Self {
        let (a, b) = (GemmOperand::Whole(a_name, a), GemmOperand::Whole(b_name, b));
        let (factor, addend, bias, fast_sums) = (1.0, Addend::Nothing, None, false);
        Self { transpose, shape, a, b, factor, addend, bias, fast_sums }
    }

    /// Adds the product to the previous contents of the destination.
    pub(crate) fn adding(self) -> Self {
        Self { addend: Addend::Destination, ..self }
    }

    /// Starts the product and writes it to `dst`. Errors refer to `dst` as `name`.
    pub(crate) fn into(self, op: &'static str, name: &'static str, dst: &Tensor) -> Result<()> {
        let dst = GemmOperand::Whole(name, dst);
        let (m, n, k) = self.shape;
        for (matrix, length) in [(self.a, m * k), (self.b, n * k), (dst, m * n)] {
            let (name, found) = (matrix.name(), matrix.tensor().elem_count());
            if found != length {
                bail!("{op}: `{name}` has {found} elements, expected {length}");
            }
        }
        if self.a.dtype() != self.b.dtype() {
            bail!(
                "{op}: found operands of {:?} and {:?}, expected one dtype",
                self.a.dtype(),
                self.b.dtype()
            );
        }
        if m == 0 || n == 0 || (k == 0 && matches!(self.addend, Addend::Destination)) {
            return Ok(());
        }
        tracing::trace!(target: "kernels::launch", op, "launch");
        run(op, &self, dst)
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn run(op: &'static str, gemm: &Gemm<'_>, dst: GemmOperand<'_>) -> Result<()> {
    super::blas::run(op, gemm, dst)
}

#[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
pub(crate) fn run(op: &'static str, _: &Gemm<'_>, _: GemmOperand<'_>) -> Result<()> {
    unreachable!("{op}: no device has kernels in this build")
}

#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub(crate) fn run(op: &'static str, gemm: &Gemm<'_>, dst: GemmOperand<'_>) -> Result<()> {
    use crate::cpu::products::{Store, nn, nt, tn};
    use crate::cpu::{self, Element as _, read};
    use half::bf16;

    fn elements(op: &'static str, matrix: GemmOperand<'_>) -> Result<Vec<f32>> {
        let operand = read(op, matrix.name(), matrix.tensor())?;
        if matrix.dtype() == DType::U8 {
            return Ok(operand
                .slice::<u8>()?
                .iter()
                .map(|code| crate::e4m3::value(*code))
                .collect());
        }
        let GemmOperand::SecondHalves(_, tensor) = matrix else {
            return Ok(operand.f32()?.into_owned());
        };
        let (_, columns) = tensor.dims2()?;
        let bytes: Vec<u8> =
            operand.slice::<f32>()?.iter().flat_map(|word| word.to_bits().to_le_bytes()).collect();
        let rows = bytes.chunks(4 * columns).map(|row| &row[2 * columns..]);
        let halves = rows.flat_map(|row| row.chunks(2));
        Ok(halves.map(|half| bf16::from_le_bytes([half[0], half[1]]).widen()).collect())
    }

    let (m, n, k) = gemm.shape;
    let (mut a, b) = (elements(op, gemm.a)?, elements(op, gemm.b)?);
    for a in &mut a {
        *a *= gemm.factor;
    }
    let mut sums = match gemm.addend {
        Addend::Nothing => vec![0f32; m * n],
        Addend::Destination => elements(op, dst)?,
        Addend::Residual(addend) => elements(op, GemmOperand::Whole("residual", addend))?,
    };
    if let Some(bias) = gemm.bias {
        let bias = elements(op, GemmOperand::Whole("bias", bias))?;
        sums.chunks_mut(n).for_each(|row| cpu::add(&bias, row));
    }
    match gemm.transpose {
        Transpose::Nt if gemm.fast_sums => fast_sums((m, n, k), &mut sums, &a, &b),
        Transpose::Nt => nt((m, n, k), &mut sums, Store::Add, &a, &b),
        Transpose::Nn => nn((m, n, k), &mut sums, Store::Add, &a, &b),
        Transpose::Tn => tn((m, n, k), &mut sums, Store::Add, &a, &b),
    }
    let (name, dst) = (dst.name(), dst.tensor());
    super::interpreted::remember(
        crate::launch::address(op, name, dst)?.0,
        dst.elem_count() * dst.dtype().size_in_bytes(),
    );
    if dst.dtype() == DType::BF16 {
        return cpu::write(op, name, dst, |dst: &mut [bf16]| {
            for (dst, sum) in dst.iter_mut().zip(sums) {
                *dst = bf16::narrow(sum);
            }
        });
    }
    cpu::write(op, name, dst, |dst: &mut [f32]| dst.copy_from_slice(&sums))
}

/// Adds `a b^T` to `sums [m, n]`. A tensor core of Hopper adds 32 products of e4m3 to a sum at a time:
/// it drops what is more than 13 bits below the first bit of the largest of them.
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
fn fast_sums((m, n, k): (usize, usize, usize), sums: &mut [f32], a: &[f32], b: &[f32]) {
    for (index, sum) in (0..m * n).zip(sums) {
        let (row, column) = (index / n, index % n);
        let (a, b) = (&a[row * k..][..k], &b[column * k..][..k]);
        let mut added = 0f32;
        for (a, b) in a.chunks(32).zip(b.chunks(32)) {
            let products = || a.iter().zip(b).map(|(x, y)| x * y).chain([added]);
            let largest = products().fold(0f32, |most, x| most.max(x.abs()));
            let unit = f32::from_bits(largest.to_bits() & 0x7f80_0000) / 8192.0;
            let multiples = |x: f32| if unit > 0.0 { (x / unit).trunc() * unit } else { x };
            added = products().map(multiples).sum();
        }
        *sum += added;
    }
}
