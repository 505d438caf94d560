//! Opening a GPU, uploading to it, and reading its memory use.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Device, Result, Shape, Tensor, WithDType};
use rayon::prelude::*;

/// Number of bytes that one task copies.
const COPIED: usize = 1 << 18;

/// Whether this build supports GPUs (feature `cuda`).
pub const CUDA_BUILD: bool = cfg!(feature = "cuda");

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Highest number of bytes in use by tensors so far.
    pub peak: u64,
    /// Highest number of bytes reserved from the driver so far, including free memory kept for
    /// reuse.
    pub reserved: u64,
    /// Bytes in use by tensors now.
    pub used: u64,
}

/// Opens GPU `ordinal` with one stream for all threads, and with freed memory kept for later
/// tensors. Fails if the CUDA libraries cannot be loaded or there is no such GPU.
#[cfg(feature = "cuda")]
pub fn open_gpu(ordinal: usize) -> Result<Device> {
    // cudarc panics if a library is missing.
    let opened = std::panic::catch_unwind(|| Device::new_cuda_with_stream(ordinal));
    let device = opened.unwrap_or_else(|_| {
        candle_core::bail!("cannot load the CUDA libraries: install the NVIDIA driver")
    })?;
    let gpu = device.as_cuda_device()?;
    // SAFETY: all tensors are used on the single stream of this device, so uses and frees are in
    // order.
    #[expect(unsafe_code, reason = "the caller must guarantee the order of streams")]
    unsafe {
        gpu.disable_event_tracking();
    }
    keep_freed_memory(ordinal)?;
    Ok(device)
}

/// Fails, because this build has no CUDA support.
#[cfg(not(feature = "cuda"))]
pub fn open_gpu(ordinal: usize) -> Result<Device> {
    candle_core::bail!("cuda:{ordinal}: this build has no CUDA kernels")
}

/// Number of GPUs that this process can use; 0 if the driver is missing.
#[cfg(feature = "cuda")]
pub fn count_gpus() -> usize {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    // cudarc panics if a library is missing.
    let count = std::panic::catch_unwind(CudaContext::device_count);
    count.ok().and_then(std::result::Result::ok).map_or(0, |count| count.max(0) as usize)
}

/// Returns 0, because this build has no CUDA support.
#[cfg(not(feature = "cuda"))]
pub fn count_gpus() -> usize {
    0
}

/// Ends the process without the exit handlers of libraries. Those of CUDA wait for running kernels,
/// and a sum over ranks does not end while it waits for a rank that is lost.
pub fn exit_at_once(code: i32) -> ! {
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "a function of the C library")]
    // SAFETY: it has no requirements.
    unsafe {
        libc::_exit(code)
    }
    #[cfg(not(unix))]
    std::process::exit(code)
}

/// Without this setting the driver releases memory at every synchronization, and each step
/// allocates it again.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "driver calls")]
fn keep_freed_memory(ordinal: usize) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let mut everything = u64::MAX;
    let device = result::device::get(ordinal as i32).w()?;
    // SAFETY: the device exists, its pool is valid, and the attribute is a 64-bit integer.
    unsafe {
        let pool = result::device::get_mem_pool(device).w()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut everything).cast()).w()
    }
}

/// Returns a tensor on `device` with these values. On a GPU the copy is asynchronous: the host does
/// not wait for it.
pub fn upload<T: WithDType>(
    values: Vec<T>,
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return super::cuda::upload(&values, shape, device);
    }
    Tensor::from_vec(values, shape.into(), device)
}

/// Copies `from`, in host memory, to `to`, a contiguous tensor of the same dtype and number of elements
/// on any device. On a GPU the copy is asynchronous, and in order with the work on tensors.
pub fn copy_from_host(from: &Tensor, to: &Tensor) -> Result<()> {
    let (len, expected) = (from.elem_count(), to.elem_count());
    if len != expected || from.dtype() != to.dtype() {
        candle_core::bail!(
            "copy_from_host: `from` has {len} elements of {:?}, expected {expected} of {:?}",
            from.dtype(),
            to.dtype()
        );
    }
    #[cfg(feature = "cuda")]
    if to.device().is_cuda() {
        return super::with_bytes(from, |bytes| super::cuda::upload_bytes(bytes, to))?;
    }
    super::cpu::distinct("copy_from_host", "to", to, &[("from", from)])?;
    super::with_bytes(from, |from| {
        super::change_bytes(to, |to| {
            let parts = to.par_chunks_mut(COPIED).zip(from.par_chunks(COPIED));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
        })
    })?
}

/// Returns the memory use of the GPU `device`, or `None` on the CPU or if the driver reports an
/// error.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "driver calls")]
pub fn gpu_memory(device: &Device) -> Option<GpuMemory> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let Device::Cuda(gpu) = device else { return None };
    let stream = gpu.cuda_stream();
    let context = stream.context();
    let (mut peak, mut reserved, mut used) = (0u64, 0u64, 0u64);
    // SAFETY: as above; the attributes are 64-bit integers.
    unsafe {
        let pool = result::device::get_mem_pool(context.cu_device()).ok()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut peak).cast()).ok()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut reserved).cast()).ok()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut used).cast()).ok()?;
    }
    Some(GpuMemory { peak, reserved, used })
}

/// Returns `None`, because this build has no CUDA support.
#[cfg(not(feature = "cuda"))]
pub fn gpu_memory(_: &Device) -> Option<GpuMemory> {
    None
}
