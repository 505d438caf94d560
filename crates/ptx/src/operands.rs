//! The registers that an instruction reads and writes.

use crate::instruction::{Address, MatrixA, Op, Operand, Reg, Scalar, Space, Type};

impl Op {
    /// Whether the assembler usually turns it into nothing.
    pub(crate) fn is_move(&self) -> bool {
        match self {
            Self::Scalar { kind, .. } => matches!(kind, Scalar::Mov(_)),
            Self::Load { space, .. } => *space == Space::Param,
            _ => matches!(
                self,
                Self::Pack { .. }
                    | Self::Unpack { .. }
                    | Self::ParamAddress { .. }
                    | Self::ToGlobal { .. }
            ),
        }
    }

    /// Whether a unit for special functions has a part in it.
    pub(crate) fn is_special(&self) -> bool {
        let Self::Scalar { kind, .. } = self else { return false };
        matches!(
            kind,
            Scalar::Ex2 { .. }
                | Scalar::Lg2
                | Scalar::Rcp
                | Scalar::Rsqrt
                | Scalar::Sqrt(Type::F32)
                | Scalar::Div(Type::F32)
                | Scalar::DivApprox
        )
    }

    /// Whether all threads of the mask of the instruction, or of the warp, execute it together.
    pub(crate) fn is_warp_wide(&self) -> bool {
        matches!(
            self,
            Self::Shuffle { .. }
                | Self::WarpBarrier { .. }
                | Self::Barrier { .. }
                | Self::SetMaxRegs { .. }
                | Self::LoadMatrix { .. }
                | Self::Mma { .. }
                | Self::WarpgroupMma(_)
                | Self::WarpgroupFence
                | Self::WarpgroupCommit
                | Self::WarpgroupWait { .. }
        )
    }

    pub(crate) fn visit_registers(&self, visit: &mut dyn FnMut(Reg)) {
        self.sources(&mut |operand| {
            if let Operand::Reg(reg) = operand {
                visit(reg);
            }
        });
        self.results(visit);
    }

    fn results(&self, visit: &mut dyn FnMut(Reg)) {
        match self {
            Self::Scalar { to, .. }
            | Self::Pack { to, .. }
            | Self::ParamAddress { to, .. }
            | Self::ToGlobal { to, .. }
            | Self::MemoryBarrierTryWait { to, .. }
            | Self::LoadStrong { to, .. }
            | Self::AddStrong { to: Some(to), .. } => visit(*to),
            Self::Unpack { to, .. } => to.iter().flatten().for_each(|reg| visit(*reg)),
            Self::Load { to, .. } | Self::LoadMatrix { to, .. } => {
                for reg in to {
                    visit(*reg);
                }
            }
            Self::Shuffle { to, in_range, .. } => {
                visit(*to);
                if let Some(reg) = in_range {
                    visit(*reg);
                }
            }
            Self::Mma { d, .. } => d.iter().for_each(|reg| visit(*reg)),
            Self::WarpgroupMma(of) => of.d.iter().for_each(|reg| visit(*reg)),
            _ => {}
        }
    }

    fn sources(&self, visit: &mut dyn FnMut(Operand)) {
        let mut address = |address: &Address| visit(address.base);
        match self {
            Self::Load { from, .. }
            | Self::LoadMatrix { from, .. }
            | Self::LoadStrong { from, .. } => address(from),
            Self::AddStrong { at, value, .. } => {
                address(at);
                visit(*value);
            }
            Self::AddFloats { at, values } => {
                address(at);
                for value in values {
                    visit(*value);
                }
            }
            Self::Store { to, from, .. } => {
                address(to);
                for operand in from {
                    visit(*operand);
                }
            }
            Self::CopyAsync { to, from, size, .. } => {
                address(to);
                address(from);
                if let Some(operand) = size {
                    visit(*operand);
                }
            }
            Self::CopyBox { to, map, at, barrier } => {
                address(to);
                address(barrier);
                visit(*map);
                for operand in at {
                    visit(*operand);
                }
            }
            Self::MemoryBarrierInit { at, count } => {
                address(at);
                visit(*count);
            }
            Self::MemoryBarrierArrive { at, bytes } => {
                address(at);
                if let Some(operand) = bytes {
                    visit(*operand);
                }
            }
            Self::MemoryBarrierTryWait { at, parity, .. } => {
                address(at);
                visit(*parity);
            }
            _ => self.values(visit),
        }
    }

    /// The sources of instructions without an address.
    fn values(&self, visit: &mut dyn FnMut(Operand)) {
        match self {
            Self::Scalar { from, .. } | Self::Shuffle { from, .. } => {
                for operand in from {
                    visit(*operand);
                }
            }
            Self::Pack { from, .. } => from.iter().for_each(|operand| visit(*operand)),
            Self::Unpack { from, .. }
            | Self::ParamAddress { from, .. }
            | Self::ToGlobal { from, .. } => visit(*from),
            Self::WarpBarrier { mask } => visit(*mask),
            Self::Barrier { id, threads, .. } => {
                visit(*id);
                if let Some(operand) = threads {
                    visit(*operand);
                }
            }
            Self::CopyWait { pending } => visit(*pending),
            Self::Mma { a, b, c, .. } => {
                a.iter().chain(b).chain(c).for_each(|operand| visit(*operand));
            }
            Self::WarpgroupMma(of) => {
                match &of.a {
                    MatrixA::Regs(a) => a.iter().for_each(|operand| visit(*operand)),
                    MatrixA::Descriptor(a) => visit(*a),
                }
                visit(of.b);
                visit(of.adds);
            }
            _ => {}
        }
    }
}
