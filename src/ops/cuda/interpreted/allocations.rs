//! The live allocations of the tests of this crate, so that an access outside of every tensor is found.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The allocation that contains an address: its start and its size. Without a registry, as in other
/// programs than the tests of this crate, all of the address space.
pub(super) fn find(at: u64) -> Option<(u64, usize)> {
    if !cfg!(test) {
        return Some((0, usize::MAX));
    }
    quietly(|| {
        let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, size) = live.range(..=at).next_back()?;
        (at < start + *size as u64).then_some((*start, *size))
    })
    .flatten()
}

static LIVE: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Whether this thread changes the list, which allocates too.
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

fn quietly<T>(change: impl FnOnce() -> T) -> Option<T> {
    IS_BUSY
        .try_with(|busy| {
            if busy.replace(true) {
                return None;
            }
            let result = change();
            busy.set(false);
            Some(result)
        })
        .ok()
        .flatten()
}

fn note(at: *mut u8, size: Option<usize>) {
    quietly(|| {
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        match size {
            Some(size) => live.insert(at as u64, size),
            None => live.remove(&(at as u64)),
        };
    });
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
        note(at, Some(layout.size()));
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        note(at, None);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) };
    }
}
