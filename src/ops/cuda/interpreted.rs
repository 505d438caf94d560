//! Launches of kernels whose PTX is executed on the CPU (`TRAINER_EMULATE_CUDA=ptx:8.0`): the code
//! that ships, with checks of every access. `TRAINER_PTX` is the folder that `scripts/cuda/check.sh
//! ptx` writes.

#![expect(unsafe_code, reason = "kernels take addresses")]

use candle_core::{Error, Result};
use ptx::{Global, Kernel};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

mod allocations;

static CAPABILITY: LazyLock<Option<String>> = LazyLock::new(|| {
    let variable = std::env::var("TRAINER_EMULATE_CUDA").ok()?;
    variable.strip_prefix("ptx:").map(str::to_owned)
});

/// Whether launches execute PTX.
pub(super) fn is_on() -> bool {
    CAPABILITY.is_some()
}

/// Forgets the values of a new tensor: its memory counts as unwritten.
pub(super) fn forget(at: u64, bytes: usize) {
    if is_on() {
        allocations::forget(at, bytes);
    }
}

/// The host writes these bytes, in place of a library.
pub(super) fn remember(at: u64, bytes: usize) {
    if is_on() {
        ptx::Host::write(&allocations::Allocations, at, bytes);
    }
}

type Kernels = HashMap<String, Arc<Kernel>>;

static KERNELS: LazyLock<std::result::Result<Kernels, String>> = LazyLock::new(|| {
    let root = std::env::var("TRAINER_PTX").map_err(|_| "TRAINER_PTX is not set".to_owned())?;
    let folders: &[&str] = match CAPABILITY.as_deref() {
        Some("9.0") => &["90", "90a"],
        _ => &["80"],
    };
    let mut kernels = Kernels::new();
    for folder in folders {
        let folder = Path::new(&root).join(folder);
        let failed = |error: &dyn std::fmt::Display| format!("`{}`: {error}", folder.display());
        for entry in std::fs::read_dir(&folder).map_err(|error| failed(&error))? {
            let path = entry.map_err(|error| failed(&error))?.path();
            let text = crate::files::read_to_string(&path).map_err(|error| failed(&error))?;
            let module =
                ptx::parse(&text).map_err(|error| format!("`{}`: {error}", path.display()))?;
            kernels.extend(module.kernels.into_iter().map(|kernel| (kernel.name.clone(), kernel)));
        }
    }
    Ok(kernels)
});

/// Registers of a multiprocessor.
const REGISTERS: u64 = 65536;

/// Executes a kernel with arguments at these addresses.
pub(super) fn launch(
    name: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: &[*mut c_void],
) -> Result<()> {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    let kernels = KERNELS.as_ref().map_err(|error| Error::msg(error.clone()))?;
    let kernel = kernels.get(name).ok_or_else(|| Error::msg(format!("no kernel `{name}`")))?;
    if kernel.params.len() != arguments.len() {
        let (found, expected) = (arguments.len(), kernel.params.len());
        return Err(Error::msg(format!("{name}: {found} arguments, expected {expected}")));
    }
    let mut params = vec![0; kernel.param_bytes];
    for (param, argument) in kernel.params.iter().zip(arguments) {
        let to = params[param.offset..].as_mut_ptr();
        // SAFETY: an argument has the size of its parameter, as in a launch on a GPU.
        unsafe { std::ptr::copy_nonoverlapping(argument.cast::<u8>(), to, param.bytes) };
    }
    // SAFETY: the caller borrows the tensors, and allocations are checked.
    let mut global = unsafe { Global::of_host(&allocations::Allocations) };
    let launch = ptx::Launch {
        kernel,
        grid,
        threads: threads as usize,
        shared_bytes: shared as usize,
        params: &params,
        // as many as fit, in steps of 8 (the assembler takes as many for these kernels)
        registers: REGISTERS / u64::from(threads) / 8 * 8,
        seed: LAUNCHES.fetch_add(1, Ordering::Relaxed),
    };
    ptx::run(&launch, &mut global).map(|_| ()).map_err(|failure| Error::msg(failure.to_string()))
}
