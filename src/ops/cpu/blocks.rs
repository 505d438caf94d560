//! Row-wise ops on `f32` and `bf16` memory alike: operands are lent, and results are filled, block by block in `f32`.
//!
//! `f32` memory is lent as it is. `bf16` is widened into, and narrowed out of, a scratch of the thread that is as
//! large as a block: no op holds a second copy of an operand or of a result.

#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of memory that nobody has written before"
)]
#![expect(
    clippy::inline_always,
    reason = "a call would leave the level that a kernel is compiled for"
)]

use super::simd::kernels;
use super::{BLOCK, Element, Shared};
use candle_core::{DType, Device, Result, Shape, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};

/// Elements of the widest operand that are worked on at a time: they stay in the first-level cache.
const AT_A_TIME: usize = 1 << 13;
/// Elements of `bf16` that an elementwise op widens at a time.
pub(in crate::ops) const ON_STACK: usize = 1 << 12;

kernels! {
    pub(in crate::ops) fn widen_block(x: &[bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.widen();
        }
    }

    fn widen_first(x: &[bf16], y: &mut [MaybeUninit<f32>]) {
        for (y, x) in y.iter_mut().zip(x) {
            y.write(x.widen());
        }
    }

    pub(in crate::ops) fn narrow_into(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = bf16::narrow(*x);
        }
    }

    fn narrow_block(x: &[f32], y: &mut [MaybeUninit<bf16>]) {
        for (y, x) in y.iter_mut().zip(x) {
            y.write(bf16::narrow(*x));
        }
    }
}

/// `x` in `f32`, on all threads.
pub(in crate::ops) fn widen(x: &[bf16]) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    let memory = &mut y.spare_capacity_mut()[..x.len()];
    memory.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| widen_first(x, y));
    // SAFETY: the chunks tile the memory, and each was written.
    unsafe { y.set_len(x.len()) };
    y
}

/// Appends `x`, rounded to the nearest, to `y`, on all threads.
pub(in crate::ops) fn narrow_onto(x: &[f32], y: &mut Vec<bf16>) {
    y.reserve(x.len());
    let memory = &mut y.spare_capacity_mut()[..x.len()];
    memory.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| narrow_block(x, y));
    // SAFETY: the chunks tile the memory, and each was written.
    unsafe { y.set_len(y.len() + x.len()) };
}

/// The elements of an operand.
#[derive(Clone, Copy)]
pub(in crate::ops) enum Values<'a> {
    /// As ops compute.
    F32(&'a [f32]),
    /// As they may be stored.
    Bf16(&'a [bf16]),
}

impl<'a> Values<'a> {
    /// How many.
    pub(in crate::ops) fn len(self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
        }
    }

    /// Elements `span`; for `bf16` as many as a thread's scratch should hold.
    pub(in crate::ops) fn lend(self, span: Range<usize>) -> Lent<'a> {
        match self {
            Self::F32(all) => Lent::Borrowed(&all[span]),
            Self::Bf16(all) => {
                let mut scratch = Scratch::of(span.len());
                widen_block(&all[span], scratch.all());
                Lent::Widened(scratch)
            }
        }
    }
}

/// Elements in `f32` for as long as this lives.
pub(in crate::ops) enum Lent<'a> {
    /// The operand's own memory.
    Borrowed(&'a [f32]),
    /// A copy.
    Widened(Scratch),
}

impl Deref for Lent<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Borrowed(all) => all,
            Self::Widened(scratch) => &scratch.buffer[..scratch.len],
        }
    }
}

thread_local! {
    /// Buffers that nobody uses at the moment.
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of this thread, which goes back at the end.
pub(in crate::ops) struct Scratch {
    buffer: Vec<f32>,
    len: usize,
}

impl Scratch {
    /// Of any content.
    fn of(len: usize) -> Self {
        let free = FREE.try_with(|free| free.borrow_mut().pop());
        let mut buffer = free.ok().flatten().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        Self { buffer, len }
    }

    fn all(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // At the end of a thread there may be no list any more.
        let _ = FREE.try_with(|free| free.borrow_mut().push(buffer));
    }
}

/// The elements of a result.
pub(in crate::ops) enum Filled {
    /// As ops compute.
    F32(Vec<f32>),
    /// Narrowed.
    Bf16(Vec<bf16>),
}

impl Filled {
    /// The elements of a result that was asked for in `f32`.
    pub(in crate::ops) fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(all) => all,
            Self::Bf16(_) => unreachable!("asked for `f32`"),
        }
    }

    /// The result as a tensor.
    pub(in crate::ops) fn tensor(self, shape: impl Into<Shape>) -> Result<Tensor> {
        match self {
            Self::F32(all) => Tensor::from_vec(all, shape.into(), &Device::Cpu),
            Self::Bf16(all) => Tensor::from_vec(all, shape.into(), &Device::Cpu),
        }
    }
}

/// Memory of a result that is being filled.
enum Target {
    F32(Vec<f32>, Shared<MaybeUninit<f32>>),
    Bf16(Vec<bf16>, Shared<MaybeUninit<bf16>>),
}

impl Target {
    fn new(len: usize, dtype: DType) -> Self {
        if dtype == DType::BF16 {
            let mut all = Vec::with_capacity(len);
            let shared = Shared::of(&mut all.spare_capacity_mut()[..len]);
            Self::Bf16(all, shared)
        } else {
            let mut all = Vec::with_capacity(len);
            let shared = Shared::of(&mut all.spare_capacity_mut()[..len]);
            Self::F32(all, shared)
        }
    }

    /// Elements `span`, of any content.
    ///
    /// # Safety
    /// `span` is inside of the memory, and nobody else uses any of it for as long as the part lives.
    unsafe fn slots<'a>(&self, span: Range<usize>) -> SlotsOf<'a> {
        match self {
            // SAFETY: by the caller's promise.
            Self::F32(_, shared) => SlotsOf::F32(unsafe { shared.slice::<'a>(span) }),
            // SAFETY: as above.
            Self::Bf16(_, shared) => SlotsOf::Bf16(unsafe { shared.slice::<'a>(span) }),
        }
    }

    /// Zeros for elements `span`.
    ///
    /// # Safety
    /// `span` is inside of the memory, and nobody else uses any of it for as long as the part lives.
    unsafe fn part<'a>(&self, span: Range<usize>) -> Part<'a> {
        match self {
            Self::F32(_, shared) => {
                // SAFETY: by the caller's promise.
                let memory = unsafe { shared.slice::<'a>(span) };
                memory.fill(MaybeUninit::new(0.0));
                // SAFETY: just written.
                Part::Own(unsafe { memory.assume_init_mut() })
            }
            Self::Bf16(_, shared) => {
                let mut scratch = Scratch::of(span.len());
                scratch.all().fill(0.0);
                // SAFETY: by the caller's promise.
                Part::Narrowed(scratch, unsafe { shared.slice::<'a>(span) })
            }
        }
    }

    /// # Safety
    /// All of the first `len` elements, for which the memory was made, have been written.
    unsafe fn filled(self, len: usize) -> Filled {
        match self {
            Self::F32(mut all, _) => {
                // SAFETY: by the caller's promise.
                unsafe { all.set_len(len) };
                Filled::F32(all)
            }
            Self::Bf16(mut all, _) => {
                // SAFETY: by the caller's promise.
                unsafe { all.set_len(len) };
                Filled::Bf16(all)
            }
        }
    }
}

/// A block of a result.
enum Part<'a> {
    Own(&'a mut [f32]),
    Narrowed(Scratch, &'a mut [MaybeUninit<bf16>]),
}

impl Part<'_> {
    fn values(&mut self) -> &mut [f32] {
        match self {
            Self::Own(all) => all,
            Self::Narrowed(scratch, _) => scratch.all(),
        }
    }

    fn finish(self) {
        if let Self::Narrowed(mut scratch, target) = self {
            narrow_block(scratch.all(), target);
        }
    }
}

/// Makes `N` results of `num_rows` rows; `outputs` are their widths and dtypes.
///
/// `fill(rows, parts)` is called for blocks of at most `block` rows on all threads. It gets the block's rows of each
/// result, zeros to begin with. A result without width leaves nothing to call for.
pub(in crate::ops) fn filled<const N: usize>(
    num_rows: usize,
    block: usize,
    outputs: [(usize, DType); N],
    fill: impl Fn(Range<usize>, [&mut [f32]; N]) + Sync,
) -> [Filled; N] {
    let widest = outputs.iter().map(|(width, _)| *width).max().unwrap_or(0);
    let empty = outputs.iter().any(|(width, _)| *width == 0);
    let targets = outputs.map(|(width, dtype)| Target::new(num_rows * width, dtype));
    let run = |rows: Range<usize>| {
        let mut next = 0;
        let mut parts = targets.each_ref().map(|target| {
            let width = outputs[next].0;
            next += 1;
            // SAFETY: rows are inside, and each belongs to one call.
            unsafe { target.part(rows.start * width..rows.end * width) }
        });
        if !empty {
            fill(rows, parts.each_mut().map(Part::values));
        }
        parts.into_iter().for_each(Part::finish);
    };
    (0..num_rows.div_ceil(block)).into_par_iter().for_each(|index| {
        let end = ((index + 1) * block).min(num_rows);
        pieces(index * block..end, widest).for_each(&run);
    });
    let mut next = 0;
    targets.map(|target| {
        let width = outputs[next].0;
        next += 1;
        // SAFETY: the blocks tile the rows, and every part was written.
        unsafe { target.filled(num_rows * width) }
    })
}

/// Elements of a result that nobody has written yet. [`Slots::fill`] writes each once: nothing else gives a [`Full`].
pub(in crate::ops) struct Slots<'s, 'b> {
    all: &'s mut [MaybeUninit<f32>],
    brand: Brand<'b>,
}

/// Says that the slots with the same brand were filled.
pub(in crate::ops) struct Full<'b>(Brand<'b>);

/// A lifetime that fits no other.
type Brand<'b> = PhantomData<fn(&'b ()) -> &'b ()>;

/// Slots of a block of a result.
enum SlotsOf<'a> {
    F32(&'a mut [MaybeUninit<f32>]),
    Bf16(&'a mut [MaybeUninit<bf16>]),
}

impl<'b> Slots<'_, 'b> {
    /// How many.
    #[inline(always)]
    pub(in crate::ops) fn len(&self) -> usize {
        self.all.len()
    }

    /// Slot `i` becomes `value(i)`.
    #[inline(always)]
    pub(in crate::ops) fn fill(self, value: impl Fn(usize) -> f32) -> Full<'b> {
        for i in 0..self.all.len() {
            self.all[i].write(value(i));
        }
        Full(self.brand)
    }
}

/// Makes a result of `len` elements, each from its own index: `fill(span, slots)` is called for blocks on all threads.
///
/// [`filled`] writes zeros first, and so brings memory into the caches before results come: at sizes beyond them that
/// took a quarter to two fifths of the time of an elementwise op.
pub(in crate::ops) fn elementwise(
    len: usize,
    dtype: DType,
    fill: impl for<'b> Fn(Range<usize>, Slots<'_, 'b>) -> Full<'b> + Sync,
) -> Filled {
    let target = Target::new(len, dtype);
    (0..len.div_ceil(BLOCK)).into_par_iter().for_each(|index| {
        let block = index * BLOCK..((index + 1) * BLOCK).min(len);
        // SAFETY: blocks tile the elements, and each belongs to one task.
        match unsafe { target.slots(block.clone()) } {
            SlotsOf::F32(all) => {
                fill(block, Slots { all, brand: PhantomData });
            }
            SlotsOf::Bf16(all) => {
                let mut wide = [const { MaybeUninit::<f32>::uninit() }; ON_STACK];
                for start in block.clone().step_by(ON_STACK) {
                    let span = start..(start + ON_STACK).min(block.end);
                    let wide = &mut wide[..span.len()];
                    fill(span.clone(), Slots { all: wide, brand: PhantomData });
                    // SAFETY: `fill` has shown that it wrote all of it.
                    let wide = unsafe { wide.assume_init_ref() };
                    narrow_block(wide, &mut all[span.start - block.start..span.end - block.start]);
                }
            }
        }
    });
    // SAFETY: every element was written.
    unsafe { target.filled(len) }
}

/// `rows` in pieces that are worked on at a time where the widest operand has `width` columns.
pub(in crate::ops) fn pieces(
    rows: Range<usize>,
    width: usize,
) -> impl Iterator<Item = Range<usize>> {
    let step = (AT_A_TIME / width.max(1)).max(1);
    let end = rows.end;
    rows.step_by(step).map(move |start| start..(start + step).min(end))
}

/// The elements of `rows` in a matrix with `width` columns.
pub(in crate::ops) fn span(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
