//! The shared memory of a block, and what the checks know of each of its cells.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use crate::order::{Known, Stamp};

/// Unit of a stamp that no access has.
const NOBODY: Stamp = Stamp { unit: u16::MAX, epoch: 0, releases: 0, lanes: 0 };

/// A cell of 4 bytes, or of 1 byte in kernels that store less than 4.
#[derive(Debug, Clone)]
struct Cell {
    writer: Stamp,
    /// How many proxy fences the writing thread had executed; `None` for asynchronous writes.
    fences: Option<u32>,
    /// The last reads since the last write: for each unit, those of one epoch, and one for each number
    /// of releases.
    reads: Vec<Stamp>,
    is_written: bool,
    /// An asynchronous copy to this cell is in flight.
    in_flight: bool,
    /// It is a part of a barrier.
    is_barrier: bool,
}

const FRESH: Cell = Cell {
    writer: NOBODY,
    fences: None,
    reads: Vec::new(),
    is_written: false,
    in_flight: false,
    is_barrier: false,
};

/// The number of fences that the thread of a write has executed until now.
pub(crate) type Fences<'a> = &'a dyn Fn(Stamp) -> u32;

/// Who accesses shared memory, and what is ordered before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) stamp: Stamp,
    /// Of the warp, and of the thread besides.
    pub(crate) known: [&'a Known; 2],
}

impl By<'_> {
    fn follows(&self, other: Stamp) -> bool {
        let Stamp { unit, epoch, lanes, .. } = self.stamp;
        let is_own = other.unit == unit
            && (other.epoch < epoch || (other.epoch == epoch && other.lanes & !lanes == 0));
        other.unit == NOBODY.unit || is_own || self.known.iter().any(|known| known.has(other))
    }
}

/// The shared memory of a block.
#[derive(Debug)]
pub(crate) struct Shared {
    bytes: Vec<u8>,
    cells: Vec<Cell>,
    /// Number of bytes of a cell, as a power of two.
    shift: u32,
    num_warps: usize,
}

impl Shared {
    pub(crate) fn new(bytes: usize, has_small_stores: bool, num_warps: usize) -> Self {
        let shift = if has_small_stores { 0 } else { 2 };
        let cells = vec![FRESH; bytes.div_ceil(1 << shift)];
        Self { bytes: vec![0; bytes], cells, shift, num_warps }
    }

    /// Checks bounds and alignment; `align` is a number of bytes.
    pub(crate) fn check(&self, at: u64, bytes: usize, align: usize) -> Result<usize, Fault> {
        let space = Space::Shared;
        let end = at.checked_add(bytes as u64).filter(|end| *end <= self.bytes.len() as u64);
        if end.is_none() {
            return Err(Fault::OutOfBounds { space, at, bytes });
        }
        if !at.is_multiple_of(align as u64) {
            return Err(Fault::Misaligned { space, at, bytes: align });
        }
        Ok(at as usize)
    }

    fn cells(&self, at: usize, bytes: usize) -> std::ops::Range<usize> {
        at >> self.shift..((at + bytes - 1) >> self.shift) + 1
    }

    fn name(&self, stamp: Stamp) -> String {
        let unit = usize::from(stamp.unit);
        if unit >= self.num_warps {
            return "a copy of a box".to_owned();
        }
        format!("thread {}", 32 * unit + stamp.lanes.trailing_zeros() as usize)
    }

    fn race(&self, cell: usize, access: Access, other: Access, by: Stamp) -> Fault {
        Fault::Race { at: (cell << self.shift) as u64, access, other, by: self.name(by) }
    }

    /// Checks that a read may see these bytes, and notes it.
    pub(crate) fn note_read(&mut self, at: usize, bytes: usize, by: &By<'_>) -> Result<(), Fault> {
        self.note_read_of(at, bytes, by, false)
    }

    /// The same for a barrier of 8 bytes.
    pub(crate) fn note_barrier(&mut self, at: usize, by: &By<'_>) -> Result<(), Fault> {
        if !self.cells[at >> self.shift].is_barrier {
            return Err(Fault::NoMemoryBarrier { at: at as u64 });
        }
        self.note_read_of(at, 8, by, true)
    }

    fn note_read_of(
        &mut self,
        at: usize,
        bytes: usize,
        by: &By<'_>,
        of_barrier: bool,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            let place = (index << self.shift) as u64;
            if cell.is_barrier != of_barrier {
                return Err(Fault::OrdinaryAccess { at: place });
            }
            if cell.in_flight {
                return Err(Fault::InFlight { at: place });
            }
            if !cell.is_written {
                return Err(Fault::Unwritten { space: Space::Shared, at: place });
            }
            if !by.follows(cell.writer) {
                return Err(self.race(index, Access::Read, Access::Write, cell.writer));
            }
            let reads = &mut self.cells[index].reads;
            let Stamp { unit, epoch, lanes, .. } = by.stamp;
            let is_same = |read: &Stamp| Stamp { lanes, ..*read } == by.stamp;
            if let Some(read) = reads.iter_mut().find(|read| is_same(read)) {
                read.lanes |= lanes;
            } else {
                // an earlier epoch is ordered before whatever this one is ordered before
                reads.retain(|read| read.unit != unit || read.epoch == epoch);
                reads.push(by.stamp);
            }
        }
        Ok(())
    }

    /// Checks that the threads that wrote these bytes have executed a fence since then, so that the
    /// asynchronous proxy may access them.
    pub(crate) fn check_fences(
        &self,
        at: usize,
        bytes: usize,
        fences: Fences<'_>,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            if cell.fences.is_some_and(|before| fences(cell.writer) == before) {
                return Err(Fault::NoProxyFence { at: (index << self.shift) as u64 });
            }
        }
        Ok(())
    }

    /// Checks that a write may replace these bytes, and notes it.
    pub(crate) fn note_write(
        &mut self,
        at: usize,
        bytes: usize,
        by: &By<'_>,
        fences: Option<u32>,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            if cell.in_flight {
                return Err(Fault::InFlight { at: (index << self.shift) as u64 });
            }
            if cell.is_barrier {
                return Err(Fault::OrdinaryAccess { at: (index << self.shift) as u64 });
            }
            if !by.follows(cell.writer) {
                return Err(self.race(index, Access::Write, Access::Write, cell.writer));
            }
            if let Some(read) = cell.reads.iter().find(|read| !by.follows(**read)) {
                return Err(self.race(index, Access::Write, Access::Read, *read));
            }
            let cell = &mut self.cells[index];
            (cell.writer, cell.fences, cell.is_written) = (by.stamp, fences, true);
            cell.reads.clear();
        }
        Ok(())
    }

    /// Notes that a thread initialises a barrier of 8 bytes; `fences`: how many fences of barriers it
    /// has executed.
    pub(crate) fn init_barrier(
        &mut self,
        at: usize,
        by: &By<'_>,
        fences: u32,
    ) -> Result<(), Fault> {
        if self.cells[at >> self.shift].is_barrier {
            return Err(Fault::InitialisedAgain { at: at as u64 });
        }
        self.note_write(at, 8, by, Some(fences))?;
        for index in self.cells(at, 8) {
            self.cells[index].is_barrier = true;
        }
        Ok(())
    }

    /// Marks bytes that an asynchronous copy will write, or has written.
    pub(crate) fn set_in_flight(&mut self, at: usize, bytes: usize, in_flight: bool) {
        for index in self.cells(at, bytes) {
            self.cells[index].in_flight = in_flight;
        }
    }

    pub(crate) fn bytes(&self, at: usize, bytes: usize) -> &[u8] {
        &self.bytes[at..at + bytes]
    }

    pub(crate) fn bytes_mut(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        &mut self.bytes[at..at + bytes]
    }
}
