//! Opening a GPU, uploading to it, and reading its memory use.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr as _;
use candle_core::{DType, Device, Result, Shape, Tensor, WithDType};
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
    if let Some(problem) = driver_problem() {
        candle_core::bail!("{problem}");
    }
    // cudarc panics if a library is missing.
    let opened = std::panic::catch_unwind(|| Device::new_cuda_with_stream(ordinal));
    let device = opened.unwrap_or_else(|_| {
        candle_core::bail!("cannot load the CUDA libraries: install the NVIDIA driver")
    })?;
    let gpu = device.as_cuda_device()?;
    // A wait must not occupy a core: the threads of the loader need it.
    gpu.cuda_stream().context().set_blocking_synchronize().w()?;
    // SAFETY: all tensors are used on the single stream of this device, so uses and frees are in
    // order.
    #[expect(unsafe_code, reason = "the caller must guarantee the order of streams")]
    unsafe {
        gpu.disable_event_tracking();
    }
    configure_pool(ordinal)?;
    Ok(device)
}

/// Why the driver of this machine cannot run the GPU code of this binary.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "a driver call")]
fn driver_problem() -> Option<String> {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let mut version = 0;
    // SAFETY: the result is written to a variable.
    let found = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    found.ok()?; // opening the device reports the error
    super::driver_version::problem_of_driver(version.unsigned_abs())
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

/// The GPU of rank `local_rank` of a machine: the one with this number, or the only one that
/// `CUDA_VISIBLE_DEVICES` leaves to this process. Slurm gives each rank a GPU in this way.
pub fn gpu_of_rank(local_rank: usize) -> usize {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    gpu_of_visible(local_rank, visible.as_deref())
}

fn gpu_of_visible(local_rank: usize, visible: Option<&str>) -> usize {
    let is_single = |list: &str| !list.trim().is_empty() && !list.contains(',');
    if visible.is_some_and(is_single) { 0 } else { local_rank }
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

/// Sets how the pool reuses memory.
///
/// Without the first setting the driver releases memory at every synchronization, and each step
/// allocates it again. With the default of the second, an upload can receive memory that a step in
/// the queue frees, and then waits for that step.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "driver calls")]
fn configure_pool(ordinal: usize) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let (mut everything, mut no) = (u64::MAX, 0_i32);
    let device = result::device::get(ordinal as i32).w()?;
    // SAFETY: the device exists and its pool is valid; the first attribute is a 64-bit integer, the
    // second an `int`.
    unsafe {
        let pool = result::device::get_mem_pool(device).w()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut everything).cast()).w()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut no).cast()).w()
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

/// As [`upload`] of `values` as `dtype`, `f32` or `bf16`. For a GPU they are rounded on the host,
/// so that fewer bytes are copied.
pub fn upload_rounded(
    values: Vec<f32>,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() && dtype == DType::BF16 {
        return super::cuda::upload_bf16(&values, shape, device);
    }
    upload(values, shape, device)?.to_dtype(dtype)
}

/// Returns a copy of `t` in host memory. Waits for a GPU. Of a view on a GPU, only its elements are
/// copied. Fast for contiguous `f32`, `bf16` and `u8` tensors.
pub fn copy_to_host(t: &Tensor) -> Result<Tensor> {
    if t.device().is_cpu() {
        return t.copy();
    }
    #[cfg(all(feature = "cuda", unix))]
    if matches!(t.dtype(), DType::F32 | DType::BF16 | DType::U8)
        && t.is_contiguous()
        && t.elem_count() > 0
    {
        let host = Tensor::zeros(t.shape(), t.dtype(), &Device::Cpu)?;
        super::change_bytes(&host, |bytes| super::cuda::download(t, bytes))??;
        return Ok(host);
    }
    // candle copies the whole storage of a view
    t.force_contiguous()?.to_device(&Device::Cpu)
}

/// Copies `from`, in host memory, to `to`, a contiguous tensor of the same dtype and number of
/// elements on any device. On a GPU the copy is asynchronous, and in order with the work on
/// tensors.
pub fn copy_from_host(from: &Tensor, to: &Tensor) -> Result<()> {
    check_copy(from, to)?;
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

/// Checks that `from` and `to` have the same dtype and number of elements.
pub(super) fn check_copy(from: &Tensor, to: &Tensor) -> Result<()> {
    let (len, expected) = (from.elem_count(), to.elem_count());
    if len == expected && from.dtype() == to.dtype() {
        return Ok(());
    }
    candle_core::bail!(
        "copy_from_host: `from` has {len} elements of {:?}, expected {expected} of {:?}",
        from.dtype(),
        to.dtype()
    )
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

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuProperties {
    /// The name that the driver reports.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Bytes that no process uses.
    pub free: u64,
}

/// Returns the properties of the GPU `device`, or `None` on the CPU or if the driver reports an
/// error.
#[cfg(feature = "cuda")]
pub fn gpu_properties(device: &Device) -> Option<GpuProperties> {
    use candle_core::cuda_backend::cudarc::driver::result;
    let Device::Cuda(gpu) = device else { return None };
    let stream = gpu.cuda_stream();
    let context = stream.context();
    context.bind_to_thread().ok()?;
    let (free, memory) = result::mem_get_info().ok()?;
    Some(GpuProperties { name: context.name().ok()?, memory: memory as u64, free: free as u64 })
}

/// Returns `None`, because this build has no CUDA support.
#[cfg(not(feature = "cuda"))]
pub fn gpu_properties(_: &Device) -> Option<GpuProperties> {
    None
}

/// Returns `None`, because this build has no CUDA support.
#[cfg(not(feature = "cuda"))]
pub fn gpu_memory(_: &Device) -> Option<GpuMemory> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_sees_one_gpu_uses_it() {
        for (visible, gpu) in [
            (None, 3),
            (Some("0,1,2,3"), 3),
            (Some("5"), 0),
            (Some("GPU-8932f937"), 0),
            (Some(""), 3),
        ] {
            assert_eq!(gpu_of_visible(3, visible), gpu, "{visible:?}");
        }
    }
}
