//! Launches of `rows.cu`.

use super::launch::{Launch, address, empty, vectors};
use candle_core::{DType, Result, Tensor, bail};

const THREADS: u32 = 256;
/// Rows of a block: one a warp.
const ROWS: usize = 8;

/// Fails unless `ids` are of the type that kernels read.
pub(super) fn expect_u32(op: &str, name: &str, ids: &Tensor) -> Result<()> {
    match ids.dtype() {
        DType::U32 => Ok(()),
        dtype => bail!("{op}: `{name}` is {dtype:?}, expected U32"),
    }
}

/// Runs `op` with one warp for each of `rows`; the kernel takes `x`, `rows` and `other`.
fn run(op: &str, x: &Tensor, rows: &Tensor, other: Option<(&str, &Tensor)>) -> Result<()> {
    let ((t, d), m) = (x.dims2()?, rows.dims1()?);
    expect_u32(op, "rows", rows)?;
    let mut moved = vec![x];
    moved.extend(other.map(|(_, tensor)| tensor));
    let kernel = if vectors(d, &moved)? { op.to_owned() } else { format!("{op}_single") };
    let mut launch = Launch::new(&kernel, x.dtype()).grid(m.div_ceil(ROWS)).threads(THREADS);
    launch = launch.address(address(op, "x", x)?).address(address(op, "rows", rows)?);
    if let Some((name, other)) = other {
        launch = launch.address(address(op, name, other)?);
    }
    launch.int(t).int(m).int(d).run(x)
}

pub(in crate::ops) fn gather_rows(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let y = empty((rows.dims1()?, x.dim(1)?), x.dtype(), x)?;
    run("gather_rows", x, rows, Some(("y", &y)))?;
    Ok(y)
}

/// `op` is `index_copy` or `index_add`.
pub(in crate::ops) fn update_rows(op: &str, x: &Tensor, rows: &Tensor, src: &Tensor) -> Result<()> {
    run(op, x, rows, Some(("src", src)))
}

pub(in crate::ops) fn zero_rows(x: &Tensor, rows: &Tensor) -> Result<()> {
    run("zero_rows", x, rows, None)
}
