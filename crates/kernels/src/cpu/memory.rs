//! Access to the memory of CPU tensors.
//!
//! Operands are contiguous and may start at any offset of their storage. Kernels compute in `f32`:
//! `bf16` operands are converted to `f32`, and results are rounded back.

#![expect(unsafe_code, reason = "tasks that write disjoint parts share a raw pointer")]
#![expect(
    clippy::inline_always,
    reason = "a function call would lose the target features of the kernel"
)]

use super::blocks::{Values, append_bf16, to_f32};
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor,
    WithDType, bail,
};
use half::bf16;
use rayon::prelude::*;
use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;

/// Number of elements that one task converts or copies. Fixed, so that results do not depend on the
/// number of threads.
pub(crate) const BLOCK: usize = 1 << 15;

/// Element type of activations and weights.
pub(crate) trait Element: StorageElement {
    /// Converts to `f32`, exactly.
    fn widen(self) -> f32;
    /// Rounds to the nearest value, ties to even.
    fn narrow(x: f32) -> Self;
}

/// A type of the elements of tensors.
pub(crate) trait StorageElement: WithDType {
    /// All elements of a storage, or `None` if it has another type.
    fn all(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = super::simd::round_to_bf16(x).to_bits();
        // Set a bit in the upper half: a NaN with payload in the lower half only would become an
        // infinity.
        let quiet = if x.is_nan() { 0x0040 } else { 0 };
        Self::from_bits((bits >> 16) as u16 | quiet)
    }
}

impl StorageElement for f32 {
    fn all(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(all) = storage { Some(all) } else { None }
    }
}

impl StorageElement for bf16 {
    fn all(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::BF16(all) = storage { Some(all) } else { None }
    }
}

impl StorageElement for u8 {
    fn all(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::U8(all) = storage { Some(all) } else { None }
    }
}

/// A CPU tensor locked for reading.
pub(crate) struct Operand<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    op: &'static str,
    name: &'static str,
}

/// Locks `tensor` for reading. `op` and `name` appear in errors. Fails if the tensor is not
/// contiguous or not on the CPU.
pub(crate) fn read<'a>(
    op: &'static str,
    name: &'static str,
    tensor: &'a Tensor,
) -> Result<Operand<'a>> {
    if !matches!(tensor.device(), Device::Cpu) {
        bail!("{op}: `{name}` is on {:?}, expected the CPU", tensor.device());
    }
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous(op, name, layout)?;
    Ok(Operand { storage, range, op, name })
}

fn contiguous(op: &str, name: &str, layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("{op}: `{name}` {:?} must be contiguous", layout.shape()),
    }
}

impl Operand<'_> {
    fn cpu(&self) -> Result<&CpuStorage> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!("{}: `{}` is not on the CPU", self.op, self.name),
        }
    }

    /// Returns the elements, which must have type `T`.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        let storage = self.cpu()?;
        match storage.as_slice::<T>() {
            Ok(all) => Ok(&all[self.range.clone()]),
            Err(_) => bail!(
                "{}: `{}` is {:?}, expected {:?}",
                self.op,
                self.name,
                Storage::dtype(&self.storage),
                T::DTYPE
            ),
        }
    }

    /// Returns the elements in their own dtype, for conversion to `f32` block by block.
    pub(crate) fn values(&self) -> Result<Values<'_>> {
        match Storage::dtype(&self.storage) {
            DType::BF16 => Ok(Values::Bf16(self.slice::<bf16>()?)),
            _ => Ok(Values::F32(self.slice::<f32>()?)),
        }
    }

    /// Returns the elements in `f32`. Copies a whole `bf16` operand, so use it for small operands
    /// only.
    pub(crate) fn f32(&self) -> Result<Cow<'_, [f32]>> {
        match Storage::dtype(&self.storage) {
            DType::BF16 => Ok(Cow::Owned(to_f32(self.slice::<bf16>()?))),
            _ => Ok(Cow::Borrowed(self.slice::<f32>()?)),
        }
    }
}

/// Returns the common dtype of `tensors`. Fails unless it is `f32` or `bf16` and all tensors have
/// it.
pub(crate) fn compute_dtype(op: &str, tensors: &[(&str, &Tensor)]) -> Result<DType> {
    let dtype = tensors[0].1.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16) {
        bail!("{op}: `{}` is {dtype:?}, expected F32 or BF16", tensors[0].0);
    }
    for (name, tensor) in tensors {
        if tensor.dtype() != dtype {
            bail!("{op}: `{name}` is {:?}, but `{}` is {dtype:?}", tensor.dtype(), tensors[0].0);
        }
    }
    Ok(dtype)
}

/// Returns the dtype of `x`, in which an op computes. The weight must have it too, except that on
/// the CPU a `bf16` weight may be multiplied with `f32` activations: the result is that of the same
/// weight in `f32`.
pub(crate) fn weighted_dtype(
    op: &str,
    x: (&str, &Tensor),
    weight: (&str, &Tensor),
) -> Result<DType> {
    let dtypes = (x.1.dtype(), weight.1.dtype());
    if dtypes == (DType::F32, DType::BF16) && weight.1.device().is_cpu() {
        return Ok(DType::F32);
    }
    compute_dtype(op, &[x, weight])
}

/// Fails unless `tensor` has the shape `expected`.
pub(crate) fn expect_shape(
    op: &str,
    name: &str,
    tensor: &Tensor,
    expected: &[usize],
) -> Result<()> {
    if tensor.dims() != expected {
        bail!("{op}: `{name}` is {:?}, expected {expected:?}", tensor.dims());
    }
    Ok(())
}

/// Fails unless `tensor` is `f32` and has the shape `expected`.
pub(crate) fn expect_f32(op: &str, name: &str, tensor: &Tensor, expected: &[usize]) -> Result<()> {
    if tensor.dtype() != DType::F32 {
        bail!("{op}: `{name}` is {:?}, expected F32", tensor.dtype());
    }
    expect_shape(op, name, tensor, expected)
}

/// Returns a new tensor of `dtype` with these elements.
pub(crate) fn tensor(x: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    if dtype == DType::BF16 {
        let mut y = Vec::new();
        append_bf16(&x, &mut y);
        return Tensor::from_vec(y, shape.into(), &Device::Cpu);
    }
    Tensor::from_vec(x, shape.into(), &Device::Cpu)
}

/// Fails if `tensor` shares its storage with one of `sources`: locking the same storage twice would
/// deadlock.
pub(crate) fn distinct(
    op: &str,
    name: &str,
    tensor: &Tensor,
    sources: &[(&str, &Tensor)],
) -> Result<()> {
    let own = &raw const *tensor.storage_and_layout().0;
    for (source_name, source) in sources {
        if std::ptr::eq(own, &raw const *source.storage_and_layout().0) {
            bail!("{op}: `{name}` is written in place, but shares memory with `{source_name}`");
        }
    }
    Ok(())
}

/// Calls `f` with the elements of `tensor`, locked for writing. They must have type `T`, and the
/// caller must not hold a lock on them.
pub(crate) fn write<T: StorageElement, R>(
    op: &'static str,
    name: &'static str,
    tensor: &Tensor,
    f: impl FnOnce(&mut [T]) -> R,
) -> Result<R> {
    struct Write<T, F, R> {
        op: &'static str,
        operand: &'static str,
        len: usize,
        f: Cell<Option<F>>,
        result: Cell<Option<R>>,
        element: std::marker::PhantomData<T>,
    }

    impl<T: StorageElement, F: FnOnce(&mut [T]) -> R, R> InplaceOp1 for Write<T, F, R> {
        fn name(&self) -> &'static str {
            self.op
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let start = layout.start_offset();
            let dtype = candle_core::backend::BackendStorage::dtype(storage);
            let Some(all) = T::all(storage) else {
                bail!("{}: `{}` is {dtype:?}, expected {:?}", self.op, self.operand, T::DTYPE);
            };
            if let Some(f) = self.f.take() {
                self.result.set(Some(f(&mut all[start..start + self.len])));
            }
            Ok(())
        }
    }

    if !tensor.is_contiguous() {
        bail!("{op}: `{name}` {:?} must be contiguous", tensor.shape());
    }
    let len = tensor.elem_count();
    let write = Write {
        op,
        operand: name,
        len,
        f: Cell::new(Some(f)),
        result: Cell::new(None),
        element: std::marker::PhantomData,
    };
    tensor.inplace_op1(&write)?;
    match write.result.into_inner() {
        Some(result) => Ok(result),
        None => bail!("{op}: `{name}` was not written"),
    }
}

/// A pointer shared by tasks that each write a disjoint part.
pub(crate) struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: this is only an address; each dereference states why no other task accesses the part.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Pointer to the start of `all`, which must stay borrowed while the pointer is used.
    pub(crate) fn of(all: &mut [T]) -> Self {
        Self(all.as_mut_ptr())
    }

    /// Address of element `at`.
    ///
    /// # Safety
    /// `at` is inside the slice that this was created from.
    pub(crate) unsafe fn at(self, at: usize) -> *mut T {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.add(at) }
    }

    /// Elements `range`, for writing.
    ///
    /// # Safety
    /// `range` is inside the slice that this was created from, and no other task accesses it at the
    /// same time.
    pub(crate) unsafe fn slice<'a>(self, range: Range<usize>) -> &'a mut [T] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// Calls `task` once for each index in `0..num_tasks` on all threads, in ascending order, so the
/// longest tasks should come first. Each thread calls `scratch` once.
pub(crate) fn for_each_task<S>(
    num_tasks: usize,
    scratch: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, usize) + Sync,
) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let workers = rayon::current_num_threads().min(num_tasks);
    (0..workers).into_par_iter().with_max_len(1).for_each(|_| {
        let mut scratch = scratch();
        loop {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if index >= num_tasks {
                break;
            }
            task(&mut scratch, index);
        }
    });
}

/// Number of rows in a block of the row-wise ops.
pub(crate) const ROWS: usize = 32;

super::simd::kernels! {
    fn add_block(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

/// Adds `x` to `y`.
pub(crate) fn add(x: &[f32], y: &mut [f32]) {
    add_block(x, y);
}

super::simd::kernels! {
    fn add_scaled_block(factor: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = factor.mul_add(*x, *y);
        }
    }
}

/// Adds `factor * x` to `y`.
pub(crate) fn add_scaled(factor: f32, x: &[f32], y: &mut [f32]) {
    add_scaled_block(factor, x, y);
}
