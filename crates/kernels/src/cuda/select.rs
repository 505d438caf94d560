//! Selects the kernels for a GPU. Every choice that depends on the compute capability or on the
//! shared memory of a GPU is made here.

use candle_core::{DType, Device, Result, bail};

/// Minimum compute capability for the bf16 tensor-core kernels.
const SM80: (u32, u32) = (8, 0);
/// Minimum compute capability with products in FP8.
#[cfg(feature = "cuda")]
const SM89: (u32, u32) = (8, 9);
/// The only compute capability that has the instructions of the Hopper kernels.
const SM90: (u32, u32) = (9, 0);
/// Number of own rows of a block of the plain kernels, and of other rows in a tile.
pub(crate) const PLAIN_ROWS: usize = 32;
/// Number of threads of a block of the plain kernels and of the row-product kernel.
pub(crate) const PLAIN_THREADS: u32 = 256;
/// Number of threads of a producer or of a consumer in a block of the kernels for compute
/// capability 9.0.
const HOPPER_GROUP: u32 = 128;
/// Multiprocessors of an A100, which has the fewest of the GPUs with room for two chunks.
const FEW_BLOCKS: usize = 108;
/// Number of queries of a tile of the kernel for all gradients.
pub(crate) const QUERIES: usize = 64;
/// Maximum head dim of the plain kernels.
const MAX_DIM: usize = 256;

/// Properties of a GPU that the choice of kernels depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Compute capability, major and minor.
    pub(crate) capability: (u32, u32),
    /// Maximum number of bytes of shared memory of a block.
    pub(crate) shared_bytes: usize,
    /// Number of bytes of shared memory of a multiprocessor.
    pub(crate) shared_bytes_of_all: usize,
    pub(crate) multiprocessors: usize,
}

impl Gpu {
    /// Reads the properties of the GPU behind `device`.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("found operands on the CPU, expected a GPU")
        };
        let capability = super::module::capability(device)?;
        let (shared_bytes, shared_bytes_of_all) =
            (super::module::shared_bytes(device)?, super::module::shared_bytes_of_all(device)?);
        let multiprocessors = super::module::multiprocessors(device)?;
        Ok(Self { capability, shared_bytes, shared_bytes_of_all, multiprocessors })
    }

    /// The GPU whose kernels run on the CPU, which `TRAINER_EMULATE_CUDA` names; an A100 without the
    /// variable.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn of(_: &Device) -> Result<Self> {
        static VARIABLE: std::sync::LazyLock<Option<String>> =
            std::sync::LazyLock::new(|| std::env::var("TRAINER_EMULATE_CUDA").ok());
        VARIABLE.as_deref().map_or(Ok(Self::A100), Self::named)
    }

    /// The GPU of a value of `TRAINER_EMULATE_CUDA`. The kernels for Hopper alone are not emulated
    /// from their source, so `9.0` is an error.
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn named(variable: &str) -> Result<Self> {
        match variable {
            "1" | "8.0" | "ptx:8.0" => Ok(Self::A100),
            // Few, so that blocks have several items in tests.
            "ptx:9.0" => Ok(Self { multiprocessors: 3, ..Self::H100 }),
            other => {
                bail!("found TRAINER_EMULATE_CUDA={other}, expected 1, 8.0, ptx:8.0 or ptx:9.0")
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    pub(crate) const A100: Self = Self {
        capability: SM80,
        shared_bytes: 163 << 10,
        shared_bytes_of_all: 164 << 10,
        multiprocessors: 108,
    };
    #[cfg(not(feature = "cuda"))]
    pub(crate) const H100: Self = Self {
        capability: SM90,
        shared_bytes: 227 << 10,
        shared_bytes_of_all: 228 << 10,
        multiprocessors: 132,
    };

    /// Whether two blocks of a kernel have room on a multiprocessor. CUDA itself needs 1 KiB of a
    /// block.
    fn holds_two(self, bytes: usize) -> bool {
        2 * (bytes + 1024) <= self.shared_bytes_of_all
    }
}

/// The compute capability of a GPU whose tensor cores do not multiply in FP8.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_without_e4m3(device: &Device) -> Result<Option<(u32, u32)>> {
    let capability = Gpu::of(device)?.capability;
    Ok((capability < SM89).then_some(capability))
}

/// Whether a GPU has tensor cores for bf16, and `bytes` of shared memory for a block.
pub(crate) fn has_tensor_cores(device: &Device, bytes: usize) -> Result<bool> {
    let gpu = Gpu::of(device)?;
    Ok(gpu.capability >= SM80 && gpu.shared_bytes >= bytes)
}

/// Number of chunks that a block of a pass over the states of the delta rule has in shared memory, if
/// a chunk takes `bytes`. With two, the copies of a chunk are in flight during the products of another.
/// With more blocks than a GPU has multiprocessors, a second block on each does as well.
pub(crate) fn delta_stages(device: &Device, blocks: usize, bytes: usize) -> Result<usize> {
    let has_room = Gpu::of(device)?.shared_bytes >= 2 * bytes;
    Ok(if blocks <= FEW_BLOCKS && has_room { 2 } else { 1 })
}

/// Whether the kernels for compute capability 9.0 may be selected: not if `TRAINER_HOPPER` is `0`,
/// so that their results on a GPU can be compared with those of the other kernels.
fn hopper_is_allowed() -> bool {
    static ALLOWED: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var_os("TRAINER_HOPPER").is_none_or(|x| x != "0"));
    *ALLOWED
}

/// Side whose rows a block owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Own {
    Queries,
    Keys,
    /// As `Keys`; the blocks also add to the gradient of the queries, one after the other.
    KeysOfAll,
}

/// A kernel and the sizes of its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttentionLaunch {
    pub(crate) name: String,
    /// Number of own rows (queries or keys).
    pub(crate) rows: usize,
    pub(crate) threads: u32,
    /// Number of bytes of shared memory.
    pub(crate) shared: usize,
    /// Number of rows of a tile of the other side, if the kernel takes tensor maps for boxes of the
    /// rows of both sides; otherwise it takes addresses.
    pub(crate) boxes: Option<usize>,
}

/// Kernels and shared-memory layout of an attention call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionKernels {
    gpu: Gpu,
    /// Padded head dim of the tensor-core kernel; `None` for the plain kernel.
    padded: Option<usize>,
    /// Number of bytes of a row in shared memory.
    row_bytes: usize,
    /// Whether these are the kernels for compute capability 9.0.
    hopper: bool,
}

impl AttentionKernels {
    /// Selects the tensor-core kernels for heads of `dh` values of `dtype` where they exist, else
    /// the plain kernels. Returns an error if `dh` is too large for both.
    pub(crate) fn choose(op: &str, dtype: DType, dh: usize, gpu: Gpu) -> Result<Self> {
        if dh > MAX_DIM {
            bail!("{op}: the head dim is {dh}, expected at most {MAX_DIM} on a GPU");
        }
        let tensor_cores = gpu.capability >= SM80 && dtype == DType::BF16;
        if !tensor_cores || !dh.is_multiple_of(8) {
            return Ok(Self { gpu, padded: None, row_bytes: 4 * (dh | 1), hopper: false });
        }
        // Same as `Rows` in attention.cuh: rows of 80 columns are padded, the others permuted.
        let (padded, row_bytes) = match dh {
            0..=64 => (64, 128),
            65..=80 => (80, 176),
            81..=128 => (128, 256),
            _ => (256, 512),
        };
        if gpu.capability == SM90 && hopper_is_allowed() {
            return Ok(Self { gpu, padded: Some(padded), row_bytes: 2 * padded, hopper: true });
        }
        Ok(Self { gpu, padded: Some(padded), row_bytes, hopper: false })
    }

    /// Returns an error if the GPU has less shared memory than a block needs.
    pub(crate) fn expect_room(self, op: &str, block: &AttentionLaunch) -> Result<()> {
        let (need, found) = (block.shared, self.gpu.shared_bytes);
        if need > found {
            bail!(
                "{op}: `{}` needs {need} bytes of shared memory, and this GPU has {found}: kernels \
                 for bf16 (`model.precision`) and smaller heads need less",
                block.name
            );
        }
        Ok(())
    }

    fn name(self, name: &str) -> String {
        match self.padded {
            Some(padded) if self.hopper => format!("{name}_sm90_d{padded}"),
            Some(padded) => format!("{name}_d{padded}"),
            None => format!("{name}_plain"),
        }
    }

    /// The kernel of the forward pass. The sizes match `attention_forward.cu`.
    pub(crate) fn forward(self) -> AttentionLaunch {
        if self.hopper {
            return self.forward_of_hopper();
        }
        let name = self.name("attention_forward");
        // A tile of own queries, two stages of keys, and one of values.
        let shared = |rows: usize, keys: usize| (rows + 3 * keys) * self.row_bytes;
        match self.padded {
            Some(256) => AttentionLaunch {
                name,
                rows: 64,
                threads: 128,
                shared: shared(64, 32),
                boxes: None,
            },
            // Two blocks of the smallest have room on every GPU.
            Some(padded) => self.two_or_one(name, shared(128, 64), padded > 64),
            None => {
                let tiles = 3 * PLAIN_ROWS * self.row_bytes;
                let shared = tiles + 4 * PLAIN_ROWS * 32;
                AttentionLaunch {
                    name,
                    rows: PLAIN_ROWS,
                    threads: PLAIN_THREADS,
                    shared,
                    boxes: None,
                }
            }
        }
    }

    /// The kernel of the forward pass for compute capability 9.0. The sizes match
    /// `attention_forward_sm90.cu`.
    fn forward_of_hopper(self) -> AttentionLaunch {
        let (consumers, keys) = match self.padded {
            Some(64) => (3, 128),
            Some(80) => (3, 96),
            Some(128) => (2, 128),
            _ => (2, 80),
        };
        let (name, rows) = (self.name("attention_forward"), 64 * consumers);
        // A tile of queries, one of the output unless it has 256 columns, two of keys and two of
        // values; ten barriers, and two items.
        let own = if self.padded == Some(256) { rows } else { 2 * rows };
        let shared = (own + 4 * keys) * self.row_bytes + 10 * 8 + 2 * 20;
        let threads = HOPPER_GROUP * (1 + consumers as u32);
        AttentionLaunch { name, rows, threads, shared, boxes: Some(keys) }
    }

    /// Number of blocks of the forward pass with `items` tasks of a head, if they take items until none
    /// is left. A multiprocessor has room for one.
    pub(crate) fn blocks_that_take(self, items: usize) -> Option<usize> {
        self.hopper.then_some(items.min(self.gpu.multiprocessors))
    }

    /// The kernel for 128 own rows with four warps, of which two blocks share a multiprocessor, or
    /// the one with eight if `has_single` and there is room for one block only.
    fn two_or_one(self, name: String, shared: usize, has_single: bool) -> AttentionLaunch {
        if has_single && !self.gpu.holds_two(shared) {
            let name = format!("{name}_single");
            AttentionLaunch { name, rows: 128, threads: 256, shared, boxes: None }
        } else {
            AttentionLaunch { name, rows: 128, threads: 128, shared, boxes: None }
        }
    }

    /// Number of columns of a head in the kernels for tensor cores; 0 in the plain ones.
    pub(crate) fn columns(self) -> usize {
        self.padded.unwrap_or_default()
    }

    /// The kernels of the backward pass, in order. Blocks that own keys run longest, so they come first.
    /// One kernel for all gradients takes five products of a tile, where two take seven: it computes
    /// scores and gradients of probabilities once. With 256 columns its sums have no room in registers.
    pub(crate) fn passes(self) -> &'static [Own] {
        let at_once = self.hopper && self.padded != Some(256);
        if at_once { &[Own::KeysOfAll] } else { &[Own::Keys, Own::Queries] }
    }

    /// A kernel of [`Self::passes`]. The sizes match the shapes in `attention_backward.cu`.
    pub(crate) fn backward(self, own: Own) -> AttentionLaunch {
        if self.hopper {
            return self.backward_of_hopper(own);
        }
        let name = match own {
            Own::Keys | Own::KeysOfAll => self.name("attention_backward_keys"),
            Own::Queries => self.name("attention_backward_queries"),
        };
        let (rows, threads, others) = match (self.padded, own) {
            (None, _) => {
                let tiles = 4 * PLAIN_ROWS * self.row_bytes;
                let shared = tiles + 2 * 4 * PLAIN_ROWS * 32;
                let (rows, threads) = (PLAIN_ROWS, PLAIN_THREADS);
                return AttentionLaunch { name, rows, threads, shared, boxes: None };
            }
            (Some(64), Own::Queries) => (128, 128, 64),
            (Some(256), Own::Queries) => (64, 128, 16),
            (Some(_), Own::Queries) | (Some(64), _) => (128, 128, 32),
            (Some(256), _) => (32, 128, 32),
            (Some(_), _) => (128, 256, 64),
        };
        // Two tiles of own rows, two stages of two tiles of other rows, and two stages of `lse` and
        // `delta`. Where two warps share rows, the blocks also exchange `p` and `ds` of a tile, at
        // once or, with 256 columns, one after the other.
        let bytes = |others: usize| (2 * rows + 4 * others) * self.row_bytes + 4 * others * 4;
        let exchanged = match (self.padded, own) {
            (Some(128), Own::Keys) => 4 * rows * others,
            (Some(256), Own::Keys) => 2 * rows * others,
            _ => 0,
        };
        let shared = bytes(others) + exchanged;
        if self.padded != Some(256) && own == Own::Queries {
            return self.two_or_one(name, shared, true);
        }
        if self.padded == Some(128) && own == Own::Keys && shared > self.gpu.shared_bytes {
            let name = format!("{name}_less");
            return AttentionLaunch { name, rows, threads, shared: bytes(32), boxes: None };
        }
        AttentionLaunch { name, rows, threads, shared, boxes: None }
    }

    /// A kernel of the backward pass for compute capability 9.0. The sizes match the shapes in
    /// `attention_backward_sm90.cu` and `attention_backward_all_sm90.cu`.
    fn backward_of_hopper(self, own: Own) -> AttentionLaunch {
        let (name, rows, others, stages) = match own {
            Own::KeysOfAll => ("attention_backward_all", 128, QUERIES, 3),
            Own::Keys => ("attention_backward_keys", 64, 64, 2),
            Own::Queries => ("attention_backward_queries", 128, 48, 2),
        };
        // Two tiles of own rows, and in each stage two tiles of other rows and, where these are
        // queries, their `lse` and `delta`. The own rows have a barrier, and each stage has two.
        let statistics = if own == Own::Queries { 0 } else { 8 * others };
        let stage = 2 * others * self.row_bytes + statistics + 2 * 8;
        // Two buffers for `ds`, two barriers, and the work of the block, of which threads read 16
        // bytes at a time.
        let exchanged = if own == Own::KeysOfAll { 2 * 2 * rows * others + 2 * 8 + 40 } else { 0 };
        let shared = 2 * rows * self.row_bytes + stages * stage + 8 + exchanged;
        let (name, threads) = (self.name(name), 3 * HOPPER_GROUP);
        AttentionLaunch { name, rows, threads, shared, boxes: Some(others) }
    }
}

/// Name of the attention kernel for heads of dim `dh` on `device`, for logs.
pub(crate) fn attention_kernel(device: &Device, dtype: DType, dh: usize) -> &'static str {
    let kernels =
        Gpu::of(device).and_then(|gpu| AttentionKernels::choose("attention", dtype, dh, gpu));
    match kernels {
        Ok(AttentionKernels { hopper: true, .. }) => "flash, Hopper's tensor cores in bf16",
        Ok(AttentionKernels { padded: Some(_), .. }) => "flash, tensor cores in bf16",
        Ok(AttentionKernels { padded: None, .. }) => "flash, plain kernel in f32",
        Err(_) => "none on a GPU",
    }
}
