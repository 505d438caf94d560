//! Instructions of a warp other than [`Op::Scalar`] and branches.

use crate::block::{Block, Outcome};
use crate::fault::Fault;
use crate::instruction::{Address, LANES, Lanes, Op, Operand, Reg, Shuffle, Space};
use crate::products;
use crate::shared;
use crate::warp::{Wait, iterate_lanes};

/// The generic address of the first parameter: outside of all allocations.
pub(crate) const PARAM_WINDOW: u64 = 0x7e00_0000_0000;

impl Block<'_> {
    /// Executes an instruction in the threads `active` of a warp; `pc` is its index.
    pub(crate) fn execute(
        &mut self,
        warp: usize,
        op: &Op,
        pc: usize,
        active: u32,
    ) -> Result<Outcome, Fault> {
        if op.is_warp_wide() {
            let needed = self.needed(warp, op, active)?;
            if needed & !active != 0 && needed & !self.warps[warp].live == 0 {
                return Ok(Outcome::Again(Wait::Lanes));
            } else if needed != active {
                return Err(Fault::NotAllLanes { reached: active, needed });
            }
        }
        match op {
            Op::Load { space, bytes, signed, to, from } => {
                let used = self.kernel.used_bytes.get(&pc).copied().unwrap_or(u32::MAX);
                self.load(warp, (*space, *bytes, *signed), to, from, (active, used))?;
            }
            Op::Store { space, bytes, to, from } => {
                self.store(warp, (*space, *bytes), to, from, active)?;
            }
            Op::Shuffle { mode, to, in_range, from } => {
                self.shuffle(warp, *mode, (*to, *in_range), from, active)?;
            }
            Op::WarpBarrier { .. } => self.warp_barrier(warp, active),
            Op::Barrier { waits, id, threads } => {
                return self.barrier(warp, *waits, (*id, *threads), active);
            }
            Op::SetMaxRegs { increases, regs } => {
                return self.set_max_regs(warp, pc, (*increases, *regs));
            }
            Op::LoadMatrix { to, from, transposed } => {
                self.load_matrix(warp, to, from, *transposed)?;
            }
            Op::Mma { d, a, b, c } => {
                let values = |operand: &Operand| self.warps[warp].values(*operand, &self.position);
                let sums = products::mma(
                    &a.map(|x| values(&x)),
                    &b.map(|x| values(&x)),
                    &c.map(|x| values(&x)),
                );
                self.counts.products += 16 * 8 * 16;
                for (reg, sums) in d.iter().zip(&sums) {
                    self.warps[warp].set(*reg, sums, active);
                }
            }
            Op::FenceInit | Op::FenceProxy => {
                let of = &mut self.warps[warp];
                for lane in iterate_lanes(active) {
                    let stamp = of.stamp(1 << lane);
                    if matches!(op, Op::FenceProxy) {
                        of.fences[lane].push(stamp);
                    }
                    of.init_fences[lane].push(stamp);
                }
            }
            Op::WarpgroupMma(_)
            | Op::WarpgroupFence
            | Op::WarpgroupCommit
            | Op::WarpgroupWait { .. } => self.execute_warpgroup(warp, op, pc)?,
            Op::Pack { .. } | Op::Unpack { .. } | Op::ParamAddress { .. } | Op::ToGlobal { .. } => {
                self.moves(warp, op, active);
            }
            Op::LoadStrong { .. } | Op::AddStrong { .. } | Op::AddFloats { .. } => {
                return self.execute_order(warp, op, active);
            }
            _ => return self.execute_copy(warp, op, pc, active),
        }
        Ok(Outcome::Next)
    }

    fn warp_barrier(&mut self, warp: usize, active: u32) {
        self.counts.barriers += 1;
        let of = &mut self.warps[warp];
        // a thread that has ended takes no part, so its accesses have no order
        if active == of.all {
            of.synchronise();
        } else {
            let released = of.released(active);
            of.acquire(&released, active);
            of.end_release();
        }
    }

    /// Executes an instruction that orders blocks.
    fn execute_order(&mut self, warp: usize, op: &Op, active: u32) -> Result<Outcome, Fault> {
        match op {
            Op::LoadStrong { acquires, to, from } => {
                let (at, lane) =
                    (self.addresses(warp, from), active.trailing_zeros() as usize & 31);
                if active != 1 << lane {
                    return Err(Fault::NotSupported("several lanes that wait for other blocks"));
                }
                let value = self.global.update(at[lane], |value| value)?;
                let of = &mut self.warps[warp];
                // a thread that has read this value before waits for another one
                if of.polling & active != 0 && of.polled == (at[lane], value) {
                    return Ok(Outcome::Again(Wait::Change { at: at[lane], value }));
                }
                (of.polling, of.polled) = (of.polling | active, (at[lane], value));
                of.set(*to, &[u64::from(value); LANES], active);
                if *acquires {
                    self.global.acquire(at[lane]);
                }
            }
            Op::AddStrong { releases, to, at, value } => {
                let (at, values) = (self.addresses(warp, at), self.values(warp, *value));
                let mut before = [0; LANES];
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    let add = |value: u32| value.wrapping_add(values[lane] as u32);
                    before[lane] = u64::from(self.global.update(at[lane], add)?);
                    self.counts.global_written += 4;
                    if *releases {
                        self.global.release(at[lane], self.warps[warp].released(1 << lane));
                    }
                }
                self.warps[warp].end_release();
                if let Some(to) = to {
                    self.warps[warp].set(*to, &before, active);
                }
            }
            Op::AddFloats { at, values } => {
                let at = self.addresses(warp, at);
                let values = values.map(|value| self.values(warp, value));
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    self.add_floats(warp, lane, at[lane], values.map(|values| values[lane]))?;
                }
            }
            _ => {}
        }
        Ok(Outcome::Next)
    }

    fn add_floats(
        &mut self,
        warp: usize,
        lane: usize,
        at: u64,
        values: [u64; 4],
    ) -> Result<(), Fault> {
        let (by, mut bytes) = (self.warps[warp].by(lane), [0; 16]);
        self.global.read(at, &mut bytes, (16, u32::MAX), &by)?;
        // PTX ISA, `red`: on global memory, it flushes subnormal operands and results to zeros of the
        // same sign.
        let flushed = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
        for (sum, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            let before = flushed(f32::from_le_bytes(*sum));
            *sum = flushed(before + flushed(f32::from_bits(value as u32))).to_le_bytes();
        }
        self.counts.global_written += 16;
        self.global.write(at, &bytes, &by)
    }

    fn values(&self, warp: usize, operand: Operand) -> Lanes {
        self.warps[warp].values(operand, &self.position)
    }

    /// The threads that must execute an instruction of the whole warp together. Only `shfl.sync` does
    /// not wait for threads that have ended. PTX ISA, `bar`: `.aligned` means all threads.
    pub(crate) fn needed(&self, warp: usize, op: &Op, active: u32) -> Result<u32, Fault> {
        let of = &self.warps[warp];
        match op {
            Op::Shuffle { from: [.., mask], .. } => {
                Ok(of.uniform(*mask, active, &self.position)? as u32 & of.live)
            }
            // -1 in a warp with fewer threads names those that there are
            Op::WarpBarrier { mask } => {
                Ok(of.uniform(*mask, active, &self.position)? as u32 & of.all)
            }
            Op::Barrier { .. } => Ok(of.all),
            _ => Ok(u32::MAX),
        }
    }

    fn moves(&mut self, warp: usize, op: &Op, active: u32) {
        let position = self.position;
        let bits = &self.kernel.reg_bits;
        let of = &mut self.warps[warp];
        match op {
            Op::Pack { to, from } => {
                let width = u32::from(bits[to.0 as usize]) / from.len() as u32;
                let mut joined = [0; LANES];
                for (index, operand) in from.iter().enumerate() {
                    let part = of.values(*operand, &position);
                    for (to, part) in joined.iter_mut().zip(part) {
                        *to |= (part & ((1 << width) - 1)) << (width * index as u32);
                    }
                }
                of.set(*to, &joined, active);
            }
            Op::Unpack { to, from } => {
                let whole = of.values(*from, &position);
                let width = to.iter().flatten().next().map_or(32, |reg| bits[reg.0 as usize]);
                for (index, reg) in to.iter().enumerate() {
                    let shift = u32::from(width) * index as u32;
                    let part = whole.map(|whole| whole >> shift & ((1 << width) - 1));
                    if let Some(reg) = reg {
                        of.set(*reg, &part, active);
                    }
                }
            }
            Op::ParamAddress { to, from } => {
                let at = of.values(*from, &position).map(|at| PARAM_WINDOW + at);
                of.set(*to, &at, active);
            }
            Op::ToGlobal { to, from } => {
                let at = of.values(*from, &position);
                of.set(*to, &at, active);
            }
            _ => {}
        }
    }

    pub(crate) fn addresses(&self, warp: usize, address: &Address) -> Lanes {
        let base = self.warps[warp].values(address.base, &self.position);
        // addresses of 32 bits wrap
        let mask = match address.base {
            Operand::Reg(reg) => u64::MAX >> (64 - self.kernel.reg_bits[reg.0 as usize]),
            _ => u64::MAX,
        };
        base.map(|base| base.wrapping_add(address.offset as u64) & mask)
    }

    /// Counts how long shared memory serves an access of some lanes to a number of bytes each.
    fn count_busy(&mut self, space: Space, (addresses, active): (&Lanes, u32), bytes: usize) {
        if space == Space::Shared {
            let addresses = iterate_lanes(active).map(|lane| addresses[lane]);
            self.counts.shared_busy += shared::busy(addresses, bytes);
        }
    }

    fn load(
        &mut self,
        warp: usize,
        (space, bytes, signed): (Space, usize, bool),
        to: &[Reg],
        from: &Address,
        (active, used): (u32, u32),
    ) -> Result<(), Fault> {
        let addresses = self.addresses(warp, from);
        let all = bytes * to.len();
        let mut results = [[0; LANES]; 4];
        self.count_busy(space, (&addresses, active), all);
        for lane in iterate_lanes(active) {
            self.lane = lane;
            let mut read = [0; 16];
            self.read(warp, lane, (space, addresses[lane]), &mut read[..all], used)?;
            for (index, result) in results[..to.len()].iter_mut().enumerate() {
                let mut value = [0; 8];
                value[..bytes].copy_from_slice(&read[bytes * index..bytes * (index + 1)]);
                result[lane] = u64::from_le_bytes(value);
            }
        }
        for (reg, mut result) in to.iter().zip(results) {
            let width = u32::from(self.kernel.reg_bits[reg.0 as usize]);
            if signed {
                let shift = 64 - 8 * bytes as u32;
                let mask = u64::MAX >> (64 - width);
                result = result.map(|value| ((value << shift) as i64 >> shift) as u64 & mask);
            }
            self.warps[warp].set(*reg, &result, active);
        }
        Ok(())
    }

    /// Reads bytes for a thread; those outside of the mask `used` may be unwritten.
    fn read(
        &mut self,
        warp: usize,
        lane: usize,
        (space, at): (Space, u64),
        to: &mut [u8],
        used: u32,
    ) -> Result<(), Fault> {
        let bytes = to.len();
        match space {
            Space::Param => {
                if !at.is_multiple_of(bytes as u64) {
                    return Err(Fault::Misaligned { space, at, bytes });
                }
                let end = at.saturating_add(bytes as u64);
                let from = self.params.get(at as usize..end as usize);
                to.copy_from_slice(from.ok_or(Fault::OutOfBounds { space, at, bytes })?);
            }
            Space::Global => {
                self.counts.global_read += bytes as u64;
                self.global.read(at, to, (bytes, used), &self.warps[warp].by(lane))?;
            }
            Space::Shared => {
                self.counts.shared_read += bytes as u64;
                let first = self.shared.check(at, bytes, bytes)?;
                let by = self.warps[warp].by(lane);
                for start in (0..bytes).step_by(4) {
                    let part = (bytes - start).min(4);
                    if used >> start & ((1 << part) - 1) != 0 {
                        self.shared.note_read(first + start, part, &by)?;
                    }
                }
                to.copy_from_slice(self.shared.bytes(first, bytes));
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        warp: usize,
        (space, bytes): (Space, usize),
        to: &Address,
        from: &[Operand],
        active: u32,
    ) -> Result<(), Fault> {
        let addresses = self.addresses(warp, to);
        let all = bytes * from.len();
        let mut values = [[0; LANES]; 4];
        for (values, operand) in values.iter_mut().zip(from) {
            *values = self.warps[warp].values(*operand, &self.position);
        }
        self.count_busy(space, (&addresses, active), all);
        for lane in iterate_lanes(active) {
            self.lane = lane;
            let mut written = [0; 16];
            for (index, values) in values[..from.len()].iter().enumerate() {
                let value = &values[lane].to_le_bytes()[..bytes];
                written[bytes * index..bytes * (index + 1)].copy_from_slice(value);
            }
            let (at, written) = (addresses[lane], &written[..all]);
            match space {
                Space::Global => {
                    self.counts.global_written += all as u64;
                    self.global.write(at, written, &self.warps[warp].by(lane))?;
                }
                Space::Shared => {
                    self.counts.shared_written += all as u64;
                    self.write_shared(warp, lane, at, written)?;
                }
                Space::Param => return Err(Fault::NotSupported("a store to a parameter")),
            }
        }
        Ok(())
    }

    /// Writes bytes to shared memory for a thread, at a multiple of their number.
    pub(crate) fn write_shared(
        &mut self,
        warp: usize,
        lane: usize,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let first = self.shared.check(at, bytes.len(), bytes.len())?;
        let of = &self.warps[warp];
        let fences = of.fences[lane].len() as u32;
        self.shared.note_write(first, bytes.len(), &of.by(lane), Some(fences))?;
        self.shared.bytes_mut(first, bytes.len()).copy_from_slice(bytes);
        Ok(())
    }

    /// PTX ISA, `shfl.sync`. `from`: value, distance or lane, clamp and mask of segments, members.
    fn shuffle(
        &mut self,
        warp: usize,
        mode: Shuffle,
        (to, in_range): (Reg, Option<Reg>),
        from: &[Operand; 4],
        active: u32,
    ) -> Result<(), Fault> {
        let of = &self.warps[warp];
        let [values, distances, clamps, _] = from.map(|operand| of.values(operand, &self.position));
        let [mut results, mut ranges] = [[0; LANES]; 2];
        for lane in iterate_lanes(active) {
            self.lane = lane;
            let (b, clamp) = (distances[lane] as usize & 31, clamps[lane] as usize & 31);
            let segment = clamps[lane] as usize >> 8 & 31;
            let last = (lane & segment) | (clamp & !segment);
            let (source, is_in_range) = match mode {
                Shuffle::Up => (lane.wrapping_sub(b), lane as isize - b as isize >= last as isize),
                Shuffle::Down => (lane + b, lane + b <= last),
                Shuffle::Butterfly => (lane ^ b, lane ^ b <= last),
                Shuffle::Index => {
                    let source = (lane & segment) | (b & !segment);
                    (source, source <= last)
                }
            };
            let source = if is_in_range { source } else { lane };
            if active >> source & 1 == 0 {
                return Err(Fault::AbsentLane { lane: source });
            }
            (results[lane], ranges[lane]) = (values[source], u64::from(is_in_range));
        }
        self.warps[warp].set(to, &results, active);
        if let Some(reg) = in_range {
            self.warps[warp].set(reg, &ranges, active);
        }
        Ok(())
    }

    fn barrier(
        &mut self,
        warp: usize,
        waits: bool,
        (id, threads): (Operand, Option<Operand>),
        active: u32,
    ) -> Result<Outcome, Fault> {
        self.counts.barriers += 1;
        let of = &mut self.warps[warp];
        let id = of.uniform(id, active, &self.position)?;
        // PTX ISA, `bar`: warps count as 32 threads, whatever they have
        let all = self.position.threads.next_multiple_of(LANES) as u64;
        let threads =
            threads.map(|threads| of.uniform(threads, active, &self.position)).transpose()?;
        // an arrival does not wait, so it does not order the accesses of the warp
        let released = if waits {
            of.synchronise();
            of.released(0)
        } else {
            let released = of.released(active);
            of.end_release();
            released
        };
        let barrier = self.barriers.entry(id).or_default();
        let ended = barrier.arrive((id, threads.unwrap_or(all)), warp, waits, &released)?;
        let Some((waiting, known)) = ended else {
            return Ok(if waits { Outcome::Waits } else { Outcome::Next });
        };
        for other in &waiting {
            let live = self.warps[*other].live;
            self.warps[*other].acquire(&known, live);
        }
        self.release(waiting.into_iter().filter(|other| *other != warp).collect());
        Ok(Outcome::Next)
    }

    /// PTX ISA, `setmaxnreg`.
    fn set_max_regs(
        &mut self,
        warp: usize,
        pc: usize,
        (increases, regs): (bool, u32),
    ) -> Result<Outcome, Fault> {
        let regs = u64::from(regs);
        let before = self.warps[warp].max_regs;
        if (increases && regs < before) || (!increases && regs > before) {
            let direction = if increases { "inc" } else { "dec" };
            return Err(Fault::Registers { direction, before, after: regs });
        }
        if self.used_regs() - 32 * before + 32 * regs > self.pool {
            return Ok(Outcome::Again(Wait::Registers { regs }));
        }
        self.align(warp, (pc, [0; 2]))?;
        self.warps[warp].max_regs = regs;
        Ok(Outcome::Next)
    }

    fn load_matrix(
        &mut self,
        warp: usize,
        to: &[Reg],
        from: &Address,
        transposed: bool,
    ) -> Result<(), Fault> {
        let addresses = self.addresses(warp, from);
        let mut rows = Vec::with_capacity(LANES);
        let lanes = u32::MAX >> (LANES - 8 * to.len());
        self.count_busy(Space::Shared, (&addresses, lanes), products::PIECE);
        for (lane, at) in products::matrix_rows(&addresses, to.len()).iter().enumerate() {
            self.lane = lane;
            let mut row = [0; 16];
            self.read(warp, lane, (Space::Shared, *at), &mut row, u32::MAX)?;
            rows.push(row);
        }
        for (reg, values) in to.iter().zip(products::distribute(&rows, transposed)) {
            self.warps[warp].set(*reg, &values, u32::MAX);
        }
        Ok(())
    }
}
