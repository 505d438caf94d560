//! Products of a warpgroup (`wgmma`): they take effect when a warp waits for them.

use crate::block::Block;
use crate::fault::Fault;
use crate::instruction::{Lanes, MatrixA, Op, Operand, Reg, WarpgroupMma};
use crate::order::{By, Stamp};
use crate::products::{self, Descriptor};
use crate::warp::Warp;
use std::collections::{BTreeMap, VecDeque};

/// Bits of sums that are in flight: the canonical NaN.
const IN_FLIGHT: u64 = 0x7fff_ffff;

/// Products of a warp that have not ended.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    open: Vec<Product>,
    groups: VecDeque<Vec<Product>>,
    /// Number of groups that have ended.
    num_ended: u32,
    sums: BTreeMap<Reg, Lanes>,
}

#[derive(Debug)]
struct Product {
    n: usize,
    d: Vec<Reg>,
    a: Left,
    a_regs: Vec<Reg>,
    b: Vec<u64>,
    b_transposed: bool,
    adds: bool,
    /// Whether a `wgmma.fence` followed.
    is_fenced: bool,
}

/// An instruction that the four warps of a warpgroup execute together (`.aligned`): its index, and
/// the descriptors of A and B.
type Together = (usize, [u64; 2]);

/// Such instructions that some warps of a warpgroup have executed and others have not.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    open: VecDeque<Together>,
    /// Number of instructions that all warps have executed, and that each warp has.
    by_all: usize,
    by_warp: [usize; 4],
}

impl Aligned {
    /// A warp (0 to 3) executes an instruction.
    fn execute(&mut self, warp: usize, what: Together) -> Result<(), Fault> {
        match self.open.get(self.by_warp[warp] - self.by_all) {
            Some(other) if *other != what => return Err(Fault::NotAligned),
            Some(_) => {}
            None => self.open.push_back(what),
        }
        self.by_warp[warp] += 1;
        if self.by_warp.iter().all(|number| *number > self.by_all) {
            self.by_all += 1;
            self.open.pop_front();
        }
        Ok(())
    }

    /// The index of the first instruction that not all warps have executed.
    pub(crate) fn open(&self) -> Option<usize> {
        self.open.front().map(|(pc, _)| *pc)
    }
}

#[derive(Debug)]
enum Left {
    Values(Vec<f32>),
    /// Addresses of pieces, and whether rows of k are adjacent.
    Shared(Vec<u64>, bool),
}

impl InFlight {
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.groups.iter().all(Vec::is_empty)
    }

    pub(crate) fn commit(&mut self) {
        let group = std::mem::take(&mut self.open);
        self.groups.push_back(group);
    }

    fn open_group(&self) -> u32 {
        self.num_ended + self.groups.len() as u32 + 1
    }

    fn all(&self) -> impl Iterator<Item = &Product> {
        self.groups.iter().flatten().chain(&self.open)
    }

    /// `wgmma.fence`.
    pub(crate) fn fence(&mut self) {
        for product in self.groups.iter_mut().flatten().chain(&mut self.open) {
            product.is_fenced = true;
        }
    }

    /// Whether a thread may not access a register (PTX ISA, `wgmma.wait_group`).
    fn is_busy(&self, reg: Reg) -> bool {
        self.sums.contains_key(&reg) || self.all().any(|product| product.a_regs.contains(&reg))
    }

    /// Whether a product of another shape, or one that reads the register as A, needs a fence before
    /// one with these sums (PTX ISA, `wgmma.fence`).
    fn needs_fence(&self, n: usize, reg: Reg) -> bool {
        self.all().filter(|product| !product.is_fenced).any(|product| {
            (product.n != n && product.d.contains(&reg)) || product.a_regs.contains(&reg)
        })
    }
}

impl Block<'_> {
    /// Notes which registers an instruction accesses, and fails if a product in flight uses one.
    pub(crate) fn check_products(&mut self, warp: usize, op: &Op) -> Result<(), Fault> {
        let of = &mut self.warps[warp];
        if !of.has_products() || matches!(op, Op::WarpgroupMma(_)) {
            return Ok(());
        }
        let mut busy = None;
        op.visit_registers(&mut |reg| {
            if of.products.is_busy(reg) {
                busy = Some(reg);
            }
            of.touch(reg);
        });
        match busy {
            Some(reg) => Err(Fault::BusyRegister { register: self.name(reg) }),
            None => Ok(()),
        }
    }

    fn name(&self, reg: Reg) -> String {
        self.kernel.regs[reg.0 as usize].clone()
    }

    /// Addresses of the pieces of an operand in shared memory.
    fn pieces(
        &self,
        warp: usize,
        (operand, rows, transposed): (Operand, usize, bool),
    ) -> Result<Vec<u64>, Fault> {
        let product = |error: &dyn std::fmt::Display| Fault::Product(error.to_string());
        let bits = self.warps[warp].uniform(operand, u32::MAX, &self.position)?;
        let descriptor = Descriptor::decode(bits).map_err(|error| product(&error))?;
        descriptor.addresses(rows, transposed).map_err(|error| product(&error))
    }

    /// Executes an instruction on products.
    pub(crate) fn execute_warpgroup(
        &mut self,
        warp: usize,
        op: &Op,
        pc: usize,
    ) -> Result<(), Fault> {
        let mut descriptors = [0; 2];
        if let Op::WarpgroupMma(of) = op {
            let value = |operand| self.warps[warp].uniform(operand, u32::MAX, &self.position);
            let a = match of.a {
                MatrixA::Regs(_) => 0,
                MatrixA::Descriptor(a) => value(a)?,
            };
            descriptors = [a, value(of.b)?];
        }
        self.align(warp, (pc, descriptors))?;
        match op {
            Op::WarpgroupMma(of) => return self.issue_product(warp, of),
            Op::WarpgroupFence => self.warps[warp].fence(),
            Op::WarpgroupCommit => self.warps[warp].products.commit(),
            Op::WarpgroupWait { pending } => self.wait_for_products(warp, *pending as usize),
            _ => {}
        }
        Ok(())
    }

    /// A warp executes an instruction that all of its warpgroup must execute.
    pub(crate) fn align(&mut self, warp: usize, what: Together) -> Result<(), Fault> {
        self.aligned[warp / 4].execute(warp % 4, what)
    }

    fn issue_product(&mut self, warp: usize, op: &WarpgroupMma) -> Result<(), Fault> {
        let of = &self.warps[warp];
        let [a_transposed, b_transposed] = op.transpose;
        let adds = of.uniform(op.adds, u32::MAX, &self.position)? != 0;
        let (a, a_regs) = match &op.a {
            MatrixA::Regs(regs) => {
                let values = regs.map(|operand| of.values(operand, &self.position));
                let names = regs.iter().filter_map(|operand| match operand {
                    Operand::Reg(reg) => Some(*reg),
                    _ => None,
                });
                (Left::Values(products::a_from_registers(&[values])), names.collect())
            }
            MatrixA::Descriptor(operand) => {
                let pieces = self.pieces(warp, (*operand, 64, a_transposed))?;
                (Left::Shared(pieces, a_transposed), Vec::new())
            }
        };
        let b = self.pieces(warp, (op.b, op.n, b_transposed))?;
        let fresh = op.d.iter().filter(|reg| !of.products.sums.contains_key(reg));
        let mut unfenced = fresh.chain(&a_regs).filter(|reg| of.is_touched(**reg));
        if let Some(reg) = unfenced.next() {
            return Err(Fault::NoProductFence { register: self.name(*reg) });
        }
        if let Some(reg) = op.d.iter().find(|reg| of.products.needs_fence(op.n, **reg)) {
            return Err(Fault::NoProductFence { register: self.name(*reg) });
        }
        if let Some(reg) = a_regs.iter().find(|reg| of.products.sums.contains_key(reg)) {
            return Err(Fault::BusyRegister { register: self.name(*reg) });
        }
        let (n, d) = (op.n, op.d.clone());
        let product = Product { n, d, a, a_regs, b, b_transposed, adds, is_fenced: false };
        self.note_operands(warp, &product)?;
        let of = &mut self.warps[warp];
        for reg in &product.d {
            let value = *of.reg(*reg);
            of.products.sums.entry(*reg).or_insert(value);
            of.restore(*reg, &[IN_FLIGHT; 32]);
        }
        of.products.open.push(product);
        Ok(())
    }

    /// The stamp of the reads of a group of products.
    ///
    /// PTX ISA, `wgmma.commit_group`: a group has the products of a warp, not of a thread; and
    /// `wgmma.wait_group`: the executing threads wait until their groups are complete. So a thread that
    /// has waited may overwrite the operands of all products of its warp, without `bar.warp.sync`. A
    /// thread of another warp may only if a thread that has waited is ordered before, whatever other
    /// barriers it has passed.
    fn product_stamp(&self, warp: usize, group: u32) -> Stamp {
        let unit = (self.warps.len() + warp) as u16;
        Stamp { unit, epoch: group, releases: 0, lanes: 1 }
    }

    /// Notes the reads of a product that starts. Threads must have fenced what they wrote.
    ///
    /// A warp computes 16 rows of the result, but the PTX ISA does not say which warps read which rows
    /// of A in shared memory. So each may read all of them, until it has waited.
    fn note_operands(&mut self, warp: usize, product: &Product) -> Result<(), Fault> {
        let stamp = self.product_stamp(warp, self.warps[warp].products.open_group());
        let warps = &self.warps;
        let find_fence = |write, before| Self::find_fence(warps, write, before);
        let known = warps[warp].known_to_all();
        let by = By { stamp, known: [&known, &known], is_async: true };
        let a = match &product.a {
            Left::Shared(pieces, _) => &pieces[..],
            Left::Values(_) => &[],
        };
        for at in a.iter().chain(&product.b) {
            let first = self.shared.check(*at, 16, 16)?;
            self.shared.note_read(first, 16, &by)?;
            self.shared.check_fences(first, 16, &find_fence, &by)?;
        }
        Ok(())
    }

    /// Ends the groups of products of a warp but the last `pending` ones.
    fn wait_for_products(&mut self, warp: usize, pending: usize) {
        while self.warps[warp].products.groups.len() > pending {
            let group = self.warps[warp].products.groups.pop_front().unwrap_or_default();
            for product in group {
                let read = |pieces: &[u64]| -> Vec<[u8; 16]> {
                    let piece = |at: &u64| self.shared.bytes(*at as usize, 16).try_into();
                    pieces.iter().map(|at| piece(at).expect("16 bytes")).collect()
                };
                let b = products::matrix(&read(&product.b), product.b_transposed);
                let a = match &product.a {
                    Left::Values(values) => values.clone(),
                    Left::Shared(pieces, transposed) => {
                        let own = rows_of_warp(pieces, warp, *transposed);
                        products::matrix(&read(&own), *transposed)
                    }
                };
                let sums = &mut self.warps[warp].products.sums;
                let mut d = [product.d.iter().map(|reg| sums[reg]).collect::<Vec<Lanes>>()];
                products::wgmma(&a, &b, &mut d, product.adds);
                sums.extend(product.d.iter().copied().zip(d[0].iter().copied()));
                // four warps read B together, and each of them its own rows of A
                let of_a = if product.a_regs.is_empty() { 2 * a.len() } else { 0 };
                let read = (2 * b.len() / 4 + of_a) as u64;
                self.counts.shared_read += read;
                self.counts.shared_busy += read;
                self.counts.products += (16 * product.n * 16) as u64;
            }
            let of = &mut self.warps[warp];
            of.end_products();
            of.products.num_ended += 1;
            let open = of.products.num_ended + 1;
            let stamp = self.product_stamp(warp, open);
            self.warps[warp].end_access(Stamp { lanes: 0, ..stamp });
        }
    }
}

/// The pieces of A in shared memory whose rows a warp has in its part of the result.
fn rows_of_warp(pieces: &[u64], warp: usize, transposed: bool) -> Vec<u64> {
    let of = warp % 4;
    let is_own = |index: usize| if transposed { index % 8 / 2 == of } else { index / 32 == of };
    let own = pieces.iter().enumerate().filter(|(index, _)| is_own(*index));
    own.map(|(_, piece)| *piece).collect()
}

impl Warp {
    /// Gives the sums of ended products back to their registers.
    fn end_products(&mut self) {
        let busy: Vec<Reg> = self.products.all().flat_map(|product| product.d.clone()).collect();
        let ended: Vec<Reg> =
            self.products.sums.keys().copied().filter(|reg| !busy.contains(reg)).collect();
        for reg in ended {
            if let Some(sums) = self.products.sums.remove(&reg) {
                self.restore(reg, &sums);
            }
        }
    }
}
