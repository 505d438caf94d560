//! Linear layers of experts: each row is multiplied with the weight of its expert.
//!
//! Shapes: `E` experts; `R` rows in the order of their experts, where expert `e` has rows
//! `offsets[e]..offsets[e + 1]` (`offsets [E + 1]`, `u32`); `K` inputs, `M` outputs; `x [R, K]`,
//! `y [R, M]`. The weight and its gradient, an `f32` buffer, are `[E, M, K]` or `[E, K, M]`. On the
//! CPU, forward also accepts `w` in `bf16` with `x` in `f32`.
//!
//! The bits of a row depend on the row and the weight of its expert only, and not on the number of
//! rows that the expert has. The gradient of an expert without rows is not touched.

use super::cpu::blocks::Values;
use super::cpu::grouped::{WeightLayout, add_outer_products, products};
use super::cpu::{self, compute_dtype, distinct, expect_f32, read, weighted_dtype};
use super::cuda::select::has_tensor_cores;
use super::launch::{Launch, can_be_checked, empty, launch, on_gpu, vectors};
use super::norm_geometry::MULTIPROCESSORS;
use super::rows::expect_u32;
use candle_core::{DType, Result, Tensor, bail};

/// Order of the dims of the weights of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertLayout {
    /// `[E, M, K]`: outputs, then inputs, as in a linear layer.
    OutIn,
    /// `[E, K, M]`: inputs, then outputs.
    InOut,
}

impl ExpertLayout {
    /// Returns `(M, K)` of a weight with the dims `(a, b)` of a matrix, and vice versa.
    fn out_in(self, (a, b): (usize, usize)) -> (usize, usize) {
        match self {
            Self::OutIn => (a, b),
            Self::InOut => (b, a),
        }
    }
}

/// Checks a weight or its gradient and `offsets`, and returns `(E, M, K)`.
fn matrices_of(
    op: &str,
    (name, w): (&str, &Tensor),
    layout: ExpertLayout,
    offsets: &Tensor,
) -> Result<(usize, usize, usize)> {
    let [e, a, b] = w.dims() else {
        let expected = if layout == ExpertLayout::OutIn { "[E, M, K]" } else { "[E, K, M]" };
        bail!("{op}: `{name}` is {:?}, expected {expected}", w.dims());
    };
    if offsets.dtype() != DType::U32 {
        bail!("{op}: `offsets` is {:?}, expected U32", offsets.dtype());
    }
    cpu::expect_shape(op, "offsets", offsets, &[e + 1])?;
    let (m, k) = layout.out_in((*a, *b));
    Ok((*e, m, k))
}

/// Checks that a matrix has `width` columns, and returns its number of rows.
fn rows_of(op: &str, name: &str, x: &Tensor, width: usize) -> Result<usize> {
    let (rows, found) = x.dims2()?;
    if found != width {
        bail!("{op}: `{name}` is {:?}: found {found} columns, expected {width}", x.dims());
    }
    Ok(rows)
}

/// Fails unless `offsets` ascend from 0 to `rows`. Does nothing on a GPU, where reading them would
/// wait for the device.
fn check_offsets(op: &'static str, offsets: &Tensor, rows: usize) -> Result<()> {
    if !can_be_checked(offsets) {
        return Ok(());
    }
    let offsets = read(op, "offsets", offsets)?;
    let offsets = offsets.slice::<u32>()?;
    let ascend = offsets.is_sorted() && offsets.first() == Some(&0);
    match offsets.last() {
        Some(last) if ascend && *last as usize == rows => Ok(()),
        _ => bail!("{op}: `offsets` is {offsets:?}, expected ascending rows from 0 to {rows}"),
    }
}

/// Returns the products of the rows of `x` with the weights of their experts, `[R, M]`.
pub fn grouped_linear(
    x: &Tensor,
    w: &Tensor,
    layout: ExpertLayout,
    offsets: &Tensor,
) -> Result<Tensor> {
    let op = "grouped_linear";
    let (_, m, k) = matrices_of(op, ("w", w), layout, offsets)?;
    let rows = rows_of(op, "x", x, k)?;
    let dtype = weighted_dtype(op, ("x", x), ("w", w))?;
    let stored = match layout {
        ExpertLayout::OutIn => WeightLayout::OfOutputs,
        ExpertLayout::InOut => WeightLayout::OfInputs,
    };
    multiply(op, [("x", x), ("w", w)], stored, offsets, (rows, m, k), dtype)
}

/// Returns the gradient of `x`, `[R, K]`, from that of the result, `dy: [R, M]`.
pub fn grouped_linear_backward_input(
    dy: &Tensor,
    w: &Tensor,
    layout: ExpertLayout,
    offsets: &Tensor,
) -> Result<Tensor> {
    let op = "grouped_linear_backward_input";
    let (_, m, k) = matrices_of(op, ("w", w), layout, offsets)?;
    let rows = rows_of(op, "dy", dy, m)?;
    let dtype = compute_dtype(op, &[("dy", dy), ("w", w)])?;
    let stored = match layout {
        ExpertLayout::OutIn => WeightLayout::OfInputs,
        ExpertLayout::InOut => WeightLayout::OfOutputs,
    };
    multiply(op, [("dy", dy), ("w", w)], stored, offsets, (rows, k, m), dtype)
}

fn multiply(
    op: &'static str,
    [(name, x), (w_name, w)]: [(&'static str, &Tensor); 2],
    stored: WeightLayout,
    offsets: &Tensor,
    (rows, n, k): (usize, usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    check_offsets(op, offsets, rows)?;
    if on_gpu(x) {
        compute_dtype(op, &[(name, x), (w_name, w)])?;
        return products_on_gpu(op, [(name, x), (w_name, w)], stored, offsets, (rows, n, k));
    }
    let (x, w, offsets) = (read(op, name, x)?, read(op, w_name, w)?, read(op, "offsets", offsets)?);
    let offsets = offsets.slice::<u32>()?;
    let (x, w): (Values<'_>, Values<'_>) = (x.values()?, w.values()?);
    products((n, k), offsets, x, (w, stored), dtype).tensor((rows, n))
}

/// Adds the gradient of the weights to `dw` (`f32`), which has their shape, from `x: [R, K]` and
/// the gradient of the result, `dy: [R, M]`.
pub fn grouped_linear_backward_weight(
    x: &Tensor,
    dy: &Tensor,
    layout: ExpertLayout,
    offsets: &Tensor,
    dw: &Tensor,
) -> Result<()> {
    let op = "grouped_linear_backward_weight";
    let (_, m, k) = matrices_of(op, ("dw", dw), layout, offsets)?;
    let (rows, dy_rows) = (rows_of(op, "x", x, k)?, rows_of(op, "dy", dy, m)?);
    if rows != dy_rows {
        bail!("{op}: found {dy_rows} rows in `dy`, expected {rows} as in `x`");
    }
    compute_dtype(op, &[("x", x), ("dy", dy)])?;
    expect_f32(op, "dw", dw, dw.dims())?;
    distinct(op, "dw", dw, &[("x", x), ("dy", dy)])?;
    let [a, b] = match layout {
        ExpertLayout::OutIn => [("dy", dy), ("x", x)],
        ExpertLayout::InOut => [("x", x), ("dy", dy)],
    };
    check_offsets(op, offsets, rows)?;
    if on_gpu(x) {
        return add_outer_products_on_gpu(op, [a, b], offsets, dw);
    }
    let offsets = read(op, "offsets", offsets)?;
    let offsets = offsets.slice::<u32>()?;
    let (size, [a, b]) = ((a.1.dim(1)?, b.1.dim(1)?), [read(op, a.0, a.1)?, read(op, b.0, b.1)?]);
    let (a, b) = (a.values()?, b.values()?);
    cpu::write(op, "dw", dw, |dw| add_outer_products(size, offsets, a, b, dw))
}

/// Number of rows and columns of a tile, of threads, and of bytes of shared memory of the kernels
/// for tensor cores: two blocks share a multiprocessor.
const TILE: [usize; 2] = [128, 128];
const TILE_THREADS: u32 = 128;
const STAGES: usize = 3 * 2 * 64 * 256;
/// The same of the plain kernels. They have no dynamic shared memory besides the list of experts.
const PLAIN_TILE: [usize; 2] = [64, 64];
const PLAIN_THREADS: u32 = 256;
/// Number of blocks. They take tile after tile, so results do not depend on it.
const BLOCKS: usize = 2 * MULTIPROCESSORS;
const PLAIN_BLOCKS: usize = 4 * MULTIPROCESSORS;
/// Maximum number of experts: their list is in shared memory.
const MAX_EXPERTS: usize = 2048;

/// Number of blocks for `rows` rows of `e` experts: as many as there can be tiles, up to `most`.
fn blocks(rows: usize, e: usize, columns: usize, tile: [usize; 2], most: usize) -> usize {
    let row_tiles = (rows / tile[0] + e).min(rows);
    (row_tiles * columns.div_ceil(tile[1])).min(most)
}

/// Whether the kernels for tensor cores handle these matrices, with their numbers of columns, and
/// the GPU has `shared` bytes for a block.
fn are_fast(matrices: &[(&Tensor, usize)], shared: usize) -> Result<bool> {
    for (matrix, columns) in matrices {
        if !vectors(*columns, &[matrix])? {
            return Ok(false);
        }
    }
    let first = matrices[0].0;
    Ok(first.dtype() == DType::BF16 && has_tensor_cores(first.device(), shared)?)
}

/// Returns the products of the rows of `x [rows, k]` with the matrices of their experts,
/// `[rows, n]`.
fn products_on_gpu(
    op: &'static str,
    [(name, x), (w_name, w)]: [(&str, &Tensor); 2],
    stored: WeightLayout,
    offsets: &Tensor,
    (rows, n, k): (usize, usize, usize),
) -> Result<Tensor> {
    let e = experts(op, w, offsets)?;
    let y = empty((rows, n), x.dtype(), x)?;
    let w_columns = if stored == WeightLayout::OfOutputs { k } else { n };
    let list = 4 * (e + 1);
    let fast = are_fast(&[(x, k), (w, w_columns), (&y, n)], STAGES + list)?;
    let launch = match (fast, stored) {
        (true, WeightLayout::OfOutputs) => Launch::new("grouped_of_outputs", x.dtype()),
        (true, WeightLayout::OfInputs) => Launch::new("grouped_of_inputs", x.dtype()),
        (false, _) => Launch::new("grouped_plain", x.dtype()),
    };
    let launch = if fast {
        launch.grid(blocks(rows, e, n, TILE, BLOCKS)).threads(TILE_THREADS).shared(STAGES + list)
    } else {
        let blocks = blocks(rows, e, n, PLAIN_TILE, PLAIN_BLOCKS);
        launch.grid(blocks).threads(PLAIN_THREADS).shared(list)
    };
    if fast {
        launch!(op, launch; (name, x), (w_name, w), offsets, y, e, n, k)?;
    } else {
        let of_inputs = stored == WeightLayout::OfInputs;
        launch!(op, launch; (name, x), (w_name, w), offsets, y, e, n, k, of_inputs)?;
    }
    Ok(y)
}

/// Adds `a^T b` of the rows of each expert to its matrix of `dw [e, m, n]`.
fn add_outer_products_on_gpu(
    op: &'static str,
    [(a_name, a), (b_name, b)]: [(&str, &Tensor); 2],
    offsets: &Tensor,
    dw: &Tensor,
) -> Result<()> {
    let e = experts(op, dw, offsets)?;
    let (rows, m) = a.dims2()?;
    let n = b.dim(1)?;
    if rows == 0 {
        return Ok(());
    }
    let fast = are_fast(&[(a, m), (b, n), (dw, n)], STAGES)?;
    let tiles = |tile: [usize; 2]| e * m.div_ceil(tile[0]) * n.div_ceil(tile[1]);
    let launch = if fast {
        let blocks = tiles(TILE).min(BLOCKS);
        Launch::new("grouped_outer", a.dtype()).grid(blocks).threads(TILE_THREADS).shared(STAGES)
    } else {
        let blocks = tiles(PLAIN_TILE).min(PLAIN_BLOCKS);
        Launch::new("grouped_outer_plain", a.dtype()).grid(blocks).threads(PLAIN_THREADS)
    };
    launch!(op, launch; (a_name, a), (b_name, b), offsets, dw, e, m, n)
}

/// Returns `E` of a weight or its gradient.
fn experts(op: &str, w: &Tensor, offsets: &Tensor) -> Result<usize> {
    expect_u32(op, "offsets", offsets)?;
    match w.dim(0)? {
        e if e <= MAX_EXPERTS => Ok(e),
        e => bail!("{op}: found {e} experts, expected at most {MAX_EXPERTS} on a GPU"),
    }
}

#[cfg(test)]
mod tests;
