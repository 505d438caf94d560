//! Thread geometry of `rms_norm.cu` and `layer_norm.cu`, and the partial column sums of kernels.

use super::launch::{KernelArgument, Launch, empty, launch, vectors};
use candle_core::{DType, Result, Tensor, bail};

pub(super) const WARP: usize = 32;
/// Number of columns per thread, forward and backward: `FORWARD` and `BACKWARD` in `held_rows.cuh`.
const COLUMNS: [usize; 2] = [16, 8];
/// Maximum number of threads per block: `__launch_bounds__` of the kernels. A backward kernel that
/// accesses chunks allows as many as are [resident](Pass::Backward).
const MAX_THREADS: usize = 512;
/// Number of multiprocessors of an H200. Fixed on all GPUs, because it determines the order of
/// sums.
pub(super) const MULTIPROCESSORS: usize = 132;

/// How blocks iterate over rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// Each block processes its own rows once.
    Forward,
    /// As many blocks as run concurrently, each iterating over rows.
    Backward {
        /// Number of threads for which a multiprocessor has registers, and which a block may have.
        resident: usize,
    },
}

/// Number of blocks and threads for `n` rows of `d` columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    chunks: bool,
    warps: usize,
    groups: usize,
    blocks: usize,
}

impl Geometry {
    /// Fails if a row is too long for one block. `rows` lists the operands whose rows are accessed.
    pub(super) fn new(op: &str, pass: Pass, n: usize, d: usize, rows: &[&Tensor]) -> Result<Self> {
        let chunks = vectors(d, rows)?;
        let columns = COLUMNS[usize::from(pass != Pass::Forward)];
        let max_threads = match pass {
            Pass::Backward { resident } if chunks => resident,
            _ => MAX_THREADS,
        };
        if d > columns * max_threads {
            bail!(
                "{op}: rows have {d} columns, but a block supports at most {}",
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

    /// Number of partial column sums, one per group of warps.
    pub(super) fn shares(self) -> usize {
        self.blocks * self.groups
    }

    /// Returns the launch of the kernel, without arguments.
    pub(super) fn launch(self, kernel: &str, dtype: DType) -> Launch {
        let kernel = if self.chunks { kernel.to_owned() } else { format!("{kernel}_single") };
        Launch::new(&kernel, dtype)
            .grid(self.blocks)
            .threads((self.groups * self.warps * WARP) as u32)
    }

    /// Number of warps per row.
    pub(super) fn warps(self) -> usize {
        self.warps
    }
}

/// Partial column sums that a kernel writes, `[N, D]`, and the gradient that they are added to.
/// Nothing without a gradient.
pub(super) struct ColumnShares<'a>(Option<(Tensor, &'a Tensor)>);

impl<'a> ColumnShares<'a> {
    pub(super) fn new(sums: Option<&'a Tensor>, n: usize, d: usize) -> Result<Self> {
        let shares = sums.map(|sums| empty((n, d), DType::F32, sums)).transpose()?;
        Ok(Self(shares.zip(sums)))
    }

    /// Adds the sums of the columns. The order of the additions depends on `N` only.
    pub(super) fn add(&self, op: &str) -> Result<()> {
        let Some((shares, sums)) = &self.0 else { return Ok(()) };
        let (n, d) = shares.dims2()?;
        let launch = Launch::new("add_columns", DType::F32).grid(d.div_ceil(WARP)).threads(1024);
        launch!(op, launch; shares, sums, n, d)
    }
}

impl KernelArgument for ColumnShares<'_> {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        self.0.as_ref().map(|(shares, _)| shares).add_to(launch, of)
    }
}
