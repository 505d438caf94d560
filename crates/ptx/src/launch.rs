use crate::block::{Block, State};
use crate::fault::{Failure, Fault};
use crate::global::Global;
use crate::instruction::{Kernel, LANES};

#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, along x: a multiple of 32, at most 1,024.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// Maximum number of bytes of static and dynamic shared memory of a block, which depends on the
    /// GPU.
    pub max_shared_bytes: usize,
    /// Maximum number of instructions of a block, counted once for a warp; a block that executes more
    /// counts as endless.
    pub max_instructions: u64,
    pub params: &'a [u8],
    /// Registers of a thread when the kernel begins, as the assembler of PTX chooses; for `setmaxnreg`.
    pub registers: u64,
    /// Decides on the order of warps and of asynchronous work.
    pub seed: u64,
}

/// What a launch has executed. Instructions are counted once for a warp. What a warp executes between
/// an `mbarrier.try_wait` that fails and the next one is left out, and so are instructions that it
/// tries again: their number depends on the order of the warps. All numbers are therefore the same in
/// every order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub instructions: u64,
    pub branches: u64,
    /// Those of them that the assembler usually turns into nothing: copies of registers, addresses,
    /// and loads of parameters.
    pub moves: u64,
    /// Those of them that the units for special functions execute, 16 lanes in a cycle: powers,
    /// logarithms, roots and quotients of `f32`.
    pub special: u64,
    pub barriers: u64,
    /// Bytes that threads and copies read from and write to global memory.
    pub global_read: u64,
    pub global_written: u64,
    /// Different bytes of global memory that the launch reads before it writes them, and that it
    /// writes: what no cache can save.
    pub memory_read: u64,
    pub memory_written: u64,
    /// Bytes that threads, copies and products read from and write to shared memory. The warps of a
    /// warpgroup read B of a product together.
    pub shared_read: u64,
    pub shared_written: u64,
    /// Bytes that shared memory could have moved meanwhile, 128 in a cycle: an access takes as many
    /// cycles as it has different words of 4 bytes in one of the 32 banks.
    pub shared_busy: u64,
    /// Multiplications of elements in matrix products.
    pub products: u64,
    /// Whether a thread has executed each instruction of the kernel.
    pub executed: Vec<bool>,
}

const MAX_THREADS: usize = 1024;

/// Maximum number of blocks along x, y and z (CUDA C++ Programming Guide, "Technical Specifications per
/// Compute Capability").
pub(crate) const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Executes all blocks, one after the other. If their order matters, blocks begin in a random order, and
/// up to `MAX_AT_ONCE` of them are executed at once.
pub fn run(launch: &Launch<'_>, global: &mut Global) -> Result<Counts, Box<Failure>> {
    let kernel = launch.kernel;
    if let Some(fault) = find_wrong_size(launch) {
        let (kernel, source, seed) = (kernel.name.clone(), None, launch.seed);
        let failure = Failure { kernel, line: 0, source, block: [0; 3], thread: 0, seed, fault };
        return Err(Box::new(failure));
    }
    let mut counts = Counts { executed: vec![false; kernel.code.len()], ..Counts::default() };
    global.begin(kernel.global_shift);
    let num_blocks = launch.grid.iter().product();
    let result = if kernel.has_order {
        run_together(launch, (0..num_blocks).collect(), global, &mut counts)
    } else {
        let all =
            |block: u32| begin(launch, block).go_on(global, &mut counts, usize::MAX).map(|_| ());
        (0..num_blocks).try_for_each(all)
    };
    (counts.memory_read, counts.memory_written) = global.end();
    result.map(|()| counts)
}

/// Maximum number of blocks that are executed at once.
const MAX_AT_ONCE: usize = 8;

fn begin<'a>(launch: &Launch<'a>, index: u32) -> Block<'a> {
    let [x, y, _] = launch.grid;
    Block::new(launch, [index % x, index / x % y, index / x / y], u64::from(index))
}

/// Executes blocks of which some wait for others. As on a GPU, a block that has started keeps its place
/// until it ends, in any order; so they hang if those that run wait for those that have not started.
fn run_together(
    launch: &Launch<'_>,
    mut others: Vec<u32>,
    global: &mut Global,
    counts: &mut Counts,
) -> Result<(), Box<Failure>> {
    let mut random = Random::new(launch.seed ^ 0x5eed);
    let at_once = 1 + random.below(MAX_AT_ONCE);
    let (mut blocks, mut waiting) = (Vec::new(), 0);
    while !blocks.is_empty() || !others.is_empty() {
        if blocks.len() < at_once && !others.is_empty() {
            let next = others.swap_remove(random.below(others.len()));
            blocks.push(begin(launch, next));
            waiting = 0;
        }
        // those that wait are in front, so each is tried once before they count as hanging
        let index = waiting + random.below(blocks.len() - waiting);
        let most = [1, 8, 256][random.below(3)];
        let most = 1 + random.below(most);
        match blocks[index].go_on(global, counts, most)? {
            State::GoesOn => waiting = 0,
            State::Ended => {
                blocks.swap_remove(index);
                waiting = 0;
            }
            State::Waits => {
                blocks.swap(waiting, index);
                waiting += 1;
                if waiting == blocks.len() && (blocks.len() == at_once || others.is_empty()) {
                    return blocks[0].check_end();
                }
            }
        }
        waiting = waiting.min(blocks.len().saturating_sub(1));
    }
    Ok(())
}

/// The limit that a launch exceeds, as a driver would report it.
fn find_wrong_size(launch: &Launch<'_>) -> Option<Fault> {
    let Launch { kernel, grid, threads, max_shared_bytes, .. } = *launch;
    let most = if kernel.max_threads == 0 { MAX_THREADS } else { kernel.max_threads };
    if threads == 0 || !threads.is_multiple_of(LANES) || threads > most {
        return Some(Fault::NumThreads { threads, most });
    }
    let fixed: usize = kernel.shared_ranges.iter().map(ExactSizeIterator::len).sum();
    let bytes = fixed.saturating_add(launch.shared_bytes);
    if bytes > max_shared_bytes {
        return Some(Fault::TooMuchShared { bytes, most: max_shared_bytes });
    }
    let num_blocks = grid.iter().try_fold(1_u32, |product, size| product.checked_mul(*size));
    let is_large = grid.iter().zip(MAX_GRID).any(|(size, most)| *size > most);
    (is_large || num_blocks.is_none_or(|number| number == 0)).then_some(Fault::Grid { grid })
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
