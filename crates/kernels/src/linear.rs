//! Linear layer `y = x W^T + b`, and its gradients.
//!
//! Shapes: `x [N, K]`, `w [M, K]` (a weight with more dims is read as `[M, K]`), `b [M]`,
//! `y [N, M]`. `N` may be several dims: all dims of `x` except the last. Gradient buffers are
//! `f32`. On the CPU, forward also accepts `w` in `bf16` with all other operands in `f32`.

use super::column_shares::sum_columns_on_gpu;
use super::cpu::blocks::{by_rows, filled, span};
use super::cpu::column_sums::add_rows;
use super::cpu::products::{Matrix, Store, new_product, nn, nt, tn};
use super::cpu::{
    self, Operand, ROWS, compute_dtype, expect_f32, expect_shape, read, weighted_dtype,
};
use super::cuda::gemm::{Addend, Gemm, Transpose};
use super::fill_zero;
use super::launch::{address, empty, on_gpu};
use candle_core::{DType, Error, Result, Tensor, bail};
use std::ops::Range;

/// Returns `(N, last)`: the product of all dims but the last, and the last.
pub(super) fn rows_of(op: &str, name: &str, t: &Tensor) -> Result<(usize, usize)> {
    match t.dims() {
        [] => bail!("{op}: `{name}` is a scalar, expected at least one dim"),
        [rows @ .., last] => Ok((rows.iter().product(), *last)),
    }
}

/// Returns `(M, K)` of a weight: its first dim, and the product of the others.
fn matrix_of(op: &str, w: &Tensor) -> Result<(usize, usize)> {
    match w.dims() {
        [m, k @ ..] if !k.is_empty() => Ok((*m, k.iter().product())),
        dims => bail!("{op}: `w` is {dims:?}, expected [M, K]"),
    }
}

pub(super) fn with_last(t: &Tensor, last: usize) -> Vec<usize> {
    let mut dims = t.dims().to_vec();
    if let Some(end) = dims.last_mut() {
        *end = last;
    }
    dims
}

/// The term `u b^T` of an adapter of rank `r`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `[N, r]`.
    pub u: &'a Tensor,
    /// `[M, r]` in forward. In backward, where the term is `u b`: `[r, K]`.
    pub b: &'a Tensor,
}

/// Returns `x W^T + bias`, `[N, M]`. Fails if the shapes do not match.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    forward("linear", x, w, bias, None, None, 1.0)
}

/// Returns `factor x W^T`, `[N, M]`.
pub fn linear_times(x: &Tensor, w: &Tensor, factor: f64) -> Result<Tensor> {
    forward("linear_times", x, w, None, None, None, factor)
}

/// Returns `x W^T + u b^T + bias + residual`, `[N, M]`, with `residual: [N, M]`.
pub fn linear_low_rank(
    x: &Tensor,
    w: &Tensor,
    low_rank: LowRank<'_>,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    forward("linear_low_rank", x, w, bias, residual, Some(low_rank), 1.0)
}

/// Returns `x W^T + bias + residual`, `[N, M]`, with `residual: [N, M]`.
pub fn linear_add(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
) -> Result<Tensor> {
    forward("linear_add", x, w, bias, Some(residual), None, 1.0)
}

fn forward(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    low_rank: Option<LowRank<'_>>,
    factor: f64, // 1 if there are other terms
) -> Result<Tensor> {
    let ((n, m, k), shape) = forward_shape(op, x, w, bias, residual)?;
    let dtype = x.dtype();
    let rank = check_low_rank(op, low_rank, x, n, |b, r| expect_shape(op, "b", b, &[m, r]))?;
    if on_gpu(x) {
        let y = empty(shape, dtype, x)?;
        let bias = bias.map(|bias| aligned(op, bias)).transpose()?;
        let gemm = Gemm::new(Transpose::Nt, (n, m, k), [("x", x), ("w", w)]);
        let (factor, bias) = (factor as f32, bias.as_ref());
        let addend = residual.map_or(Addend::Nothing, Addend::Residual);
        Gemm { factor, addend, bias, ..gemm }.into(op, "y", &y)?;
        add_low_rank_on_gpu(op, Transpose::Nt, low_rank, (n, m), ("y", &y))?;
        return Ok(y);
    }
    let residual = residual.map(|residual| read(op, "residual", residual)).transpose()?;
    let residual = residual.as_ref().map(Operand::values).transpose()?;
    let bias = bias.map(|bias| read(op, "bias", bias)).transpose()?;
    let bias = bias.as_ref().map(Operand::f32).transpose()?;
    let (x, w) = (read(op, "x", x)?, read(op, "w", w)?);
    let (x, w) = (x.values()?, w.values()?);
    let low_rank = operands(op, low_rank)?;
    let low_rank = low_rank.as_ref().map(|(u, b)| Ok::<_, Error>((u.values()?, b.values()?)));
    let low_rank = low_rank.transpose()?;
    let add_low_rank = |rows: &Range<usize>, y: &mut [f32]| {
        if let Some((u, b)) = low_rank {
            let u = u.part(span(rows, rank));
            nt((rows.len(), m, rank), y, Store::Add, u, b);
        }
    };
    let y = by_rows((n, m, k.max(m)), shape, dtype, |rows| {
        let x = x.part(span(&rows, k));
        if residual.is_none() && bias.is_none() {
            let mut y = new_product((rows.len(), m, k), Matrix::rows(x, k), Matrix::rows(w, k).t());
            add_low_rank(&rows, &mut y);
            return y;
        }
        let [y] = filled(rows.len(), ROWS, [(m, DType::F32)], |at, [y]| {
            if let Some(residual) = residual {
                let at = rows.start + at.start..rows.start + at.end;
                y.copy_from_slice(&residual.view(span(&at, m)));
            }
            if let Some(bias) = &bias {
                y.chunks_mut(m).for_each(|row| cpu::add(bias, row));
            }
        });
        let mut y = y.into_f32();
        nt((rows.len(), m, k), &mut y, Store::Add, x, w);
        add_low_rank(&rows, &mut y);
        y
    })?;
    times(y, factor)
}

fn times(y: Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 { Ok(y) } else { y * factor }
}

/// Adds the term of an adapter to `dst`, whose `shape` is (rows, columns).
fn add_low_rank_on_gpu(
    op: &'static str,
    transpose: Transpose,
    low_rank: Option<LowRank<'_>>,
    (n, m): (usize, usize),
    (name, dst): (&'static str, &Tensor),
) -> Result<()> {
    let Some(LowRank { u, b }) = low_rank else { return Ok(()) };
    let rank = u.elem_count() / n.max(1);
    Gemm::new(transpose, (n, m, rank), [("u", u), ("b", b)]).adding().into(op, name, dst)
}

/// Returns `bias` or an aligned copy: cublasLt requires 16-byte alignment.
fn aligned(op: &str, bias: &Tensor) -> Result<Tensor> {
    if address(op, "bias", bias)?.0.is_multiple_of(16) {
        return Ok(bias.clone());
    }
    bias.force_contiguous()
}

/// Checks the operands of a forward product. Returns `(N, M, K)` and the shape of the result.
pub(super) fn forward_shape(
    op: &str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<((usize, usize, usize), Vec<usize>)> {
    let ((n, k), (m, w_k)) = (rows_of(op, "x", x)?, matrix_of(op, w)?);
    if k != w_k {
        bail!(
            "{op}: `x` is {:?} and `w` is {:?}: found {k} inputs, expected {w_k}",
            x.dims(),
            w.dims()
        );
    }
    weighted_dtype(op, ("x", x), ("w", w))?;
    let shape = with_last(x, m);
    if let Some(residual) = residual {
        compute_dtype(op, &[("x", x), ("residual", residual)])?;
        expect_shape(op, "residual", residual, &shape)?;
    }
    if let Some(bias) = bias {
        compute_dtype(op, &[("x", x), ("bias", bias)])?;
        expect_shape(op, "bias", bias, &[m])?;
    }
    Ok(((n, m, k), shape))
}

fn operands<'a>(
    op: &'static str,
    low_rank: Option<LowRank<'a>>,
) -> Result<Option<(Operand<'a>, Operand<'a>)>> {
    low_rank.map(|LowRank { u, b }| Ok((read(op, "u", u)?, read(op, "b", b)?))).transpose()
}

/// Checks `u: [N, r]`, and `b` with `check`. Returns the rank, or 0 without a term.
fn check_low_rank(
    op: &'static str,
    low_rank: Option<LowRank<'_>>,
    x: &Tensor,
    n: usize,
    check: impl Fn(&Tensor, usize) -> Result<()>,
) -> Result<usize> {
    let Some(LowRank { u, b }) = low_rank else { return Ok(0) };
    compute_dtype(op, &[("x", x), ("u", u), ("b", b)])?;
    let (rows, rank) = rows_of(op, "u", u)?;
    if rows != n || rank == 0 {
        bail!("{op}: `u` is {:?}, expected {n} rows of at least 1 column", u.dims());
    }
    check(b, rank)?;
    Ok(rank)
}

/// Checks `dy [N, M]` against `w [M, K]` and returns `(N, M, K)`.
pub(super) fn backward_shape(op: &str, dy: &Tensor, w: &Tensor) -> Result<(usize, usize, usize)> {
    let ((n, m), (w_m, k)) = (rows_of(op, "dy", dy)?, matrix_of(op, w)?);
    if m != w_m {
        bail!(
            "{op}: `dy` is {:?} and `w` is {:?}: found {m} outputs, expected {w_m}",
            dy.dims(),
            w.dims()
        );
    }
    Ok((n, m, k))
}

/// Returns the input gradient `dy W`, `[N, K]`.
pub fn linear_backward_input(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    input_gradient("linear_backward_input", dy, w, None, 1.0)
}

/// Returns `factor dy W`, `[N, K]`.
pub fn linear_backward_input_times(dy: &Tensor, w: &Tensor, factor: f64) -> Result<Tensor> {
    input_gradient("linear_backward_input_times", dy, w, None, factor)
}

/// Returns `dy W + u b`, `[N, K]`, with `u: [N, r]` and `b: [r, K]`.
pub fn linear_backward_input_low_rank(
    dy: &Tensor,
    w: &Tensor,
    low_rank: LowRank<'_>,
) -> Result<Tensor> {
    input_gradient("linear_backward_input_low_rank", dy, w, Some(low_rank), 1.0)
}

fn input_gradient(
    op: &'static str,
    dy: &Tensor,
    w: &Tensor,
    low_rank: Option<LowRank<'_>>,
    factor: f64, // 1 if there is another term
) -> Result<Tensor> {
    let (n, m, k) = backward_shape(op, dy, w)?;
    let dtype = compute_dtype(op, &[("dy", dy), ("w", w)])?;
    let shape = with_last(dy, k);
    let rank = check_low_rank(op, low_rank, dy, n, |b, r| expect_shape(op, "b", b, &[r, k]))?;
    if on_gpu(dy) {
        let dx = empty(shape, dtype, dy)?;
        let gemm = Gemm::new(Transpose::Nn, (n, k, m), [("dy", dy), ("w", w)]);
        Gemm { factor: factor as f32, ..gemm }.into(op, "dx", &dx)?;
        add_low_rank_on_gpu(op, Transpose::Nn, low_rank, (n, k), ("dx", &dx))?;
        return Ok(dx);
    }
    let (dy, w) = (read(op, "dy", dy)?, read(op, "w", w)?);
    let (dy, w) = (dy.values()?, w.values()?);
    let low_rank = operands(op, low_rank)?;
    let low_rank = low_rank.as_ref().map(|(u, b)| Ok::<_, Error>((u.values()?, b.values()?)));
    let low_rank = low_rank.transpose()?;
    let dx = by_rows((n, k, k.max(m)), shape, dtype, |rows| {
        let dy = dy.part(span(&rows, m));
        let mut dx = new_product((rows.len(), k, m), Matrix::rows(dy, m), Matrix::rows(w, k));
        if let Some((u, b)) = low_rank {
            let u = u.part(span(&rows, rank));
            nn((rows.len(), k, rank), &mut dx, Store::Add, u, b);
        }
        dx
    })?;
    times(dx, factor)
}

/// Returns `dx + dy W`, `[N, K]`. It may reuse the memory of `dx`, so `dx` and its clones must not
/// be used afterwards.
pub fn linear_backward_input_add(dy: &Tensor, w: &Tensor, dx: Tensor) -> Result<Tensor> {
    let op = "linear_backward_input_add";
    let (n, m, k) = backward_shape(op, dy, w)?;
    compute_dtype(op, &[("dy", dy), ("w", w), ("dx", &dx)])?;
    expect_shape(op, "dx", &dx, &with_last(dy, k))?;
    cpu::distinct(op, "dx", &dx, &[("dy", dy), ("w", w)])?;
    if on_gpu(dy) {
        let gemm = Gemm::new(Transpose::Nn, (n, k, m), [("dy", dy), ("w", w)]);
        gemm.adding().into(op, "dx", &dx)?;
        return Ok(dx);
    }
    let (dy, w) = (read(op, "dy", dy)?, read(op, "w", w)?);
    let (dy, w) = (dy.values()?, w.values()?);
    if dx.dtype() == DType::F32 {
        cpu::write(op, "dx", &dx, |dx| nn((n, k, m), dx, Store::Add, dy, w))?;
        return Ok(dx);
    }
    let dx_read = read(op, "dx", &dx)?;
    let old = dx_read.values()?;
    by_rows((n, k, k.max(m)), dx.dims(), dx.dtype(), |rows| {
        let mut sum = old.view(span(&rows, k)).to_vec();
        nn((rows.len(), k, m), &mut sum, Store::Add, dy.part(span(&rows, m)), w);
        sum
    })
}

/// Adds the weight gradient `dy^T x` to `dw` (`f32`), which has the shape of the weight.
pub fn linear_backward_weight(x: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
    linear_backward_weight_into(x, dy, dw, Store::Add)
}

/// As [`linear_backward_weight`], but overwrites `dw` if `write` says so.
pub fn linear_backward_weight_into(
    x: &Tensor,
    dy: &Tensor,
    dw: &Tensor,
    write: Store,
) -> Result<()> {
    let op = "linear_backward_weight";
    let (n, m, k) = weight_shape(op, x, dy, dw)?;
    if on_gpu(x) {
        if n == 0 && write == Store::Overwrite {
            return fill_zero(dw);
        }
        let gemm = Gemm::new(Transpose::Tn, (m, k, n), [("dy", dy), ("x", x)]);
        let gemm = if write == Store::Add { gemm.adding() } else { gemm };
        return gemm.into(op, "dw", dw);
    }
    let (x, dy) = (read(op, "x", x)?, read(op, "dy", dy)?);
    let (x, dy) = (x.values()?, dy.values()?);
    cpu::write(op, "dw", dw, |dw| tn((m, k, n), dw, write, dy, x))
}

/// Checks the operands of a weight gradient and returns `(N, M, K)`.
pub(super) fn weight_shape(
    op: &str,
    x: &Tensor,
    dy: &Tensor,
    dw: &Tensor,
) -> Result<(usize, usize, usize)> {
    let ((n, k), (dy_n, m)) = (rows_of(op, "x", x)?, rows_of(op, "dy", dy)?);
    if n != dy_n {
        bail!(
            "{op}: `x` is {:?} and `dy` is {:?}: found {dy_n} rows in `dy`, expected {n}",
            x.dims(),
            dy.dims()
        );
    }
    compute_dtype(op, &[("x", x), ("dy", dy)])?;
    expect_f32(op, "dw", dw, dw.dims())?;
    if matrix_of(op, dw)? != (m, k) {
        bail!("{op}: `dw` is {:?}, expected [{m}, {k}]", dw.dims());
    }
    cpu::distinct(op, "dw", dw, &[("x", x), ("dy", dy)])?;
    Ok((n, m, k))
}

/// Adds the sum of the rows of `dy [N, M]` to `db [M]` (`f32`).
pub fn bias_backward(dy: &Tensor, db: &Tensor) -> Result<()> {
    let op = "bias_backward";
    let (_, m) = rows_of(op, "dy", dy)?;
    compute_dtype(op, &[("dy", dy)])?;
    expect_f32(op, "db", db, &[m])?;
    cpu::distinct(op, "db", db, &[("dy", dy)])?;
    if on_gpu(dy) {
        return sum_columns_on_gpu(op, dy, None, db);
    }
    let dy = read(op, "dy", dy)?;
    let dy = dy.values()?;
    add_rows(op, "db", Some(db), dy)
}

#[cfg(test)]
mod tests;
