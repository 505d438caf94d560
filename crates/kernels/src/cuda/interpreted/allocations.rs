//! The live allocations of a test program, so that an access outside of every tensor is found.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

/// The live allocations.
#[derive(Debug)]
pub(super) struct Allocations;

impl ptx::Host for Allocations {
    fn find(&self, at: u64) -> Option<(u64, usize)> {
        with(|live| {
            let (start, allocation) = live.range(..=at).next_back()?;
            let is_inside = allocation.is_tensor && at - start < allocation.size as u64;
            is_inside.then_some((*start, allocation.size))
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

/// A kernel may access this allocation: its address was taken for a launch.
pub(super) fn mark(at: u64) {
    with(|live| {
        if let Some((start, allocation)) = live.range_mut(..=at).next_back()
            && at - start < allocation.size as u64
        {
            allocation.is_tensor = true;
        }
    });
}

#[derive(Default)]
struct Allocation {
    size: usize,
    is_tensor: bool,
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

/// The allocator of the system, for test programs (`test_allocator!`). While kernels are executed from
/// their PTX, it keeps a list, and leaves bytes after each allocation, so that an access past its end
/// is not in the next one.
#[derive(Debug)]
pub struct PtxAllocator;

/// Whether this program has the allocator, and lists allocations.
pub(super) fn is_listed() -> bool {
    with(|live| !live.is_empty()).unwrap_or_default()
}

const GAP: usize = 256;

/// The rule of `CAPABILITY`, read at the first allocation: `std::env` allocates.
fn is_on() -> bool {
    const UNKNOWN: u8 = 0;
    const OFF: u8 = 1;
    const ON: u8 = 2;
    static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
    let state = STATE.load(Ordering::Relaxed);
    if state != UNKNOWN {
        return state == ON;
    }
    // SAFETY: a name that ends with 0; no test changes the environment of its own process.
    let value = unsafe { libc::getenv(c"TRAINER_EMULATE_CUDA".as_ptr()) };
    let is_on = if value.is_null() {
        // SAFETY: as above.
        !unsafe { libc::getenv(c"TRAINER_PTX".as_ptr()) }.is_null()
    } else {
        // SAFETY: a string that ends with 0, of which `strncmp` reads no byte after its end.
        unsafe { libc::strncmp(value, c"ptx:".as_ptr(), 4) == 0 }
    };
    STATE.store(if is_on { ON } else { OFF }, Ordering::Relaxed);
    is_on
}

/// The layout with the bytes after an allocation; `None` if it is too large.
fn padded(size: usize, align: usize) -> Option<Layout> {
    let gap = if is_on() { GAP } else { 0 };
    Layout::from_size_align(size.checked_add(gap)?, align).ok()
}

fn add(at: *mut u8, size: usize) {
    if is_on() && !at.is_null() {
        with(|live| live.insert(at as u64, Allocation { size, ..Allocation::default() }));
    }
}

fn remove(at: *mut u8) {
    if is_on() {
        with(|live| live.remove(&(at as u64)));
    }
}

// SAFETY: the allocator of the system does the work.
unsafe impl GlobalAlloc for PtxAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(padded) = padded(layout.size(), layout.align()) else { return null_mut() };
        // SAFETY: as the caller promises.
        let at = unsafe { System.alloc(padded) };
        add(at, layout.size());
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(padded) = padded(layout.size(), layout.align()) else { return null_mut() };
        // SAFETY: as the caller promises.
        let at = unsafe { System.alloc_zeroed(padded) };
        add(at, layout.size());
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        remove(at);
        if let Some(padded) = padded(layout.size(), layout.align()) {
            // SAFETY: as the caller promises; `alloc` had the same layout.
            unsafe { System.dealloc(at, padded) };
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let [old, new] = [layout.size(), size].map(|size| padded(size, layout.align()));
        let (Some(old), Some(new)) = (old, new) else { return null_mut() };
        remove(at);
        // SAFETY: as the caller promises; `alloc` had the old layout.
        let new = unsafe { System.realloc(at, old, new.size()) };
        // A failure leaves the old allocation.
        let (kept, size) = if new.is_null() { (at, layout.size()) } else { (new, size) };
        add(kept, size);
        new
    }
}
