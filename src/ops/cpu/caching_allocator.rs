//! The process's allocator: large blocks are kept and handed out again instead of going back to
//! the system.
//!
//! A training step asks for the same few hundred buffers of megabytes over and over. The system's
//! allocator maps and unmaps each of them, and every page is faulted in and zeroed anew: up to half
//! of the time of a small step. Here a freed block waits in a list of its size class for the next
//! buffer of that size, so that a step runs in the memory of the step before it. Blocks beyond the
//! highest demand so far are given back when sizes change, so memory follows the peak, not the sum.

#![expect(unsafe_code, reason = "an allocator hands out raw memory")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Smaller blocks are the system's business: it recycles them itself.
const SMALLEST: usize = 1 << 17;
/// Every block begins on a cache line, which is also the widest vector.
const ALIGN: usize = 64;
/// Classes between two powers of two: a block is at most an eighth larger than asked for.
const STEPS: usize = 8;
const NUM_CLASSES: usize = (usize::BITS as usize - 17) * STEPS;
/// Room above the highest demand, for buffers whose size no kept block has.
const SLACK: usize = 64 << 20;

/// A global allocator that keeps large blocks.
#[derive(Debug)]
pub struct CachingAllocator(Mutex<Kept>);

/// Free blocks by class, each list linked through the blocks themselves.
#[derive(Debug)]
struct Kept {
    heads: [*mut Link; NUM_CLASSES],
    live: usize, // bytes asked for and not freed; what a class adds to them is never touched
    peak: usize, // most that `live` has been
    free: usize, // bytes in the lists
}

/// The beginning of a free block.
#[derive(Debug)]
struct Link {
    next: *mut Link,
}

// SAFETY: the pointers lead to free blocks, which nobody but the holder of the lock touches.
unsafe impl Send for Kept {}

/// The class of a size: its index, and the size of its blocks.
fn class(size: usize) -> (usize, usize) {
    let power = size.next_power_of_two() / 2; // power < size <= 2 * power
    let step = power / STEPS;
    let steps = (size - power).div_ceil(step); // 1..=STEPS
    let exponent = power.trailing_zeros() as usize - (SMALLEST.trailing_zeros() as usize - 1);
    (exponent * STEPS + steps - 1, power + steps * step)
}

/// Where blocks come from: mapped one by one, zeroed, so that memory given back leaves the process.
/// From a heap it would not: blocks of many sizes split what was freed, and pages stay for good.
#[cfg(unix)]
mod source {
    /// A huge page of x86-64, and of arm64 with small pages of 4 KiB.
    const HUGE_PAGE: usize = 2 << 20;

    /// `size` zeroed bytes, or null.
    pub(in crate::ops) fn get(size: usize) -> *mut u8 {
        if size < 2 * HUGE_PAGE {
            return map(size);
        }
        // Ops stream through blocks: in pages of 4 KiB, looking up addresses took a quarter of the time.
        let block = map(size + HUGE_PAGE);
        if block.is_null() {
            return block;
        }
        let before = block.align_offset(HUGE_PAGE);
        let after = HUGE_PAGE - before;
        // SAFETY: all three parts are inside of the new mapping, and nobody uses it yet. Failures cost address
        // space or speed and nothing else.
        unsafe {
            let block = block.add(before);
            if before > 0 {
                libc::munmap(block.sub(before).cast(), before);
            }
            libc::munmap(block.add(size).cast(), after);
            #[cfg(target_os = "linux")]
            libc::madvise(block.cast(), size, libc::MADV_HUGEPAGE);
            block
        }
    }

    /// `size` zeroed bytes that begin on a page, or null.
    fn map(size: usize) -> *mut u8 {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
        // SAFETY: a new mapping touches nobody's memory.
        let block = unsafe { libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0) };
        if block == libc::MAP_FAILED { std::ptr::null_mut() } else { block.cast() }
    }

    /// # Safety
    /// `block` is from `get` with the same size, and nobody uses it.
    pub(in crate::ops) unsafe fn give_back(block: *mut u8, size: usize) {
        // SAFETY: by the caller's promise; a failure would leave the pages mapped and unused.
        unsafe { libc::munmap(block.cast(), size) };
    }
}

/// The same from the system's allocator.
#[cfg(not(unix))]
mod source {
    use std::alloc::{GlobalAlloc, Layout, System};

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, super::ALIGN).unwrap_or(Layout::new::<super::Link>())
    }

    /// `size` zeroed bytes, or null.
    pub(in crate::ops) fn get(size: usize) -> *mut u8 {
        // SAFETY: the size of a class is not zero.
        unsafe { System.alloc_zeroed(layout(size)) }
    }

    /// # Safety
    /// `block` is from `get` with the same size, and nobody uses it.
    pub(in crate::ops) unsafe fn give_back(block: *mut u8, size: usize) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(block, layout(size)) };
    }
}

fn is_ours(layout: Layout) -> bool {
    layout.size() >= SMALLEST && layout.align() <= ALIGN && layout.size() <= isize::MAX as usize / 2
}

impl Kept {
    /// A kept block of the class, if there is one.
    fn take(&mut self, class: usize, size: usize) -> Option<*mut u8> {
        let head = self.heads[class];
        if head.is_null() {
            return None;
        }
        // SAFETY: a block in the list is free and at least as large as a link.
        self.heads[class] = unsafe { (*head).next };
        self.free -= size;
        Some(head.cast())
    }

    #[expect(clippy::cast_ptr_alignment, reason = "blocks begin on a cache line")]
    fn put(&mut self, block: *mut u8, class: usize, size: usize) {
        let link = block.cast::<Link>();
        // SAFETY: the block was just freed by its owner, is aligned and larger than a link.
        unsafe { link.write(Link { next: self.heads[class] }) };
        self.heads[class] = link;
        self.free += size;
    }

    fn hand_out(&mut self, size: usize) {
        self.live += size;
        self.peak = self.peak.max(self.live);
    }

    /// Gives blocks back until one of `size` for `asked` bytes fits under the peak; the largest go first.
    fn make_room(&mut self, asked: usize, size: usize) {
        let bound = self.peak.max(self.live + asked) + SLACK;
        for class in (0..NUM_CLASSES).rev() {
            let block_size = size_of_class(class);
            while self.live + self.free + size > bound {
                let Some(block) = self.take(class, block_size) else { break };
                // SAFETY: it was got with the size of its class and is in no list any more.
                unsafe { source::give_back(block, block_size) };
            }
        }
    }
}

fn size_of_class(class: usize) -> usize {
    let power = (SMALLEST / 2) << (class / STEPS);
    power + (class % STEPS + 1) * (power / STEPS)
}

impl CachingAllocator {
    /// Without kept blocks.
    pub const fn new() -> Self {
        Self(Mutex::new(Kept { heads: [ptr::null_mut(); NUM_CLASSES], live: 0, peak: 0, free: 0 }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block, and whether it is fresh from the system and zeroed.
    fn block(&self, layout: Layout) -> (*mut u8, bool) {
        let (class, size) = class(layout.size());
        let mut kept = self.lock();
        let taken = kept.take(class, size);
        if let Some(block) = taken {
            kept.hand_out(layout.size());
            return (block, false);
        }
        kept.make_room(layout.size(), size);
        drop(kept);
        let block = source::get(size);
        if !block.is_null() {
            self.lock().hand_out(layout.size());
        }
        (block, true)
    }
}

impl Default for CachingAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: blocks of our classes are got with the size of their class and given back with the same;
// a block is in a list or with an owner, never both, as the lock orders every change.
unsafe impl GlobalAlloc for CachingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_ours(layout) {
            // SAFETY: the caller's promise, passed on.
            return unsafe { System.alloc(layout) };
        }
        self.block(layout).0
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_ours(layout) {
            // SAFETY: the caller's promise, passed on.
            return unsafe { System.alloc_zeroed(layout) };
        }
        let (block, fresh) = self.block(layout);
        if !fresh && !block.is_null() {
            // SAFETY: the block is at least as large as was asked for.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !is_ours(layout) {
            // SAFETY: the caller's promise, passed on.
            return unsafe { System.dealloc(block, layout) };
        }
        let (class, size) = class(layout.size());
        let mut kept = self.lock();
        kept.live -= layout.size();
        kept.put(block, class, size);
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the alignment is that of an existing block, and the caller bounds the size.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (is_ours(layout), is_ours(new_layout)) {
            // SAFETY: the caller's promise, passed on.
            (false, false) => return unsafe { System.realloc(block, layout, new_size) },
            (true, true) if class(layout.size()) == class(new_size) => {
                let mut kept = self.lock();
                kept.live -= layout.size();
                kept.hand_out(new_size);
                return block;
            }
            _ => {}
        }
        // SAFETY: the new size is the caller's, and not zero.
        let new_block = unsafe { self.alloc(new_layout) };
        if !new_block.is_null() {
            let common = layout.size().min(new_size);
            // SAFETY: two different blocks, each at least this long; the old one is the caller's.
            unsafe {
                ptr::copy_nonoverlapping(block, new_block, common);
                self.dealloc(block, layout);
            }
        }
        new_block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_its_sizes_and_wastes_at_most_an_eighth() {
        let mut last = (0, 0);
        for size in (SMALLEST..SMALLEST * 40).step_by(4097).chain([SMALLEST, SMALLEST * 2]) {
            let (class, block) = class(size);
            assert!(block >= size && block - size <= size / 8, "{size} in {block}");
            assert_eq!(size_of_class(class), block);
            last = last.max((class, block));
        }
        assert!(class(isize::MAX as usize / 2).0 < NUM_CLASSES);
    }

    #[test]
    fn a_freed_block_comes_back_for_its_size_and_zeroed_if_asked() {
        let recycler = CachingAllocator::new();
        let layout = Layout::from_size_align(SMALLEST + 5, 4).unwrap();
        // SAFETY: each block is used within its size and freed once with its layout.
        unsafe {
            let first = recycler.alloc(layout);
            first.write_bytes(7, layout.size());
            recycler.dealloc(first, layout);
            let again = recycler.alloc_zeroed(layout);
            assert_eq!(again, first);
            assert!(std::slice::from_raw_parts(again, layout.size()).iter().all(|byte| *byte == 0));
            assert_eq!(again as usize % ALIGN, 0);
            recycler.dealloc(again, layout);
        }
        assert_eq!(recycler.lock().live, 0);
    }

    #[test]
    fn growing_keeps_the_content_and_crosses_from_the_system_to_here_and_back() {
        let recycler = CachingAllocator::new();
        let mut layout = Layout::from_size_align(1000, 8).unwrap();
        // SAFETY: as above.
        unsafe {
            let mut block = recycler.alloc(layout);
            block.write_bytes(9, 1000);
            for size in [SMALLEST, SMALLEST + 1, SMALLEST * 3, SMALLEST * 3 + 1, 2000] {
                block = recycler.realloc(block, layout, size);
                layout = Layout::from_size_align(size, 8).unwrap();
                let kept = std::slice::from_raw_parts(block, 1000);
                assert!(kept.iter().all(|byte| *byte == 9), "at {size}");
            }
            recycler.dealloc(block, layout);
        }
        assert_eq!(recycler.lock().live, 0);
    }

    #[test]
    fn memory_follows_the_highest_demand_and_not_the_sum_of_sizes() {
        let recycler = CachingAllocator::new();
        for step in 0..200 {
            let size = SMALLEST * 100 + step * 300_000; // another class every few steps
            let layout = Layout::from_size_align(size, 4).unwrap();
            // SAFETY: as above.
            unsafe { recycler.dealloc(recycler.alloc(layout), layout) };
            let kept = recycler.lock();
            assert!(kept.live + kept.free <= kept.peak + SLACK, "step {step}: {}", kept.free);
        }
    }

    #[test]
    fn threads_share_it() {
        let recycler = CachingAllocator::new();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let recycler = &recycler;
                scope.spawn(move || {
                    for round in 0..500 {
                        let size = SMALLEST + (round * 7919) % SMALLEST;
                        let layout = Layout::from_size_align(size, 4).unwrap();
                        // SAFETY: as above.
                        unsafe {
                            let block = recycler.alloc(layout);
                            block.write_bytes(thread, size);
                            assert_eq!(block.add(size - 1).read(), thread);
                            recycler.dealloc(block, layout);
                        }
                    }
                });
            }
        });
        assert_eq!(recycler.lock().live, 0);
    }
}
