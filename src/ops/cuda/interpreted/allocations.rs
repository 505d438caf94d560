//! The live allocations of the tests of this crate, so that an access outside of every tensor is found.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The live allocations.
#[derive(Debug)]
pub(super) struct Allocations;

impl ptx::Host for Allocations {
    /// Without a registry, as in other programs than the tests of this crate, all of the address
    /// space.
    fn find(&self, at: u64) -> Option<(u64, usize)> {
        if !cfg!(test) {
            return Some((0, usize::MAX));
        }
        with(|live| {
            let (start, allocation) = live.range(..=at).next_back()?;
            (at - start < allocation.size as u64).then_some((*start, allocation.size))
        })
        .flatten()
    }

    fn unwritten(&self, at: u64, bytes: usize) -> Option<u64> {
        with(|live| {
            let (start, allocation) = live.range(..=at).next_back()?;
            let first = (at - start) as usize;
            let written = allocation.written.get(first..first + bytes)?;
            written.iter().position(|is_written| !is_written).map(|byte| at + byte as u64)
        })
        .flatten()
    }

    fn write(&self, at: u64, bytes: usize) {
        with(|live| {
            let found = live.range_mut(..=at).next_back();
            let Some((start, allocation)) = found else { return };
            let first = (at - start) as usize;
            if let Some(written) = allocation.written.get_mut(first..first + bytes) {
                written.fill(true);
            }
        });
    }
}

/// Nothing has written these bytes of an allocation.
pub(super) fn forget(at: u64, bytes: usize) {
    with(|live| {
        let found = live.range_mut(..=at).next_back();
        let Some((start, allocation)) = found else { return };
        let first = (at - start) as usize;
        allocation.written.resize(allocation.size, true);
        if let Some(written) = allocation.written.get_mut(first..first + bytes) {
            written.fill(false);
        }
    });
}

#[derive(Default)]
struct Allocation {
    size: usize,
    /// Whether each byte was written; empty: all of them.
    written: Vec<bool>,
}

static LIVE: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Whether this thread changes the list, which allocates too.
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Reads or changes the list; `None` while this thread does so already.
fn with<T>(change: impl FnOnce(&mut BTreeMap<u64, Allocation>) -> T) -> Option<T> {
    IS_BUSY
        .try_with(|busy| {
            if busy.replace(true) {
                return None;
            }
            let result = change(&mut LIVE.lock().unwrap_or_else(PoisonError::into_inner));
            busy.set(false);
            Some(result)
        })
        .ok()
        .flatten()
}

#[cfg(test)]
#[global_allocator]
static REGISTRY: Registry = Registry;

/// The allocator of the system, with a list of what is allocated.
struct Registry;

// SAFETY: the allocator of the system does the work.
unsafe impl GlobalAlloc for Registry {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let at = unsafe { System.alloc(layout) };
        with(|live| {
            live.insert(at as u64, Allocation { size: layout.size(), written: Vec::new() })
        });
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        with(|live| live.remove(&(at as u64)));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) };
    }
}
