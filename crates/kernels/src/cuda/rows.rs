use super::launch::{Launch, address, empty, rows_at, vectors};
use candle_core::{DType, Result, Tensor, bail};

const THREADS: u32 = 256;
/// Number of rows per block, one per warp.
const ROWS: usize = 8;

/// Fails unless `ids` is `u32`.
pub(super) fn expect_u32(op: &str, name: &str, ids: &Tensor) -> Result<()> {
    match ids.dtype() {
        DType::U32 => Ok(()),
        dtype => bail!("{op}: `{name}` is {dtype:?}, expected U32"),
    }
}

/// Launches kernel `op` with one warp for each of `rows`. Its arguments are `x`, `rows` and
/// `other`.
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

pub(crate) fn gather_rows(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let y = empty((rows.dims1()?, x.dim(1)?), x.dtype(), x)?;
    run("gather_rows", x, rows, Some(("y", &y)))?;
    Ok(y)
}

/// Copies the rows of `from [N, M]` to those of `to`. Both may be columns of a wider matrix.
pub(crate) fn copy_columns(from: &Tensor, to: &Tensor) -> Result<()> {
    let (op, (n, d)) = ("copy_columns", from.dims2()?);
    let ((x, x_stride), (y, y_stride)) = (rows_at(op, "from", from)?, rows_at(op, "to", to)?);
    let mut wide = true;
    for elements in [d, x_stride, y_stride] {
        wide &= vectors(elements, &[from, to])?;
    }
    let kernel = if wide { op } else { "copy_columns_single" };
    let launch = Launch::new(kernel, from.dtype()).grid(n.div_ceil(ROWS)).threads(THREADS);
    launch.address(x).address(y).int(n).int(d).int(x_stride).int(y_stride).run(from)
}

pub(crate) fn own_columns(x: &Tensor) -> Result<Tensor> {
    let y = empty(x.shape(), x.dtype(), x)?;
    copy_columns(x, &y)?;
    Ok(y)
}

/// `op` is `index_copy` or `index_add`, which are also the names of the kernels.
pub(crate) fn update_rows(op: &str, x: &Tensor, rows: &Tensor, src: &Tensor) -> Result<()> {
    run(op, x, rows, Some(("src", src)))
}

pub(crate) fn zero_rows(x: &Tensor, rows: &Tensor) -> Result<()> {
    run("zero_rows", x, rows, None)
}
