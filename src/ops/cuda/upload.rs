//! Host memory to the GPU without waiting for it.
//!
//! A copy out of pageable memory blocks until the stream reaches it. So values go into page-locked buffers first, which
//! are used again once their copy is done. Copies run on the one stream of the device: a micro-batch is a few
//! milliseconds of PCIe in a second of compute, and a stream of its own would need allocations of its own.

#![expect(unsafe_code, reason = "page-locked memory is raw memory")]

use super::launch::address;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice, result};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Device, Result, Shape, Tensor, WithDType, bail};
use std::sync::{Mutex, PoisonError};

/// Page-locked memory, and the end of its last copy.
struct Buffer {
    device: DeviceId,
    memory: PinnedHostSlice<u8>,
    copied: Option<CudaEvent>,
}

/// Buffers of all devices. There are as many as copies were ever under way at one time.
static BUFFERS: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
/// Copies under way, after which the oldest is waited for.
const MOST_BUFFERS: usize = 48;
/// Locking pages is slow, so buffers come in few sizes.
const SMALLEST: usize = 1 << 20;
/// Elements that one task copies.
const BLOCK: usize = 1 << 18;

/// A tensor on `device` with these values; the copy may still be under way.
pub(in crate::ops) fn upload<T: WithDType>(
    values: &[T],
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    let Device::Cuda(gpu) = device else { bail!("upload: {device:?} is no GPU") };
    if shape.elem_count() != values.len() {
        bail!("upload: {} values for {shape:?}", values.len());
    }
    // SAFETY: the copy below fills it, on the stream that every reader is on.
    let tensor = unsafe { Tensor::empty(shape, T::DTYPE, device)? };
    if values.is_empty() {
        return Ok(tensor);
    }
    let target = address("upload", "values", &tensor)?.0;
    let bytes = size_of_val(values);
    let mut buffer = take(gpu, bytes)?;
    let staged = buffer.memory.as_mut_ptr().w()?;
    copy_on_all_threads(values, staged.cast());
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the buffer holds the bytes until the event below, and the tensor has as many.
    unsafe {
        let staged = std::slice::from_raw_parts(staged, bytes);
        result::memcpy_htod_async(target, staged, stream.cu_stream()).w()?;
    }
    buffer.copied = Some(stream.record_event(None).w()?);
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    Ok(tensor)
}

fn copy_on_all_threads<T: WithDType>(values: &[T], to: *mut T) {
    use rayon::prelude::*;
    // SAFETY: the buffer has room for the values, at an address that page-locking aligns, and nobody else has it.
    let to = unsafe { std::slice::from_raw_parts_mut(to, values.len()) };
    to.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK)).for_each(|(to, from)| {
        to.copy_from_slice(from);
    });
}

/// The smallest idle buffer of at least `bytes`, or a new one.
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
    if buffers.len() >= MOST_BUFFERS {
        // The first has been under way for longest; it makes room, whatever its size.
        let oldest = buffers.remove(0);
        if let Some(copied) = &oldest.copied {
            copied.synchronize().w()?;
        }
        if fits(&oldest) {
            return Ok(oldest);
        }
    }
    drop(buffers);
    let size = bytes.next_power_of_two().max(SMALLEST);
    let stream = gpu.cuda_stream();
    // SAFETY: it is written before it is read.
    let memory = unsafe { stream.context().alloc_pinned::<u8>(size) }.w()?;
    Ok(Buffer { device: gpu.id(), memory, copied: None })
}
