use super::launch::{Launch, address, empty, vectors};
use super::rows::expect_u32;
use candle_core::{DType, Result, Tensor};

/// Number of positions that one block sorts, one per thread: `TILE` of the kernels.
const TILE: usize = 1024;
/// Number of sorted positions that one block sums: `STRETCH` of the kernels.
const STRETCH: usize = 64;

pub(crate) fn embedding(ids: &Tensor, w: &Tensor) -> Result<Tensor> {
    super::gather_rows(w, ids)
}

pub(crate) fn embedding_backward(ids: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
    add_by_row("embedding_backward", ids, None, dy, dw)
}

/// Returns the interpolated rows `[P, D]`, plus `x` if given.
pub(crate) fn interpolate_rows(
    op: &str,
    table: &Tensor,
    index: &Tensor,
    weight: &Tensor,
    x: Option<&Tensor>,
) -> Result<Tensor> {
    let ((n, d), p) = (table.dims2()?, index.dim(0)?);
    expect_u32(op, "index", index)?;
    let y = empty((p, d), table.dtype(), table)?;
    let mut rows = vec![table, &y];
    rows.extend(x);
    let kernel = kernel_name("interpolate_rows", vectors(d, &rows)?);
    let mut launch = Launch::new(&kernel, table.dtype()).grid(p.div_ceil(8)).threads(256);
    for (name, tensor) in [("table", table), ("index", index), ("weight", weight)] {
        launch = launch.address(address(op, name, tensor)?);
    }
    launch = launch.optional(op, "x", x)?.address(address(op, "y", &y)?);
    launch.int(n).int(p).int(d).run(table)?;
    Ok(y)
}

pub(crate) fn interpolate_rows_backward(
    index: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    dtable: &Tensor,
) -> Result<()> {
    add_by_row("interpolate_rows_backward", index, Some(weight), dy, dtable)
}

fn kernel_name(kernel: &str, chunks: bool) -> String {
    if chunks { kernel.to_owned() } else { format!("{kernel}_single") }
}

/// Adds `weight[i] * dy[i / taps]` to `table[ids[i]]` for each `i`, where `taps` is the number of
/// ids per row of `dy`.
fn add_by_row(
    op: &str,
    ids: &Tensor,
    weight: Option<&Tensor>,
    dy: &Tensor,
    table: &Tensor,
) -> Result<()> {
    let (n, (rows, d), num_rows) = (ids.elem_count(), dy.dims2()?, table.dim(0)?);
    expect_u32(op, "ids", ids)?;
    let (keys, from) = sorted(op, ids)?;
    let stretches = n.div_ceil(STRETCH);
    let carried = empty((stretches, d), DType::F32, dy)?;
    let chunks = vectors(d, &[dy, table, &carried])?;
    let columns = 64 * if chunks { 16 / dy.dtype().size_in_bytes() } else { 1 };
    let (keys, table_at) = (address(op, "keys", &keys)?, address(op, "table", table)?);
    Launch::new(&kernel_name("add_runs", chunks), dy.dtype())
        .grid3([stretches, d.div_ceil(columns), 1])
        .threads(64)
        .address(keys)
        .address(address(op, "from", &from)?)
        .optional(op, "weight", weight)?
        .address(address(op, "dy", dy)?)
        .address(table_at)
        .address(address(op, "carried", &carried)?)
        .int(n)
        .int(d)
        .int(num_rows)
        .int(n / rows.max(1))
        .run(dy)?;
    Launch::new("join_runs", DType::F32)
        .grid3([stretches.saturating_sub(1), d.div_ceil(256), 1])
        .threads(256)
        .address(keys)
        .address(address(op, "carried", &carried)?)
        .address(table_at)
        .int(n)
        .int(d)
        .int(num_rows)
        .run(dy)
}

/// Returns the ids in ascending order and their positions. Equal ids are in the order of their
/// positions.
fn sorted(op: &str, ids: &Tensor) -> Result<(Tensor, Tensor)> {
    let n = ids.elem_count();
    let pair =
        || Ok::<_, candle_core::Error>((empty(n, DType::U32, ids)?, empty(n, DType::U32, ids)?));
    let (tile_keys, tile_from) = pair()?;
    let tiles = n.div_ceil(TILE);
    Launch::new("sort_tiles", DType::F32)
        .grid(tiles)
        .threads(TILE as u32)
        .address(address(op, "ids", ids)?)
        .address(address(op, "keys", &tile_keys)?)
        .address(address(op, "from", &tile_from)?)
        .int(n)
        .run(ids)?;
    if tiles <= 1 {
        return Ok((tile_keys, tile_from));
    }
    let (keys, from) = pair()?;
    Launch::new("merge_tiles", DType::F32)
        .grid(tiles)
        .threads(TILE as u32)
        .address(address(op, "keys", &tile_keys)?)
        .address(address(op, "from", &tile_from)?)
        .address(address(op, "keys", &keys)?)
        .address(address(op, "from", &from)?)
        .int(n)
        .run(ids)?;
    Ok((keys, from))
}
