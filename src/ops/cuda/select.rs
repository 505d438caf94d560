//! Selects the kernels for a GPU. Every choice that depends on the compute capability or on the shared
//! memory of a GPU is made here.

use candle_core::{DType, Device, Result, bail};

/// Minimum compute capability for the bf16 tensor-core kernels.
const SM80: (u32, u32) = (8, 0);
/// Number of own rows (queries or keys) of a block of the tensor-core kernels.
const ROWS: usize = 128;
/// Number of own rows of a block of the plain kernels, and of other rows in a tile.
pub(super) const PLAIN_ROWS: usize = 32;
/// Number of threads of a block of the plain kernels and of the row-product kernel.
pub(super) const PLAIN_THREADS: u32 = 256;
/// Number of keys in a tile of the forward pass.
const FORWARD_KEYS: usize = 64;
/// Maximum head dim of the plain kernels.
const MAX_DIM: usize = 256;

/// Properties of a GPU that the choice of kernels depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gpu {
    /// Compute capability, major and minor.
    pub(super) capability: (u32, u32),
    /// Maximum number of bytes of shared memory of a block.
    pub(super) shared_bytes: usize,
    /// Number of bytes of shared memory of a multiprocessor.
    pub(super) shared_bytes_of_all: usize,
}

impl Gpu {
    /// Reads the properties of the GPU behind `device`.
    #[cfg(feature = "cuda")]
    pub(super) fn of(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("found operands on the CPU, expected a GPU")
        };
        let capability = super::module::capability(device)?;
        let (shared_bytes, shared_bytes_of_all) =
            (super::module::shared_bytes(device)?, super::module::shared_bytes_of_all(device)?);
        Ok(Self { capability, shared_bytes, shared_bytes_of_all })
    }

    /// The emulated GPU is an A100.
    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unnecessary_wraps, reason = "same signature as with the feature `cuda`")]
    pub(super) fn of(_: &Device) -> Result<Self> {
        Ok(Self::A100)
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) const A100: Self =
        Self { capability: SM80, shared_bytes: 163 << 10, shared_bytes_of_all: 164 << 10 };

    /// Whether two blocks of a kernel have room on a multiprocessor. CUDA itself needs 1 KiB of a
    /// block.
    fn holds_two(self, bytes: usize) -> bool {
        2 * (bytes + 1024) <= self.shared_bytes_of_all
    }
}

/// Side whose rows a block owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Own {
    Queries,
    Keys,
}

/// Kernels and shared-memory layout of an attention call.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionKernels {
    gpu: Gpu,
    /// Padded head dim of the tensor-core kernel; `None` for the plain kernel.
    padded: Option<usize>,
    /// Number of bytes of a row in shared memory.
    row_bytes: usize,
}

impl AttentionKernels {
    /// Selects the tensor-core kernels for heads of `dh` values of `dtype` where they exist, else the
    /// plain kernels. Returns an error if `dh` is too large for both.
    pub(super) fn choose(op: &str, dtype: DType, dh: usize, gpu: Gpu) -> Result<Self> {
        if dh > MAX_DIM {
            bail!("{op}: the head dim is {dh}, expected at most {MAX_DIM} on a GPU");
        }
        let tensor_cores = gpu.capability >= SM80 && dtype == DType::BF16;
        if !tensor_cores || !dh.is_multiple_of(8) || dh > 128 {
            return Ok(Self { gpu, padded: None, row_bytes: 4 * (dh | 1) });
        }
        // Same as `Rows` in attention.cuh: rows of 80 columns are padded, the others permuted.
        let (padded, row_bytes) = match dh {
            0..=64 => (64, 128),
            65..=80 => (80, 176),
            _ => (128, 256),
        };
        Ok(Self { gpu, padded: Some(padded), row_bytes })
    }

    /// Number of own rows of a block.
    pub(super) fn rows(self) -> usize {
        if self.padded.is_some() { ROWS } else { PLAIN_ROWS }
    }

    /// Kernel name for a pass.
    pub(super) fn name(self, name: &str) -> String {
        match self.padded {
            Some(padded) => format!("{name}_d{padded}"),
            None => format!("{name}_plain"),
        }
    }

    /// Kernel name, number of threads and bytes of shared memory of a forward block.
    pub(super) fn forward(self) -> (String, u32, usize) {
        let name = self.name("attention_forward");
        match self.padded {
            Some(padded) => {
                let bytes = (ROWS + 3 * FORWARD_KEYS) * self.row_bytes;
                // Two blocks of the smallest have room on every GPU.
                self.two_or_one(name, bytes, padded > 64)
            }
            None => (name, PLAIN_THREADS, 3 * PLAIN_ROWS * self.row_bytes + 4 * PLAIN_ROWS * 32),
        }
    }

    /// The kernel with four warps, of which two blocks share a multiprocessor, or the one with eight
    /// if `has_single` and there is room for one block only.
    fn two_or_one(self, name: String, bytes: usize, has_single: bool) -> (String, u32, usize) {
        if has_single && !self.gpu.holds_two(bytes) {
            (format!("{name}_single"), 256, bytes)
        } else {
            (name, 128, bytes)
        }
    }

    /// Kernel name, number of threads and bytes of shared memory of a backward block. The sizes match
    /// the shapes in `attention_backward.cu`.
    pub(super) fn backward(self, own: Own) -> (String, u32, usize) {
        let name = match own {
            Own::Keys => self.name("attention_backward_keys"),
            Own::Queries => self.name("attention_backward_queries"),
        };
        let (threads, others) = match (self.padded, own) {
            (None, _) => {
                let tiles = 4 * PLAIN_ROWS * self.row_bytes;
                return (name, PLAIN_THREADS, tiles + 2 * 4 * PLAIN_ROWS * 32);
            }
            (Some(64), Own::Keys) => (128, 32),
            (Some(_), Own::Keys) => (256, 64),
            (Some(64), Own::Queries) => (128, 64),
            (Some(_), Own::Queries) => (128, 32),
        };
        // Two tiles of own rows, two stages of two tiles of other rows, and two stages of `lse` and
        // `delta`. Where two warps share rows, the blocks also exchange `p` and `ds` of a tile.
        let bytes = |others| (2 * ROWS + 4 * others) * self.row_bytes + 4 * others * 4;
        if own == Own::Queries {
            return self.two_or_one(name, bytes(others), true);
        }
        if self.padded != Some(128) {
            return (name, threads, bytes(others));
        }
        let shared = bytes(others) + 4 * ROWS * others;
        if shared <= self.gpu.shared_bytes {
            (name, threads, shared)
        } else {
            (format!("{name}_less"), threads, bytes(32))
        }
    }
}

/// Name of the attention kernel for heads of dim `dh` on `device`, for logs.
pub(in crate::ops) fn attention_kernel(device: &Device, dtype: DType, dh: usize) -> &'static str {
    let kernels =
        Gpu::of(device).and_then(|gpu| AttentionKernels::choose("attention", dtype, dh, gpu));
    match kernels {
        Ok(AttentionKernels { padded: Some(_), .. }) => "flash, tensor cores in bf16",
        Ok(AttentionKernels { padded: None, .. }) => "flash, plain kernel in f32",
        Err(_) => "none on a GPU",
    }
}
