//! Launches of the kernels in `grouped.cu` (tensor cores) and `grouped_plain.cu`.

use super::launch::{Launch, address, empty, vectors};
use super::norm::MULTIPROCESSORS;
use super::rows::expect_u32;
use super::select::has_tensor_cores;
use crate::cpu::compute_dtype;
use crate::cpu::grouped::WeightLayout;
use candle_core::{DType, Result, Tensor, bail};

/// Number of rows and columns of a tile, of threads, and of bytes of shared memory of the kernels
/// for tensor cores: two blocks share a multiprocessor.
const TILE: [usize; 2] = [128, 128];
const THREADS: u32 = 128;
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
pub(crate) fn grouped_products(
    op: &'static str,
    [(name, x), (w_name, w)]: [(&'static str, &Tensor); 2],
    stored: WeightLayout,
    offsets: &Tensor,
    (rows, n, k): (usize, usize, usize),
) -> Result<Tensor> {
    compute_dtype(op, &[(name, x), (w_name, w)])?;
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
        launch.grid(blocks(rows, e, n, TILE, BLOCKS)).threads(THREADS).shared(STAGES + list)
    } else {
        let blocks = blocks(rows, e, n, PLAIN_TILE, PLAIN_BLOCKS);
        launch.grid(blocks).threads(PLAIN_THREADS).shared(list)
    };
    let launch = launch
        .address(address(op, name, x)?)
        .address(address(op, w_name, w)?)
        .address(address(op, "offsets", offsets)?)
        .address(address(op, "y", &y)?)
        .int(e)
        .int(n)
        .int(k);
    let launch = if fast { launch } else { launch.flag(stored == WeightLayout::OfInputs) };
    launch.run(x)?;
    Ok(y)
}

/// Adds `a^T b` of the rows of each expert to its matrix of `dw [e, m, n]`.
pub(crate) fn add_grouped_outer_products(
    op: &'static str,
    [(a_name, a), (b_name, b)]: [(&'static str, &Tensor); 2],
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
        Launch::new("grouped_outer", a.dtype()).grid(blocks).threads(THREADS).shared(STAGES)
    } else {
        let blocks = tiles(PLAIN_TILE).min(PLAIN_BLOCKS);
        Launch::new("grouped_outer_plain", a.dtype()).grid(blocks).threads(PLAIN_THREADS)
    };
    launch
        .address(address(op, a_name, a)?)
        .address(address(op, b_name, b)?)
        .address(address(op, "offsets", offsets)?)
        .address(address(op, "dw", dw)?)
        .int(e)
        .int(m)
        .int(n)
        .run(a)
}

/// Returns `E` of a weight or its gradient.
fn experts(op: &str, w: &Tensor, offsets: &Tensor) -> Result<usize> {
    expect_u32(op, "offsets", offsets)?;
    match w.dim(0)? {
        e if e <= MAX_EXPERTS => Ok(e),
        e => bail!("{op}: found {e} experts, expected at most {MAX_EXPERTS} on a GPU"),
    }
}
