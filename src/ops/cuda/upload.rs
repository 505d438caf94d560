//! Asynchronous upload of host memory to a GPU.
//!
//! A copy from pageable memory blocks the host until the stream reaches it. So values are first
//! copied to page-locked buffers, which are reused after their upload. Uploads use the single
//! stream of the device: a micro-batch takes a few milliseconds of PCIe per second of compute, and
//! a second stream would need a separate memory pool.

#![expect(unsafe_code, reason = "page-locked memory is accessed through raw pointers")]

use super::launch::address;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice, result};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Device, Result, Shape, Tensor, WithDType, bail};
use std::sync::{Mutex, PoisonError};

/// A page-locked buffer, and the event that marks the end of its last upload.
struct Buffer {
    device: DeviceId,
    memory: PinnedHostSlice<u8>,
    copied: Option<CudaEvent>,
}

/// Idle and busy buffers of all devices. Their number is the peak number of concurrent uploads.
static BUFFERS: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
/// Maximum number of buffers. At this limit an upload waits for the oldest one to finish.
const MAX_BUFFERS: usize = 48;
/// Minimum buffer size in bytes. Page-locking is slow, so few sizes are used.
const MIN_BUFFER_BYTES: usize = 1 << 20;
/// Number of elements that one task copies.
const BLOCK: usize = 1 << 18;
/// Number of bytes that are staged at a time: while they are on their way, the next ones are copied.
const STAGED: usize = 1 << 24;

/// Returns a tensor on `device` with these values. The upload may still be in progress.
pub(in crate::ops) fn upload<T: WithDType>(
    values: &[T],
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    let Device::Cuda(gpu) = device else { bail!("upload: found {device:?}, expected a GPU") };
    if shape.elem_count() != values.len() {
        bail!("upload: found {} values for the shape {shape:?}", values.len());
    }
    // SAFETY: the upload below fills the tensor, on the same stream as every reader.
    let tensor = unsafe { Tensor::empty(shape, T::DTYPE, device)? };
    if values.is_empty() {
        return Ok(tensor);
    }
    send(values, address("upload", "values", &tensor)?.0, gpu)?;
    Ok(tensor)
}

/// Copies `bytes` to `to`, a contiguous tensor of this size on a GPU, in order with its stream. The copy
/// may still be in progress.
pub(in crate::ops) fn upload_bytes(bytes: &[u8], to: &Tensor) -> Result<()> {
    let Device::Cuda(gpu) = to.device() else {
        bail!("upload: found {:?}, expected a GPU", to.device());
    };
    let expected = to.elem_count() * to.dtype().size_in_bytes();
    if bytes.len() != expected {
        bail!("upload: found {} bytes for a tensor of {expected}", bytes.len());
    }
    let target = address("upload", "to", to)?.0;
    for (part, bytes) in bytes.chunks(STAGED).enumerate() {
        send(bytes, target + (part * STAGED) as u64, gpu)?;
    }
    Ok(())
}

/// Starts a copy of `values`, which are not empty, to an address on `gpu`.
fn send<T: Copy + Send + Sync>(values: &[T], target: u64, gpu: &CudaDevice) -> Result<()> {
    let bytes = size_of_val(values);
    let mut buffer = take(gpu, bytes)?;
    let staged = buffer.memory.as_mut_ptr().w()?;
    copy_on_all_threads(values, staged.cast());
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the buffer keeps the bytes until the event below, and the caller's tensor has room.
    unsafe {
        let staged = std::slice::from_raw_parts(staged, bytes);
        result::memcpy_htod_async(target, staged, stream.cu_stream()).w()?;
    }
    buffer.copied = Some(stream.record_event(None).w()?);
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    Ok(())
}

fn copy_on_all_threads<T: Copy + Send + Sync>(values: &[T], to: *mut T) {
    use rayon::prelude::*;
    // SAFETY: the buffer has capacity for the values, page-locked memory is aligned, and this
    // thread owns it.
    let to = unsafe { std::slice::from_raw_parts_mut(to, values.len()) };
    to.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK)).for_each(|(to, from)| {
        to.copy_from_slice(from);
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
    if buffers.len() >= MAX_BUFFERS {
        // The first buffer has been busy for longest. It is replaced, whatever its size.
        let oldest = buffers.remove(0);
        if let Some(copied) = &oldest.copied {
            copied.synchronize().w()?;
        }
        if fits(&oldest) {
            return Ok(oldest);
        }
    }
    drop(buffers);
    let size = bytes.next_power_of_two().max(MIN_BUFFER_BYTES);
    let stream = gpu.cuda_stream();
    // SAFETY: the memory is written before it is read.
    let memory = unsafe { stream.context().alloc_pinned::<u8>(size) }.w()?;
    Ok(Buffer { device: gpu.id(), memory, copied: None })
}
