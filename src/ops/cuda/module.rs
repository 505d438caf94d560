//! The compiled kernels on each device.

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Machine code for sm_80 and sm_90, and PTX for what comes after; one image a `.cu` file.
const IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
/// Dynamic shared memory that a kernel may use without asking.
const FREE_SHARED: u32 = 48 << 10;

#[derive(Default)]
struct Loaded {
    modules: Vec<Arc<CudaModule>>,
    functions: HashMap<String, CudaFunction>,
}

static LOADED: LazyLock<Mutex<HashMap<DeviceId, Loaded>>> = LazyLock::new(Mutex::default);

/// The kernel called `name` on `device`, allowed `shared` bytes of dynamic shared memory.
pub(super) fn function(device: &CudaDevice, name: &str, shared: u32) -> Result<CudaFunction> {
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = all.entry(device.id()).or_default();
    if loaded.modules.is_empty() {
        let stream = device.cuda_stream();
        for (file, image) in IMAGES {
            let module = stream.context().load_module(Ptx::from_binary(image.to_vec()));
            loaded.modules.push(module.map_err(|error| {
                Error::msg(format!("the kernels of {file} do not load on this GPU: {error}"))
            })?);
        }
    }
    if let Some(function) = loaded.functions.get(name) {
        return Ok(function.clone());
    }
    let found = loaded.modules.iter().find_map(|module| module.load_function(name).ok());
    let function = found.ok_or_else(|| Error::msg(format!("no kernel is called `{name}`")))?;
    if shared > FREE_SHARED {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared as i32).w()?;
    }
    loaded.functions.insert(name.to_owned(), function.clone());
    Ok(function)
}
