use crate::instruction::Space;
use std::fmt;

/// A rule of the PTX ISA that an instruction broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("{space} address {at:#x} of {bytes} bytes is in no allocation")]
    OutOfBounds { space: Space, at: u64, bytes: usize },
    #[error("{space} address {at:#x} is not a multiple of {bytes}")]
    Misaligned { space: Space, at: u64, bytes: usize },
    #[error("reads {space} memory at {at:#x} that nothing has written")]
    Unwritten { space: Space, at: u64 },
    #[error(
        "data race in {space} memory at {at:#x}: this {access} and an earlier {other} by {by} have no order"
    )]
    Race { space: Space, at: u64, access: Access, other: Access, by: String },
    #[error(
        "data race in global memory at {at:#x}: this {access} and a {other} by another block have no order"
    )]
    BlockRace { at: u64, access: Access, other: Access },
    #[error("accesses shared memory at {at:#x}, where an asynchronous copy is in flight")]
    InFlight { at: u64 },
    #[error(
        "an asynchronous access of shared memory at {at:#x}, which was written without fence.proxy.async"
    )]
    NoProxyFence { at: u64 },
    #[error("lanes {reached:#010x} of a warp reach an instruction of the lanes {needed:#010x}")]
    NotAllLanes { reached: u32, needed: u32 },
    #[error("lanes have different values for an operand of the whole warp")]
    NotUniform,
    #[error("reads from lane {lane}, which does not take part")]
    AbsentLane { lane: usize },
    #[error("barrier {id} expects {expected} threads, but {found} arrive")]
    BarrierCount { id: u64, expected: u64, found: u64 },
    #[error("barrier {id} of a block does not exist, only those from 0 to {}", end - 1)]
    BarrierId { id: u64, end: u64 },
    #[error("warp {warp} arrives at barrier {id} again before all others have arrived")]
    ArrivesAgain { id: u64, warp: usize },
    #[error("a memory barrier of {count} arrivals, instead of 1 to {}", end - 1)]
    ArrivalCount { count: i64, end: i64 },
    #[error("the memory barrier at {at:#x} is initialised again")]
    InitialisedAgain { at: u64 },
    #[error("accesses the memory barrier at {at:#x} as ordinary memory")]
    OrdinaryAccess { at: u64 },
    #[error(
        "an arrival at the memory barrier at {at:#x}, and no thread has waited for the phase before"
    )]
    NotWaitedFor { at: u64 },
    #[error("{parity} is not the parity of a phase, which is 0 or 1")]
    Parity { parity: u64 },
    #[error("the memory barrier at {at:#x} is not initialised")]
    NoMemoryBarrier { at: u64 },
    #[error("a copy of {size} bytes, expected at most {most}")]
    CopySize { size: usize, most: usize },
    #[error("the memory barrier at {at:#x} receives {what} than it expects")]
    MemoryBarrierCount { at: u64, what: &'static str },
    #[error("register {register} takes part in a product that is in flight")]
    BusyRegister { register: String },
    #[error("register {register} was accessed after the last wgmma.fence and before the product")]
    NoProductFence { register: String },
    #[error("no thread can continue: {waiting}")]
    Hang { waiting: String },
    #[error("the block ends while {what} are in flight")]
    EndInFlight { what: &'static str },
    #[error(
        "the warps of a warpgroup do not execute the same instructions on registers or products"
    )]
    NotAligned,
    #[error("setmaxnreg.{direction} from {before} to {after} registers")]
    Registers { direction: &'static str, before: u64, after: u64 },
    #[error("a block of {threads} threads, expected a multiple of 32 from 32 to {most}")]
    NumThreads { threads: usize, most: usize },
    #[error("a block with {bytes} bytes of shared memory, expected at most {most}")]
    TooMuchShared { bytes: usize, most: usize },
    #[error(
        "a grid of {grid:?} blocks, expected 1 to {max:?}, and at most {} in all", u32::MAX,
        max = crate::launch::MAX_GRID
    )]
    Grid { grid: [u32; 3] },
    #[error("the block has not ended after {most} instructions of its warps")]
    Endless { most: u64 },
    #[error("{0}")]
    Scalar(crate::scalar::ScalarFault),
    /// An operand of a matrix product or of a copy of a box.
    #[error("{0}")]
    Product(String),
    #[error("not supported: {0}")]
    NotSupported(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// A fault, and where and when it occurred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub kernel: String,
    pub line: u32,
    /// File and line of the source, if the PTX has them.
    pub source: Option<(String, u32)>,
    pub block: [u32; 3],
    pub thread: usize,
    /// The seed of the launch: another launch with it has the same order of warps.
    pub seed: u64,
    pub fault: Fault,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, line, source, block: [x, y, z], thread, seed, fault } = self;
        write!(f, "{kernel}, PTX line {line}")?;
        if let Some((file, line)) = source {
            write!(f, " ({file}:{line})")?;
        }
        write!(f, ", block ({x}, {y}, {z}), thread {thread}, seed {seed}: {fault}")
    }
}

impl std::error::Error for Failure {}
