//! The compiled kernels on each device.

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{Error, Result};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Machine code for sm_80 and sm_90, and PTX for what comes after; one image a `.cu` file.
const IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
/// Shared memory that a kernel may use without asking, its own arrays included.
const FREE_SHARED: u32 = 48 << 10;

#[derive(Default)]
struct Loaded {
    modules: Vec<Arc<CudaModule>>,
    /// Kernels, and the dynamic shared memory that each may use.
    functions: HashMap<String, (CudaFunction, u32)>,
}

static LOADED: LazyLock<Mutex<HashMap<DeviceId, Loaded>>> = LazyLock::new(Mutex::default);

/// The kernel called `name` on `device`, whose context this thread has bound, allowed `shared` bytes of dynamic shared
/// memory.
pub(super) fn function(device: &CudaDevice, name: &str, shared: u32) -> Result<CudaFunction> {
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = all.entry(device.id()).or_default();
    if loaded.modules.is_empty() {
        let stream = device.cuda_stream();
        let load = |(file, image): &(&str, &[u8])| {
            let module = stream.context().load_module(Ptx::from_binary(image.to_vec()));
            module.map_err(|error| {
                Error::msg(format!("the kernels of {file} do not load on this GPU: {error}"))
            })
        };
        loaded.modules = IMAGES.iter().map(load).collect::<Result<_>>()?;
    }
    let (function, allowed) = match loaded.functions.entry(name.to_owned()) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(place) => {
            let found = loaded.modules.iter().find_map(|module| module.load_function(name).ok());
            let found = found.ok_or_else(|| Error::msg(format!("no kernel is called `{name}`")))?;
            let own = found.get_attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES).w()?;
            place.insert((found, FREE_SHARED - own as u32))
        }
    };
    // One kernel serves several sizes of rows: a later launch may need more than those before it.
    if shared > *allowed {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared as i32).w()?;
        *allowed = shared;
    }
    Ok(function.clone())
}
