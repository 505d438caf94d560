//! Thread geometry of `rms_norm.cu` and `layer_norm.cu`.

use super::launch::{Launch, vectors};
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
    is_wide: bool,
    warps: usize,
    groups: usize,
    blocks: usize,
}

/// Number of columns per thread.
fn columns(pass: Pass) -> usize {
    COLUMNS[usize::from(pass != Pass::Forward)]
}

/// Maximum number of columns that the registers of a block hold.
fn most_columns(pass: Pass, chunks: bool) -> usize {
    let max_threads = match pass {
        Pass::Backward { resident } if chunks => resident,
        _ => MAX_THREADS,
    };
    columns(pass) * max_threads
}

impl Geometry {
    /// Fails if a row is too long for the registers of one block. `rows` lists the operands whose rows
    /// are accessed.
    pub(super) fn new(op: &str, pass: Pass, n: usize, d: usize, rows: &[&Tensor]) -> Result<Self> {
        let geometry = Self::of_any_width(pass, n, d, rows)?;
        if geometry.is_wide {
            let most = most_columns(pass, geometry.chunks);
            bail!("{op}: rows have {d} columns, but a block supports at most {most}");
        }
        Ok(geometry)
    }

    /// For ops with kernels for rows of any length, whose names end in `_wide`.
    pub(super) fn of_any_width(pass: Pass, n: usize, d: usize, rows: &[&Tensor]) -> Result<Self> {
        let chunks = vectors(d, rows)?;
        if d > most_columns(pass, chunks) {
            let most = if pass == Pass::Forward { n } else { MULTIPROCESSORS };
            let warps = MAX_THREADS / WARP;
            return Ok(Self { chunks, is_wide: true, warps, groups: 1, blocks: n.min(most) });
        }
        let warps = d.div_ceil(columns(pass) * WARP).max(1);
        let groups = (8 / warps).max(1);
        let threads = groups * warps * WARP;
        let most = match pass {
            Pass::Forward => n,
            Pass::Backward { resident } => MULTIPROCESSORS * (resident / threads).max(1),
        };
        let blocks = n.div_ceil(groups).min(most);
        Ok(Self { chunks, is_wide: false, warps, groups, blocks })
    }

    /// Number of partial column sums, one per group of warps.
    pub(super) fn shares(self) -> usize {
        self.blocks * self.groups
    }

    /// Returns the launch of the kernel, without arguments.
    pub(super) fn launch(self, kernel: &str, dtype: DType) -> Launch {
        let wide = if self.is_wide { "_wide" } else { "" };
        let single = if self.chunks { "" } else { "_single" };
        Launch::new(&format!("{kernel}{wide}{single}"), dtype)
            .grid(self.blocks)
            .threads((self.groups * self.warps * WARP) as u32)
    }

    /// Number of warps per row.
    pub(super) fn warps(self) -> usize {
        self.warps
    }
}
