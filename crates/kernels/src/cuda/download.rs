//! Copies of tensors on a GPU to host memory, through page-locked buffers.
//!
//! A copy to pageable memory runs at a fraction of the speed of the bus. So pieces go to two
//! page-locked buffers in turn: while one is on its way, the other is copied to its place.

#![expect(unsafe_code, reason = "page-locked memory is accessed through raw pointers")]

use super::driver::copy_to_host_async;
use crate::launch::address;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Device, Result, Tensor, bail};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Number of bytes of a piece.
const PIECE: usize = 1 << 24;
/// Number of bytes that one task copies.
const BLOCK: usize = 1 << 19;

type Buffers = [PinnedHostSlice<u8>; 2];
/// Buffers that are not in use. A copy takes them out: it waits for the threads of the pool, one of
/// which may begin another copy.
static BUFFERS: LazyLock<Mutex<HashMap<DeviceId, Vec<Buffers>>>> = LazyLock::new(Mutex::default);

/// Copies the bytes of `from`, a contiguous tensor on a GPU, to `to`. They are there on return.
pub(crate) fn download(from: &Tensor, to: &mut [u8]) -> Result<()> {
    let Device::Cuda(gpu) = from.device() else {
        bail!("download: found {:?}, expected a GPU", from.device());
    };
    let expected = from.elem_count() * from.dtype().size_in_bytes();
    if to.len() != expected {
        bail!("download: found {} bytes for a tensor of {expected}", to.len());
    }
    let idle = || BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = idle().entry(gpu.id()).or_default().pop();
    let mut buffers = match taken {
        Some(buffers) => buffers,
        None => [page_locked(gpu)?, page_locked(gpu)?],
    };
    let result = download_through(&mut buffers, gpu, from, to);
    if result.is_ok() {
        idle().entry(gpu.id()).or_default().push(buffers);
    } else {
        // A copy to them may still be on its way.
        std::mem::forget(buffers);
    }
    result
}

fn download_through(
    buffers: &mut Buffers,
    gpu: &CudaDevice,
    from: &Tensor,
    to: &mut [u8],
) -> Result<()> {
    let (source, stream) = (address("download", "from", from)?.0, gpu.cuda_stream());
    stream.context().bind_to_thread().w()?;
    let mut start = |piece: usize, bytes: usize| -> Result<(*const u8, CudaEvent)> {
        let buffer = buffers[piece % 2].as_mut_ptr().w()?;
        let at = source + (piece * PIECE) as u64;
        // SAFETY: the buffer has `PIECE` bytes, and the tensor exists until the wait below.
        unsafe { copy_to_host_async(buffer, at, bytes, stream.cu_stream())? };
        Ok((
            buffer.cast_const(),
            stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?,
        ))
    };
    let mut pieces = to.chunks_mut(PIECE).enumerate();
    let mut before: Option<(&mut [u8], *const u8, CudaEvent)> = None;
    loop {
        // Its buffer is that of the piece before the last one, which is in its place.
        let next = match pieces.next() {
            Some((piece, to)) => {
                let (buffer, arrived) = start(piece, to.len())?;
                Some((to, buffer, arrived))
            }
            None => None,
        };
        let is_last = next.is_none();
        if let Some((to, buffer, arrived)) = std::mem::replace(&mut before, next) {
            arrived.synchronize().w()?;
            // SAFETY: the copy to the buffer is done.
            let from = unsafe { std::slice::from_raw_parts(buffer, to.len()) };
            let blocks = to.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
            blocks.for_each(|(to, from)| to.copy_from_slice(from));
        }
        if is_last {
            return Ok(());
        }
    }
}

/// A buffer that the host can read fast, unlike one for uploads.
fn page_locked(gpu: &CudaDevice) -> Result<PinnedHostSlice<u8>> {
    // SAFETY: the memory is written before it is read.
    unsafe { gpu.cuda_stream().context().alloc_pinned_with_flags::<u8>(PIECE, 0) }.w()
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{device, random};
    use super::*;

    #[test]
    fn every_piece_arrives() {
        let device = device();
        if device.is_cpu() {
            eprintln!("skipped: TRAINER_TEST_DEVICE names no GPU");
            return;
        }
        for len in [0, 1, PIECE / 4, PIECE / 4 + 1, PIECE + 3] {
            let x = random(len as u64, &[len]);
            let mut bytes = vec![0; 4 * len];
            download(&x, &mut bytes).unwrap();
            let expected = if len == 0 { Vec::new() } else { x.to_vec1::<f32>().unwrap() };
            let got = bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
            assert!(got.eq(expected), "{len}");
        }
    }
}
