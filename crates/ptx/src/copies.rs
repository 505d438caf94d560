//! Asynchronous copies to shared memory, and the barriers in shared memory.

use crate::block::{Block, Outcome};
use crate::execute::PARAM_WINDOW;
use crate::fault::Fault;
use crate::instruction::{Address, LANES, Op, Operand, Reg};
use crate::order::{By, Known, Stamp};
use crate::products::{Piece, TensorMap};
use crate::warp::{Copy16, Wait, Warp, iterate_lanes};

/// Bytes of a barrier in shared memory.
const BARRIER_BYTES: usize = 8;

/// A copy of a box of a tensor that is in flight.
#[derive(Debug)]
pub(crate) struct BoxCopy {
    pieces: Vec<Piece>,
    /// Address of the barrier that receives the bytes.
    barrier: u64,
    bytes: i64,
    stamp: Stamp,
    /// Index of the instruction, warp and lane.
    pub(crate) issued: (usize, usize, usize),
}

impl Block<'_> {
    /// Executes an instruction on copies or barriers in shared memory.
    pub(crate) fn execute_copy(
        &mut self,
        warp: usize,
        op: &Op,
        pc: usize,
        active: u32,
    ) -> Result<Outcome, Fault> {
        match op {
            Op::CopyAsync { to, from, size } => {
                self.start_copies(warp, (to, from), *size, active)?;
            }
            Op::CopyCommit => {
                let of = &mut self.warps[warp];
                for lane in iterate_lanes(active) {
                    let group = std::mem::take(&mut of.open_copies[lane]);
                    of.copies[lane].push(group);
                }
            }
            Op::CopyWait { pending } => {
                let pending = self.warps[warp].uniform(*pending, active, &self.position)? as usize;
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    self.finish_copies(warp, lane, pending)?;
                }
            }
            Op::CopyBox { to, map, at, barrier } => {
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    self.start_box(warp, lane, pc, (to, *map, at, barrier))?;
                }
            }
            Op::MemoryBarrierInit { at, count } => {
                let (addresses, counts) =
                    (self.addresses(warp, at), self.warps[warp].values(*count, &self.position));
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    let at = addresses[lane];
                    let first = self.shared.check(at, BARRIER_BYTES, BARRIER_BYTES)?;
                    let of = &self.warps[warp];
                    let fences = of.init_fences[lane].len() as u32;
                    self.shared.init_barrier(first, &of.by(lane), fences)?;
                    self.memory_barriers.init(at, counts[lane] as i64)?;
                }
            }
            Op::MemoryBarrierArrive { at, bytes } => {
                let addresses = self.addresses(warp, at);
                let bytes = bytes.map(|bytes| self.warps[warp].values(bytes, &self.position));
                for lane in iterate_lanes(active) {
                    self.lane = lane;
                    self.see_barrier(warp, lane, addresses[lane], false)?;
                    let known = self.warps[warp].released(1 << lane);
                    let bytes = bytes.map_or(0, |bytes| i64::from(bytes[lane] as u32));
                    self.memory_barriers.receive(addresses[lane], 1, bytes, &known)?;
                }
                self.warps[warp].end_release();
                self.warps[warp].polling &= !active;
            }
            Op::MemoryBarrierTryWait { to, at, parity } => {
                return self.try_wait(warp, *to, (at, *parity), active);
            }
            _ => return Err(Fault::NotSupported("an instruction of an unknown kind")),
        }
        Ok(Outcome::Next)
    }

    /// `mbarrier.try_wait` may return false before the phase has ended, which it does at random.
    fn try_wait(
        &mut self,
        warp: usize,
        to: Reg,
        (at, parity): (&Address, Operand),
        active: u32,
    ) -> Result<Outcome, Fault> {
        let lane = active.trailing_zeros() as usize;
        let at = self.addresses(warp, at);
        let is_same = iterate_lanes(active).all(|other| at[other] == at[lane]);
        let at = Some(at[lane]).filter(|_| is_same);
        let at = at.ok_or(Fault::NotSupported("lanes that wait for different barriers"))?;
        let parity = match self.warps[warp].uniform(parity, active, &self.position)? {
            0 => false,
            1 => true,
            parity => return Err(Fault::Parity { parity }),
        };
        self.see_barrier(warp, lane, at, false)?;
        self.warps[warp].polling &= !active;
        let barrier = self.memory_barriers.at_mut(at)?;
        let has_ended = barrier.has_ended(parity);
        let of = &mut self.warps[warp];
        if has_ended {
            of.acquire(barrier.wait(), active);
        } else if self.random.below(4) != 0 {
            return Ok(Outcome::Again(Wait::Phase { at, parity }));
        } else {
            of.polling |= active;
        }
        of.set(to, &[u64::from(has_ended); LANES], active);
        Ok(Outcome::Next)
    }

    /// Checks that a thread sees an initialised barrier. With `is_async`, it is for a copy, which
    /// needs a fence after the initialisation: PTX ISA 9.1 has copies access their barriers through
    /// the generic proxy, for which a barrier of the block is enough, but the programming guide of
    /// CUDA has the fence.
    fn see_barrier(
        &mut self,
        warp: usize,
        lane: usize,
        at: u64,
        is_async: bool,
    ) -> Result<(), Fault> {
        let first = self.shared.check(at, BARRIER_BYTES, BARRIER_BYTES)?;
        let warps = &self.warps;
        let by = warps[warp].by(lane);
        self.shared.note_barrier(first, &by)?;
        if is_async {
            let find_fence = |write, before| {
                let (warp, lane) = find_writer(warps, write)?;
                warp.init_fences[lane].get(before as usize).copied()
            };
            self.shared.check_fences(first, BARRIER_BYTES, &find_fence, &by)?;
        }
        self.memory_barriers.at(at).map(|_| ())
    }

    fn start_copies(
        &mut self,
        warp: usize,
        (to, from): (&Address, &Address),
        size: Option<Operand>,
        active: u32,
    ) -> Result<(), Fault> {
        let [to, from] = [to, from].map(|address| self.addresses(warp, address));
        let sizes = size.map(|size| self.warps[warp].values(size, &self.position));
        for lane in iterate_lanes(active) {
            self.lane = lane;
            let size = sizes.map_or(16, |sizes| sizes[lane] as u32 as usize);
            if size > 16 {
                return Err(Fault::CopySize { size, most: 16 });
            }
            if size > 0 {
                let by = self.warps[warp].by(lane);
                self.global.note_read(from[lane], size, (16, u32::MAX), &by)?;
            }
            // nothing else may access these bytes until the copy has ended
            self.write_shared(warp, lane, to[lane], &[0; 16])?;
            let copy = Copy16 { to: to[lane] as usize, from: from[lane], bytes: size };
            self.shared.set_in_flight(copy.to, 16, true);
            self.warps[warp].open_copies[lane].push(copy);
        }
        Ok(())
    }

    /// Ends the groups of copies of a thread but the last `pending` ones.
    fn finish_copies(&mut self, warp: usize, lane: usize, pending: usize) -> Result<(), Fault> {
        while self.warps[warp].copies[lane].len() > pending {
            for Copy16 { to, from, bytes } in self.warps[warp].copies[lane].remove(0) {
                let mut data = [0; 16];
                if bytes > 0 {
                    self.counts.global_read += bytes as u64;
                    let by = self.warps[warp].by(lane);
                    self.global.read(from, &mut data[..bytes], (16, u32::MAX), &by)?;
                }
                self.counts.shared_written += 16;
                self.counts.shared_busy += 16;
                self.shared.set_in_flight(to, 16, false);
                self.write_shared(warp, lane, to as u64, &data)?;
            }
        }
        Ok(())
    }

    fn start_box(
        &mut self,
        warp: usize,
        lane: usize,
        pc: usize,
        (to, map, at, barrier): (&Address, Operand, &[Operand], &Address),
    ) -> Result<(), Fault> {
        let value = |operand: &Operand| self.warps[warp].values(*operand, &self.position)[lane];
        let map = value(&map).checked_sub(PARAM_WINDOW).map(|at| at as usize);
        let bytes = map.filter(|at| at.is_multiple_of(64));
        let bytes =
            bytes.and_then(|at| self.params.get(at..at + TensorMap::BYTES)?.try_into().ok());
        let bytes =
            bytes.ok_or(Fault::NotSupported("a tensor map that is not an aligned parameter"))?;
        let product = |error: &dyn std::fmt::Display| Fault::Product(error.to_string());
        let map = TensorMap::from_bytes(bytes).map_err(|error| product(&error))?;
        let [x, y, z] = at else { return Err(Fault::NotSupported("a box without three axes")) };
        let at = [x, y, z].map(|operand| value(operand) as i32);
        let (to, barrier) = (self.addresses(warp, to)[lane], self.addresses(warp, barrier)[lane]);
        self.see_barrier(warp, lane, barrier, true)?;
        let stamp = self.memory_barriers.at(barrier)?.stamp();
        let known = self.warps[warp].released(1 << lane);
        let pieces: Vec<Piece> = map.pieces(to, at).map_err(|error| product(&error))?.collect();
        self.warps[warp].end_release();
        let by = By { stamp, known: [&known, &known], is_async: true };
        let find_fence = |write, before| Self::find_fence(&self.warps, write, before);
        for piece in &pieces {
            let first = self.shared.check(piece.to, 16, 16)?;
            self.shared.check_fences(first, 16, &find_fence, &by)?;
            self.shared.note_write(first, 16, &by, None)?;
            self.shared.set_in_flight(first, 16, true);
            if !piece.inside.is_empty() {
                self.global.note_read(piece.from, piece.inside.len(), (1, u32::MAX), &by)?;
            }
        }
        let bytes = map.box_bytes() as i64;
        let issued = (pc, warp, lane);
        self.boxes.push(BoxCopy { pieces, barrier, bytes, stamp, issued });
        Ok(())
    }

    pub(crate) fn copy_box(&mut self, copy: BoxCopy) -> Result<(), Fault> {
        let BoxCopy { pieces, barrier, bytes, stamp, .. } = copy;
        for Piece { to, inside, from } in pieces {
            let first = self.shared.check(to, 16, 16)?;
            let mut data = [0; 16];
            if !inside.is_empty() {
                self.counts.global_read += inside.len() as u64;
                self.global.copy(from, &mut data[inside])?;
            }
            self.counts.shared_written += 16;
            self.counts.shared_busy += 16;
            self.shared.set_in_flight(first, 16, false);
            self.shared.bytes_mut(first, 16).copy_from_slice(&data);
        }
        // PTX ISA, "Asynchronous Operations": only the copy itself, not earlier accesses of its thread
        let mut known = Known::default();
        known.add(stamp);
        self.memory_barriers.receive(barrier, 0, -bytes, &known)
    }

    /// The first proxy fence of the thread of a write after it had executed `before` of them.
    pub(crate) fn find_fence(warps: &[Warp], write: Stamp, before: u32) -> Option<Stamp> {
        let (warp, lane) = find_writer(warps, write)?;
        warp.fences[lane].get(before as usize).copied()
    }
}

/// The warp and the lane of a write by a thread.
fn find_writer(warps: &[Warp], write: Stamp) -> Option<(&Warp, usize)> {
    let lane = write.lanes.trailing_zeros() as usize & 31;
    warps.get(usize::from(write.unit)).map(|warp| (warp, lane))
}
