//! A caching global allocator: it keeps freed large blocks and reuses them instead of returning
//! them to the system.
//!
//! A training step allocates the same few hundred buffers of several megabytes every time. The
//! system allocator maps and unmaps each of them, and the kernel zeroes every page at its first
//! access: up to half of the time of a small step. Here a freed block goes to the free list of its
//! size class, so a step reuses the memory of the previous step. When sizes change, blocks beyond
//! the highest demand so far are unmapped, so memory follows the peak demand, not the sum of all
//! sizes.

#![expect(unsafe_code, reason = "an allocator returns raw memory")]

use super::out_of_memory::record_failed_allocation;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Minimum block size in bytes. Smaller blocks go to the system allocator, which caches them.
const SMALLEST: usize = 1 << 17;
/// Alignment of every block in bytes: a cache line, which is also the widest vector register.
const ALIGN: usize = 64;
/// Number of size classes between two powers of two: a block is at most an eighth larger than
/// requested.
const STEPS: usize = 8;
const NUM_CLASSES: usize = (usize::BITS as usize - 17) * STEPS;
/// Bytes that may be held above the highest demand, because a free block may have no fitting class.
const SLACK: usize = 64 << 20;

/// A global allocator that keeps freed large blocks for reuse.
#[derive(Debug)]
pub struct CachingAllocator(Mutex<FreeLists>);

/// Free blocks by class. Each list is linked through the first bytes of the blocks.
#[derive(Debug)]
struct FreeLists {
    heads: [*mut Link; NUM_CLASSES],
    live: usize, // bytes requested and not freed, without the padding of the size class
    peak: usize, // highest value of `live` so far
    free: usize, // bytes in the free lists
}

/// The first bytes of a free block.
#[derive(Debug)]
struct Link {
    next: *mut Link,
}

// SAFETY: the pointers refer to free blocks, which only the holder of the lock accesses.
unsafe impl Send for FreeLists {}

/// Returns the index of the class of a size, and the block size of that class.
fn class(size: usize) -> (usize, usize) {
    let power = size.next_power_of_two() / 2; // power < size <= 2 * power
    let step = power / STEPS;
    let steps = (size - power).div_ceil(step); // 1..=STEPS
    let exponent = power.trailing_zeros() as usize - (SMALLEST.trailing_zeros() as usize - 1);
    (exponent * STEPS + steps - 1, power + steps * step)
}

/// Source of blocks: each is its own zeroed mapping, so an unmapped block leaves the process. A
/// heap would keep the pages, because blocks of many sizes fragment it.
#[cfg(unix)]
mod source {
    /// Bytes of a huge page on x86-64, and on arm64 with 4 KiB base pages.
    const HUGE_PAGE: usize = 2 << 20;

    /// Returns `size` zeroed bytes, or null if the system has no memory.
    pub(crate) fn get(size: usize) -> *mut u8 {
        if size < 2 * HUGE_PAGE {
            return map(size);
        }
        // Ops stream through blocks. With 4 KiB pages, address translation took a quarter of the
        // time.
        let block = map(size + HUGE_PAGE);
        if block.is_null() {
            return block;
        }
        let before = block.align_offset(HUGE_PAGE);
        let after = HUGE_PAGE - before;
        // SAFETY: all three parts are inside the new mapping, which nothing else uses yet. If a
        // call fails, only address space or speed is lost.
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

    /// Returns `size` zeroed, page-aligned bytes, or null.
    fn map(size: usize) -> *mut u8 {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
        // SAFETY: a new mapping does not overlap memory in use.
        let block = unsafe { libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0) };
        if block == libc::MAP_FAILED { std::ptr::null_mut() } else { block.cast() }
    }

    /// # Safety
    /// `block` comes from `get` with the same size, and nothing uses it any more.
    pub(crate) unsafe fn release(block: *mut u8, size: usize) {
        // SAFETY: the caller guarantees it; if the call fails, the pages stay mapped and unused.
        unsafe { libc::munmap(block.cast(), size) };
    }
}

/// The same interface on top of the system allocator.
#[cfg(not(unix))]
mod source {
    use std::alloc::{GlobalAlloc, Layout, System};

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, super::ALIGN).unwrap_or(Layout::new::<super::Link>())
    }

    /// Returns `size` zeroed bytes, or null.
    pub(crate) fn get(size: usize) -> *mut u8 {
        // SAFETY: the size of a class is not zero.
        unsafe { System.alloc_zeroed(layout(size)) }
    }

    /// # Safety
    /// `block` comes from `get` with the same size, and nothing uses it any more.
    pub(crate) unsafe fn release(block: *mut u8, size: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(block, layout(size)) };
    }
}

fn is_ours(layout: Layout) -> bool {
    layout.size() >= SMALLEST && layout.align() <= ALIGN && layout.size() <= isize::MAX as usize / 2
}

impl FreeLists {
    /// Removes a free block of the class from its list, if there is one.
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
        // SAFETY: the owner just freed the block, which is aligned and larger than a link.
        unsafe { link.write(Link { next: self.heads[class] }) };
        self.heads[class] = link;
        self.free += size;
    }

    fn add_live(&mut self, size: usize) {
        self.live += size;
        self.peak = self.peak.max(self.live);
    }

    /// Unmaps free blocks, largest first, until a new block of `size` bytes for a request of
    /// `requested` bytes fits below the peak plus `SLACK`.
    fn trim(&mut self, requested: usize, size: usize) {
        let bound = self.peak.max(self.live + requested) + SLACK;
        for class in (0..NUM_CLASSES).rev() {
            let block_size = size_of_class(class);
            while self.live + self.free + size > bound {
                let Some(block) = self.take(class, block_size) else { break };
                // SAFETY: the block was allocated with the size of its class and is no longer in a
                // list.
                unsafe { source::release(block, block_size) };
            }
        }
    }
}

impl FreeLists {
    fn release_all(&mut self) {
        for class in 0..NUM_CLASSES {
            let size = size_of_class(class);
            while let Some(block) = self.take(class, size) {
                // SAFETY: the block was allocated with the size of its class and is no longer in a
                // list.
                unsafe { source::release(block, size) };
            }
        }
    }
}

/// Records a failed allocation of the system.
fn checked(block: *mut u8, size: usize) -> *mut u8 {
    if block.is_null() {
        record_failed_allocation(size);
    }
    block
}

fn size_of_class(class: usize) -> usize {
    let power = (SMALLEST / 2) << (class / STEPS);
    power + (class % STEPS + 1) * (power / STEPS)
}

impl CachingAllocator {
    /// Creates an allocator that holds no blocks.
    pub const fn new() -> Self {
        Self(Mutex::new(FreeLists {
            heads: [ptr::null_mut(); NUM_CLASSES],
            live: 0,
            peak: 0,
            free: 0,
        }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeLists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a block, and whether it is new from the system and therefore zeroed.
    fn block(&self, layout: Layout) -> (*mut u8, bool) {
        let (class, size) = class(layout.size());
        let mut lists = self.lock();
        let taken = lists.take(class, size);
        if let Some(block) = taken {
            lists.add_live(layout.size());
            return (block, false);
        }
        lists.trim(layout.size(), size);
        drop(lists);
        let mut block = source::get(size);
        if block.is_null() {
            self.lock().release_all();
            block = source::get(size);
        }
        if block.is_null() {
            record_failed_allocation(size);
        } else {
            self.lock().add_live(layout.size());
        }
        (block, true)
    }
}

impl Default for CachingAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: blocks of the size classes are allocated and freed with the size of their class. A block
// is either in a list or with an owner, never both, because the lock orders every change.
unsafe impl GlobalAlloc for CachingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_ours(layout) {
            // SAFETY: guaranteed by the caller of this function.
            return checked(unsafe { System.alloc(layout) }, layout.size());
        }
        self.block(layout).0
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_ours(layout) {
            // SAFETY: guaranteed by the caller of this function.
            return checked(unsafe { System.alloc_zeroed(layout) }, layout.size());
        }
        let (block, fresh) = self.block(layout);
        if !fresh && !block.is_null() {
            // SAFETY: the block is at least as large as requested.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !is_ours(layout) {
            // SAFETY: guaranteed by the caller of this function.
            return unsafe { System.dealloc(block, layout) };
        }
        let (class, size) = class(layout.size());
        let mut lists = self.lock();
        lists.live -= layout.size();
        lists.put(block, class, size);
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the alignment is that of an existing block, and the caller bounds the size.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (is_ours(layout), is_ours(new_layout)) {
            (false, false) => {
                // SAFETY: guaranteed by the caller of this function.
                return checked(unsafe { System.realloc(block, layout, new_size) }, new_size);
            }
            (true, true) if class(layout.size()) == class(new_size) => {
                let mut lists = self.lock();
                lists.live -= layout.size();
                lists.add_live(new_size);
                return block;
            }
            _ => {}
        }
        // SAFETY: the caller guarantees that the new size is not zero.
        let new_block = unsafe { self.alloc(new_layout) };
        if !new_block.is_null() {
            let common = layout.size().min(new_size);
            // SAFETY: the two blocks differ and have at least this length; the caller owns the old
            // one.
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
    fn a_freed_block_is_reused_for_its_size_and_zeroed_on_request() {
        let allocator = CachingAllocator::new();
        let layout = Layout::from_size_align(SMALLEST + 5, 4).unwrap();
        // SAFETY: each block is used within its size and freed once with its layout.
        unsafe {
            let first = allocator.alloc(layout);
            first.write_bytes(7, layout.size());
            allocator.dealloc(first, layout);
            let again = allocator.alloc_zeroed(layout);
            assert_eq!(again, first);
            assert!(std::slice::from_raw_parts(again, layout.size()).iter().all(|byte| *byte == 0));
            assert_eq!(again as usize % ALIGN, 0);
            allocator.dealloc(again, layout);
        }
        assert_eq!(allocator.lock().live, 0);
    }

    #[test]
    fn realloc_keeps_the_content_when_it_moves_to_and_from_the_system_allocator() {
        let allocator = CachingAllocator::new();
        let mut layout = Layout::from_size_align(1000, 8).unwrap();
        // SAFETY: as above.
        unsafe {
            let mut block = allocator.alloc(layout);
            block.write_bytes(9, 1000);
            for size in [SMALLEST, SMALLEST + 1, SMALLEST * 3, SMALLEST * 3 + 1, 2000] {
                block = allocator.realloc(block, layout, size);
                layout = Layout::from_size_align(size, 8).unwrap();
                let content = std::slice::from_raw_parts(block, 1000);
                assert!(content.iter().all(|byte| *byte == 9), "at {size}");
            }
            allocator.dealloc(block, layout);
        }
        assert_eq!(allocator.lock().live, 0);
    }

    #[test]
    fn memory_follows_the_peak_demand_and_not_the_sum_of_sizes() {
        let allocator = CachingAllocator::new();
        for step in 0..200 {
            let size = SMALLEST * 100 + step * 300_000; // a different class every few steps
            let layout = Layout::from_size_align(size, 4).unwrap();
            // SAFETY: as above.
            unsafe { allocator.dealloc(allocator.alloc(layout), layout) };
            let lists = allocator.lock();
            assert!(lists.live + lists.free <= lists.peak + SLACK, "step {step}: {}", lists.free);
        }
    }

    #[test]
    fn threads_can_share_the_allocator() {
        let allocator = CachingAllocator::new();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..500 {
                        let size = SMALLEST + (round * 7919) % SMALLEST;
                        let layout = Layout::from_size_align(size, 4).unwrap();
                        // SAFETY: as above.
                        unsafe {
                            let block = allocator.alloc(layout);
                            block.write_bytes(thread, size);
                            assert_eq!(block.add(size - 1).read(), thread);
                            allocator.dealloc(block, layout);
                        }
                    }
                });
            }
        });
        assert_eq!(allocator.lock().live, 0);
    }
}
