//! Launches from C: the stand-in for the driver (`tests/fixtures/cuda`) executes kernels with it.

#![expect(unsafe_code, reason = "addresses of another language")]

use crate::global::Host;
use crate::library::{Library, LibraryError};
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;

/// Writes start and size of the allocation that contains an address; 0: there is none.
type Find = unsafe extern "C" fn(at: u64, start: *mut u64, bytes: *mut u64) -> i32;

/// The memory of the stand-in.
#[derive(Debug)]
struct HostMemory(Find);

impl Host for HostMemory {
    fn find(&self, at: u64) -> Option<(u64, usize)> {
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: the function writes two numbers.
        let found = unsafe { (self.0)(at, &raw mut start, &raw mut bytes) };
        (found != 0).then_some((start, bytes as usize))
    }

    fn unwritten(&self, _: u64, _: usize) -> Option<u64> {
        None
    }

    fn write(&self, _: u64, _: usize) {}
}

/// Executes a kernel. Returns 0, or 1 if no kernel has the name, or 2 after a fault, whose text is
/// written to `error`, with at most `error_bytes` bytes and a NUL.
///
/// The first call reads `root` (see [`Library::open`]); later ones ignore it.
///
/// # Safety
/// Strings end with NUL. `arguments` has the address of a value for each parameter. What `find` finds
/// is allocated, and nothing else accesses it during the launch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_launch(
    root: *const c_char,
    capability: *const c_char,
    name: *const c_char,
    grid: *const [u32; 3],
    threads: u32,
    shared: u32,
    arguments: *const *mut c_void,
    find: Find,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    static MEMORY: OnceLock<HostMemory> = OnceLock::new();
    // SAFETY: as the caller promises.
    let (text, grid) =
        unsafe { (|text| CStr::from_ptr::<'static>(text).to_string_lossy().into_owned(), *grid) };
    let library = LIBRARY.get_or_init(|| {
        let library = Library::open(Path::new(&text(root)), &text(capability), None);
        library.map_err(|error| error.to_string())
    });
    let result = library.as_ref().map_err(Clone::clone).and_then(|library| {
        let kernel = match library.kernel(&text(name)) {
            Ok(kernel) => kernel,
            Err(LibraryError::NoKernel(_)) => return Ok(1),
            Err(error) => return Err(error.to_string()),
        };
        let memory = MEMORY.get_or_init(|| HostMemory(find));
        // SAFETY: as the caller promises.
        let ended = unsafe { library.launch(kernel, grid, threads, shared, arguments, memory) };
        ended.map(|_| 0).map_err(|failure| failure.to_string())
    });
    result.unwrap_or_else(|text| {
        let bytes = &text.as_bytes()[..text.len().min(error_bytes)];
        // SAFETY: the buffer has room for the bytes and a NUL.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), error, bytes.len());
            *error.add(bytes.len()) = 0;
        }
        2
    })
}
