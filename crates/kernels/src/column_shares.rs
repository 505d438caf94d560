//! Column sums of kernels: the gradients of norms, biases and convolutions. Each block of a kernel
//! writes a partial sum, a share, and `columns.cu` adds the shares in their order.

use super::launch::{
    Arrays, KernelArgument, Launch, THREADS, address, empty, launch, on_gpu, vectors,
};
use super::norm_geometry::WARP;
use candle_core::{DType, Result, Tensor, TensorId};
use std::cell::RefCell;

/// Gradients of a launch, as in `columns.cu`.
const MOST_SUMS: usize = 32;

/// The gradients of a [`join_column_sums`], and the shares that are not yet added to them.
#[derive(Default)]
struct Joined {
    grads: Vec<TensorId>,
    waiting: Vec<(Tensor, Tensor)>,
}

thread_local! {
    static JOINED: RefCell<Joined> = RefCell::default();
}

/// Calls `backward`, which adds column sums to tensors of `grads` and does not read them. A GPU
/// adds them in one launch at the end, instead of a launch for each. The bits are the same.
pub fn join_column_sums<T>(grads: &[&Tensor], backward: impl FnOnce() -> Result<T>) -> Result<T> {
    if !grads.first().is_some_and(|grad| on_gpu(grad)) {
        return backward();
    }
    let grads = grads.iter().map(|grad| grad.id()).collect();
    let outer = JOINED.replace(Joined { grads, waiting: Vec::new() });
    let result = backward();
    let Joined { waiting, .. } = JOINED.replace(outer);
    let result = result?;
    add_columns("join_column_sums", &waiting)?;
    Ok(result)
}

/// Adds shares `[N, D]` to distinct gradients `[D]`. The order of the additions depends on `N` only.
fn add_columns(op: &str, all: &[(Tensor, Tensor)]) -> Result<()> {
    for all in all.chunks(MOST_SUMS) {
        let mut list = Arrays::new(MOST_SUMS);
        list.longs(all.iter().map(|(shares, _)| Ok(address(op, "shares", shares)?.0)))?;
        list.longs(all.iter().map(|(_, sums)| Ok(address(op, "sums", sums)?.0)))?;
        list.halves(MOST_SUMS, all.iter().map(|(shares, _)| shares.dims()[0] as u32));
        list.halves(MOST_SUMS, all.iter().map(|(shares, _)| shares.dims()[1] as u32));
        let widths = all.iter().map(|(shares, _)| shares.dims()[1].div_ceil(WARP));
        let (list, blocks) = list.with_blocks(widths);
        let launch = Launch::new("add_columns", DType::F32).grid(blocks).threads(1024);
        launch!(op, launch.on(&all[0].0); list, all.len())?;
    }
    Ok(())
}

/// The shares that a kernel writes, `[N, D]`, and the gradient that they are added to. Nothing
/// without a gradient.
pub(super) struct ColumnShares<'a>(Option<(Tensor, &'a Tensor)>);

impl<'a> ColumnShares<'a> {
    pub(super) fn new(sums: Option<&'a Tensor>, n: usize, d: usize) -> Result<Self> {
        let shares = sums.map(|sums| empty((n, d), DType::F32, sums)).transpose()?;
        Ok(Self(shares.zip(sums)))
    }

    /// Adds the shares to the gradient, now or at the end of a [`join_column_sums`].
    pub(super) fn add(self, op: &str) -> Result<()> {
        let Some((shares, sums)) = self.0 else { return Ok(()) };
        let added = (shares, sums.clone());
        JOINED.with_borrow_mut(|Joined { grads, waiting }| {
            if !grads.contains(&sums.id()) {
                return add_columns(op, &[added]);
            }
            // A gradient has one place in a launch.
            if waiting.iter().any(|(_, other)| other.id() == sums.id()) {
                add_columns(op, &std::mem::take(waiting))?;
            }
            waiting.push(added);
            Ok(())
        })
    }
}

/// Number of columns of `dy` of a block of `bias.cu`, number of rows of a partial sum, and maximum
/// number of partial sums.
const SHARE_COLUMNS: usize = 256;
const SHARE_ROWS: usize = 64;
const MAX_SHARES: usize = 64;

/// Adds the sum of the rows of `dy [N, M]`, or of `dy * f`, to `sums [M]` on a GPU.
pub(super) fn sum_columns_on_gpu(
    op: &'static str,
    dy: &Tensor,
    f: Option<&Tensor>,
    sums: &Tensor,
) -> Result<()> {
    let (n, m) = dy.dims2()?;
    // Each share has its own rows. The number of shares depends on that of the rows only, so the
    // result does too.
    let num_shares = n.div_ceil(SHARE_ROWS).min(MAX_SHARES);
    let shares = ColumnShares::new(Some(sums), num_shares, m)?;
    let name = if f.is_some() { "product_shares" } else { "bias_shares" };
    let launch = Launch::new(name, dy.dtype()).threads(THREADS);
    let launch = launch.grid3([m.div_ceil(SHARE_COLUMNS), num_shares, 1]);
    let vectors = vectors(m, &[dy, f.unwrap_or(dy)])?;
    match f {
        Some(f) => launch!(op, launch; dy, f, shares, n, m, vectors)?,
        None => launch!(op, launch; dy, shares, n, m, vectors)?,
    }
    shares.add(op)
}

impl KernelArgument for ColumnShares<'_> {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        self.0.as_ref().map(|(shares, _)| shares).add_to(launch, of)
    }
}
