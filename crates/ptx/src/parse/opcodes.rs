//! Instructions from their opcodes and operands.

use super::ParseError;
use super::kernel::Body;
use super::operands::{Arg, special};
use super::scalars::{Signature, signature};
use super::types::{Class, Form, type_named};
use crate::instruction::{
    Address, MatrixA, Op, Operand, Reg, Scalar, Shuffle, Space, Type, WarpgroupMma,
};

const COPY_BOX: &str =
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes";

impl<'a> Body<'a, '_> {
    /// The current instruction with its operands.
    pub(super) fn operation(&mut self, args: &[Arg<'a>]) -> Result<Op, ParseError> {
        let parts: Vec<&str> = self.opcode.split('.').collect();
        if let Some(signature) = signature(&parts) {
            return self.scalar(&signature, args);
        }
        match *parts {
            ["mov", ty] => match type_named(ty) {
                Some(ty) => self.mov(ty, args),
                None => Err(self.unknown()),
            },
            ["ld", order @ ("acquire" | "relaxed"), "gpu", "global", "u32"] => {
                self.count(args, &[2])?;
                let (to, from) =
                    (self.reg(&args[0], Form::U32)?, self.address(&args[1], Space::Global)?);
                Ok(Op::LoadStrong { acquires: order == "acquire", to, from })
            }
            ["atom", "global", "add", "u32"]
            | ["red", "release" | "relaxed", "gpu", "global", "add", "u32"] => {
                self.add_strong(parts[1] == "release", parts[0] == "atom", args)
            }
            ["red", "relaxed", "gpu", "global", "add", "v4", "f32"] => {
                self.count(args, &[2])?;
                let at = self.address(&args[0], Space::Global)?;
                Ok(Op::AddFloats { at, values: self.values(&args[1], Form::F32)? })
            }
            ["ld", ref access @ ..] => match AccessForm::read(access) {
                Some(access) => self.load(&access, args),
                None => Err(self.unknown()),
            },
            // `wb` is what a store without it does, too.
            ["st", "global", "wb", ref access @ ..] => {
                self.store(AccessForm::in_space(Space::Global, access), args)
            }
            ["st", ref access @ ..] => self.store(AccessForm::read(access), args),
            ["shfl", "sync", mode, "b32"] => self.shuffle(mode, args),
            ["mbarrier" | "fence", ..] => self.memory_barrier(args),
            ["cp", ..] => self.copy(args),
            ["ldmatrix" | "mma" | "wgmma" | "setmaxnreg", ..] => self.matrix(&parts, args),
            _ => self.control(args),
        }
    }

    /// The error of an opcode that is not understood.
    fn unknown(&self) -> ParseError {
        ParseError {
            line: self.line,
            found: format!("`{}`", self.opcode),
            expected: "an opcode that is understood".to_owned(),
        }
    }

    fn scalar(&self, signature: &Signature, args: &[Arg]) -> Result<Op, ParseError> {
        self.count(args, &[1 + signature.count])?;
        let converts = matches!(signature.kind, Scalar::Convert { .. } | Scalar::FloatOf { .. });
        // A signed result would be extended to the whole register; `Scalar::Convert` does not.
        let wider = converts && Form::from(signature.to).class == Class::Unsigned;
        let to = self.reg_or_wider(&args[0], signature.to.into(), wider)?;
        let mut from = [Operand::Immediate(0); 4];
        for (index, (arg, &ty)) in args[1..].iter().zip(&signature.from).enumerate() {
            from[index] = self.value_or_wider(arg, ty.into(), converts)?;
        }
        Ok(Op::Scalar { kind: signature.kind, to, from })
    }

    /// `mov` of a value, of the address of a variable, or of a list of values.
    fn mov(&mut self, ty: Type, args: &[Arg<'a>]) -> Result<Op, ParseError> {
        self.count(args, &[2])?;
        let form = Form::from(ty);
        if let Arg::List(to) = &args[0] {
            let element = self.element(form, &args[0], to)?;
            let sink = |arg: &Arg| *arg == Arg::Name("_");
            let reg = |arg| if sink(arg) { Ok(None) } else { self.reg(arg, element).map(Some) };
            let to: Vec<Option<Reg>> = to.iter().map(reg).collect::<Result<_, _>>()?;
            let regs: Vec<Reg> = to.iter().copied().flatten().collect();
            self.distinct(&args[0], &regs)?;
            return Ok(Op::Unpack { to, from: self.value(&args[1], form)? });
        }
        let to = self.reg(&args[0], form)?;
        if let Arg::List(from) = &args[1] {
            let element = self.element(form, &args[1], from)?;
            let from = from.iter().map(|arg| self.value(arg, element)).collect::<Result<_, _>>()?;
            return Ok(Op::Pack { to, from });
        }
        let from = match self.address_or_special(form, &args[1]) {
            Some(operand) => operand,
            None => self.value(&args[1], form)?,
        };
        let zero = Operand::Immediate(0);
        Ok(Op::Scalar { kind: Scalar::Mov(ty), to, from: [from, zero, zero, zero] })
    }

    /// The type of the elements of a list that makes up a value.
    fn element(&self, form: Form, arg: &Arg, list: &[Arg]) -> Result<Form, ParseError> {
        let bits = form.bits / list.len().clamp(1, 64) as u8;
        if form.class == Class::Bits && matches!(list.len(), 2 | 4) && bits >= 16 {
            return Ok(Form { class: Class::Bits, bits });
        }
        Err(self.wrong(arg, "a register, or a list of `.b32` or `.b64` with 2 or 4 elements"))
    }

    /// A special register, or the address of a variable. Registers hide variables.
    fn address_or_special(&mut self, form: Form, arg: &Arg) -> Option<Operand> {
        let Arg::Name(name) = *arg else { return None };
        if form.class == Class::Float {
            return None;
        }
        if let Some(special) = special(name) {
            return (form.bits == 32).then_some(Operand::Special(special));
        }
        if form.bits < 32 || self.find_reg(name).is_some() {
            return None;
        }
        let (_, address) = self.variable_address(name)?;
        Some(Operand::Immediate(address))
    }

    fn load(&mut self, access: &AccessForm, args: &[Arg]) -> Result<Op, ParseError> {
        self.count(args, &[2])?;
        let &AccessForm { space, form, elements } = access;
        let list = match elements {
            None => &args[..1],
            Some(elements) => self.list(&args[0], elements)?,
        };
        let reg = |arg| self.reg_or_wider(arg, form, true);
        let to: Vec<_> = list.iter().map(reg).collect::<Result<_, _>>()?;
        self.distinct(&args[0], &to)?;
        let wider = to.iter().any(|reg| self.kernel.reg_bits[reg.0 as usize] > form.bits);
        let signed = form.class == Class::Signed && wider;
        let from = self.address(&args[1], space)?;
        Ok(Op::Load { space, bytes: form.bytes(), signed, to, from })
    }

    /// An addition to a number that other blocks may access, too.
    fn add_strong(
        &mut self,
        releases: bool,
        returns: bool,
        args: &[Arg],
    ) -> Result<Op, ParseError> {
        self.count(args, &[2 + usize::from(returns)])?;
        let (to, rest) = args.split_at(usize::from(returns));
        let to = to.first().map(|to| self.reg(to, Form::U32)).transpose()?;
        let at = self.address(&rest[0], Space::Global)?;
        Ok(Op::AddStrong { releases, to, at, value: self.value(&rest[1], Form::U32)? })
    }

    fn store(&mut self, access: Option<AccessForm>, args: &[Arg]) -> Result<Op, ParseError> {
        let access = access.filter(|access| access.space != Space::Param);
        let Some(AccessForm { space, form, elements }) = access else { return Err(self.unknown()) };
        self.count(args, &[2])?;
        let to = self.address(&args[0], space)?;
        let list = match elements {
            None => &args[1..],
            Some(elements) => self.list(&args[1], elements)?,
        };
        let value = |arg| self.value_or_wider(arg, form, true);
        let from = list.iter().map(value).collect::<Result<_, _>>()?;
        Ok(Op::Store { space, bytes: form.bytes(), to, from })
    }

    /// `shfl.sync d|p, a, b, c, membermask`.
    fn shuffle(&self, mode: &str, args: &[Arg]) -> Result<Op, ParseError> {
        let mode = match mode {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            "idx" => Shuffle::Index,
            _ => return Err(self.unknown()),
        };
        self.count(args, &[5])?;
        let (to, in_range) = match args[0] {
            Arg::Pair(to, predicate) => {
                let predicate = self.reg(&Arg::Name(predicate), Form::PREDICATE)?;
                (self.reg(&Arg::Name(to), Form::B32)?, Some(predicate))
            }
            ref to => (self.reg(to, Form::B32)?, None),
        };
        let mut from = [self.value(&args[1], Form::B32)?; 4];
        for index in 1..4 {
            from[index] = self.value(&args[index + 1], Form::U32)?;
        }
        Ok(Op::Shuffle { mode, to, in_range, from })
    }

    /// Branches, barriers and addresses of other spaces.
    fn control(&mut self, args: &[Arg<'a>]) -> Result<Op, ParseError> {
        match self.opcode {
            "bra" | "bra.uni" => {
                self.count(args, &[1])?;
                let Arg::Name(label) = args[0] else { return Err(self.wrong(&args[0], "a label")) };
                self.jump(label);
                Ok(Op::Branch { target: 0, uniform: self.opcode == "bra.uni" })
            }
            "ret" | "exit" => {
                self.count(args, &[0])?;
                Ok(Op::Exit)
            }
            "cvta.param.u64" => {
                self.count(args, &[2])?;
                let to = self.reg(&args[0], Form::U64)?;
                Ok(Op::ParamAddress { to, from: Operand::Reg(self.reg(&args[1], Form::U64)?) })
            }
            "cvta.to.global.u64" => {
                self.count(args, &[2])?;
                let to = self.reg(&args[0], Form::U64)?;
                Ok(Op::ToGlobal { to, from: Operand::Reg(self.reg(&args[1], Form::U64)?) })
            }
            "bar.warp.sync" => {
                self.count(args, &[1])?;
                Ok(Op::WarpBarrier { mask: self.value(&args[0], Form::U32)? })
            }
            "bar.sync" | "bar.arrive" => {
                let waits = self.opcode == "bar.sync";
                self.count(args, if waits { &[1, 2] } else { &[2] })?;
                let id = self.value(&args[0], Form::U32)?;
                let threads = args.get(1).map(|arg| self.value(arg, Form::U32)).transpose()?;
                Ok(Op::Barrier { waits, id, threads })
            }
            _ => Err(self.unknown()),
        }
    }

    /// Copies to shared memory.
    fn copy(&mut self, args: &[Arg]) -> Result<Op, ParseError> {
        match self.opcode {
            "cp.async.cg.shared.global" => {
                self.count(args, &[3, 4])?;
                let to = self.address(&args[0], Space::Shared)?;
                let from = self.address(&args[1], Space::Global)?;
                self.constant(&args[2], &[16])?;
                let size = args.get(3).map(|arg| self.value(arg, Form::U32)).transpose()?;
                Ok(Op::CopyAsync { to, from, size })
            }
            "cp.async.commit_group" => {
                self.count(args, &[0])?;
                Ok(Op::CopyCommit)
            }
            "cp.async.wait_group" => {
                self.count(args, &[1])?;
                let pending = u64::from(self.constant(&args[0], &[])?);
                Ok(Op::CopyWait { pending: Operand::Immediate(pending) })
            }
            COPY_BOX => {
                self.count(args, &[3])?;
                let to = self.address(&args[0], Space::Shared)?;
                let Arg::Box { map, at } = &args[1] else {
                    return Err(self.wrong(&args[1], "the address of a map, with coordinates"));
                };
                let map = Operand::Reg(self.reg(&Arg::Name(map), Form::U64)?);
                if at.len() != 3 {
                    return Err(self.wrong(&args[1], "3 coordinates"));
                }
                let at = at.iter().map(|arg| self.value(arg, Form::U32));
                let at = at.collect::<Result<_, _>>()?;
                Ok(Op::CopyBox { to, map, at, barrier: self.address(&args[2], Space::Shared)? })
            }
            _ => Err(self.unknown()),
        }
    }

    /// Barriers in shared memory, and fences.
    fn memory_barrier(&mut self, args: &[Arg]) -> Result<Op, ParseError> {
        match self.opcode {
            "mbarrier.init.shared::cta.b64" => {
                self.count(args, &[2])?;
                let at = self.address(&args[0], Space::Shared)?;
                Ok(Op::MemoryBarrierInit { at, count: self.value(&args[1], Form::U32)? })
            }
            "mbarrier.arrive.shared::cta.b64" => {
                self.count(args, &[2])?;
                Ok(Op::MemoryBarrierArrive { at: self.arrival(args)?, bytes: None })
            }
            "mbarrier.arrive.expect_tx.shared::cta.b64" => {
                self.count(args, &[3])?;
                let bytes = Some(self.value(&args[2], Form::U32)?);
                Ok(Op::MemoryBarrierArrive { at: self.arrival(args)?, bytes })
            }
            "mbarrier.try_wait.parity.shared::cta.b64" => {
                self.count(args, &[3])?;
                let to = self.reg(&args[0], Form::PREDICATE)?;
                let at = self.address(&args[1], Space::Shared)?;
                let parity = self.value(&args[2], Form::U32)?;
                Ok(Op::MemoryBarrierTryWait { to, at, parity })
            }
            "fence.mbarrier_init.release.cluster" => {
                self.count(args, &[0])?;
                Ok(Op::FenceInit)
            }
            "fence.proxy.async.shared::cta" => {
                self.count(args, &[0])?;
                Ok(Op::FenceProxy)
            }
            _ => Err(self.unknown()),
        }
    }

    /// The barrier of `mbarrier.arrive _, [barrier]`. Nothing reads its state.
    fn arrival(&mut self, args: &[Arg]) -> Result<Address, ParseError> {
        if args[0] != Arg::Name("_") {
            return Err(self.wrong(&args[0], "`_`"));
        }
        self.address(&args[1], Space::Shared)
    }

    /// Products of matrices, and what goes with them.
    fn matrix(&mut self, parts: &[&str], args: &[Arg]) -> Result<Op, ParseError> {
        match *parts {
            ["ldmatrix", "sync", "aligned", "m8n8", n, "shared", "b16"] => {
                self.load_matrix(n, false, args)
            }
            ["ldmatrix", "sync", "aligned", "m8n8", n, "trans", "shared", "b16"] => {
                self.load_matrix(n, true, args)
            }
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"] => {
                self.count(args, &[4])?;
                let d = self.regs(&args[0], 4, Form::F32)?;
                let (a, b) = (self.values(&args[1], Form::B32)?, self.values(&args[2], Form::B32)?);
                let c = self.values(&args[3], Form::F32)?;
                Ok(Op::Mma { d: [d[0], d[1], d[2], d[3]], a, b, c })
            }
            ["setmaxnreg", change @ ("inc" | "dec"), "sync", "aligned", "u32"] => {
                self.count(args, &[1])?;
                let allowed: Vec<u32> = (24..=256).step_by(8).collect();
                let regs = self.constant(&args[0], &allowed)?;
                Ok(Op::SetMaxRegs { increases: change == "inc", regs })
            }
            ["wgmma", "mma_async", "sync", "aligned", shape, "f32", "bf16", "bf16"] => {
                self.warpgroup_mma(shape, args)
            }
            ["wgmma", "fence", "sync", "aligned"] => {
                self.count(args, &[0])?;
                Ok(Op::WarpgroupFence)
            }
            ["wgmma", "commit_group", "sync", "aligned"] => {
                self.count(args, &[0])?;
                Ok(Op::WarpgroupCommit)
            }
            ["wgmma", "wait_group", "sync", "aligned"] => {
                self.count(args, &[1])?;
                Ok(Op::WarpgroupWait { pending: self.constant(&args[0], &[])? })
            }
            _ => Err(self.unknown()),
        }
    }

    fn load_matrix(
        &mut self,
        matrices: &str,
        transposed: bool,
        args: &[Arg],
    ) -> Result<Op, ParseError> {
        let matrices = match matrices {
            "x1" => 1,
            "x2" => 2,
            "x4" => 4,
            _ => return Err(self.unknown()),
        };
        self.count(args, &[2])?;
        let to = self.regs(&args[0], matrices, Form::B32)?;
        Ok(Op::LoadMatrix { to, from: self.address(&args[1], Space::Shared)?, transposed })
    }

    /// `wgmma.mma_async d, a, b, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b`,
    /// without imm-trans-a if A is in registers.
    fn warpgroup_mma(&self, shape: &str, args: &[Arg]) -> Result<Op, ParseError> {
        let sizes = (8..=256).step_by(8);
        let n = sizes.into_iter().find(|n| shape == format!("m64n{n}k16"));
        let Some(n) = n else { return Err(self.unknown()) };
        self.count(args, &[7, 8])?;
        let in_regs = matches!(args[1], Arg::List(_));
        self.count(args, if in_regs { &[7] } else { &[8] })?;
        let a = if in_regs {
            MatrixA::Regs(self.values(&args[1], Form::B32)?)
        } else {
            MatrixA::Descriptor(Operand::Reg(self.reg(&args[1], Form::B64)?))
        };
        let transposed = |arg| Ok::<_, ParseError>(self.constant(arg, &[0, 1])? == 1);
        let transpose = if in_regs {
            [false, transposed(&args[6])?]
        } else {
            [transposed(&args[6])?, transposed(&args[7])?]
        };
        for scale in &args[4..6] {
            if *scale != Arg::Number("1") {
                return Err(self.wrong(scale, "1, which does not negate an operand"));
            }
        }
        Ok(Op::WarpgroupMma(Box::new(WarpgroupMma {
            n,
            d: self.regs(&args[0], n / 2, Form::F32)?,
            a,
            b: Operand::Reg(self.reg(&args[2], Form::B64)?),
            adds: self.value(&args[3], Form::PREDICATE)?,
            transpose,
        })))
    }
}

/// What a load or store accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AccessForm {
    space: Space,
    form: Form,
    /// Elements of a list, if it is one.
    elements: Option<usize>,
}

impl AccessForm {
    /// `global.v4.f32`, split at dots. The state space must be given.
    fn read(parts: &[&str]) -> Option<Self> {
        let space = match *parts.first()? {
            "param" => Space::Param,
            "global" => Space::Global,
            "shared" => Space::Shared,
            _ => return None,
        };
        Self::in_space(space, &parts[1..])
    }

    /// `v4.f32`, split at dots.
    fn in_space(space: Space, parts: &[&str]) -> Option<Self> {
        let (elements, ty) = match *parts {
            [ty] => (None, ty),
            ["v2", ty] => (Some(2), ty),
            ["v4", ty] => (Some(4), ty),
            _ => return None,
        };
        let form = Form::named(ty).filter(|form| form.class != Class::Predicate)?;
        // At most 16 bytes (PTX ISA, "Vectors").
        (elements.unwrap_or(1) * form.bytes() <= 16).then_some(Self { space, form, elements })
    }
}
