//! Launches of kernels.

use crate::block::Block;
use crate::fault::{Failure, Fault};
use crate::global::Global;
use crate::instruction::Kernel;

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// The bytes of all parameters.
    pub params: &'a [u8],
    /// Registers of a thread when the kernel begins, as the assembler of PTX chooses; for `setmaxnreg`.
    pub registers: u64,
    /// Decides on the order of warps and of asynchronous work.
    pub seed: u64,
}

/// What a launch has executed. Instructions are counted once for a warp.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub instructions: u64,
    pub branches: u64,
    pub barriers: u64,
    /// Bytes that threads and copies read from and write to global memory.
    pub global_read: u64,
    pub global_written: u64,
    /// Bytes that threads, copies and products read from and write to shared memory.
    pub shared_read: u64,
    pub shared_written: u64,
    /// Multiplications of elements in matrix products.
    pub products: u64,
    /// Whether a thread has executed each instruction of the kernel.
    pub executed: Vec<bool>,
}

/// Maximum number of threads of a block.
const MAX_THREADS: usize = 1024;

/// Executes all blocks, one after the other.
pub fn run(launch: &Launch<'_>, global: &mut Global) -> Result<Counts, Box<Failure>> {
    let Launch { kernel, threads, .. } = *launch;
    let most = if kernel.max_threads == 0 { MAX_THREADS } else { kernel.max_threads };
    if threads > most {
        let fault = Fault::TooManyThreads { threads, most };
        let (kernel, source) = (kernel.name.clone(), None);
        let failure = Failure { kernel, line: 0, source, block: [0; 3], thread: 0, fault };
        return Err(Box::new(failure));
    }
    let mut counts = Counts { executed: vec![false; kernel.code.len()], ..Counts::default() };
    global.begin();
    let [x, y, z] = launch.grid;
    for index in 0..x * y * z {
        let block = [index % x, index / x % y, index / x / y];
        Block::new(launch, block, index, global, &mut counts).run()?;
    }
    Ok(counts)
}

/// A generator of pseudo-random numbers (xorshift64*, Vigna 2016).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // no state may be zero
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}
