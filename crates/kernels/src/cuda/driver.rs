//! Functions of the CUDA driver that this program replaces.
//!
//! candle and cudarc allocate GPU memory and read it to the host in their own code. They call the
//! driver by its symbols, so a function of this program with the same name is linked in its place.
//! It adds what the libraries leave out, and calls the driver's function:
//!
//! - An allocation that fails waits for the GPU and returns unused memory of the pool to the
//!   driver, then tries again. The host enqueues a whole step ahead, so memory that it has freed is
//!   still in use when it allocates, and free memory is in pieces.
//! - Sizes are rounded up to few classes, so that a tensor fits into the memory of one of similar
//!   size: the number of tokens differs from pack to pack.
//! - A copy to the host is complete when the function returns. The driver guarantees this for
//!   page-locked memory only after a wait, and for other memory not at all.
//! - With `TRAINER_POISON=1`, new memory contains NaN, so that a value that no kernel has written
//!   shows.
//! - With `TRAINER_EXACT_SIZES=1`, sizes are not rounded, so that compute-sanitizer finds an access
//!   past the end of a tensor.

#![cfg_attr(feature = "cuda", expect(unsafe_code, reason = "functions of the driver"))]

/// Minimum size and alignment of an allocation, in bytes.
const SMALLEST: usize = 512;
/// Number of classes between a power of two and the next one. More of them waste less memory: at
/// most 1/32, as 2 MiB at 64 MiB, the size of a page of the GPU.
const CLASSES: u32 = 32;

/// The result of a call, with the driver's code of an error.
type DriverResult<T> = Result<T, u32>;
/// The driver's code for a lack of memory.
const OUT_OF_MEMORY: u32 = 2;

/// Calls of the driver that an allocation needs.
trait Calls {
    /// Allocates this number of bytes.
    fn allocate(&self, bytes: usize) -> DriverResult<u64>;
    /// Waits for all work of the GPU.
    fn synchronize(&self) -> DriverResult<()>;
    /// Returns the unused memory of the pool to the driver.
    fn trim(&self) -> DriverResult<()>;
    /// Sets all bytes to 0xFF, which is NaN in every float dtype.
    fn poison(&self, address: u64, bytes: usize) -> DriverResult<()>;
}

/// The size of the class of an allocation.
fn class(bytes: usize) -> usize {
    let step = match bytes.checked_ilog2() {
        Some(power) => (1 << power >> CLASSES.ilog2()).max(SMALLEST),
        None => return SMALLEST, // the driver cannot allocate 0 bytes
    };
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

/// Settings of the environment, for tests on a GPU.
#[derive(Default)]
struct Settings {
    /// Fill new memory with NaN.
    poison: bool,
    /// Allocate the requested size, and not that of its class.
    exact_sizes: bool,
}

/// Allocates memory for `bytes`. If there is not enough, tries again after all work is done.
fn allocate(calls: &impl Calls, bytes: usize, settings: &Settings) -> DriverResult<u64> {
    let mut rounded = if settings.exact_sizes { bytes.max(1) } else { class(bytes) };
    let mut allocated = calls.allocate(rounded);
    if allocated == Err(OUT_OF_MEMORY) {
        calls.synchronize()?;
        calls.trim()?;
        allocated = calls.allocate(rounded);
    }
    if allocated == Err(OUT_OF_MEMORY) && rounded > bytes && bytes > 0 {
        rounded = bytes;
        allocated = calls.allocate(rounded);
    }
    let address = allocated?;
    if settings.poison {
        calls.poison(address, rounded)?;
    }
    Ok(address)
}

#[cfg(all(feature = "cuda", unix))]
pub(super) use replaced::copy_to_host_async;

#[cfg(all(feature = "cuda", unix))]
mod replaced {
    use super::{Calls, DriverResult, Settings, allocate};
    use crate::cpu::record_failed_gpu_allocation;
    use candle_core::cuda_backend::WrapErr as _;
    use candle_core::cuda_backend::cudarc::driver::sys::{self, CUresult};
    use candle_core::{Result, bail};
    use std::ffi::{CStr, c_void};
    use std::sync::{LazyLock, Once};

    type Allocate = unsafe extern "C" fn(*mut u64, usize, sys::CUstream) -> CUresult;
    type CopyToHost = unsafe extern "C" fn(*mut c_void, u64, usize, sys::CUstream) -> CUresult;

    /// The functions of the driver; `None` if the library that is loaded has no such function.
    struct Driver {
        allocate: Option<Allocate>,
        copy_to_host: Option<CopyToHost>,
    }

    static DRIVER: LazyLock<Driver> = LazyLock::new(|| {
        let (allocate, copy_to_host) = (next(c"cuMemAllocAsync"), next(c"cuMemcpyDtoHAsync_v2"));
        // SAFETY: the types are those of the driver's functions, and `Option` of a function has no
        // other values than a pointer.
        unsafe {
            Driver {
                allocate: std::mem::transmute::<*mut c_void, Option<Allocate>>(allocate),
                copy_to_host: std::mem::transmute::<*mut c_void, Option<CopyToHost>>(copy_to_host),
            }
        }
    });
    static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
        Settings { poison: is_set("TRAINER_POISON"), exact_sizes: is_set("TRAINER_EXACT_SIZES") }
    });

    /// The function with this name in the libraries after this program.
    fn next(name: &CStr) -> *mut c_void {
        // SAFETY: the name ends with NUL.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
    }

    fn status(result: CUresult) -> DriverResult<()> {
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result as u32) }
    }

    /// The driver, for allocations on a stream of the current context.
    struct OnStream {
        stream: sys::CUstream,
        allocate: Allocate,
        failed: std::cell::Cell<CUresult>,
    }

    impl OnStream {
        fn status(&self, result: CUresult) -> DriverResult<()> {
            if result != CUresult::CUDA_SUCCESS {
                self.failed.set(result);
            }
            status(result)
        }
    }

    impl Calls for OnStream {
        fn allocate(&self, bytes: usize) -> DriverResult<u64> {
            let mut address = 0;
            // SAFETY: the stream is one of the caller, and the address is written to a variable.
            self.status(unsafe { (self.allocate)(&raw mut address, bytes, self.stream) })?;
            Ok(address)
        }

        fn synchronize(&self) -> DriverResult<()> {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                tracing::warn!(
                    "the GPU memory is nearly exhausted: an allocation waits for the GPU, which makes \
                     steps slower"
                );
            });
            // SAFETY: it has no requirements.
            self.status(unsafe { sys::cuCtxSynchronize() })
        }

        fn trim(&self) -> DriverResult<()> {
            let (mut device, mut pool) = (0, std::ptr::null_mut());
            // SAFETY: the results are written to variables, and the pool is that of the device.
            unsafe {
                self.status(sys::cuCtxGetDevice(&raw mut device))?;
                self.status(sys::cuDeviceGetMemPool(&raw mut pool, device))?;
                self.status(sys::cuMemPoolTrimTo(pool, 0))
            }
        }

        fn poison(&self, address: u64, bytes: usize) -> DriverResult<()> {
            // SAFETY: the memory was allocated on this stream.
            self.status(unsafe { sys::cuMemsetD8Async(address, 0xFF, bytes, self.stream) })
        }
    }

    /// Replaces the driver's function.
    ///
    /// # Safety
    ///
    /// As for the driver's function.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn cuMemAllocAsync(
        address: *mut u64,
        bytes: usize,
        stream: sys::CUstream,
    ) -> CUresult {
        let Some(allocate_in_pool) = DRIVER.allocate else {
            return CUresult::CUDA_ERROR_NOT_FOUND;
        };
        let calls = OnStream {
            stream,
            allocate: allocate_in_pool,
            failed: std::cell::Cell::new(CUresult::CUDA_SUCCESS),
        };
        if let Ok(found) = allocate(&calls, bytes, &SETTINGS) {
            // SAFETY: the caller passes the address of a variable.
            unsafe { *address = found };
            return CUresult::CUDA_SUCCESS;
        }
        if calls.failed.get() == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            record_failed_gpu_allocation(bytes);
        }
        calls.failed.get()
    }

    /// Replaces the driver's function. The bytes are there when it returns.
    ///
    /// # Safety
    ///
    /// As for the driver's function.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: u64,
        bytes: usize,
        stream: sys::CUstream,
    ) -> CUresult {
        let Some(copy) = DRIVER.copy_to_host else {
            return CUresult::CUDA_ERROR_NOT_FOUND;
        };
        // SAFETY: as for the caller.
        match unsafe { copy(to, from, bytes, stream) } {
            // SAFETY: the stream is that of the caller.
            CUresult::CUDA_SUCCESS => unsafe { sys::cuStreamSynchronize(stream) },
            failed => failed,
        }
    }

    /// Starts a copy to page-locked memory, which has arrived when the work of the stream is done.
    ///
    /// # Safety
    ///
    /// Both places have this number of bytes, and exist until then.
    pub(in crate::cuda) unsafe fn copy_to_host_async(
        to: *mut u8,
        from: u64,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Result<()> {
        let Some(copy) = DRIVER.copy_to_host else {
            bail!("the CUDA driver has no function `cuMemcpyDtoHAsync_v2`");
        };
        // SAFETY: as for the caller.
        unsafe { copy(to.cast(), from, bytes, stream) }.result().w()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A GPU of which `free` bytes are free at once, and `freed` bytes after a wait, of which
    /// `in_pieces` only after the pool is trimmed.
    #[derive(Default)]
    struct Fake {
        free: RefCell<usize>,
        freed: usize,
        in_pieces: usize,
        error: Option<u32>,
        calls: RefCell<Vec<String>>,
    }

    impl Fake {
        fn log(&self, call: impl Into<String>) {
            self.calls.borrow_mut().push(call.into());
        }
    }

    impl Calls for Fake {
        fn allocate(&self, bytes: usize) -> DriverResult<u64> {
            self.log(format!("allocate {bytes}"));
            match self.error {
                Some(error) => Err(error),
                None if bytes <= *self.free.borrow() => Ok(4096),
                None => Err(OUT_OF_MEMORY),
            }
        }

        fn synchronize(&self) -> DriverResult<()> {
            self.log("synchronize");
            *self.free.borrow_mut() += self.freed;
            Ok(())
        }

        fn trim(&self) -> DriverResult<()> {
            self.log("trim");
            *self.free.borrow_mut() += self.in_pieces;
            Ok(())
        }

        fn poison(&self, address: u64, bytes: usize) -> DriverResult<()> {
            self.log(format!("poison {address} {bytes}"));
            Ok(())
        }
    }

    #[test]
    fn an_allocation_that_fails_is_tried_again_after_a_wait_and_without_unused_memory() {
        let enough = Fake { free: 1024.into(), ..Fake::default() };
        assert_eq!(allocate(&enough, 1000, &Settings::default()), Ok(4096));
        assert_eq!(*enough.calls.borrow(), ["allocate 1024"]);
        for (freed, in_pieces) in [(1024, 0), (0, 1024)] {
            let later = Fake { freed, in_pieces, ..Fake::default() };
            assert_eq!(allocate(&later, 1000, &Settings::default()), Ok(4096));
            let calls = ["allocate 1024", "synchronize", "trim", "allocate 1024"];
            assert_eq!(*later.calls.borrow(), calls);
        }
    }

    #[test]
    fn the_exact_size_is_tried_last() {
        let tight = Fake { freed: 1000, ..Fake::default() };
        assert_eq!(allocate(&tight, 1000, &Settings::default()), Ok(4096));
        assert_eq!(tight.calls.borrow().last().unwrap(), "allocate 1000");
        let never = Fake::default();
        assert_eq!(allocate(&never, 1000, &Settings::default()), Err(OUT_OF_MEMORY));
        assert_eq!(never.calls.borrow().len(), 5);
    }

    #[test]
    fn sizes_can_be_exact() {
        let enough = Fake { free: 4096.into(), ..Fake::default() };
        let settings = Settings { poison: true, exact_sizes: true };
        assert_eq!(allocate(&enough, 1000, &settings), Ok(4096));
        assert_eq!(*enough.calls.borrow(), ["allocate 1000", "poison 4096 1000"]);
    }

    #[test]
    fn other_errors_are_not_tried_again() {
        let broken = Fake { error: Some(700), ..Fake::default() };
        assert_eq!(allocate(&broken, 1000, &Settings::default()), Err(700));
        assert_eq!(broken.calls.borrow().len(), 1);
    }

    #[test]
    fn new_memory_is_poisoned() {
        let enough = Fake { free: 4096.into(), ..Fake::default() };
        let settings = Settings { poison: true, exact_sizes: false };
        assert_eq!(allocate(&enough, 1000, &settings), Ok(4096));
        assert_eq!(*enough.calls.borrow(), ["allocate 1024", "poison 4096 1024"]);
        let bytes = [0xFF; 4];
        assert!(f32::from_le_bytes(bytes).is_nan());
        assert!(half::bf16::from_le_bytes([0xFF; 2]).is_nan());
        assert!(f64::from_le_bytes([0xFF; 8]).is_nan());
    }

    /// The functions of candle call ours, behind the driver of scripts/cuda/stand_in.sh. On a GPU
    /// this would disturb other tests.
    #[cfg(feature = "cuda")]
    #[test]
    fn candle_gets_memory_that_was_freed_but_is_in_use_or_in_pieces() {
        use crate::testing::device;
        use candle_core::{DType, Tensor};
        let Some(total) = std::env::var_os("STAND_IN_MEMORY") else { return };
        let total: usize = total.to_str().unwrap().parse().unwrap();
        let allocate = |bytes: usize| Tensor::zeros(bytes, DType::U8, &device());
        for _ in 0..3 {
            let pieces: Vec<_> = (0..12).map(|_| allocate(total / 16).unwrap()).collect();
            assert!(allocate(total / 2).is_err());
            drop(pieces);
            drop(allocate(total / 2).unwrap());
        }
        let error = allocate(2 * total).unwrap_err().to_string();
        assert!(error.contains("OUT_OF_MEMORY"), "{error}");
    }

    #[test]
    fn a_class_holds_its_sizes_and_wastes_little() {
        assert_eq!([0, 1, 512, 513].map(class), [512, 512, 512, 1024]);
        assert_eq!(class(usize::MAX), usize::MAX);
        for power in 14..44 {
            for bytes in [(1 << power) - 1, 1 << power, (1 << power) + 1, 3 << (power - 1)] {
                let rounded = class(bytes);
                assert!(rounded >= bytes && rounded - bytes <= bytes / 32, "{bytes}: {rounded}");
                assert_eq!(class(rounded), rounded);
            }
        }
        // activations of a 4B model, of packs whose lengths differ by 200 tokens
        let sizes = (15_400..16_384).step_by(200).map(|rows| class(rows * 9728 * 2));
        let mut sizes: Vec<usize> = sizes.collect();
        sizes.dedup();
        assert!(sizes.len() <= 3, "{sizes:?}");
    }
}
