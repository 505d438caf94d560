//! GPUs: opening one, and its memory.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Device, Result, Shape, Tensor, WithDType};

/// Whether this build can use GPUs at all.
pub const CUDA_BUILD: bool = cfg!(feature = "cuda");

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Most that tensors took at one time so far.
    pub peak: u64,
    /// Most that was held for them, with what lies idle between them.
    pub reserved: u64,
    /// What they take now.
    pub used: u64,
}

/// GPU `ordinal`, ready for our kernels: one stream for all threads, and freed memory kept for the next tensor.
#[cfg(feature = "cuda")]
pub fn open_gpu(ordinal: usize) -> Result<Device> {
    // Loading a library that is not there is a panic further down.
    let opened = std::panic::catch_unwind(|| Device::new_cuda_with_stream(ordinal));
    let device = opened.unwrap_or_else(|_| {
        candle_core::bail!("the CUDA libraries cannot be loaded: is the driver installed?")
    })?;
    let gpu = device.as_cuda_device()?;
    // SAFETY: every tensor lives on the one stream of this device, so use and free are in order.
    #[expect(unsafe_code, reason = "a promise about streams")]
    unsafe {
        gpu.disable_event_tracking();
    }
    keep_freed_memory(ordinal)?;
    Ok(device)
}

/// There is none in this build.
#[cfg(not(feature = "cuda"))]
pub fn open_gpu(ordinal: usize) -> Result<Device> {
    candle_core::bail!("cuda:{ordinal}: this build has no CUDA kernels")
}

/// Without it the driver gives memory back at every synchronisation, and each step allocates anew.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "driver calls")]
fn keep_freed_memory(ordinal: usize) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let mut everything = u64::MAX;
    let device = result::device::get(ordinal as i32).w()?;
    // SAFETY: the device is one, its pool is valid, and the attribute is a 64-bit number.
    unsafe {
        let pool = result::device::get_mem_pool(device).w()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut everything).cast()).w()
    }
}

/// A tensor on `device` with these values. On a GPU the copy is only begun: nothing waits for it but the GPU.
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

/// Memory of the GPU behind `device`; `None` on the CPU.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "driver calls")]
pub fn gpu_memory(device: &Device) -> Option<GpuMemory> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let Device::Cuda(gpu) = device else { return None };
    let stream = gpu.cuda_stream();
    let context = stream.context();
    let (mut peak, mut reserved, mut used) = (0u64, 0u64, 0u64);
    // SAFETY: as above; the attributes are read into 64-bit numbers.
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

/// There is none in this build.
#[cfg(not(feature = "cuda"))]
pub fn gpu_memory(_: &Device) -> Option<GpuMemory> {
    None
}
