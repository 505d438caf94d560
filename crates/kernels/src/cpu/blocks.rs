//! Building blocks of row-wise and elementwise ops: they read operands and write results in `f32`,
//! block by block, whether the memory is `f32` or `bf16`.
//!
//! `f32` memory is used directly. `bf16` blocks are converted through a per-thread scratch buffer
//! of one block, so no op holds a full second copy of an operand or of a result.

#![expect(unsafe_code, reason = "tasks write disjoint blocks of uninitialized memory")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
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

/// Maximum number of elements of the widest operand processed at a time, so that they stay in the
/// L1 cache.
const AT_A_TIME: usize = 1 << 13;
/// Number of elements of the rows that [`by_rows`] computes at a time (4 MiB in `f32`).
const PANEL: usize = 1 << 20;
/// Number of `bf16` elements that an elementwise op converts at a time, on the stack.
pub(crate) const ON_STACK: usize = 1 << 12;

kernels! {
    pub(crate) fn to_f32_block(x: &[bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.widen();
        }
    }

    fn to_f32_uninit(x: &[bf16], y: &mut [MaybeUninit<f32>]) {
        for (y, x) in y.iter_mut().zip(x) {
            y.write(x.widen());
        }
    }

    pub(crate) fn to_bf16_block(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = bf16::narrow(*x);
        }
    }

    fn to_bf16_uninit(x: &[f32], y: &mut [MaybeUninit<bf16>]) {
        for (y, x) in y.iter_mut().zip(x) {
            y.write(bf16::narrow(*x));
        }
    }
}

/// Converts `x` to `f32`, on all threads.
pub(crate) fn to_f32(x: &[bf16]) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    let memory = &mut y.spare_capacity_mut()[..x.len()];
    memory.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| to_f32_uninit(x, y));
    // SAFETY: the chunks tile the memory, and every chunk was written.
    unsafe { y.set_len(x.len()) };
    y
}

/// Appends `x`, rounded to nearest, to `y`, on all threads.
pub(crate) fn append_bf16(x: &[f32], y: &mut Vec<bf16>) {
    y.reserve(x.len());
    let memory = &mut y.spare_capacity_mut()[..x.len()];
    memory.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| to_bf16_uninit(x, y));
    // SAFETY: the chunks tile the memory, and every chunk was written.
    unsafe { y.set_len(y.len() + x.len()) };
}

/// Elements of an operand, in its dtype.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a> {
    /// `f32` elements, used directly.
    F32(&'a [f32]),
    /// `bf16` elements, converted block by block.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(all: &'a [f32]) -> Self {
        Self::F32(all)
    }
}

impl<'a> From<&'a Vec<f32>> for Values<'a> {
    fn from(all: &'a Vec<f32>) -> Self {
        Self::F32(all)
    }
}

impl<'a> Values<'a> {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
        }
    }

    /// Elements `span`, without a conversion.
    pub(crate) fn part(self, span: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[span]),
            Self::Bf16(all) => Self::Bf16(&all[span]),
        }
    }

    /// Elements `span` in `f32`. For `bf16` this fills a scratch buffer of that length, so `span`
    /// should be one block.
    pub(crate) fn view(self, span: Range<usize>) -> F32View<'a> {
        match self {
            Self::F32(all) => F32View::Borrowed(&all[span]),
            Self::Bf16(all) => {
                let mut scratch = Scratch::of(span.len());
                to_f32_block(&all[span], scratch.all());
                F32View::Converted(scratch)
            }
        }
    }
}

/// Read-only `f32` view of a part of an operand.
pub(crate) enum F32View<'a> {
    /// Memory of the operand itself.
    Borrowed(&'a [f32]),
    /// Converted copy in a scratch buffer.
    Converted(Scratch),
}

impl Deref for F32View<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Borrowed(all) => all,
            Self::Converted(scratch) => &scratch.buffer[..scratch.len],
        }
    }
}

thread_local! {
    /// Scratch buffers that are not in use.
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A scratch buffer of this thread. Dropping it makes it available again.
pub(crate) struct Scratch {
    buffer: Vec<f32>,
    len: usize,
}

impl Scratch {
    /// Returns a buffer of `len` elements with unspecified contents.
    pub(crate) fn of(len: usize) -> Self {
        let free = FREE.try_with(|free| free.borrow_mut().pop());
        let mut buffer = free.ok().flatten().unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        Self { buffer, len }
    }

    pub(crate) fn all(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // Fails while the thread exits, when the list has already been dropped.
        let _ = FREE.try_with(|free| free.borrow_mut().push(buffer));
    }
}

/// Elements of a complete result.
pub(crate) enum Filled {
    /// `f32` elements.
    F32(Vec<f32>),
    /// Elements rounded to `bf16`.
    Bf16(Vec<bf16>),
}

impl Filled {
    /// Returns the elements of a result that was created with dtype `f32`. Panics for `bf16`.
    pub(crate) fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(all) => all,
            Self::Bf16(_) => unreachable!("the result was created with dtype `f32`"),
        }
    }

    /// Converts the elements into a tensor of this shape.
    pub(crate) fn tensor(self, shape: impl Into<Shape>) -> Result<Tensor> {
        match self {
            Self::F32(all) => Tensor::from_vec(all, shape.into(), &Device::Cpu),
            Self::Bf16(all) => Tensor::from_vec(all, shape.into(), &Device::Cpu),
        }
    }
}

/// Uninitialized memory of a result, and a pointer to it for the tasks.
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

    /// Elements `span`, uninitialized.
    ///
    /// # Safety
    /// `span` is inside the memory, and nothing else accesses it during the lifetime `'a`.
    unsafe fn slots<'a>(&self, span: Range<usize>) -> SlotsOf<'a> {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::F32(_, shared) => SlotsOf::F32(unsafe { shared.slice::<'a>(span) }),
            // SAFETY: as above.
            Self::Bf16(_, shared) => SlotsOf::Bf16(unsafe { shared.slice::<'a>(span) }),
        }
    }

    /// Elements `span`, set to zero.
    ///
    /// # Safety
    /// `span` is inside the memory, and nothing else accesses it during the lifetime `'a`.
    unsafe fn part<'a>(&self, span: Range<usize>) -> OutputBlock<'a> {
        match self {
            Self::F32(_, shared) => {
                // SAFETY: guaranteed by the caller.
                let memory = unsafe { shared.slice::<'a>(span) };
                memory.fill(MaybeUninit::new(0.0));
                // SAFETY: just initialized.
                OutputBlock::Own(unsafe { memory.assume_init_mut() })
            }
            Self::Bf16(_, shared) => {
                let mut scratch = Scratch::of(span.len());
                scratch.all().fill(0.0);
                // SAFETY: guaranteed by the caller.
                OutputBlock::Narrowed(scratch, unsafe { shared.slice::<'a>(span) })
            }
        }
    }

    /// # Safety
    /// The first `len` elements have been written, and `len` is the length given to [`Self::new`].
    unsafe fn filled(self, len: usize) -> Filled {
        match self {
            Self::F32(mut all, _) => {
                // SAFETY: guaranteed by the caller.
                unsafe { all.set_len(len) };
                Filled::F32(all)
            }
            Self::Bf16(mut all, _) => {
                // SAFETY: guaranteed by the caller.
                unsafe { all.set_len(len) };
                Filled::Bf16(all)
            }
        }
    }
}

/// A block of a result that a task fills: the memory itself, or a scratch buffer that is rounded to
/// `bf16` at the end.
enum OutputBlock<'a> {
    Own(&'a mut [f32]),
    Narrowed(Scratch, &'a mut [MaybeUninit<bf16>]),
}

impl OutputBlock<'_> {
    fn values(&mut self) -> &mut [f32] {
        match self {
            Self::Own(all) => all,
            Self::Narrowed(scratch, _) => scratch.all(),
        }
    }

    fn finish(self) {
        if let Self::Narrowed(mut scratch, target) = self {
            to_bf16_uninit(scratch.all(), target);
        }
    }
}

/// Creates `N` results of `num_rows` rows. `outputs` lists their widths and dtypes.
///
/// Calls `fill(rows, parts)` on all threads for blocks of at most `block` rows; `parts` holds these
/// rows of each result, initially zero. If the first width is 0, `fill` is not called.
pub(crate) fn filled<const N: usize>(
    num_rows: usize,
    block: usize,
    outputs: [(usize, DType); N],
    fill: impl Fn(Range<usize>, [&mut [f32]; N]) + Sync,
) -> [Filled; N] {
    let widest = outputs.iter().map(|(width, _)| *width).max().unwrap_or(0);
    let empty = outputs.first().is_none_or(|(width, _)| *width == 0);
    let targets = outputs.map(|(width, dtype)| Target::new(num_rows * width, dtype));
    let run = |rows: Range<usize>| {
        let mut next = 0;
        let mut parts = targets.each_ref().map(|target| {
            let width = outputs[next].0;
            next += 1;
            // SAFETY: the rows are in range, and each row belongs to one call.
            unsafe { target.part(rows.start * width..rows.end * width) }
        });
        if !empty {
            fill(rows, parts.each_mut().map(OutputBlock::values));
        }
        parts.into_iter().for_each(OutputBlock::finish);
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

/// Uninitialized elements of a result. Only [`Slots::fill`], which writes every element, returns a
/// [`Full`].
pub(crate) struct Slots<'s, 'b> {
    all: &'s mut [MaybeUninit<f32>],
    brand: Brand<'b>,
}

/// Proof that the [`Slots`] with the same brand were filled.
pub(crate) struct Full<'b>(Brand<'b>);

/// A unique lifetime that ties a [`Full`] to its [`Slots`].
type Brand<'b> = PhantomData<fn(&'b ()) -> &'b ()>;

/// Uninitialized elements of a block, in the dtype of the result.
enum SlotsOf<'a> {
    F32(&'a mut [MaybeUninit<f32>]),
    Bf16(&'a mut [MaybeUninit<bf16>]),
}

impl<'b> Slots<'_, 'b> {
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Writes `value(i)` to each element `i`.
    #[inline(always)]
    pub(crate) fn fill(self, value: impl Fn(usize) -> f32) -> Full<'b> {
        for i in 0..self.all.len() {
            self.all[i].write(value(i));
        }
        Full(self.brand)
    }
}

/// Creates a result of `len` elements, each computed from its own index: calls `fill(span, slots)`
/// for blocks on all threads.
///
/// Unlike [`filled`] it does not write zeros first. For results larger than the caches, writing
/// zeros took 25 % to 40 % of the time of an elementwise op.
pub(crate) fn elementwise(
    len: usize,
    dtype: DType,
    fill: impl for<'b> Fn(Range<usize>, Slots<'_, 'b>) -> Full<'b> + Sync,
) -> Filled {
    let target = Target::new(len, dtype);
    (0..len.div_ceil(BLOCK)).into_par_iter().for_each(|index| {
        let block = index * BLOCK..((index + 1) * BLOCK).min(len);
        // SAFETY: the blocks tile the elements, and each block belongs to one task.
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
                    // SAFETY: the returned `Full` proves that `fill` wrote all elements.
                    let wide = unsafe { wide.assume_init_ref() };
                    to_bf16_uninit(
                        wide,
                        &mut all[span.start - block.start..span.end - block.start],
                    );
                }
            }
        }
    });
    // SAFETY: every element was written.
    unsafe { target.filled(len) }
}

/// Builds a tensor of `num_rows * width` elements from rows that `f` computes in `f32`. For `f32`
/// results `f` is called once; for `bf16` once per panel of a matrix with `widest` columns.
pub(crate) fn by_rows(
    (num_rows, width, widest): (usize, usize, usize),
    shape: impl Into<Shape>,
    dtype: DType,
    f: impl Fn(Range<usize>) -> Vec<f32>,
) -> Result<Tensor> {
    if dtype != DType::BF16 {
        return Filled::F32(f(0..num_rows)).tensor(shape);
    }
    let step = (PANEL / widest.max(1)).max(64);
    let mut y = Vec::with_capacity(num_rows * width);
    for start in (0..num_rows).step_by(step) {
        append_bf16(&f(start..(start + step).min(num_rows)), &mut y);
    }
    Filled::Bf16(y).tensor(shape)
}

/// Splits `rows` into pieces that are processed at a time when the widest operand has `width`
/// columns.
fn pieces(rows: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (AT_A_TIME / width.max(1)).max(1);
    let end = rows.end;
    rows.step_by(step).map(move |start| start..(start + step).min(end))
}

/// Element range of `rows` in a matrix with `width` columns.
pub(crate) fn span(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
