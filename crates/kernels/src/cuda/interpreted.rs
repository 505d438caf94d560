//! Launches of kernels whose PTX is executed on the CPU: the code that ships, with checks of every
//! access. `TRAINER_PTX` is the folder that `scripts/cuda/ptx.sh` writes; launches add lines to the
//! file `TRAINER_PTX_COUNTS`, if it is set, and `TRAINER_PTX_SEED` changes their order of warps.
//!
//! With `TRAINER_EMULATE_CUDA=ptx:8.0` or `ptx:9.0`, the ops use the kernels of that compute
//! capability. Without it, only tests that launch a kernel themselves do, with the kernels of 9.0.
//! The kernels for Hopper alone run in no other way without a GPU.

#![expect(unsafe_code, reason = "kernels take addresses")]

use candle_core::{Error, Result};
use ptx::Library;
use std::ffi::c_void;
use std::path::Path;
use std::sync::LazyLock;

mod allocations;

pub use allocations::PtxAllocator;

static CAPABILITY: LazyLock<Option<String>> =
    LazyLock::new(|| match std::env::var("TRAINER_EMULATE_CUDA") {
        Ok(variable) => variable.strip_prefix("ptx:").map(str::to_owned),
        Err(_) => std::env::var_os("TRAINER_PTX").map(|_| "9.0".to_owned()),
    });

/// Whether launches execute PTX.
pub(crate) fn is_on() -> bool {
    CAPABILITY.is_some()
}

/// Whether the kernels of compute capability 9.0 can be launched.
#[cfg(test)]
pub(crate) fn has_hopper() -> bool {
    CAPABILITY.as_deref() == Some("9.0")
}

/// Forgets the values of a new tensor: its memory counts as unwritten.
pub(crate) fn forget(at: u64, bytes: usize) {
    if is_on() {
        allocations::forget(at, bytes);
    }
}

/// The host writes these bytes, in place of a library.
pub(crate) fn remember(at: u64, bytes: usize) {
    if is_on() {
        ptx::Host::write(&allocations::Allocations, at, bytes);
    }
}

static LIBRARY: LazyLock<std::result::Result<Library, String>> = LazyLock::new(|| {
    let root = std::env::var("TRAINER_PTX").map_err(|_| {
        "TRAINER_PTX is not set, expected the folder with the PTX of all kernels".to_owned()
    })?;
    let capability = CAPABILITY.as_deref().unwrap_or_default();
    Library::open(Path::new(&root), capability, None).map_err(|error| error.to_string())
});

/// Kernels may access the tensor at this address.
pub(crate) fn mark(at: u64) {
    if is_on() {
        allocations::mark(at);
    }
}

/// Executes a kernel with arguments at these addresses, of these sizes.
pub(crate) fn launch(
    name: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: &[*mut c_void],
    sizes: &[usize],
) -> Result<()> {
    if !allocations::is_listed() {
        return Err(Error::msg(
            "`TRAINER_EMULATE_CUDA=ptx:..` works in test programs only, which list their allocations; \
             `TRAINER_EMULATE_CUDA=8.0` works in every program with the feature `cuda-emulation`",
        ));
    }
    let library = LIBRARY.as_ref().map_err(|error| Error::msg(error.clone()))?;
    let kernel = library.kernel(name).map_err(|error| Error::msg(error.to_string()))?;
    let expected: Vec<usize> = kernel.params.iter().map(|param| param.bytes).collect();
    if sizes != expected {
        let text = format!("{name}: arguments of {sizes:?} bytes, expected {expected:?}");
        return Err(Error::msg(text));
    }
    let (arguments, memory) = (arguments.as_ptr(), &allocations::Allocations);
    // SAFETY: an argument has the size of its parameter. The caller borrows the tensors, and
    // allocations are checked.
    let ended = unsafe { library.launch(kernel, grid, threads, shared, arguments, memory) };
    let counts = ended.map_err(|failure| Error::msg(failure.to_string()))?;
    #[cfg(not(test))]
    let _ = counts;
    #[cfg(test)]
    COUNTED.with_borrow_mut(|counted| {
        if let Some(counted) = counted {
            let (name, warps) = (name.to_owned(), threads.div_ceil(32));
            let blocks = grid.iter().product();
            counted.push(Launched { name, blocks, warps, counts });
        }
    });
    Ok(())
}

#[cfg(test)]
thread_local! {
    /// The launches of this thread during `counted`.
    static COUNTED: std::cell::RefCell<Option<Vec<Launched>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
pub(crate) struct Launched {
    pub(super) name: String,
    pub(super) blocks: u32,
    /// Warps of a block.
    pub(super) warps: u32,
    pub(super) counts: ptx::Counts,
}

/// What the launches of an op execute.
#[cfg(test)]
pub(crate) fn counted(op: impl FnOnce() -> Result<()>) -> Result<Vec<Launched>> {
    COUNTED.set(Some(Vec::new()));
    let ended = op();
    let counted = COUNTED.take().unwrap_or_default();
    ended.map(|()| counted)
}
