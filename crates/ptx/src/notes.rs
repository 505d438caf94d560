//! Which threads of a launch accessed which bytes of global memory, to find data races.
//!
//! Blocks have no order, so no block may access what another one writes, except after it has seen a number
//! at an address that a thread of the other one released: what is ordered before the release is ordered
//! before all that is executed later in this block. Within a block, accesses have
//! the order of `order.rs`. The bytes are divided into cells, each as large as the smallest store of the
//! kernel: a store writes whole cells, so two accesses of a cell are accesses of the same bytes, unless
//! both are loads.

use crate::fault::{Access, Fault};
use crate::instruction::Space;
use crate::order::{By, Known, NO_ACCESS, Stamp};
use std::collections::{BTreeMap, HashMap};

/// Bytes of a page of cells.
const PAGE: u64 = 4096;

/// The last accesses of a cell: an index into [`Notes::points`], and the lanes. [`NONE`]: no access;
/// [`MANY_BLOCKS`]: those of several blocks; [`LIST`]: the lanes are an index into [`Notes::lists`].
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    point: u32,
    lanes: u32,
}

const NONE: u32 = 0;
const MANY_BLOCKS: u32 = 1;
const LIST: u32 = 2;

/// Accesses of other blocks that are ordered before.
type OfBlocks = BTreeMap<u64, Known>;

/// The time of an access: the number of the block, and a stamp without its lanes.
#[derive(Debug, Clone, Copy)]
struct Point {
    block: u64,
    stamp: Stamp,
}

/// The cells of a page; empty: no access.
#[derive(Debug, Default)]
struct Page {
    number: u64,
    writes: Vec<Entry>,
    reads: Vec<Entry>,
    /// Whether each cell was read before the launch wrote it, which writes do not clear.
    was_read: Vec<bool>,
}

#[derive(Debug)]
pub(crate) struct Notes {
    /// The power of two of the bytes of a cell.
    shift: u32,
    pages: Vec<Page>,
    /// Indices into `pages`, by number, and the last one that was used.
    index: HashMap<u64, usize>,
    last_page: usize,
    points: Vec<Point>,
    /// The number of the block that is executed, and its warps.
    block: u64,
    num_warps: usize,
    /// The last point of each unit of the block.
    present: Vec<u32>,
    /// Reads of a cell by several units.
    lists: Vec<Vec<Entry>>,
    unused_lists: Vec<u32>,
    /// What is ordered before what each block does next, and what was released at each address.
    of_blocks: HashMap<u64, OfBlocks>,
    of_addresses: HashMap<u64, OfBlocks>,
}

/// An access that takes place now.
struct Now<'a> {
    access: Access,
    entry: Entry,
    block: u64,
    num_warps: usize,
    by: &'a By<'a>,
    of_blocks: &'a HashMap<u64, OfBlocks>,
}

impl Notes {
    /// No accesses. `shift`: see [`Kernel::global_shift`](crate::Kernel::global_shift).
    pub(crate) fn new(shift: u32) -> Self {
        let reserved = Point { block: u64::MAX, stamp: NO_ACCESS };
        Self {
            shift,
            pages: Vec::new(),
            index: HashMap::new(),
            last_page: 0,
            points: vec![reserved; LIST as usize + 1],
            block: 0,
            num_warps: 0,
            present: Vec::new(),
            lists: Vec::new(),
            unused_lists: Vec::new(),
            of_blocks: HashMap::new(),
            of_addresses: HashMap::new(),
        }
    }

    pub(crate) fn acquire(&mut self, at: u64) {
        if let Some(released) = self.of_addresses.get(&at) {
            join(self.of_blocks.entry(self.block).or_default(), released);
        }
    }

    pub(crate) fn release(&mut self, at: u64, known: Known) {
        let mut all = self.of_blocks.get(&self.block).cloned().unwrap_or_default();
        all.insert(self.block, known);
        join(self.of_addresses.entry(at).or_default(), &all);
    }

    pub(crate) fn begin_block(&mut self, block: u64, num_warps: usize) {
        (self.block, self.num_warps) = (block, num_warps);
        self.present.clear();
    }

    fn point(&mut self, stamp: Stamp) -> u32 {
        let unit = usize::from(stamp.unit);
        if self.present.len() <= unit {
            self.present.resize(unit + 1, NONE);
        }
        let stamp = Stamp { lanes: 0, ..stamp };
        let last = self.present[unit];
        if last == NONE || self.points[last as usize].stamp != stamp {
            self.present[unit] = self.points.len() as u32;
            self.points.push(Point { block: self.block, stamp });
        }
        self.present[unit]
    }

    fn find_page(&mut self, number: u64) -> usize {
        if self.pages.get(self.last_page).is_none_or(|page| page.number != number) {
            let pages = &mut self.pages;
            self.last_page = *self.index.entry(number).or_insert_with(|| {
                pages.push(Page { number, ..Page::default() });
                pages.len() - 1
            });
        }
        self.last_page
    }

    /// Notes an access, and fails if it has no order with an earlier one.
    pub(crate) fn note(
        &mut self,
        at: u64,
        bytes: usize,
        access: Access,
        by: &By<'_>,
    ) -> Result<(), Fault> {
        let entry = Entry { point: self.point(by.stamp), lanes: by.stamp.lanes };
        let end = at + bytes as u64;
        let mut start = at;
        while start < end {
            let index = self.find_page(start / PAGE);
            let last = end.min((start / PAGE + 1) * PAGE);
            let first = (start % PAGE) >> self.shift;
            let cells = first..=((last - 1) % PAGE) >> self.shift;
            for cell in cells {
                let at = at.max(start / PAGE * PAGE + (cell << self.shift));
                self.note_cell((index, cell as usize), at, (access, entry), by)?;
            }
            start = last;
        }
        Ok(())
    }

    fn note_cell(
        &mut self,
        (page, cell): (usize, usize),
        at: u64,
        (access, entry): (Access, Entry),
        by: &By<'_>,
    ) -> Result<(), Fault> {
        let Self { points, lists, unused_lists, pages, block, num_warps, of_blocks, .. } = self;
        let (block, num_warps) = (*block, *num_warps);
        let now = &Now { access, entry, block, num_warps, by, of_blocks };
        let page = &mut pages[page];
        let num_cells = PAGE as usize >> self.shift;
        if let Some(write) = page.writes.get(cell) {
            now.check(*write, Access::Write, at, points)?;
        }
        let mut reads = Reads { points, lists, unused: unused_lists };
        if now.access == Access::Read {
            if page.reads.is_empty() {
                page.reads = vec![Entry::default(); num_cells];
                page.was_read = vec![false; num_cells];
            }
            let is_own = page.writes.get(cell).is_some_and(|write| write.point != NONE);
            page.was_read[cell] |= !is_own;
            reads.add(&mut page.reads[cell], now);
            return Ok(());
        }
        if let Some(read) = page.reads.get_mut(cell) {
            reads.check(*read, at, now)?;
            reads.clear(read);
        }
        if page.writes.is_empty() {
            page.writes = vec![Entry::default(); num_cells];
        }
        page.writes[cell] = now.entry;
        Ok(())
    }

    /// Whether the launch has written all of these bytes.
    pub(crate) fn is_written(&mut self, at: u64, bytes: usize) -> bool {
        (at >> self.shift..=(at + bytes as u64 - 1) >> self.shift).all(|cell| {
            let at = cell << self.shift;
            let page = self.find_page(at / PAGE);
            let write = self.pages[page].writes.get(((at % PAGE) >> self.shift) as usize);
            write.is_some_and(|write| write.point != NONE)
        })
    }

    /// Number of the bytes that the launch has read before it wrote them, and of those it has written.
    pub(crate) fn different_bytes(&self) -> (u64, u64) {
        let cells = self.pages.iter().flat_map(|page| &page.was_read);
        let read = cells.filter(|was_read| **was_read).count() as u64;
        (read << self.shift, self.written().map(|(_, bytes)| bytes as u64).sum())
    }

    /// Address and number of all bytes that the launch has written.
    pub(crate) fn written(&self) -> impl Iterator<Item = (u64, usize)> {
        let shift = self.shift;
        self.pages.iter().flat_map(move |page| {
            let mut start = 0;
            let runs = page.writes.chunk_by(|a, b| (a.point == NONE) == (b.point == NONE));
            runs.filter_map(move |run| {
                let first = start;
                start += run.len();
                let at = page.number * PAGE + ((first as u64) << shift);
                (run[0].point != NONE).then_some((at, run.len() << shift))
            })
        })
    }
}

fn join(to: &mut OfBlocks, other: &OfBlocks) {
    for (block, known) in other {
        to.entry(*block).or_default().join(known);
    }
}

impl Now<'_> {
    /// Fails unless an earlier access is ordered before.
    fn check(&self, other: Entry, what: Access, at: u64, points: &[Point]) -> Result<(), Fault> {
        let is_same = other.point == self.entry.point && other.lanes & !self.entry.lanes == 0;
        if other.point == NONE || (is_same && !self.by.is_async) {
            return Ok(());
        }
        let access = self.access;
        let Point { block, stamp } = points[other.point as usize];
        let stamp = Stamp { lanes: other.lanes, ..stamp };
        if block != self.block {
            let known = self.of_blocks.get(&self.block).and_then(|of| of.get(&block));
            if known.is_some_and(|known| known.has(stamp)) {
                return Ok(());
            }
            return Err(Fault::BlockRace { at, access, other: what });
        }
        if self.by.follows(stamp) {
            return Ok(());
        }
        let by = stamp.describe(self.num_warps);
        Err(Fault::Race { space: Space::Global, at, access, other: what, by })
    }
}

/// The reads of cells.
struct Reads<'a> {
    points: &'a [Point],
    lists: &'a mut Vec<Vec<Entry>>,
    unused: &'a mut Vec<u32>,
}

impl Reads<'_> {
    /// Fails unless all reads of a cell are ordered before a write.
    fn check(&self, read: Entry, at: u64, now: &Now<'_>) -> Result<(), Fault> {
        if read.point != LIST {
            return now.check(read, Access::Read, at, self.points);
        }
        let list = &self.lists[read.lanes as usize];
        list.iter().try_for_each(|read| now.check(*read, Access::Read, at, self.points))
    }

    /// A write follows: the reads count no longer.
    fn clear(&mut self, read: &mut Entry) {
        if read.point == LIST {
            self.unused.push(read.lanes);
        }
        *read = Entry::default();
    }

    fn add(&mut self, read: &mut Entry, now: &Now<'_>) {
        let new = now.entry;
        match read.point {
            NONE => *read = new,
            MANY_BLOCKS => {}
            point if point == new.point => read.lanes |= new.lanes,
            LIST => {
                let list = &mut self.lists[read.lanes as usize];
                if self.points[list[0].point as usize].block == now.block {
                    Self::add_to(list, self.points, new);
                } else {
                    self.clear(read);
                    read.point = MANY_BLOCKS;
                }
            }
            point if self.points[point as usize].block != now.block => read.point = MANY_BLOCKS,
            _ => {
                let index = self.unused.pop().unwrap_or_else(|| {
                    self.lists.push(Vec::new());
                    self.lists.len() as u32 - 1
                });
                let list = &mut self.lists[index as usize];
                list.clear();
                list.push(*read);
                Self::add_to(list, self.points, new);
                if let [one] = list[..] {
                    *read = one;
                    self.unused.push(index);
                } else {
                    *read = Entry { point: LIST, lanes: index };
                }
            }
        }
    }

    /// Adds a read to those of its block.
    fn add_to(list: &mut Vec<Entry>, points: &[Point], new: Entry) {
        if let Some(same) = list.iter_mut().find(|read| read.point == new.point) {
            same.lanes |= new.lanes;
            return;
        }
        let Stamp { unit, epoch, .. } = points[new.point as usize].stamp;
        // an earlier epoch, and an earlier release of these lanes, is ordered before whatever the new
        // read is ordered before
        list.retain_mut(|read| {
            let other = points[read.point as usize].stamp;
            if other.unit == unit {
                read.lanes &= !new.lanes;
            }
            other.unit != unit || (other.epoch == epoch && read.lanes != 0)
        });
        list.push(new);
    }
}
