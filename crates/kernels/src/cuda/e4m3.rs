//! Launches of `e4m3.cu`, and products of operands in FP8.
//!
//! cublasLt multiplies e4m3 operands that both have the dim of the sums as their rows, with sizes
//! that are multiples of 16. So an operand whose columns are summed over is transposed when it is
//! rounded, and codes are padded with zeros.
//!
//! The product is computed with scales of 1 into `f32`, and `e4m3_scale` multiplies by the scales of
//! rows and columns, adds bias and addend, and rounds once. That needs nothing of cublasLt that
//! CUDA 12.4 does not have. The sums are computed for as many rows at a time as fit in the L2 cache
//! of a Hopper GPU.

use super::gemm::{Addend, Gemm, GemmOperand, Transpose};
use super::launch::{Launch, address, empty, vectors};
use crate::linear::{rows_of, with_last};
use candle_core::{DType, Result, Tensor};

const THREADS: u32 = 256;
/// Sizes of codes are multiples of this.
const ALIGNED: usize = 16;
/// Number of rows with one maximum of a column, as in `e4m3.cu`.
const SHARE: usize = 64;
/// Rows and columns of a block that transposes, as in `e4m3.cu`.
const TILE: usize = 64;
/// Maximum number of bytes of the sums of a product.
const SUMS_BYTES: usize = 32 << 20;
/// The sums have a multiple of this number of rows, which tensor cores compute at once.
const SUMS_ROWS: usize = 128;
/// Maximum number of rows of sums: the size of a grid.
const MAX_SUMS_ROWS: usize = (1 << 16) - SUMS_ROWS;

/// A matrix in e4m3.
pub(super) struct Rounded {
    /// `[rows, columns]`, `u8`. The sums of a product run over the columns.
    pub(super) codes: Tensor,
    /// `[rows]`, `f32`.
    pub(super) scales: Tensor,
}

/// Returns `x w^T + bias + residual`.
pub(crate) fn e4m3_linear(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    (bias, residual): (Option<&Tensor>, Option<&Tensor>),
) -> Result<Tensor> {
    let ((n, k), m) = (rows_of(op, "x", x)?, w.dim(0)?);
    let y = empty(with_last(x, m), x.dtype(), x)?;
    let w = round_rows(op, ("w", w), (m, k), m.next_multiple_of(ALIGNED))?;
    let x = round_rows(op, ("x", x), (n, k), n)?;
    multiply(op, [&x, &w], (n, m), (bias, residual), &y, SUMS_BYTES)?;
    Ok(y)
}

/// Returns `dy w`, or adds it to `dx`.
pub(crate) fn e4m3_linear_backward_input(
    op: &'static str,
    dy: &Tensor,
    w: &Tensor,
    dx: Option<Tensor>,
) -> Result<Tensor> {
    let ((n, m), k) = (rows_of(op, "dy", dy)?, w.dim(1)?);
    let w = round_columns(op, ("w", w), (m, k), k.next_multiple_of(ALIGNED))?;
    let dy_rounded = round_rows(op, ("dy", dy), (n, m), n)?;
    let addend = dx.clone();
    let dx = dx.map_or_else(|| empty(with_last(dy, k), dy.dtype(), dy), Ok)?;
    multiply(op, [&dy_rounded, &w], (n, k), (None, addend.as_ref()), &dx, SUMS_BYTES)?;
    Ok(dx)
}

/// Adds `dy^T x` to `dw`.
pub(crate) fn e4m3_linear_backward_weight(
    op: &'static str,
    x: &Tensor,
    dy: &Tensor,
    dw: &Tensor,
) -> Result<()> {
    let ((n, m), (_, k)) = (rows_of(op, "dy", dy)?, rows_of(op, "x", x)?);
    if n == 0 {
        return Ok(());
    }
    let dy = round_columns(op, ("dy", dy), (n, m), m)?;
    let x = round_columns(op, ("x", x), (n, k), k.next_multiple_of(ALIGNED))?;
    multiply(op, [&dy, &x], (m, k), (None, Some(dw)), dw, SUMS_BYTES)
}

/// Rounds `x [n, k]` with a scale for each row. The result has `rows` rows; those beyond `n` are
/// zeros.
pub(super) fn round_rows(
    op: &'static str,
    (name, x): (&'static str, &Tensor),
    (n, k): (usize, usize),
    rows: usize,
) -> Result<Rounded> {
    let columns = k.next_multiple_of(ALIGNED);
    let codes = empty((rows, columns), DType::U8, x)?;
    let scales = empty(rows, DType::F32, x)?;
    let whole = k == columns && vectors(k, &[x])?;
    Launch::new(if whole { "e4m3_rows" } else { "e4m3_rows_single" }, x.dtype())
        .grid(rows)
        .threads(THREADS)
        .address(address(op, name, x)?)
        .address(address(op, "codes", &codes)?)
        .address(address(op, "scales", &scales)?)
        .int(n)
        .int(k)
        .int(columns)
        .run(x)?;
    Ok(Rounded { codes, scales })
}

/// Rounds `x [n, k]` with a scale for each column. The result is transposed and has `rows` rows;
/// those beyond `k` are zeros.
pub(super) fn round_columns(
    op: &'static str,
    (name, x): (&'static str, &Tensor),
    (n, k): (usize, usize),
    rows: usize,
) -> Result<Rounded> {
    let (columns, shares) = (n.next_multiple_of(ALIGNED), n.div_ceil(SHARE));
    let maxima = empty((shares, k), DType::F32, x)?;
    let scales = empty(rows, DType::F32, x)?;
    let codes = empty((rows, columns), DType::U8, x)?;
    Launch::new("e4m3_column_maxima", x.dtype())
        .grid3([k.div_ceil(THREADS as usize), shares, 1])
        .threads(THREADS)
        .address(address(op, name, x)?)
        .address(address(op, "maxima", &maxima)?)
        .int(n)
        .int(k)
        .run(x)?;
    Launch::new("e4m3_scales", DType::F32)
        .grid(rows.div_ceil(THREADS as usize))
        .threads(THREADS)
        .address(address(op, "maxima", &maxima)?)
        .address(address(op, "scales", &scales)?)
        .int(shares)
        .int(k)
        .int(rows)
        .run(x)?;
    Launch::new("e4m3_columns", x.dtype())
        .grid3([rows.div_ceil(TILE), columns.div_ceil(TILE), 1])
        .threads(THREADS)
        .address(address(op, name, x)?)
        .address(address(op, "scales", &scales)?)
        .address(address(op, "codes", &codes)?)
        .int(n)
        .int(k)
        .int(rows)
        .int(columns)
        .run(x)?;
    Ok(Rounded { codes, scales })
}

/// Number of rows of sums of `columns` columns in `bytes`.
fn rows_at_once(columns: usize, bytes: usize) -> usize {
    let rows = bytes / (size_of::<f32>() * columns) / SUMS_ROWS * SUMS_ROWS;
    rows.clamp(SUMS_ROWS, MAX_SUMS_ROWS)
}

/// Writes `a b^T + bias + addend` to `y [n, m]`, with at most `bytes` of sums or `SUMS_ROWS` rows.
/// `addend` may be `y`.
pub(super) fn multiply(
    op: &'static str,
    [a, b]: [&Rounded; 2],
    (n, m): (usize, usize),
    (bias, addend): (Option<&Tensor>, Option<&Tensor>),
    y: &Tensor,
    bytes: usize,
) -> Result<()> {
    if n == 0 || m == 0 {
        return Ok(());
    }
    let (columns, k) = b.codes.dims2()?;
    let rows = rows_at_once(columns, bytes).min(n);
    let buffer = empty((rows, columns), DType::F32, y)?;
    let y = y.reshape((n, m))?;
    let addend = addend.map(|addend| addend.reshape((n, m))).transpose()?;
    for first in (0..n).step_by(rows) {
        let rows = rows.min(n - first);
        let part = |t: &Tensor| t.narrow(0, first, rows);
        let (codes, scales, y) = (part(&a.codes)?, part(&a.scales)?, part(&y)?);
        let addend = addend.as_ref().map(part).transpose()?;
        let sums = buffer.narrow(0, 0, rows)?;
        let gemm = Gemm {
            transpose: Transpose::Nt,
            shape: (rows, columns, k),
            a: GemmOperand::Whole("a", &codes),
            b: GemmOperand::Whole("b", &b.codes),
            addend: Addend::Nothing,
            bias: None,
        };
        gemm.into(op, "sums", &sums)?;
        let mut whole = vectors(m, &[&y])?;
        for t in bias.into_iter().chain(&addend) {
            whole = whole && vectors(0, &[t])?;
        }
        let elements = if whole { 16 / y.dtype().size_in_bytes() } else { 1 };
        let kernel = if whole { "e4m3_scale" } else { "e4m3_scale_single" };
        Launch::new(kernel, y.dtype())
            .grid3([m.div_ceil(THREADS as usize * elements), rows, 1])
            .threads(THREADS)
            .address(address(op, "sums", &sums)?)
            .address(address(op, "scales", &scales)?)
            .address(address(op, "scales", &b.scales)?)
            .optional(op, "bias", bias)?
            .optional(op, "residual", addend.as_ref())?
            .address(address(op, "y", &y)?)
            .int(m)
            .int(columns)
            .run(&y)?;
    }
    Ok(())
}
