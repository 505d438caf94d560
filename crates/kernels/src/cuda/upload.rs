//! Asynchronous upload of host memory to a GPU.
//!
//! A copy from pageable memory blocks the host until the stream reaches it. So values are first
//! copied to page-locked buffers, in pieces, and each buffer is used again after its copy. Large
//! tensors, such as pixels, go through a stream of their own: in the stream of the tensors they
//! would wait for the steps that are queued there. Small ones use that stream.

#![expect(unsafe_code, reason = "page-locked memory is accessed through raw pointers")]

use crate::launch::address;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice, result};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage, DeviceId, WrapErr as _};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, WithDType, bail};
use half::bf16;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// A page-locked buffer, and the event that marks the end of its last upload.
struct Buffer {
    device: DeviceId,
    memory: PinnedHostSlice<u8>,
    copied: Option<CudaEvent>,
    /// Whether the copy is on the stream for large tensors, so that it is done soon.
    is_large: bool,
}

/// Idle and busy buffers of all devices. Their number is the peak number of concurrent uploads.
static BUFFERS: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
/// Streams for large tensors.
static STREAMS: LazyLock<Mutex<HashMap<DeviceId, Arc<CudaStream>>>> = LazyLock::new(Mutex::default);
/// Maximum number of bytes of all buffers. At this limit an upload waits for the oldest one.
const MAX_BUFFER_BYTES: usize = 256 << 20;
/// Minimum buffer size in bytes. Page-locking is slow, so few sizes are used.
const MIN_BUFFER_BYTES: usize = 1 << 20;
/// Number of elements that one task copies.
const BLOCK: usize = 1 << 18;
/// Number of bytes that are staged at a time: while they are on their way, the next ones are
/// copied.
const STAGED: usize = 1 << 24;
/// Tensors of at least this number of bytes are large.
const LARGE: usize = 1 << 22;

/// Returns a tensor on `device` with these values. The upload may still be in progress.
pub(crate) fn upload<T: WithDType>(
    values: &[T],
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    place(values.len(), shape.into(), device, &|range: Range<usize>, to: &mut [T]| {
        to.copy_from_slice(&values[range]);
    })
}

/// Returns a `bf16` tensor on `device` with these values, which are rounded on the host.
pub(crate) fn upload_bf16(
    values: &[f32],
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    place(values.len(), shape.into(), device, &|range: Range<usize>, to: &mut [bf16]| {
        for (to, from) in to.iter_mut().zip(&values[range]) {
            *to = bf16::from_f32(*from);
        }
    })
}

/// Uploads `len` values; `fill` writes those of a range.
fn place<T: WithDType>(
    len: usize,
    shape: Shape,
    device: &Device,
    fill: &(impl Fn(Range<usize>, &mut [T]) + Sync),
) -> Result<Tensor> {
    let Device::Cuda(gpu) = device else { bail!("upload: found {device:?}, expected a GPU") };
    if shape.elem_count() != len {
        bail!("upload: found {len} values for the shape {shape:?}");
    }
    let large = len * size_of::<T>() >= LARGE && gpu.cuda_stream().context().has_async_alloc();
    match T::DTYPE {
        DType::BF16 if large => place_large::<T, bf16>(shape, gpu, fill),
        DType::F32 if large => place_large::<T, f32>(shape, gpu, fill),
        _ => {
            // SAFETY: the upload below fills the tensor, on the same stream as every reader.
            let tensor = unsafe { Tensor::empty(shape, T::DTYPE, device)? };
            if len > 0 {
                let target = address("upload", "values", &tensor)?.0;
                send(len, target, gpu, &gpu.cuda_stream(), false, fill)?;
            }
            Ok(tensor)
        }
    }
}

/// As [`place`], on a stream of its own; `E` is the element type `T` in storages of candle.
fn place_large<T: WithDType, E: CudaDType>(
    shape: Shape,
    gpu: &CudaDevice,
    fill: &(impl Fn(Range<usize>, &mut [T]) + Sync),
) -> Result<Tensor> {
    let (tensors, copies) = (gpu.cuda_stream(), copy_stream(gpu)?);
    let len = shape.elem_count();
    tensors.context().bind_to_thread().w()?;
    // SAFETY: the memory is allocated and filled on the copy stream, and the stream of the tensors
    // waits for both. The slice frees it on that stream, after its last use.
    let slice = unsafe {
        let target = result::malloc_async(copies.cu_stream(), len * size_of::<T>()).w()?;
        let slice = tensors.upgrade_device_ptr::<E>(target, len);
        let sent = send(len, target, gpu, &copies, true, fill);
        tensors.join(&copies).w()?;
        sent?;
        slice
    };
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, gpu.clone()));
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}

/// The stream for large tensors.
fn copy_stream(gpu: &CudaDevice) -> Result<Arc<CudaStream>> {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stream) = streams.get(&gpu.id()) {
        return Ok(stream.clone());
    }
    let stream = gpu.cuda_stream().context().new_stream().w()?;
    streams.insert(gpu.id(), stream.clone());
    Ok(stream)
}

/// Copies `bytes` to `to`, a contiguous tensor of this size on a GPU, in order with its stream. The
/// copy may still be in progress.
pub(crate) fn upload_bytes(bytes: &[u8], to: &Tensor) -> Result<()> {
    let stream = to.device().as_cuda_device()?.cuda_stream();
    upload_bytes_on(&stream, bytes, to)
}

/// As [`upload_bytes`], in order with `stream`.
pub(super) fn upload_bytes_on(stream: &CudaStream, bytes: &[u8], to: &Tensor) -> Result<()> {
    let Device::Cuda(gpu) = to.device() else {
        bail!("upload: found {:?}, expected a GPU", to.device());
    };
    let expected = to.elem_count() * to.dtype().size_in_bytes();
    if bytes.len() != expected {
        bail!("upload: found {} bytes for a tensor of {expected}", bytes.len());
    }
    let target = address("upload", "to", to)?.0;
    let fill = |range: Range<usize>, to: &mut [u8]| to.copy_from_slice(&bytes[range]);
    send(bytes.len(), target, gpu, stream, false, &fill)
}

/// Starts a copy of `len` values to an address on `gpu`, in pieces.
fn send<T: Copy + Send>(
    len: usize,
    target: u64,
    gpu: &CudaDevice,
    stream: &CudaStream,
    is_large: bool,
    fill: &(impl Fn(Range<usize>, &mut [T]) + Sync),
) -> Result<()> {
    stream.context().bind_to_thread().w()?;
    let each = STAGED / size_of::<T>();
    for first in (0..len).step_by(each) {
        let piece = first..(first + each).min(len);
        let bytes = piece.len() * size_of::<T>();
        let mut buffer = take(gpu, bytes)?;
        let staged = buffer.memory.as_mut_ptr().w()?;
        fill_on_all_threads(piece, staged.cast(), fill);
        // SAFETY: the buffer keeps the bytes until the event below, and the caller's tensor has
        // room.
        unsafe {
            let staged = std::slice::from_raw_parts(staged, bytes);
            let target = target + (first * size_of::<T>()) as u64;
            result::memcpy_htod_async(target, staged, stream.cu_stream()).w()?;
        }
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
        buffer.copied = Some(event);
        buffer.is_large = is_large;
        BUFFERS.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
    Ok(())
}

fn fill_on_all_threads<T: Copy + Send>(
    piece: Range<usize>,
    to: *mut T,
    fill: &(impl Fn(Range<usize>, &mut [T]) + Sync),
) {
    use rayon::prelude::*;
    // SAFETY: the buffer has capacity for the values, page-locked memory is aligned, and this
    // thread owns it.
    let to = unsafe { std::slice::from_raw_parts_mut(to, piece.len()) };
    to.par_chunks_mut(BLOCK).enumerate().for_each(|(block, to)| {
        let first = piece.start + block * BLOCK;
        fill(first..first + to.len(), to);
    });
}

/// Returns the smallest idle buffer of at least `bytes`, or a new one.
fn take(gpu: &CudaDevice, bytes: usize) -> Result<Buffer> {
    let mut buffers = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |buffer: &Buffer| buffer.device == gpu.id() && buffer.memory.len() >= bytes;
    let idle = |buffer: &Buffer| buffer.copied.as_ref().is_none_or(CudaEvent::is_complete);
    let found = (0..buffers.len())
        .filter(|&i| fits(&buffers[i]) && idle(&buffers[i]))
        .min_by_key(|&i| buffers[i].memory.len());
    if let Some(found) = found {
        return Ok(buffers.remove(found));
    }
    let size = bytes.next_power_of_two().max(MIN_BUFFER_BYTES);
    let held = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.memory.len()).sum::<usize>();
    while !buffers.is_empty() && held(&buffers) + size > MAX_BUFFER_BYTES {
        // The first buffers have been busy for longest. One that is too small is freed.
        let done = buffers.iter().position(idle);
        let soon = || buffers.iter().position(|buffer| buffer.is_large);
        let oldest = done.or_else(soon).unwrap_or(0);
        let oldest = buffers.remove(oldest);
        drop(buffers); // another thread need not wait for this copy
        if let Some(copied) = &oldest.copied {
            copied.synchronize().w()?;
        }
        if fits(&oldest) {
            return Ok(oldest);
        }
        drop(oldest);
        buffers = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    }
    drop(buffers);
    let stream = gpu.cuda_stream();
    // SAFETY: the memory is written before it is read.
    let memory = unsafe { stream.context().alloc_pinned::<u8>(size) }.w()?;
    Ok(Buffer { device: gpu.id(), memory, copied: None, is_large: false })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::device;
    use super::*;

    #[test]
    fn large_tensors_arrive_before_their_first_use() {
        let device = device();
        if device.is_cpu() {
            eprintln!("skipped: TRAINER_TEST_DEVICE names no GPU");
            return;
        }
        // more than all buffers, while the stream of the tensors is busy
        let len = MAX_BUFFER_BYTES / 4 + 12_345;
        let expected: Vec<f32> = (0..len).map(|at| (at % 65_521) as f32).collect();
        let busy = Tensor::rand(0f32, 1f32, (4096, 4096), &device).unwrap();
        for _ in 0..3 {
            let product = busy.matmul(&busy).unwrap();
            let tensor = upload(&expected, len, &device).unwrap();
            let rounded = upload_bf16(&expected, len, &device).unwrap();
            let rounded = rounded.to_vec1::<bf16>().unwrap();
            assert!(tensor.to_vec1::<f32>().unwrap() == expected);
            assert!(rounded.into_iter().eq(expected.iter().map(|x| bf16::from_f32(*x))));
            drop(product);
        }
        let held: usize = BUFFERS.lock().unwrap().iter().map(|buffer| buffer.memory.len()).sum();
        assert!(held <= MAX_BUFFER_BYTES, "{held}");
    }
}
