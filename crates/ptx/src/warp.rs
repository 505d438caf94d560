//! A warp: its registers, its threads that are at different instructions, and the accesses of
//! others that happened before.

use crate::fault::Fault;
use crate::instruction::{Guard, LANES, Lanes, Operand, Reg, Special};
use crate::order::{By, Known, NOTHING, Stamp};
use crate::warpgroup::InFlight;

/// Threads of a warp that are at the same instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fragment {
    pub(crate) pc: usize,
    pub(crate) lanes: u32,
    pub(crate) wait: Wait,
}

/// What a fragment waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Nothing,
    /// Other threads of the warp, at the same instruction.
    Lanes,
    /// A barrier of the block.
    Barrier,
    /// The end of a phase of the barrier in shared memory.
    Phase {
        at: u64,
        parity: bool,
    },
    /// Another value at an address in global memory, which another block stores.
    Change {
        at: u64,
        value: u32,
    },
    /// Registers that other warps release.
    Registers {
        regs: u64,
    },
}

/// A copy of 16 bytes by `cp.async`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy16 {
    pub(crate) to: usize,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Warp {
    pub(crate) index: usize,
    regs: Vec<Lanes>,
    /// Its threads, and those that have not ended.
    pub(crate) all: u32,
    pub(crate) live: u32,
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) epoch: u32,
    /// Number of releases in this epoch.
    releases: u32,
    known: Known,
    /// What single threads know besides.
    of_lanes: Vec<Option<Box<Known>>>,
    /// Proxy fences of each thread, and both these and fences of initialised barriers.
    pub(crate) fences: Vec<Vec<Stamp>>,
    pub(crate) init_fences: Vec<Vec<Stamp>>,
    /// Copies of each thread: those of the open group, and of groups in flight, the oldest first.
    pub(crate) open_copies: Vec<Vec<Copy16>>,
    pub(crate) copies: Vec<Vec<Vec<Copy16>>>,
    pub(crate) products: InFlight,
    /// Registers that were accessed since the last `wgmma.fence`, and at the start all of them; empty
    /// in kernels without products.
    touched: Vec<bool>,
    /// Registers of each thread (`setmaxnreg`).
    pub(crate) max_regs: u64,
    /// Threads whose last `mbarrier.try_wait` has failed, so that they execute it again, and those that
    /// may execute [`Op::LoadStrong`](crate::instruction::Op::LoadStrong) again.
    pub(crate) polling: u32,
    /// Address and value of the last of these loads.
    pub(crate) polled: (u64, u32),
}

pub(crate) fn iterate_lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

impl Warp {
    /// Threads `32 * index ..` of a block of `threads`.
    pub(crate) fn new(
        index: usize,
        threads: usize,
        (num_regs, has_products): (usize, bool),
        max_regs: u64,
    ) -> Self {
        let num = (threads - LANES * index).min(LANES);
        let live = u32::MAX >> (LANES - num);
        let mut known = Known::default();
        known.add(Stamp { unit: index as u16, epoch: 1, releases: 0, lanes: 0 });
        Self {
            index,
            regs: vec![[0xdead_dead_dead_dead; LANES]; num_regs],
            all: live,
            live,
            fragments: vec![Fragment { pc: 0, lanes: live, wait: Wait::Nothing }],
            epoch: 1,
            releases: 0,
            known,
            of_lanes: vec![None; LANES],
            fences: vec![Vec::new(); LANES],
            init_fences: vec![Vec::new(); LANES],
            open_copies: vec![Vec::new(); LANES],
            copies: vec![Vec::new(); LANES],
            products: InFlight::default(),
            touched: vec![true; if has_products { num_regs } else { 0 }],
            max_regs,
            polling: 0,
            polled: (0, 0),
        }
    }

    /// Whether a register was accessed since the last `wgmma.fence`.
    pub(crate) fn is_touched(&self, reg: Reg) -> bool {
        self.touched[reg.0 as usize]
    }

    /// Whether the kernel has products of warpgroups.
    pub(crate) fn has_products(&self) -> bool {
        !self.touched.is_empty()
    }

    pub(crate) fn touch(&mut self, reg: Reg) {
        self.touched[reg.0 as usize] = true;
    }

    /// `wgmma.fence`.
    pub(crate) fn fence(&mut self) {
        self.products.fence();
        self.touched.fill(false);
    }

    /// Replaces a register of all threads, as products do.
    pub(crate) fn restore(&mut self, reg: Reg, values: &Lanes) {
        self.regs[reg.0 as usize] = *values;
    }

    pub(crate) fn reg(&self, reg: Reg) -> &Lanes {
        &self.regs[reg.0 as usize]
    }

    pub(crate) fn values(&self, operand: Operand, position: &Position) -> Lanes {
        match operand {
            Operand::Reg(reg) => self.regs[reg.0 as usize],
            Operand::Immediate(value) => [value; LANES],
            Operand::Special(Special::Thread) => {
                std::array::from_fn(|lane| (LANES * self.index + lane) as u64)
            }
            Operand::Special(Special::Threads) => [position.threads as u64; LANES],
            Operand::Special(Special::Block(axis)) => [u64::from(position.block[axis]); LANES],
            Operand::Special(Special::Blocks(axis)) => [u64::from(position.grid[axis]); LANES],
        }
    }

    /// The value of an operand that is the same in all `lanes`.
    pub(crate) fn uniform(
        &self,
        operand: Operand,
        lanes: u32,
        position: &Position,
    ) -> Result<u64, Fault> {
        let values = self.values(operand, position);
        let first = values[lanes.trailing_zeros() as usize];
        let is_same = iterate_lanes(lanes).all(|lane| values[lane] == first);
        if is_same { Ok(first) } else { Err(Fault::NotUniform) }
    }

    /// Replaces a register in `lanes`.
    pub(crate) fn set(&mut self, reg: Reg, values: &Lanes, lanes: u32) {
        let to = &mut self.regs[reg.0 as usize];
        if lanes == u32::MAX {
            *to = *values;
            return;
        }
        for lane in iterate_lanes(lanes) {
            to[lane] = values[lane];
        }
    }

    /// Those of `lanes` whose predicate holds.
    pub(crate) fn active(&self, guard: Option<Guard>, lanes: u32) -> u32 {
        let Some(Guard { predicate, negated }) = guard else { return lanes };
        let values = self.reg(predicate);
        let holds = (0..LANES).fold(0, |mask, lane| mask | u32::from(values[lane] != 0) << lane);
        lanes & if negated { !holds } else { holds }
    }

    /// Threads end. Those that wait for other threads of the warp look again whom they need.
    pub(crate) fn end_threads(&mut self, lanes: u32) {
        self.live &= !lanes;
        for fragment in self.fragments.iter_mut().filter(|of| of.wait == Wait::Lanes) {
            fragment.wait = Wait::Nothing;
        }
    }

    pub(crate) fn stamp(&self, lanes: u32) -> Stamp {
        let Self { index, epoch, releases, .. } = *self;
        Stamp { unit: index as u16, epoch, releases, lanes }
    }

    pub(crate) fn by(&self, lane: usize) -> By<'_> {
        let known = [&self.known, self.of_lanes[lane].as_deref().unwrap_or(&NOTHING)];
        By { stamp: self.stamp(1 << lane), known, is_async: false }
    }

    /// What is ordered before an asynchronous access of all threads together: what the whole warp has
    /// seen, and what its threads did.
    pub(crate) fn known_to_all(&self) -> Known {
        let mut known = self.known.clone();
        known.add(self.stamp(self.live));
        known
    }

    /// An asynchronous access with this stamp has ended, and the warp has waited for it.
    pub(crate) fn end_access(&mut self, stamp: Stamp) {
        self.known.add(stamp);
    }

    /// All threads of the warp synchronise: their accesses so far are ordered before later ones.
    pub(crate) fn synchronise(&mut self) {
        for known in self.of_lanes.iter_mut().filter_map(Option::take) {
            self.known.join(&known);
        }
        (self.epoch, self.releases) = (self.epoch + 1, 0);
        let now = self.stamp(0);
        self.known.add(now);
    }

    /// What is ordered before by what these threads release now. [`Warp::end_release`] follows when
    /// all threads of the instruction have released.
    pub(crate) fn released(&self, lanes: u32) -> Known {
        let mut released = self.known.clone();
        for known in iterate_lanes(lanes).filter_map(|lane| self.of_lanes[lane].as_deref()) {
            released.join(known);
        }
        released.add(self.stamp(lanes));
        released
    }

    /// Later accesses are not a part of the last release.
    pub(crate) fn end_release(&mut self) {
        self.releases += 1;
    }

    /// These threads see what others released.
    pub(crate) fn acquire(&mut self, released: &Known, lanes: u32) {
        if lanes == self.live {
            self.known.join(released);
            return;
        }
        for lane in iterate_lanes(lanes) {
            self.of_lanes[lane].get_or_insert_default().join(released);
        }
    }
}

/// Where a block is in its grid.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position {
    pub(crate) block: [u32; 3],
    pub(crate) grid: [u32; 3],
    pub(crate) threads: usize,
}
