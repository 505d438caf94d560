//! Loading of the compiled kernels on each device.

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUfunction_attribute_enum as Attribute,
};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Error, Result, bail};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The name of each `.cu` file, its image, and the names of its kernels. Images have machine code
/// for several GPUs and PTX for others. Those with a name that ends with `_sm90` have machine code
/// for sm_90a alone. Behind the stand-in, one image has all kernels, and no names.
const IMAGES: &[(&str, &[u8], &[&str])] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    functions: HashMap<String, Kernel>,
}

#[derive(Clone)]
struct Kernel {
    function: CudaFunction,
    /// Maximum number of bytes of dynamic shared memory of a launch.
    max_shared: u32,
}

static LOADED: LazyLock<Mutex<HashMap<DeviceId, Loaded>>> = LazyLock::new(Mutex::default);

/// Returns the kernel `name` on `device` for a launch with `shared` bytes of dynamic shared memory.
/// The context of the device must be current on this thread.
pub(crate) fn function(device: &CudaDevice, name: &str, shared: u32) -> Result<CudaFunction> {
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = all.entry(device.id()).or_default();
    let kernel = if let Some(kernel) = loaded.functions.get(name) {
        kernel.clone()
    } else {
        let kernel = load(device, &mut loaded.modules, name)?;
        loaded.functions.insert(name.to_owned(), kernel.clone());
        kernel
    };
    if shared > kernel.max_shared {
        let most = kernel.max_shared;
        bail!("{name}: a block needs {shared} bytes of shared memory, this GPU allows {most}");
    }
    Ok(kernel.function)
}

/// Compute capability, major and minor.
pub(crate) fn capability(device: &CudaDevice) -> Result<(u32, u32)> {
    let (major, minor) = device.cuda_stream().context().compute_capability().w()?;
    Ok((major as u32, minor as u32))
}

/// Maximum number of bytes of shared memory of a block.
pub(crate) fn shared_bytes(device: &CudaDevice) -> Result<usize> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    Ok(device.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Number of bytes of shared memory of a multiprocessor.
pub(crate) fn shared_bytes_of_all(device: &CudaDevice) -> Result<usize> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
    Ok(device.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Number of multiprocessors.
pub(crate) fn multiprocessors(device: &CudaDevice) -> Result<usize> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    Ok(device.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Registers of a multiprocessor.
const REGISTERS: i32 = 65536;

/// Warps of Hopper's kernels exchange registers (`setmaxnreg`). With fewer at the start than this
/// exchange assumes, they would wait for ever.
fn check_registers(function: &CudaFunction, name: &str) -> Result<()> {
    let threads = Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    let threads = function.get_attribute(threads).w()?.max(1);
    let found = function.get_attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).w()?;
    let expected = REGISTERS / threads / 8 * 8;
    if found == expected {
        return Ok(());
    }
    bail!(
        "{name}: a thread has {found} registers, expected {expected}: set TRAINER_HOPPER=0 to use \
         other kernels, or build with CUDA 12.4 to 13.0"
    )
}

/// Loads a kernel, and before it its module if this is the first kernel of it: a GPU without machine
/// code in the image waits until the driver has compiled the PTX of the whole module.
fn load(
    device: &CudaDevice,
    modules: &mut HashMap<&'static str, Arc<CudaModule>>,
    name: &str,
) -> Result<Kernel> {
    let has_kernel = |kernels: &[&str]| kernels.is_empty() || kernels.contains(&name);
    let Some((file, image, _)) = IMAGES.iter().find(|(_, _, kernels)| has_kernel(kernels)) else {
        bail!("no kernel has the name `{name}`");
    };
    let module = match modules.entry(file) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            let stream = device.cuda_stream();
            let module = stream.context().load_module(Ptx::from_binary(image.to_vec()));
            entry.insert(module.map_err(|error| {
                Error::msg(format!("cannot load the kernels of `{file}` on this GPU: {error}"))
            })?)
        }
    };
    let function = module.load_function(name).map_err(|error| {
        Error::msg(format!("cannot load the kernel `{name}` on this GPU: {error}"))
    })?;
    if name.contains("_sm90_") {
        check_registers(&function, name)?;
    }
    // Allow the maximum: launches of a kernel differ in size, and the first may not be the largest.
    let most = shared_bytes(device)? as i32;
    let own = function.get_attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES).w()?;
    let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, most - own).w()?;
    Ok(Kernel { function, max_shared: (most - own) as u32 })
}
