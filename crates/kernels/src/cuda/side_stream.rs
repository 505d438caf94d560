//! A second stream of a GPU, for work at the same time as that on its tensors.

#![expect(unsafe_code, reason = "copies and kernels take addresses")]

use super::upload::upload_bytes_on;
use crate::launch::{Address, ELEMENTS, KernelArgument as _, Launch, Long, THREADS, address};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr as _};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// A stream with high priority. All tensors of the GPU are used on another one.
///
/// Nothing orders the streams, except for [`Self::wait_for_tensors`], [`Self::tensors_wait`] and
/// [`Self::tensors_wait_for`].
/// Addresses that are passed to copies and additions must be those of tensors that exist until the
/// side stream has done this work.
pub struct SideStream {
    device: CudaDevice,
    tensors: Arc<CudaStream>,
    side: Arc<CudaStream>,
    marks: Mutex<Vec<CudaEvent>>,
}

impl SideStream {
    /// Creates a stream on a GPU that [`open_gpu`](crate::open_gpu) opened.
    pub fn new(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("found {device:?}, expected a GPU");
        };
        let tensors = device.cuda_stream();
        let context = tensors.context();
        context.bind_to_thread().w()?;
        let (_, highest) = result::stream::get_priority_range().w()?;
        let side = context.new_stream_with_priority(highest).w()?;
        Ok(Self { device: device.clone(), tensors, side, marks: Mutex::default() })
    }

    /// Makes the GPU current on this thread.
    pub fn bind_to_thread(&self) -> Result<()> {
        self.side.context().bind_to_thread().w()
    }

    /// The `cudaStream_t`.
    pub fn handle(&self) -> *mut c_void {
        self.side.cu_stream().cast()
    }

    /// Address of a contiguous tensor on this GPU.
    pub fn address(&self, tensor: &Tensor) -> Result<u64> {
        Ok(address("a side stream", "tensor", tensor)?.0)
    }

    /// Makes this stream wait for all earlier work on tensors.
    pub fn wait_for_tensors(&self) -> Result<()> {
        self.side.join(&self.tensors).w()
    }

    /// Makes later work on tensors wait for all earlier work of this stream.
    pub fn tensors_wait(&self) -> Result<()> {
        self.tensors.join(&self.side).w()
    }

    /// Records the earlier work of this stream as number `mark`, in place of what this number stood
    /// for. A new number is one above all before it, from 0.
    pub fn record(&self, mark: usize) -> Result<()> {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if mark == marks.len() {
            marks.push(self.side.context().new_event(None).w()?);
        }
        marks[mark].record(&self.side).w()
    }

    /// Makes later work on tensors wait for the work that was recorded as `mark`.
    pub fn tensors_wait_for(&self, mark: usize) -> Result<()> {
        let marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        self.tensors.wait(&marks[mark]).w()
    }

    /// Copies `bytes` to `to`, a contiguous tensor of this size on this GPU, which must exist until
    /// the copy is done.
    pub fn upload(&self, bytes: &[u8], to: &Tensor) -> Result<()> {
        upload_bytes_on(&self.side, bytes, to)
    }

    /// Copies `len` bytes between tensors on this GPU.
    pub fn copy(&self, from: u64, to: u64, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.bind_to_thread()?;
        // SAFETY: the caller guarantees that both tensors have `len` bytes there and exist until
        // the copy is done.
        unsafe { result::memcpy_dtod_async(to, from, len, self.side.cu_stream()) }.w()
    }

    /// Adds `len` elements in `f32` at `from` to those at `to`.
    pub fn add_f32(&self, from: u64, to: u64, len: usize) -> Result<()> {
        let aligned = from.is_multiple_of(16) && to.is_multiple_of(16);
        let kernel = if aligned { "add_in_place" } else { "add_in_place_single" };
        let mut launch = Launch::new(kernel, DType::F32).grid(len.div_ceil(ELEMENTS));
        let of = ("add_f32", "an address");
        Address(to).add_to(&mut launch, of)?;
        Address(from).add_to(&mut launch, of)?;
        Long(len).add_to(&mut launch, of)?;
        launch.threads(THREADS).run_on(&self.device, &self.side)
    }

    /// Whether all work of this stream is done.
    pub fn is_done(&self) -> Result<bool> {
        self.bind_to_thread()?;
        // SAFETY: the stream exists as long as `self`.
        match unsafe { sys::cuStreamQuery(self.side.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => result.result().w().map(|()| true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{device, random, values};
    use super::*;
    use candle_core::D;

    #[test]
    fn the_side_stream_uses_tensors_after_their_computation_and_before_their_next_use() {
        let device = device();
        if device.is_cpu() {
            eprintln!("skipped: TRAINER_TEST_DEVICE names no GPU");
            return;
        }
        let side = SideStream::new(&device).unwrap();
        for len in [1, 3, 4096, 1 << 22] {
            for offset in [0, 1] {
                let (x, y) = (random(1, &[len + offset]), random(2, &[len + offset]));
                let part = |t: &Tensor| t.narrow(D::Minus1, offset, len).unwrap();
                let expected = (part(&x) + part(&y)).unwrap();
                let sum = Tensor::zeros(len, DType::F32, &device).unwrap();
                let at = |t: &Tensor| side.address(&part(t)).unwrap();
                side.wait_for_tensors().unwrap();
                side.add_f32(at(&y), at(&x), len).unwrap();
                side.copy(at(&x), side.address(&sum).unwrap(), 4 * len).unwrap();
                side.tensors_wait().unwrap();
                assert_eq!(values(&sum), values(&expected), "{len} elements from {offset}");
                assert!(side.is_done().unwrap());
            }
        }
    }

    #[test]
    fn a_mark_covers_the_work_before_it() {
        let device = device();
        if device.is_cpu() {
            eprintln!("skipped: TRAINER_TEST_DEVICE names no GPU");
            return;
        }
        let side = SideStream::new(&device).unwrap();
        let len = 1 << 22;
        let x = random(1, &[len]);
        let copies = [(); 3].map(|()| Tensor::zeros(len, DType::F32, &device).unwrap());
        side.wait_for_tensors().unwrap();
        for (mark, copy) in copies.iter().enumerate() {
            side.copy(side.address(&x).unwrap(), side.address(copy).unwrap(), 4 * len).unwrap();
            side.record(mark).unwrap();
        }
        for (mark, copy) in copies.iter().enumerate() {
            side.tensors_wait_for(mark).unwrap();
            assert_eq!(values(copy), values(&x), "mark {mark}");
        }
    }
}
