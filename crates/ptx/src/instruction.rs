//! Kernels as the parser produces them and the machine executes them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Number of threads of a warp.
pub const LANES: usize = 32;

/// A value of each thread of a warp: the low bits of each element, the others are zero. Predicates
/// are 0 or 1.
pub type Lanes = [u64; LANES];

/// The kernels of one PTX file.
#[derive(Debug, Clone, Default)]
pub struct Module {
    /// The kernels, in the order of the file.
    pub kernels: Vec<Arc<Kernel>>,
}

/// A kernel (`.entry`).
#[derive(Debug, Clone, Default)]
pub struct Kernel {
    /// Its name, as `extern "C"` has it.
    pub name: String,
    pub params: Vec<Param>,
    pub param_bytes: usize,
    /// Names of the registers; a [`Reg`] is an index into this list.
    pub regs: Vec<String>,
    /// Bits of each register: 1 (a predicate), 16, 32 or 64.
    pub reg_bits: Vec<u8>,
    /// Addresses of the static variables in shared memory that the kernel names, in order, without
    /// duplicates. All variables of the module are laid out in the order of the file, from address
    /// 0, each at a multiple of its alignment.
    pub shared_ranges: Vec<Range<usize>>,
    /// The address at which dynamic shared memory (`.extern .shared`) begins, if the kernel names
    /// it.
    pub dynamic_shared: Option<usize>,
    /// Threads of a block (`.maxntid`), at most; 0 if not given.
    pub max_threads: usize,
    /// The instructions. Execution begins with the first one.
    pub code: Vec<Instruction>,
    /// Loads of which only some bytes are used (`.pragma "used_bytes_mask"`; all registers are
    /// written): the index of the instruction, and a bit of each byte, the lowest one first.
    pub used_bytes: BTreeMap<usize, u32>,
    /// Whether the code has products of warpgroups (`wgmma`).
    pub has_products: bool,
    /// Whether the order of blocks matters: they wait for each other ([`Op::LoadStrong`]), or take
    /// tickets ([`Op::AddStrong`]).
    pub has_order: bool,
    /// The power of two of the bytes of the smallest store to shared memory, at most 2 (4 bytes).
    /// The checks distinguish cells of this size: each store writes whole cells.
    pub shared_shift: u32,
    /// The same for global memory, at most 4 (16 bytes).
    pub global_shift: u32,
    /// Names of the source files that `.loc` lines refer to; index 0 is unused.
    pub sources: Arc<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    pub name: String,
    /// Its offset in the bytes of the parameters.
    pub offset: usize,
    /// Its size in bytes.
    pub bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

/// A value that an instruction reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    Reg(Reg),
    /// A literal, or the address of a variable in its state space; truncated to the width of the
    /// operation.
    Immediate(u64),
    Special(Special),
}

/// A special register (PTX ISA, "Special Registers"). Only the dimensions that have a size above 1
/// occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// `%tid.x`.
    Thread,
    /// `%ntid.x`.
    Threads,
    /// `%ctaid.x`, `.y`, `.z`.
    Block(usize),
    /// `%nctaid.x`, `.y`, `.z`.
    Blocks(usize),
}

/// `[base + offset]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    pub base: Operand,
    pub offset: i64,
}

/// A state space of memory (PTX ISA, "State Spaces").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Param,
    Global,
    Shared,
}

/// As in PTX: `global`.
impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Param => "param",
            Self::Global => "global",
            Self::Shared => "shared",
        })
    }
}

/// `@p` or `@!p`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    pub predicate: Reg,
    /// `@!p`.
    pub negated: bool,
}

#[derive(Debug, Clone)]
pub struct Instruction {
    pub guard: Option<Guard>,
    pub op: Op,
    /// Line of the PTX file, from 1.
    pub line: u32,
    /// File and line of the last `.loc` (index into [`Kernel::sources`]); `(0, 0)` without any.
    pub source: (u32, u32),
}

#[derive(Debug, Clone)]
pub enum Op {
    /// Computes from values of the same thread.
    Scalar {
        kind: Scalar,
        to: Reg,
        from: [Operand; 4],
    },
    /// `mov.b32 r, {a, b}` and the like: joins values of equal width, the first one in the low bits.
    Pack {
        to: Reg,
        from: Vec<Operand>,
    },
    /// `mov.b32 {a, b}, r`: the reverse; `None` is the sink `_`.
    Unpack {
        to: Vec<Option<Reg>>,
        from: Operand,
    },
    /// `cvta.param`: the generic address of a parameter.
    ParamAddress {
        to: Reg,
        from: Operand,
    },
    /// `cvta.to.global`: a global address from a generic one; both are equal.
    ToGlobal {
        to: Reg,
        from: Operand,
    },
    /// `bytes` per element, sign extended to the register if `signed`.
    Load {
        space: Space,
        bytes: usize,
        signed: bool,
        to: Vec<Reg>,
        from: Address,
    },
    Store {
        space: Space,
        bytes: usize,
        to: Address,
        from: Vec<Operand>,
    },
    /// `ld.acquire.gpu.global.u32`; `.relaxed` without an order.
    LoadStrong {
        acquires: bool,
        to: Reg,
        from: Address,
    },
    /// `atom.global.add.u32` if `to` is given, `red.release.gpu.global.add.u32`; `.relaxed` without an
    /// order.
    AddStrong {
        releases: bool,
        to: Option<Reg>,
        at: Address,
        value: Operand,
    },
    /// `red.relaxed.gpu.global.add.v4.f32`. The order of two of them decides on the sums, so they count
    /// as ordinary loads and stores: two without an order are a race.
    AddFloats {
        at: Address,
        values: [Operand; 4],
    },
    /// To the index of an instruction. `uniform` (`.uni`): all threads that execute it agree.
    Branch {
        target: usize,
        uniform: bool,
    },
    /// `ret`, `exit`.
    Exit,
    /// `shfl.sync`: `to`, optionally whether the source lane is in range, and `a`, `b`, `c`,
    /// `membermask`.
    Shuffle {
        mode: Shuffle,
        to: Reg,
        in_range: Option<Reg>,
        from: [Operand; 4],
    },
    /// `bar.warp.sync membermask`.
    WarpBarrier {
        mask: Operand,
    },
    /// `bar.sync` or `bar.arrive` of a block; without `threads`, all of the block.
    Barrier {
        waits: bool,
        id: Operand,
        threads: Option<Operand>,
    },
    /// `cp.async.cg.shared.global [to], [from], 16, size`: `size` bytes, the rest of 16 is zero.
    CopyAsync {
        to: Address,
        from: Address,
        size: Option<Operand>,
    },
    /// `cp.async.commit_group`.
    CopyCommit,
    /// `cp.async.wait_group n`.
    CopyWait {
        pending: Operand,
    },
    /// `cp.async.bulk.tensor.3d` from global to shared memory.
    CopyBox {
        to: Address,
        map: Operand,
        at: Vec<Operand>,
        barrier: Address,
    },
    MemoryBarrierInit {
        at: Address,
        count: Operand,
    },
    /// `mbarrier.arrive`, with `expect_tx` if `bytes` is given. The state is not used (`_`).
    MemoryBarrierArrive {
        at: Address,
        bytes: Option<Operand>,
    },
    MemoryBarrierTryWait {
        to: Reg,
        at: Address,
        parity: Operand,
    },
    /// `fence.mbarrier_init.release.cluster`.
    FenceInit,
    /// `fence.proxy.async.shared::cta`.
    FenceProxy,
    /// `setmaxnreg.inc` or `.dec`.
    SetMaxRegs {
        increases: bool,
        regs: u32,
    },
    /// `ldmatrix.sync.aligned.m8n8.xN[.trans].shared.b16`.
    LoadMatrix {
        to: Vec<Reg>,
        from: Address,
        transposed: bool,
    },
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`.
    Mma {
        d: [Reg; 4],
        a: [Operand; 4],
        b: [Operand; 2],
        c: [Operand; 4],
    },
    /// `wgmma.mma_async` of f32 sums of bf16 products, 64 x `n` x 16.
    WarpgroupMma(Box<WarpgroupMma>),
    /// `wgmma.fence`.
    WarpgroupFence,
    /// `wgmma.commit_group`.
    WarpgroupCommit,
    /// `wgmma.wait_group n`.
    WarpgroupWait {
        pending: u32,
    },
}

/// The operands of `wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16`.
#[derive(Debug, Clone)]
pub struct WarpgroupMma {
    pub n: usize,
    /// `n / 2` sums of each thread.
    pub d: Vec<Reg>,
    /// Four registers, or the descriptor of a tile in shared memory.
    pub a: MatrixA,
    /// Descriptor of the tile of B.
    pub b: Operand,
    /// Whether the sums continue (`scale-d`); false: they start at zero.
    pub adds: Operand,
    /// Whether A and B are transposed (MN-major).
    pub transpose: [bool; 2],
}

#[derive(Debug, Clone)]
pub enum MatrixA {
    Regs([Operand; 4]),
    Descriptor(Operand),
}

/// PTX ISA, `shfl.sync`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    Pred,
    B16,
    B32,
    B64,
    U16,
    U32,
    U64,
    S16,
    S32,
    S64,
    F32,
    F64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Round {
    /// To the nearest, ties to even: `.rn`, and the default.
    Nearest,
    /// Toward zero: `.rz`.
    Zero,
    /// Toward negative infinity: `.rm`.
    Down,
}

/// A comparison of `setp`. `*u` is true for NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    /// Both are numbers.
    Num,
    /// At least one is NaN.
    Nan,
}

/// An operation on values of one thread. Unless a comment says otherwise, operands have the type of
/// the result, in the order of the PTX instruction. `.ftz` flushes subnormal inputs and results to
/// zero with their signs; it occurs with `Ex2` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// `mov`.
    Mov(Type),
    Add(Type, Round),
    Sub(Type, Round),
    /// `mul.f32`, `mul.f64`.
    MulFloat(Type, Round),
    /// `mul.lo`, `mul.hi`.
    MulLow(Type),
    MulHigh(Type),
    /// `mul.wide`: operands of the type, the result has twice its width.
    MulWide(Type),
    /// `mad.lo`.
    MadLow(Type),
    Fma(Type, Round),
    /// `div`: integers toward zero; `f32` and `f64` to the nearest.
    Div(Type),
    /// `div.approx.f32`: 2 ulp; 0 if the divisor is between 2^126 and 2^128.
    DivApprox,
    Rem(Type),
    Min(Type),
    Max(Type),
    Neg(Type),
    Abs(Type),
    And(Type),
    Or(Type),
    Xor(Type),
    Not(Type),
    /// The amount is a 32-bit value; amounts of the width or more give 0, or the sign.
    Shl(Type),
    Shr(Type),
    /// `bfi a, b, start, length`: `a` into `b`.
    BitFieldInsert(Type),
    /// `prmt.b32` in its default mode.
    Permute,
    /// `selp a, b, p`.
    Select(Type),
    /// `setp`; the result is a predicate.
    Compare(Compare, Type),
    /// `cvt` between integers: truncated or extended by the sign of `from`. The register of the
    /// operand may be wider than `from` (also for [`Scalar::FloatOf`]), and that of the result wider
    /// than an unsigned `to`: then its other bits are zero.
    Convert {
        from: Type,
        to: Type,
    },
    /// `cvt.rn.f32.*`, `cvt.rn.f64.*` from an integer.
    FloatOf {
        from: Type,
        to: Type,
    },
    /// `cvt.f64.f32`.
    Widen,
    /// `cvt.rn.f32.f64`.
    Narrow,
    /// `cvt.sat.f32.f32`: to [0, 1]; NaN is 0.
    Saturate,
    /// `cvt.rn.bf16.f32`; NaN is 0x7fff.
    Bf16,
    /// `cvt.rn.bf16x2.f32 d, a, b`: `a` in the high half.
    Bf16Pair,
    /// `ex2.approx.f32`, with `.ftz`.
    Ex2 {
        flush: bool,
    },
    /// `lg2.approx.f32`.
    Lg2,
    /// `rcp.rn.f32`.
    Rcp,
    /// `rsqrt.approx.f32`.
    Rsqrt,
    /// `sqrt.rn`.
    Sqrt(Type),
}
