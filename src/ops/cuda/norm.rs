//! How rows are dealt out to threads in `rms_norm.cu` and `layer_norm.cu`, and the sums of their shares.

use super::launch::{Launch, address, vectors};
use candle_core::{DType, Result, Tensor, bail};

pub(super) const WARP: usize = 32;
/// Columns that a thread holds, forward and backward: `FORWARD` and `BACKWARD` of `held_rows.cuh`.
const COLUMNS: [usize; 2] = [16, 8];
/// Threads of a block, forward and backward: `__launch_bounds__` of the kernels.
const MAX_THREADS: [usize; 2] = [512, 768];
/// As [`MAX_THREADS`], of kernels that move single elements.
const MAX_THREADS_SINGLE: [usize; 2] = [512, 512];
/// Of an H200. Fixed, since it decides the order of sums.
pub(super) const MULTIPROCESSORS: usize = 132;

/// What becomes of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// A block has some rows.
    Forward,
    /// As many blocks as run at once walk over the rows.
    Backward {
        /// Threads for whose registers a multiprocessor has room.
        resident: usize,
    },
}

/// Blocks and threads for `n` rows of `d` columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    chunks: bool,
    warps: usize,
    groups: usize,
    blocks: usize,
}

impl Geometry {
    /// Fails where a row is too long for one block; `rows` are the operands whose rows are read or written.
    pub(super) fn new(op: &str, pass: Pass, n: usize, d: usize, rows: &[&Tensor]) -> Result<Self> {
        let chunks = vectors(d, rows)?;
        let index = usize::from(pass != Pass::Forward);
        let columns = COLUMNS[index];
        let max_threads = if chunks { MAX_THREADS } else { MAX_THREADS_SINGLE }[index];
        if d > columns * max_threads {
            bail!(
                "{op}: rows have {d} columns, but a block takes {} at most",
                columns * max_threads
            );
        }
        let warps = d.div_ceil(columns * WARP).max(1);
        let groups = (8 / warps).max(1);
        let threads = groups * warps * WARP;
        let most = match pass {
            Pass::Forward => n,
            Pass::Backward { resident } => MULTIPROCESSORS * (resident / threads).max(1),
        };
        Ok(Self { chunks, warps, groups, blocks: n.div_ceil(groups).min(most) })
    }

    /// Rows that the groups' shares of a column sum take.
    pub(super) fn shares(self) -> usize {
        self.blocks * self.groups
    }

    /// The launch of the kernel for these rows; its arguments are missing.
    pub(super) fn launch(self, kernel: &str, dtype: DType) -> Launch {
        let kernel = if self.chunks { kernel.to_owned() } else { format!("{kernel}_single") };
        Launch::new(&kernel, dtype)
            .grid(self.blocks)
            .threads((self.groups * self.warps * WARP) as u32)
    }

    /// Warps that have one row.
    pub(super) fn warps(self) -> usize {
        self.warps
    }
}

/// `sums [D] += ` the column sums of `shares [N, D]`, in an order that `N` alone decides.
pub(super) fn add_columns(op: &str, shares: &Tensor, sums: &Tensor) -> Result<()> {
    let (n, d) = shares.dims2()?;
    Launch::new("add_columns", DType::F32)
        .grid(d.div_ceil(WARP))
        .threads(1024)
        .address(address(op, "shares", shares)?)
        .address(address(op, "sums", sums)?)
        .int(n)
        .int(d)
        .run(shares)
}
