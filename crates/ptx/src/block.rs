//! A block: chooses the next warp, and executes its instructions.

use crate::barriers::{Barrier, MemoryBarriers};
use crate::copies::BoxCopy;
use crate::fault::{Failure, Fault};
use crate::global::Global;
use crate::instruction::{Instruction, Kernel, LANES, Lanes, Op, Operand};
use crate::launch::{Counts, Launch, Random};
use crate::scalar::{self, ScalarFault};
use crate::shared::SharedMemory;
use crate::warp::{Fragment, Position, Wait, Warp};
use crate::warpgroup::Aligned;
use std::collections::BTreeMap;

const ZEROS: Lanes = [0; LANES];

pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) params: &'a [u8],
    pub(crate) position: Position,
    /// That of the launch while the block is executed.
    pub(crate) global: Global,
    pub(crate) shared: SharedMemory,
    pub(crate) warps: Vec<Warp>,
    /// What the warpgroups execute.
    pub(crate) aligned: Vec<Aligned>,
    /// Registers of all threads of the block (`setmaxnreg`).
    pub(crate) pool: u64,
    pub(crate) barriers: BTreeMap<u64, Barrier>,
    pub(crate) memory_barriers: MemoryBarriers,
    /// Copies of boxes in flight.
    pub(crate) boxes: Vec<BoxCopy>,
    pub(crate) random: Random,
    /// Values of the operands of an instruction that are no registers.
    literals: Box<[Lanes; 4]>,
    /// The lane of the warp for which an instruction is executed.
    pub(crate) lane: usize,
    seed: u64,
    max_instructions: u64,
    /// Number of instructions that may follow.
    remaining: u64,
    pub(crate) counts: Counts,
    index: u64,
}

/// What a block does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    GoesOn,
    /// It waits for another block.
    Waits,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The threads go on with the next instruction.
    Next,
    /// They execute it again later.
    Again(Wait),
    /// Another warp lets them go on with the next instruction.
    Waits,
}

impl<'a> Block<'a> {
    pub(crate) fn new(launch: &Launch<'a>, block: [u32; 3], index: u64) -> Self {
        let Launch { kernel, grid, threads, params, registers, max_instructions, seed, .. } =
            *launch;
        let num_warps = threads.div_ceil(32);
        let regs = (kernel.regs.len(), kernel.has_products);
        let warp = |index| Warp::new(index, threads, regs, registers);
        let mut ranges = kernel.shared_ranges.clone();
        ranges.extend(kernel.dynamic_shared.map(|start| start..start + launch.shared_bytes));
        // products have units of their own
        let num_units = if kernel.has_products { 2 * num_warps } else { num_warps };
        Self {
            kernel,
            params,
            position: Position { block, grid, threads },
            global: Global::default(),
            shared: SharedMemory::new(ranges, kernel.shared_shift, num_warps),
            warps: (0..num_warps).map(warp).collect(),
            aligned: (0..num_warps.div_ceil(4)).map(|_| Aligned::default()).collect(),
            pool: 32 * num_warps as u64 * registers,
            barriers: BTreeMap::new(),
            memory_barriers: MemoryBarriers::new(num_units),
            boxes: Vec::new(),
            literals: Box::new([ZEROS; 4]),
            lane: 0,
            seed,
            max_instructions,
            remaining: max_instructions,
            random: Random::new(seed ^ index << 32),
            counts: Counts::default(),
            index,
        }
    }

    /// Executes up to `most` turns of warps with the memory and the counts of the launch.
    pub(crate) fn go_on(
        &mut self,
        global: &mut Global,
        counts: &mut Counts,
        most: usize,
    ) -> Result<State, Box<Failure>> {
        std::mem::swap(&mut self.global, global);
        std::mem::swap(&mut self.counts, counts);
        self.global.begin_block(self.index, self.warps.len());
        let state = self.run(most);
        std::mem::swap(&mut self.global, global);
        std::mem::swap(&mut self.counts, counts);
        state
    }

    fn run(&mut self, most: usize) -> Result<State, Box<Failure>> {
        for _ in 0..most {
            let ready: Vec<usize> =
                (0..self.warps.len()).filter(|warp| self.is_ready(*warp)).collect();
            if !self.boxes.is_empty() && (ready.is_empty() || self.random.below(4) == 0) {
                self.deliver()?;
            } else if ready.is_empty() {
                if self.waits_for_blocks() {
                    return Ok(State::Waits);
                }
                return self.check_end().map(|()| State::Ended);
            } else {
                let warp = ready[self.random.below(ready.len())];
                // sometimes many instructions, so that a warp may be far ahead of the others
                let most = [4, 64, 1024][self.random.below(3)];
                let most = 1 + self.random.below(most);
                self.burst(warp, most)?;
            }
        }
        Ok(State::GoesOn)
    }

    fn waits_for_blocks(&self) -> bool {
        let mut fragments = self.warps.iter().flat_map(|warp| &warp.fragments);
        fragments.any(|of| matches!(of.wait, Wait::Change { .. }))
    }

    fn can_go_on(&self, warp: usize, fragment: &Fragment) -> bool {
        match fragment.wait {
            Wait::Nothing => true,
            Wait::Lanes | Wait::Barrier => false,
            Wait::Phase { at, parity } => {
                self.memory_barriers.at(at).is_ok_and(|barrier| barrier.has_ended(parity))
            }
            Wait::Change { at, value } => self.global.peek(at).is_some_and(|now| now != value),
            Wait::Registers { regs } => {
                let others = self.used_regs() - 32 * self.warps[warp].max_regs;
                others + 32 * regs <= self.pool
            }
        }
    }

    fn is_ready(&self, warp: usize) -> bool {
        self.warps[warp].fragments.iter().any(|fragment| self.can_go_on(warp, fragment))
    }

    /// Registers of all warps, including ended ones (PTX ISA, `setmaxnreg`: only `.dec`
    /// releases registers).
    pub(crate) fn used_regs(&self) -> u64 {
        self.warps.iter().map(|warp| 32 * warp.max_regs).sum()
    }

    /// Executes up to `most` instructions of a warp.
    fn burst(&mut self, warp: usize, most: usize) -> Result<(), Box<Failure>> {
        for _ in 0..most {
            let fragments = &self.warps[warp].fragments;
            let index = if let [one] = &fragments[..] {
                self.can_go_on(warp, one).then_some(0)
            } else {
                // threads that are behind go on first, so that they join the others again
                let ready =
                    (0..fragments.len()).filter(|index| self.can_go_on(warp, &fragments[*index]));
                ready.min_by_key(|index| fragments[*index].pc)
            };
            let Some(index) = index else { break };
            let Fragment { pc, lanes, .. } = self.warps[warp].fragments[index];
            self.lane = lanes.trailing_zeros() as usize;
            let ended = self.step(warp, index);
            ended.map_err(|fault| self.failure(fault, pc, warp, self.lane))?;
        }
        Ok(())
    }

    /// Executes an instruction of a fragment.
    fn step(&mut self, warp: usize, index: usize) -> Result<(), Fault> {
        let Fragment { pc, lanes, .. } = self.warps[warp].fragments[index];
        let kernel = self.kernel;
        let Instruction { guard, op, .. } = &kernel.code[pc];
        let active = self.warps[warp].active(*guard, lanes);
        if active != 0 {
            self.lane = active.trailing_zeros() as usize;
        }
        let most = self.max_instructions;
        self.remaining = self.remaining.checked_sub(1).ok_or(Fault::Endless { most })?;
        self.counts.executed[pc] |= active != 0;
        let was_polling = lanes & !self.warps[warp].polling == 0;
        let mut ends = true;
        let next = |lanes| Fragment { pc: pc + 1, lanes, wait: Wait::Nothing };
        let mut stays = next(lanes & !active);
        let mut goes = next(active);
        match op {
            Op::Branch { target, uniform } => {
                if *uniform && active != 0 && active != lanes {
                    return Err(Fault::NotUniform);
                }
                goes.pc = *target;
            }
            Op::Exit => {
                self.warps[warp].end_threads(active);
                goes.lanes = 0;
            }
            Op::Scalar { kind, to, from } if active != 0 => {
                self.check_products(warp, op)?;
                let of = &self.warps[warp];
                for (literal, operand) in self.literals.iter_mut().zip(from) {
                    if !matches!(operand, Operand::Reg(_) | Operand::Immediate(0)) {
                        *literal = of.values(*operand, &self.position);
                    }
                }
                let from = std::array::from_fn(|index| match from[index] {
                    Operand::Reg(reg) => of.reg(reg),
                    Operand::Immediate(0) => &ZEROS,
                    _ => &self.literals[index],
                });
                let mut result = [0; LANES];
                scalar::execute(*kind, &from, &mut result, active).map_err(Fault::Scalar)?;
                self.warps[warp].set(*to, &result, active);
                (stays.lanes, goes.lanes) = (0, lanes);
            }
            _ if active == 0 => {}
            _ => {
                self.check_products(warp, op)?;
                match self.execute(warp, op, pc, active)? {
                    Outcome::Next => {}
                    Outcome::Again(wait) => (goes.pc, goes.wait, ends) = (pc, wait, false),
                    Outcome::Waits => (goes.pc, goes.wait) = (pc, Wait::Barrier),
                }
                if !op.is_warp_wide() && goes.wait == Wait::Nothing {
                    (stays.lanes, goes.lanes) = (0, lanes);
                }
            }
        }
        let polls = matches!(op, Op::MemoryBarrierTryWait { .. });
        let fails = active & self.warps[warp].polling != 0;
        if ends && !(if polls { fails } else { was_polling }) {
            self.counts.instructions += 1;
            self.counts.branches += u64::from(matches!(op, Op::Branch { .. }));
            self.counts.moves += u64::from(op.is_move());
            self.counts.special += u64::from(op.is_special());
        }
        self.replace(warp, index, stays, goes);
        Ok(())
    }

    /// Replaces a fragment by two, and joins those that are at the same instruction.
    fn replace(&mut self, warp: usize, index: usize, stays: Fragment, goes: Fragment) {
        let fragments = &mut self.warps[warp].fragments;
        if fragments.len() == 1 && (stays.lanes == 0 || goes.lanes == 0) {
            fragments[0] = if stays.lanes == 0 { goes } else { stays };
            if fragments[0].lanes == 0 {
                fragments.clear();
            }
            return;
        }
        fragments.swap_remove(index);
        for mut new in [stays, goes].into_iter().filter(|new| new.lanes != 0) {
            let may_join = |of: &Fragment| matches!(of.wait, Wait::Nothing | Wait::Lanes);
            let joins = |of: &Fragment| of.pc == new.pc && may_join(of) && may_join(&new);
            if let Some(at) = fragments.iter().position(joins) {
                let other = fragments.swap_remove(at);
                new.lanes |= other.lanes;
                // with more lanes, the instruction is tried again
                new.wait = Wait::Nothing;
            }
            fragments.push(new);
        }
    }

    fn failure(&self, fault: Fault, pc: usize, warp: usize, lane: usize) -> Failure {
        let kernel = self.kernel;
        let Instruction { line, source: (file, source_line), .. } = kernel.code[pc];
        let file = kernel.sources.get(file as usize).filter(|name| !name.is_empty());
        let lane = match fault {
            Fault::Scalar(ScalarFault::DivisionByZero { lane }) => lane,
            _ => lane,
        };
        Failure {
            kernel: kernel.name.clone(),
            line,
            source: file.map(|file| (file.clone(), source_line)),
            block: self.position.block,
            thread: 32 * warp + lane,
            seed: self.seed,
            fault,
        }
    }

    /// Lets the warps that waited for a barrier go on.
    pub(crate) fn release(&mut self, warps: Vec<usize>) {
        for warp in warps {
            for fragment in &mut self.warps[warp].fragments {
                if fragment.wait == Wait::Barrier {
                    (fragment.pc, fragment.wait) = (fragment.pc + 1, Wait::Nothing);
                }
            }
        }
    }

    /// Copies a box that is in flight.
    fn deliver(&mut self) -> Result<(), Box<Failure>> {
        let index = self.random.below(self.boxes.len());
        let copy = self.boxes.swap_remove(index);
        let (pc, warp, lane) = copy.issued;
        self.copy_box(copy).map_err(|fault| self.failure(fault, pc, warp, lane).into())
    }

    /// Fails unless all threads have ended and nothing is in flight.
    pub(crate) fn check_end(&self) -> Result<(), Box<Failure>> {
        for (warp, of) in self.warps.iter().enumerate() {
            let waits_for_lanes = of.fragments.iter().find(|of| of.wait == Wait::Lanes);
            if let Some(fragment) = waits_for_lanes.filter(|_| !self.waits_for_blocks()) {
                let op = &self.kernel.code[fragment.pc].op;
                let needed = self.needed(warp, op, fragment.lanes).unwrap_or(u32::MAX);
                let fault = Fault::NotAllLanes { reached: fragment.lanes, needed };
                let first = fragment.lanes.trailing_zeros() as usize;
                return Err(self.failure(fault, fragment.pc, warp, first).into());
            }
        }
        let waiting = self.warps.iter().enumerate();
        let waiting = waiting.flat_map(|(warp, of)| of.fragments.iter().map(move |at| (warp, *at)));
        let waiting: Vec<(usize, Fragment)> = waiting.collect();
        if let Some((warp, Fragment { pc, lanes, .. })) = waiting.first().copied() {
            let list = waiting.iter().map(|(warp, of)| {
                format!("warp {warp} at line {} ({:?})", self.kernel.code[of.pc].line, of.wait)
            });
            let fault = Fault::Hang { waiting: list.collect::<Vec<_>>().join(", ") };
            return Err(self.failure(fault, pc, warp, lanes.trailing_zeros() as usize).into());
        }
        let is_open = |of: &(usize, &Aligned)| of.1.open().is_some();
        if let Some((group, of)) = self.aligned.iter().enumerate().find(is_open) {
            let pc = of.open().unwrap_or_default();
            return Err(self.failure(Fault::NotAligned, pc, 4 * group, 0).into());
        }
        let end = self.kernel.code.len() - 1;
        let in_flight = |what| Err(self.failure(Fault::EndInFlight { what }, end, 0, 0).into());
        if self.warps.iter().any(|warp| !warp.products.is_empty()) {
            return in_flight("products");
        }
        let is_copying = |warp: &Warp| {
            let open = warp.open_copies.iter().any(|copies| !copies.is_empty());
            open || warp.copies.iter().flatten().any(|group| !group.is_empty())
        };
        if self.warps.iter().any(is_copying) {
            return in_flight("copies");
        }
        if self.barriers.values().any(Barrier::is_open) {
            return in_flight("arrivals at a barrier");
        }
        if self.memory_barriers.all().any(super::barriers::MemoryBarrier::expects_bytes) {
            return in_flight("bytes that a barrier expects");
        }
        if self.memory_barriers.all().any(super::barriers::MemoryBarrier::has_unseen_copies) {
            return in_flight("copies of boxes");
        }
        Ok(())
    }
}
