//! Global memory: allocations, and which of their bytes were written.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use crate::notes::Notes;
use crate::order::{By, Known};
use std::collections::BTreeMap;
use std::ops::Range;

/// What is known of the memory of this process.
pub trait Host: std::fmt::Debug + Sync {
    /// The allocation that contains an address: its start and its size.
    fn find(&self, at: u64) -> Option<(u64, usize)>;
    /// The first of these bytes that nothing has written.
    fn unwritten(&self, at: u64, bytes: usize) -> Option<u64>;
    /// Notes that these bytes were written. A launch calls it at its end.
    fn write(&self, at: u64, bytes: usize);
}

#[derive(Debug)]
pub struct Global {
    allocations: BTreeMap<u64, OwnAllocation>,
    host: Option<&'static dyn Host>,
    /// What `host` has found in this launch, and the index of the last one.
    found: Vec<Found>,
    last_found: usize,
    /// Accesses of this launch.
    notes: Notes,
}

/// An allocation without a host.
#[derive(Debug)]
struct OwnAllocation {
    bytes: Vec<u8>,
    /// Whether each byte was written; empty: all of them.
    written: Vec<bool>,
}

/// An allocation of the host.
#[derive(Debug, Clone, Copy)]
struct Found {
    start: u64,
    size: usize,
    /// Whether all of its bytes were written before the launch.
    is_written: bool,
}

impl Found {
    fn contains(&self, at: u64, bytes: usize) -> bool {
        let end = at.checked_sub(self.start).and_then(|first| first.checked_add(bytes as u64));
        end.is_some_and(|end| end <= self.size as u64)
    }
}

impl Default for Global {
    fn default() -> Self {
        let (found, notes) = (Vec::new(), Notes::new(0));
        Self { allocations: BTreeMap::new(), host: None, found, last_found: 0, notes }
    }
}

impl Global {
    /// The memory of this process.
    ///
    /// # Safety
    /// What `host` finds is allocated, and nothing else accesses it during a launch.
    #[expect(unsafe_code, reason = "the caller answers for the addresses")]
    pub unsafe fn from_host(host: &'static dyn Host) -> Self {
        Self { host: Some(host), ..Self::default() }
    }

    /// Adds an allocation at a multiple of 256 whose bytes nothing has written, and returns its
    /// address.
    pub fn allocate(&mut self, bytes: usize) -> u64 {
        let end = self.allocations.last_key_value();
        // a gap between allocations, so that an access past the end is in none
        let at = end
            .map_or(1 << 32, |(at, of)| (at + of.bytes.len() as u64 + 256).next_multiple_of(256));
        let allocation = OwnAllocation { bytes: vec![0xff; bytes], written: vec![false; bytes] };
        self.allocations.insert(at, allocation);
        at
    }

    pub fn upload(&mut self, bytes: &[u8]) -> u64 {
        let at = self.allocate(bytes.len());
        let allocation = self.allocations.get_mut(&at).expect("it was added");
        allocation.bytes.copy_from_slice(bytes);
        allocation.written.clear();
        at
    }

    /// The bytes of an allocation, and whether all of them were written.
    pub fn download(&self, at: u64) -> Option<(&[u8], bool)> {
        let allocation = self.allocations.get(&at)?;
        Some((&allocation.bytes, allocation.written.iter().all(|is_written| *is_written)))
    }

    /// A launch begins. `shift`: see [`Kernel::global_shift`](crate::Kernel::global_shift).
    pub(crate) fn begin(&mut self, shift: u32) {
        self.notes = Notes::new(shift);
        self.found.clear();
    }

    pub(crate) fn begin_block(&mut self, block: u64, num_warps: usize) {
        self.notes.begin_block(block, num_warps);
    }

    /// A launch ends: the host learns what it has written. Returns the different bytes that it has
    /// read before it wrote them, and that it has written.
    pub(crate) fn end(&mut self) -> (u64, u64) {
        if let Some(host) = self.host {
            self.notes.written().for_each(|(at, bytes)| host.write(at, bytes));
        }
        self.notes.different_bytes()
    }

    /// The own allocation with these bytes, and the index of the first one.
    fn find(&mut self, at: u64, bytes: usize) -> Result<(&mut OwnAllocation, usize), Fault> {
        let found = self.allocations.range_mut(..=at).next_back();
        let found = found.map(|(start, allocation)| ((at - start) as usize, allocation));
        match found {
            Some((first, allocation)) if first + bytes <= allocation.bytes.len() => {
                Ok((allocation, first))
            }
            _ => Err(Fault::OutOfBounds { space: Space::Global, at, bytes }),
        }
    }

    /// The allocation of the host with these bytes. The host searches once for each allocation,
    /// because nothing else changes them during a launch.
    fn find_on_host(&mut self, host: &dyn Host, at: u64, bytes: usize) -> Result<Found, Fault> {
        let last = self.found.get(self.last_found).filter(|found| found.contains(at, bytes));
        if let Some(found) = last {
            return Ok(*found);
        }
        if let Some(index) = self.found.iter().position(|found| found.contains(at, bytes)) {
            self.last_found = index;
            return Ok(self.found[index]);
        }
        let found = host.find(at).map(|(start, size)| {
            let is_written = host.unwritten(start, size).is_none();
            Found { start, size, is_written }
        });
        let found = found.filter(|found| found.contains(at, bytes));
        let found = found.ok_or(Fault::OutOfBounds { space: Space::Global, at, bytes })?;
        self.last_found = self.found.len();
        self.found.push(found);
        Ok(found)
    }

    /// Checks that a thread may read these bytes, and notes it. `align` is a number of bytes; bytes
    /// without a bit in `used` may be unwritten.
    pub(crate) fn note_read(
        &mut self,
        at: u64,
        bytes: usize,
        (align, used): (usize, u32),
        by: &By<'_>,
    ) -> Result<(), Fault> {
        if !at.is_multiple_of(align as u64) {
            return Err(Fault::Misaligned { space: Space::Global, at, bytes: align });
        }
        for range in used_ranges(bytes, used) {
            let first = at + range.start as u64;
            let unwritten = self.find_unwritten(at, bytes, range.clone())?;
            if let Some(at) = unwritten {
                return Err(Fault::Unwritten { space: Space::Global, at });
            }
            self.notes.note(first, range.len(), Access::Read, by)?;
        }
        Ok(())
    }

    /// The first unwritten byte of a range of the bytes at an address.
    fn find_unwritten(
        &mut self,
        at: u64,
        bytes: usize,
        range: Range<usize>,
    ) -> Result<Option<u64>, Fault> {
        let first = at + range.start as u64;
        if let Some(host) = self.host {
            let is_written = self.find_on_host(host, at, bytes)?.is_written;
            if is_written || self.notes.is_written(first, range.len()) {
                return Ok(None);
            }
            // bytes of both kinds, those before the launch and those that it wrote, are rare
            let mut all = (first..).take(range.len());
            return Ok(host.unwritten(first, range.len()).and_then(|_| {
                all.find(|at| host.unwritten(*at, 1).is_some() && !self.notes.is_written(*at, 1))
            }));
        }
        let (allocation, start) = self.find(at, bytes)?;
        let written = allocation.written.get(start + range.start..start + range.end);
        let byte = written.and_then(|written| written.iter().position(|byte| !byte));
        Ok(byte.map(|byte| first + byte as u64))
    }

    /// Reads bytes without a check of races.
    pub(crate) fn copy(&mut self, at: u64, to: &mut [u8]) -> Result<(), Fault> {
        if let Some(host) = self.host {
            self.find_on_host(host, at, to.len())?;
            #[expect(unsafe_code, reason = "memory of this process")]
            // SAFETY: the bytes are in an allocation (`from_host`).
            unsafe {
                std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr(), to.len());
            }
            return Ok(());
        }
        let (allocation, first) = self.find(at, to.len())?;
        to.copy_from_slice(&allocation.bytes[first..first + to.len()]);
        Ok(())
    }

    /// Reads bytes for a thread, as [`Global::note_read`] and [`Global::copy`].
    pub(crate) fn read(
        &mut self,
        at: u64,
        to: &mut [u8],
        check: (usize, u32),
        by: &By<'_>,
    ) -> Result<(), Fault> {
        self.note_read(at, to.len(), check, by)?;
        self.copy(at, to)
    }

    /// Replaces a number that several blocks may access, and returns the one before.
    pub(crate) fn update(&mut self, at: u64, to: impl Fn(u32) -> u32) -> Result<u32, Fault> {
        if !at.is_multiple_of(4) {
            return Err(Fault::Misaligned { space: Space::Global, at, bytes: 4 });
        }
        if let Some(at) = self.find_unwritten(at, 4, 0..4)? {
            return Err(Fault::Unwritten { space: Space::Global, at });
        }
        let mut bytes = [0; 4];
        self.copy(at, &mut bytes)?;
        let before = u32::from_le_bytes(bytes);
        self.set(at, &to(before).to_le_bytes())?;
        Ok(before)
    }

    /// The number at an address where [`Global::update`] has found one.
    pub(crate) fn peek(&self, at: u64) -> Option<u32> {
        if self.host.is_some() {
            self.found.iter().find(|found| found.contains(at, 4))?;
            #[expect(unsafe_code, reason = "memory of this process")]
            // SAFETY: the bytes are in an allocation (`from_host`), at a multiple of 4 (`update`).
            return Some(unsafe { std::ptr::read(at as *const u32) });
        }
        let (start, allocation) = self.allocations.range(..=at).next_back()?;
        let first = (at - start) as usize;
        allocation.bytes.get(first..first + 4)?.try_into().ok().map(u32::from_le_bytes)
    }

    /// The block that is executed has seen what was released at this address.
    pub(crate) fn acquire(&mut self, at: u64) {
        self.notes.acquire(at);
    }

    /// What a thread has `released`, and what its block has acquired, is ordered before what other
    /// blocks do after they have acquired this address.
    pub(crate) fn release(&mut self, at: u64, released: Known) {
        self.notes.release(at, released);
    }

    /// Writes bytes without a check of races.
    fn set(&mut self, at: u64, from: &[u8]) -> Result<(), Fault> {
        if self.host.is_some() {
            #[expect(unsafe_code, reason = "memory of this process")]
            // SAFETY: the caller has found the allocation, and the bytes are in it (`from_host`).
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len());
            }
            return Ok(());
        }
        let (allocation, first) = self.find(at, from.len())?;
        let range = first..first + from.len();
        if let Some(written) = allocation.written.get_mut(range.clone()) {
            written.fill(true);
        }
        allocation.bytes[range].copy_from_slice(from);
        Ok(())
    }

    /// Writes bytes for a thread, at a multiple of their number.
    pub(crate) fn write(&mut self, at: u64, from: &[u8], by: &By<'_>) -> Result<(), Fault> {
        let bytes = from.len();
        if !at.is_multiple_of(bytes as u64) {
            return Err(Fault::Misaligned { space: Space::Global, at, bytes });
        }
        match self.host {
            Some(host) => self.find_on_host(host, at, bytes).map(|_| ())?,
            None => self.find(at, bytes).map(|_| ())?,
        }
        self.notes.note(at, bytes, Access::Write, by)?;
        self.set(at, from)
    }
}

/// The ranges of `bytes` bytes that have a bit in `used`.
fn used_ranges(bytes: usize, used: u32) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        start += (used.checked_shr(start as u32).unwrap_or(0)).trailing_zeros() as usize;
        let length = (used.checked_shr(start as u32).unwrap_or(0)).trailing_ones() as usize;
        let range = start..(start + length).min(bytes);
        start = range.end;
        (!range.is_empty()).then_some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{NOTHING, Stamp};
    use std::sync::Mutex;

    /// An allocation of 64 bytes, of which those in the list were written.
    #[derive(Debug)]
    struct TestAllocation {
        bytes: [u64; 8],
        calls: Mutex<usize>,
        written: Mutex<Vec<(u64, usize)>>,
    }

    impl TestAllocation {
        fn start(&self) -> u64 {
            self.bytes.as_ptr() as u64
        }
    }

    impl Host for TestAllocation {
        fn find(&self, at: u64) -> Option<(u64, usize)> {
            *self.calls.lock().unwrap() += 1;
            (self.start()..self.start() + 64).contains(&at).then(|| (self.start(), 64))
        }

        fn unwritten(&self, at: u64, bytes: usize) -> Option<u64> {
            let written = self.written.lock().unwrap();
            let is_written = |at: &u64| {
                written.iter().any(|(start, n)| (*start..start + *n as u64).contains(at))
            };
            (at..at + bytes as u64).find(|at| !is_written(at))
        }

        fn write(&self, at: u64, bytes: usize) {
            self.written.lock().unwrap().push((at, bytes));
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "memory of this test")]
    fn the_host_learns_at_the_end_what_was_written() {
        let memory =
            TestAllocation { bytes: [0; 8], calls: Mutex::new(0), written: Mutex::default() };
        let memory: &'static TestAllocation = Box::leak(Box::new(memory));
        let start = memory.start();
        memory.write(start, 8);
        // SAFETY: the memory is never freed, and nothing else accesses it.
        let mut global = unsafe { Global::from_host(memory) };
        global.begin(2);
        global.begin_block(0, 1);
        let stamp = Stamp { unit: 0, epoch: 1, releases: 0, lanes: 1 };
        let by = By { stamp, known: [&NOTHING; 2], is_async: false };
        let mut read = [0; 16];
        let unwritten = Err(Fault::Unwritten { space: Space::Global, at: start + 8 });
        assert_eq!(global.read(start, &mut read, (8, u32::MAX), &by), unwritten);
        global.write(start + 8, &[1, 2, 3, 4], &by).unwrap();
        let unwritten = Err(Fault::Unwritten { space: Space::Global, at: start + 12 });
        assert_eq!(global.read(start, &mut read, (8, u32::MAX), &by), unwritten);
        global.write(start + 12, &[5; 4], &by).unwrap();
        global.write(start + 60, &[5; 4], &by).unwrap();
        global.read(start, &mut read, (8, u32::MAX), &by).unwrap();
        assert_eq!(read[8..], [1, 2, 3, 4, 5, 5, 5, 5]);
        assert_eq!(*memory.calls.lock().unwrap(), 1, "the allocation is found once");
        let outside = global.copy(start + 60, &mut read);
        assert!(matches!(outside, Err(Fault::OutOfBounds { .. })));
        global.end();
        let written = [(start, 8), (start + 8, 8), (start + 60, 4)];
        assert_eq!(*memory.written.lock().unwrap(), written);
    }

    #[test]
    fn ranges_of_used_bytes() {
        let ranges = |bytes, used| {
            used_ranges(bytes, used).map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(ranges(16, u32::MAX), [(0, 16)]);
        assert_eq!(ranges(16, 0b1001_0110), [(1, 3), (4, 5), (7, 8)]);
        assert_eq!(ranges(4, 0), []);
    }
}
