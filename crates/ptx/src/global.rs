//! Global memory: allocations, and which block of a launch accesses which bytes.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use std::collections::{BTreeMap, HashMap};

/// Bytes of a page of notes.
const PAGE: u64 = 4096;

/// What is known of the memory of this process.
pub trait Host: std::fmt::Debug + Sync {
    /// The allocation that contains an address: its start and its size.
    fn find(&self, at: u64) -> Option<(u64, usize)>;
    /// The first of these bytes that nothing has written.
    fn unwritten(&self, at: u64, bytes: usize) -> Option<u64>;
    /// Notes that these bytes were written.
    fn write(&self, at: u64, bytes: usize);
}

/// Global memory.
#[derive(Debug, Default)]
pub struct Global {
    allocations: BTreeMap<u64, Allocation>,
    host: Option<&'static dyn Host>,
    /// Notes of the present launch.
    pages: HashMap<u64, Vec<Note>>,
}

#[derive(Debug)]
struct Allocation {
    bytes: Vec<u8>,
    /// Whether each byte was written; empty: all of them.
    written: Vec<bool>,
}

/// Blocks that accessed a byte, counted from 1; `MANY` readers.
#[derive(Debug, Clone, Copy, Default)]
struct Note {
    writer: u32,
    reader: u32,
}

const MANY: u32 = u32::MAX;

impl Global {
    /// The memory of this process.
    ///
    /// # Safety
    /// What `host` finds is allocated, and nothing else accesses it during a launch.
    #[expect(unsafe_code, reason = "the caller answers for the addresses")]
    pub unsafe fn of_host(host: &'static dyn Host) -> Self {
        Self { host: Some(host), ..Self::default() }
    }

    /// Adds an allocation at a multiple of 256 whose bytes nothing has written, and returns its
    /// address.
    pub fn allocate(&mut self, bytes: usize) -> u64 {
        let end = self.allocations.last_key_value();
        // a gap between allocations, so that an access past the end is in none
        let at = end
            .map_or(1 << 32, |(at, of)| (at + of.bytes.len() as u64 + 256).next_multiple_of(256));
        let allocation = Allocation { bytes: vec![0xff; bytes], written: vec![false; bytes] };
        self.allocations.insert(at, allocation);
        at
    }

    /// Adds an allocation at an address, with these bytes.
    pub fn insert(&mut self, at: u64, bytes: &[u8]) {
        let allocation = Allocation { bytes: bytes.to_owned(), written: Vec::new() };
        self.allocations.insert(at, allocation);
    }

    /// Adds an allocation with these bytes.
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

    /// Forgets which blocks accessed what: a launch begins.
    pub(crate) fn begin(&mut self) {
        self.pages.clear();
    }

    /// The allocation with these bytes, and their place in it.
    fn find(
        &mut self,
        at: u64,
        bytes: usize,
        align: usize,
    ) -> Result<(&mut Allocation, usize), Fault> {
        let space = Space::Global;
        if !at.is_multiple_of(align as u64) {
            return Err(Fault::Misaligned { space, at, bytes: align });
        }
        let found = self.allocations.range_mut(..=at).next_back();
        let found = found.map(|(start, allocation)| ((at - start) as usize, allocation));
        match found {
            Some((place, allocation)) if place + bytes <= allocation.bytes.len() => {
                Ok((allocation, place))
            }
            _ => Err(Fault::OutOfBounds { space, at, bytes }),
        }
    }

    /// Notes an access of `block`, counted from 1.
    fn note(&mut self, at: u64, bytes: usize, block: u32, access: Access) -> Result<(), Fault> {
        let end = at + bytes as u64;
        let mut start = at;
        while start < end {
            let page = self.pages.entry(start / PAGE);
            let page = page.or_insert_with(|| vec![Note::default(); PAGE as usize]);
            let last = end.min((start / PAGE + 1) * PAGE);
            let notes = (start % PAGE) as usize..(start % PAGE + last - start) as usize;
            for (byte, note) in (start..).zip(&mut page[notes]) {
                let race = |other| Fault::BlockRace { at: byte, access, other };
                if note.writer != 0 && note.writer != block {
                    return Err(race(Access::Write));
                }
                let is_own = note.reader == 0 || note.reader == block;
                match access {
                    Access::Read => note.reader = if is_own { block } else { MANY },
                    Access::Write if is_own => note.writer = block,
                    Access::Write => return Err(race(Access::Read)),
                }
            }
            start = last;
        }
        Ok(())
    }

    /// The address of bytes in the memory of this process.
    fn on_host(host: &dyn Host, at: u64, bytes: usize, align: usize) -> Result<*mut u8, Fault> {
        let space = Space::Global;
        if !at.is_multiple_of(align as u64) {
            return Err(Fault::Misaligned { space, at, bytes: align });
        }
        let is_inside = |(start, size): (u64, usize)| at - start + bytes as u64 <= size as u64;
        let found = host.find(at).filter(|found| is_inside(*found));
        found.map(|_| at as *mut u8).ok_or(Fault::OutOfBounds { space, at, bytes })
    }

    /// Reads bytes for `block`.
    pub(crate) fn read(
        &mut self,
        at: u64,
        to: &mut [u8],
        align: usize,
        block: u32,
    ) -> Result<(), Fault> {
        if let Some(host) = self.host {
            let from = Self::on_host(host, at, to.len(), align)?;
            if let Some(at) = host.unwritten(at, to.len()) {
                return Err(Fault::Unwritten { space: Space::Global, at });
            }
            self.note(at, to.len(), block, Access::Read)?;
            #[expect(unsafe_code, reason = "memory of this process")]
            // SAFETY: the bytes are in an allocation (`of_host`).
            unsafe {
                std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
            }
            return Ok(());
        }
        let (allocation, place) = self.find(at, to.len(), align)?;
        let range = place..place + to.len();
        let unwritten = allocation.written.get(range.clone());
        if let Some(byte) = unwritten.and_then(|written| written.iter().position(|byte| !byte)) {
            return Err(Fault::Unwritten { space: Space::Global, at: at + byte as u64 });
        }
        to.copy_from_slice(&allocation.bytes[range]);
        self.note(at, to.len(), block, Access::Read)
    }

    /// Writes bytes for `block`.
    pub(crate) fn write(&mut self, at: u64, from: &[u8], block: u32) -> Result<(), Fault> {
        if let Some(host) = self.host {
            let to = Self::on_host(host, at, from.len(), from.len())?;
            host.write(at, from.len());
            self.note(at, from.len(), block, Access::Write)?;
            #[expect(unsafe_code, reason = "memory of this process")]
            // SAFETY: the bytes are in an allocation (`of_host`).
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
            }
            return Ok(());
        }
        self.find(at, from.len(), from.len())?;
        self.note(at, from.len(), block, Access::Write)?;
        let (allocation, place) = self.find(at, from.len(), from.len())?;
        let range = place..place + from.len();
        if let Some(written) = allocation.written.get_mut(range.clone()) {
            written.fill(true);
        }
        allocation.bytes[range].copy_from_slice(from);
        Ok(())
    }
}
