//! The shared memory of a block, and what the checks know of each of its cells.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use crate::order::{Known, Stamp};

/// Unit of a stamp that no access has.
const NOBODY: Stamp = Stamp { unit: u16::MAX, epoch: 0, lanes: 0 };

/// A cell of 4 bytes, or of 1 byte in kernels that store less than 4.
#[derive(Debug, Clone)]
struct Cell {
    writer: Stamp,
    /// How many proxy fences the writing thread had executed; `None` for asynchronous writes.
    fences: Option<u32>,
    /// The last reads since the last write, one for each unit.
    reads: Vec<Stamp>,
    is_written: bool,
    /// An asynchronous copy to this cell is in flight.
    in_flight: bool,
}

const FRESH: Cell =
    Cell { writer: NOBODY, fences: None, reads: Vec::new(), is_written: false, in_flight: false };

/// Who accesses shared memory, and what is ordered before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) stamp: Stamp,
    /// Of the warp, and of the thread besides.
    pub(crate) known: [&'a Known; 2],
}

impl By<'_> {
    fn follows(&self, other: Stamp) -> bool {
        let Stamp { unit, epoch, lanes } = self.stamp;
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

    /// Checks that a read may see these bytes, and notes it. `is_async`: through the asynchronous
    /// proxy; `fences` then gives the number of proxy fences that a lane of a warp has executed.
    pub(crate) fn note_read(
        &mut self,
        at: usize,
        bytes: usize,
        by: &By<'_>,
        fences: Option<&dyn Fn(Stamp) -> u32>,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            let place = (index << self.shift) as u64;
            if cell.in_flight {
                return Err(Fault::InFlight { at: place });
            }
            if !cell.is_written {
                return Err(Fault::Unwritten { space: Space::Shared, at: place });
            }
            if !by.follows(cell.writer) {
                return Err(self.race(index, Access::Read, Access::Write, cell.writer));
            }
            if let (Some(of), Some(before)) = (fences, cell.fences)
                && of(cell.writer) == before
            {
                return Err(Fault::NoProxyFence { at: place });
            }
            let reads = &mut self.cells[index].reads;
            match reads.iter_mut().find(|read| read.unit == by.stamp.unit) {
                Some(read) if read.epoch == by.stamp.epoch => read.lanes |= by.stamp.lanes,
                // the earlier epoch is ordered before whatever this one is ordered before
                Some(read) => *read = by.stamp,
                None => reads.push(by.stamp),
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
