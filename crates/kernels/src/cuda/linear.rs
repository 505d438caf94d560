//! Linear layers: matrix products, and launches of `bias.cu`.

use super::gemm::{Addend, Gemm, GemmOperand, Transpose};
use super::launch::{Launch, address, empty, vectors};
use super::norm::add_columns;
use super::pointwise::fill_zero;
use crate::adjacent::{are_columns, are_rows};
use crate::{GradWrite, LowRank};
use candle_core::{DType, Result, Tensor};

/// Number of columns of `dy` per block of `bias.cu`.
const COLUMNS: usize = 256;
/// Number of threads per block: eight warps, each with its own rows.
const THREADS: u32 = 256;
/// Number of rows per partial sum, and maximum number of partial sums. They depend on the number of
/// rows only, so the result does too.
const ROWS: usize = 64;
const MAX_SHARES: usize = 64;

/// Returns `x W^T + u b^T + bias + residual` with shape `dims`; `(n, m, k)` are rows, outputs and
/// inputs.
pub(crate) fn linear(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    low_rank: Option<LowRank<'_>>,
    (n, m, k): (usize, usize, usize),
    dims: Vec<usize>,
) -> Result<Tensor> {
    let y = empty(dims, x.dtype(), x)?;
    let bias = bias.map(|bias| aligned(op, bias)).transpose()?;
    let gemm = Gemm {
        transpose: Transpose::Nt,
        shape: (n, m, k),
        a: GemmOperand::Whole("x", x),
        b: GemmOperand::Whole("w", w),
        addend: residual.map_or(Addend::Nothing, Addend::Residual),
        bias: bias.as_ref(),
    };
    gemm.into(op, "y", &y)?;
    add_low_rank(op, Transpose::Nt, low_rank, (n, m), "y", &y)?;
    Ok(y)
}

/// Adds the term of an adapter to `dst`, whose `shape` is (rows, columns).
fn add_low_rank(
    op: &'static str,
    transpose: Transpose,
    low_rank: Option<LowRank<'_>>,
    (n, m): (usize, usize),
    name: &'static str,
    dst: &Tensor,
) -> Result<()> {
    let Some(LowRank { u, b }) = low_rank else { return Ok(()) };
    let gemm = Gemm {
        transpose,
        shape: (n, m, u.elem_count() / n.max(1)),
        a: GemmOperand::Whole("u", u),
        b: GemmOperand::Whole("b", b),
        addend: Addend::Destination,
        bias: None,
    };
    gemm.into(op, name, dst)
}

/// Returns `bias` or an aligned copy: cublasLt requires 16-byte alignment.
fn aligned(op: &str, bias: &Tensor) -> Result<Tensor> {
    if address(op, "bias", bias)?.0.is_multiple_of(16) {
        return Ok(bias.clone());
    }
    bias.force_contiguous()
}

/// Returns `dy W + u b` with shape `dims`; `shape` is (rows, inputs, outputs).
pub(crate) fn linear_backward_input(
    op: &'static str,
    dy: &Tensor,
    w: &Tensor,
    low_rank: Option<LowRank<'_>>,
    shape: (usize, usize, usize),
    dims: Vec<usize>,
) -> Result<Tensor> {
    let dx = empty(dims, dy.dtype(), dy)?;
    add_input_gradient(op, dy, w, shape, Addend::Nothing, &dx)?;
    add_low_rank(op, Transpose::Nn, low_rank, (shape.0, shape.1), "dx", &dx)?;
    Ok(dx)
}

/// Adds `dy W` to `dx` in place.
pub(crate) fn linear_backward_input_add(
    op: &'static str,
    dy: &Tensor,
    w: &Tensor,
    shape: (usize, usize, usize),
    dx: Tensor,
) -> Result<Tensor> {
    add_input_gradient(op, dy, w, shape, Addend::Destination, &dx)?;
    Ok(dx)
}

fn add_input_gradient(
    op: &'static str,
    dy: &Tensor,
    w: &Tensor,
    shape: (usize, usize, usize),
    addend: Addend<'_>,
    dx: &Tensor,
) -> Result<()> {
    let (a, b) = (GemmOperand::Whole("dy", dy), GemmOperand::Whole("w", w));
    Gemm { transpose: Transpose::Nn, shape, a, b, addend, bias: None }.into(op, "dx", dx)
}

/// Adds `dy^T x` to `dw`, or replaces `dw` by it; `shape` is (outputs, inputs, rows).
pub(crate) fn linear_backward_weight(
    op: &'static str,
    x: &Tensor,
    dy: &Tensor,
    (dw, write): (&Tensor, GradWrite),
    shape: (usize, usize, usize),
) -> Result<()> {
    let addend = match write {
        GradWrite::Add => Addend::Destination,
        GradWrite::Replace if shape.2 == 0 => return fill_zero(dw),
        GradWrite::Replace => Addend::Nothing,
    };
    let (a, b) = (GemmOperand::Whole("dy", dy), GemmOperand::Whole("x", x));
    Gemm { transpose: Transpose::Tn, shape, a, b, addend, bias: None }.into(op, "dw", dw)
}

/// All elements of `parts`, which follow one another.
fn block<'a>(name: &'static str, parts: &[&'a Tensor]) -> GemmOperand<'a> {
    GemmOperand::Block(name, parts[0], parts.iter().map(|part| part.elem_count()).sum())
}

/// The sum of the numbers of rows or columns of `parts`.
fn total(parts: &[&Tensor], dim: usize) -> Result<usize> {
    parts.iter().map(|part| part.dim(dim)).sum()
}

pub(crate) fn joined_linear<const N: usize>(
    x: &Tensor,
    weights: [&Tensor; N],
) -> Result<Option<[Tensor; N]>> {
    if !are_rows(&weights) {
        return Ok(None);
    }
    let ((n, k), m) = (x.dims2()?, total(&weights, 0)?);
    let y = empty((n, m), x.dtype(), x)?;
    let (transpose, a, b) = (Transpose::Nt, GemmOperand::Whole("x", x), block("w", &weights));
    let gemm = Gemm { transpose, shape: (n, m, k), a, b, addend: Addend::Nothing, bias: None };
    gemm.into("joined_linear", "y", &y)?;
    let mut first = 0;
    let columns = weights.iter().map(|w| {
        let width = w.dim(0)?;
        first += width;
        y.narrow(1, first - width, width)
    });
    let columns = columns.collect::<Result<Vec<_>>>()?;
    Ok(Some(columns.try_into().expect("columns for each weight")))
}

pub(crate) fn joined_linear_backward_input(
    dys: &[&Tensor],
    weights: &[&Tensor],
) -> Result<Option<Tensor>> {
    if !(are_columns(dys) && are_rows(weights)) {
        return Ok(None);
    }
    let (n, m, k) = (dys[0].dim(0)?, total(dys, 1)?, weights[0].dim(1)?);
    let dx = empty((n, k), dys[0].dtype(), dys[0])?;
    let (transpose, a, b) = (Transpose::Nn, block("dy", dys), block("w", weights));
    let gemm = Gemm { transpose, shape: (n, k, m), a, b, addend: Addend::Nothing, bias: None };
    gemm.into("joined_linear_backward_input", "dx", &dx)?;
    Ok(Some(dx))
}

/// Returns whether the gradients were computed.
pub(crate) fn joined_linear_backward_weight(
    x: &Tensor,
    dys: &[&Tensor],
    (dws, write): (&[&Tensor], GradWrite),
) -> Result<bool> {
    let (n, k) = x.dims2()?;
    if n == 0 || !(are_columns(dys) && are_rows(dws)) {
        return Ok(false);
    }
    let (transpose, shape) = (Transpose::Tn, (total(dys, 1)?, k, n));
    let (a, b) = (block("dy", dys), GemmOperand::Whole("x", x));
    let addend = match write {
        GradWrite::Add => Addend::Destination,
        GradWrite::Replace => Addend::Nothing,
    };
    let gemm = Gemm { transpose, shape, a, b, addend, bias: None };
    gemm.into_matrix("joined_linear_backward_weight", block("dw", dws))?;
    Ok(true)
}

/// Adds the column sums of `dy [N, M]` to `db [M]`.
pub(crate) fn bias_backward(
    op: &'static str,
    dy: &Tensor,
    db: &Tensor,
    (n, m): (usize, usize),
) -> Result<()> {
    let num_shares = n.div_ceil(ROWS).min(MAX_SHARES);
    let shares = empty((num_shares, m), DType::F32, dy)?;
    Launch::new("bias_shares", dy.dtype())
        .grid3([m.div_ceil(COLUMNS), num_shares, 1])
        .threads(THREADS)
        .address(address(op, "dy", dy)?)
        .address(address(op, "shares", &shares)?)
        .int(n)
        .int(m)
        .flag(vectors(m, &[dy])?)
        .run(dy)?;
    add_columns(op, &shares, db)
}
