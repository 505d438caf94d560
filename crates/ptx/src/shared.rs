//! The shared memory of a block, and what the checks know of each of its cells.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use crate::order::{By, NO_ACCESS, Stamp};
use std::ops::Range;

/// What is known of a cell, whose size is that of the smallest store, at most 4 bytes.
#[derive(Debug, Clone)]
struct Cell {
    writer: Stamp,
    /// How many proxy fences the writing thread had executed; `None` for asynchronous writes.
    fences: Option<u32>,
    /// The last read of each thread since the last write: for each unit, those of one epoch, and one
    /// for each number of releases.
    reads: Vec<Stamp>,
    is_written: bool,
    /// An asynchronous copy to this cell is in flight.
    in_flight: bool,
    /// It is a part of a barrier.
    is_barrier: bool,
}

const FRESH: Cell = Cell {
    writer: NO_ACCESS,
    fences: None,
    reads: Vec::new(),
    is_written: false,
    in_flight: false,
    is_barrier: false,
};

/// The first fence of the thread of a write after it had executed a number of fences.
pub(crate) type FindFence<'a> = &'a dyn Fn(Stamp, u32) -> Option<Stamp>;

/// Bytes that shared memory could move while it serves an access of a warp to `bytes` bytes at each
/// of these addresses: 4 bytes of each of the 32 banks in a cycle. Lanes that read the same word share
/// it.
pub(crate) fn busy(addresses: impl Iterator<Item = u64>, bytes: usize) -> u64 {
    const BANKS: usize = 32;
    let words = |at: u64| at / 4..(at + bytes as u64).div_ceil(4);
    let mut all: Vec<u64> = addresses.flat_map(words).collect();
    all.sort_unstable();
    all.dedup();
    let mut of_banks = [0; BANKS];
    for word in all {
        of_banks[word as usize % BANKS] += 1;
    }
    4 * BANKS as u64 * of_banks.iter().max().copied().unwrap_or(0)
}

#[derive(Debug)]
pub(crate) struct SharedMemory {
    bytes: Vec<u8>,
    /// Addresses that the kernel may access.
    ranges: Vec<Range<usize>>,
    cells: Vec<Cell>,
    /// Number of bytes of a cell, as a power of two.
    shift: u32,
    num_warps: usize,
}

impl SharedMemory {
    /// `shift`: see [`Kernel::shared_shift`](crate::Kernel::shared_shift).
    pub(crate) fn new(ranges: Vec<Range<usize>>, shift: u32, num_warps: usize) -> Self {
        let bytes = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let cells = vec![FRESH; bytes.div_ceil(1 << shift)];
        Self { bytes: vec![0; bytes], ranges, cells, shift, num_warps }
    }

    /// Checks bounds and alignment; `align` is a number of bytes.
    pub(crate) fn check(&self, at: u64, bytes: usize, align: usize) -> Result<usize, Fault> {
        let space = Space::Shared;
        let is_inside = |range: &Range<usize>| {
            let end = at.saturating_add(bytes as u64);
            at >= range.start as u64 && end <= range.end as u64
        };
        if !self.ranges.iter().any(is_inside) {
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

    fn race(&self, cell: usize, access: Access, other: Access, by: Stamp) -> Fault {
        let (space, at) = (Space::Shared, (cell << self.shift) as u64);
        Fault::Race { space, at, access, other, by: by.describe(self.num_warps) }
    }

    /// Checks that a read may see these bytes, and notes it.
    pub(crate) fn note_read(&mut self, at: usize, bytes: usize, by: &By<'_>) -> Result<(), Fault> {
        self.note_read_or_wait(at, bytes, by, false)
    }

    /// The same for a barrier of 8 bytes.
    pub(crate) fn note_barrier(&mut self, at: usize, by: &By<'_>) -> Result<(), Fault> {
        if !self.cells[at >> self.shift].is_barrier {
            return Err(Fault::NoMemoryBarrier { at: at as u64 });
        }
        self.note_read_or_wait(at, 8, by, true)
    }

    fn note_read_or_wait(
        &mut self,
        at: usize,
        bytes: usize,
        by: &By<'_>,
        of_barrier: bool,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            let at = (index << self.shift) as u64;
            if cell.is_barrier != of_barrier {
                return Err(Fault::OrdinaryAccess { at });
            }
            if cell.in_flight {
                return Err(Fault::InFlight { at });
            }
            if !cell.is_written {
                return Err(Fault::Unwritten { space: Space::Shared, at });
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
                // an earlier epoch, and an earlier release of these lanes, is ordered before whatever
                // this read is ordered before
                reads.retain_mut(|read| {
                    if read.unit == unit {
                        read.lanes &= !lanes;
                    }
                    read.unit != unit || (read.epoch == epoch && read.lanes != 0)
                });
                reads.push(by.stamp);
            }
        }
        Ok(())
    }

    /// Checks that the threads that wrote these bytes have executed a fence after the write and before
    /// an access of the asynchronous proxy.
    pub(crate) fn check_fences(
        &self,
        at: usize,
        bytes: usize,
        find_fence: FindFence<'_>,
        by: &By<'_>,
    ) -> Result<(), Fault> {
        for index in self.cells(at, bytes) {
            let cell = &self.cells[index];
            let Some(before) = cell.fences else { continue };
            // a fence that is not ordered before may come too late in another order of the warps
            if !find_fence(cell.writer, before).is_some_and(|fence| by.follows(fence)) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::NOTHING;

    #[test]
    fn an_access_takes_the_cycles_of_its_busiest_bank() {
        let lanes = |stride: u64| (0..32).map(move |lane| 1024 + lane * stride);
        assert_eq!(busy(lanes(4), 4), 128, "each lane has a bank");
        assert_eq!(busy(lanes(0), 16), 128, "all lanes read the same words");
        assert_eq!(busy(lanes(16), 16), 4 * 128);
        assert_eq!(busy(lanes(2), 2), 128, "two lanes share a word");
        assert_eq!(busy(lanes(128), 4), 32 * 128, "all lanes in one bank");
        assert_eq!(busy(lanes(144), 16), 4 * 128, "rows with padding");
    }

    #[test]
    fn a_later_read_of_a_thread_replaces_its_earlier_ones() {
        let mut memory = SharedMemory::new(std::iter::once(0..4).collect(), 2, 1);
        let by = |releases, lanes| {
            let stamp = Stamp { unit: 0, epoch: 1, releases, lanes };
            By { stamp, known: [&NOTHING; 2], is_async: false }
        };
        memory.note_write(0, 4, &by(0, 1), None).expect("the first access");
        for releases in 0..100 {
            memory.note_read(0, 4, &by(releases, 1)).expect("the thread that wrote");
        }
        assert_eq!(memory.cells[0].reads, [by(99, 1).stamp]);
    }
}
