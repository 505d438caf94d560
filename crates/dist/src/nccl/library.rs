//! The functions of NCCL that sums need, loaded at run time.
//!
//! NCCL 2.14 or later. Streams and communicators are opaque pointers, so that this compiles without
//! CUDA.

#![expect(unsafe_code, reason = "NCCL is a C library")]

use super::super::DistError;
use super::streams::{Span, Stream, Unit};
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

/// Result of a call: success.
pub(super) const SUCCESS: c_int = 0;
/// Result of a call on a communicator that does not block: the operation has not been started yet.
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclUint8`
const UINT8: c_int = 1;
/// `ncclFloat32`
const FLOAT32: c_int = 7;
/// `ncclSum`
const SUM: c_int = 0;

/// Identifies the communicator that all ranks join (`ncclUniqueId`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// The first fields of `ncclConfig_t`. NCCL uses its defaults for the fields after `size` bytes and
/// for those that are newer than `version`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    const SIZE: usize = 20;
    const MAGIC: u32 = 0xcafebeef;
    /// 2.14.0, the first version with `ncclConfig_t`.
    const VERSION: u32 = 21400;
}

/// A communicator (`ncclComm_t`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle(*mut c_void);

// SAFETY: NCCL allows calls from any thread, one at a time; `Communicator` locks a mutex for each.
unsafe impl Send for Handle {}

/// The loaded functions. NCCL is never unloaded, because it has threads of its own.
pub(super) struct Library {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    comm_init_rank_config:
        unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    comm_finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    comm_destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    comm_abort: unsafe extern "C" fn(*mut c_void) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int,
    reduce_scatter: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int,
    all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int,
}

impl Library {
    /// Loads NCCL from `path`, or from the folders of the system's loader if `path` is only a name.
    pub(super) fn load(path: &Path) -> Result<Self, DistError> {
        // SAFETY: loading runs the initializers of NCCL, which have no requirements.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| cannot_load(path, reason(&error)))?;
        // SAFETY: each field has the type of the function in `nccl.h`. All of them exist since 2.14
        // with the same type.
        let functions = unsafe {
            Self {
                get_version: symbol(&library, path, "ncclGetVersion")?,
                get_unique_id: symbol(&library, path, "ncclGetUniqueId")?,
                get_error_string: symbol(&library, path, "ncclGetErrorString")?,
                get_last_error: symbol(&library, path, "ncclGetLastError")?,
                comm_init_rank_config: symbol(&library, path, "ncclCommInitRankConfig")?,
                comm_get_async_error: symbol(&library, path, "ncclCommGetAsyncError")?,
                comm_finalize: symbol(&library, path, "ncclCommFinalize")?,
                comm_destroy: symbol(&library, path, "ncclCommDestroy")?,
                comm_abort: symbol(&library, path, "ncclCommAbort")?,
                group_start: symbol(&library, path, "ncclGroupStart")?,
                group_end: symbol(&library, path, "ncclGroupEnd")?,
                send: symbol(&library, path, "ncclSend")?,
                recv: symbol(&library, path, "ncclRecv")?,
                all_reduce: symbol(&library, path, "ncclAllReduce")?,
                reduce_scatter: symbol(&library, path, "ncclReduceScatter")?,
                all_gather: symbol(&library, path, "ncclAllGather")?,
            }
        };
        std::mem::forget(library);
        Ok(functions)
    }

    /// The version, such as 22703 for 2.27.3, or 0 if NCCL does not return it.
    pub(super) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the argument is valid.
        unsafe { (self.get_version)(&raw mut version) };
        version
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, c_int> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the argument is valid.
        let code = unsafe { (self.get_unique_id)(&raw mut id) };
        if code == SUCCESS { Ok(id) } else { Err(code) }
    }

    /// NCCL's description of `code`, and its last message if there is one.
    pub(super) fn text(&self, code: c_int) -> String {
        let text = |text: *const c_char| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: NCCL returns texts that it keeps.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        // SAFETY: any argument is valid; the communicator is not used.
        let (description, last) =
            unsafe { ((self.get_error_string)(code), (self.get_last_error)(std::ptr::null_mut())) };
        let (description, last) = (text(description), text(last));
        match last.trim() {
            "" => description,
            last => format!("{description}: {last}"),
        }
    }

    /// Starts to join the communicator `id` on the current GPU. Returns a handle also
    /// on error, except for an invalid argument.
    pub(super) fn init(&self, id: UniqueId, rank: usize, world: usize) -> (Option<Handle>, c_int) {
        let (rank, world) = (rank as c_int, world as c_int);
        let mut config = Config {
            size: Config::SIZE,
            magic: Config::MAGIC,
            version: Config::VERSION,
            blocking: 0,
        };
        let mut comm = std::ptr::null_mut();
        // SAFETY: the arguments are valid; NCCL copies the configuration.
        let code = unsafe {
            (self.comm_init_rank_config)(&raw mut comm, world, id, rank, &raw mut config)
        };
        ((!comm.is_null()).then_some(Handle(comm)), code)
    }

    /// State of the last operation on `comm`: success, in progress, or an error, also one of a
    /// running operation.
    pub(super) fn state(&self, comm: Handle) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: a `Handle` is used until it is destroyed or aborted.
        let code = unsafe { (self.comm_get_async_error)(comm.0, &raw mut state) };
        if code == SUCCESS { state } else { code }
    }

    pub(super) fn finalize(&self, comm: Handle) -> c_int {
        // SAFETY: as in `state`.
        unsafe { (self.comm_finalize)(comm.0) }
    }

    /// Frees `comm`, which nothing may use from now on.
    pub(super) fn destroy(&self, comm: Handle) -> c_int {
        // SAFETY: as in `state`.
        unsafe { (self.comm_destroy)(comm.0) }
    }

    /// Ends all operations of `comm` and frees it. Nothing may use it from now on.
    pub(super) fn abort(&self, comm: Handle) -> c_int {
        // SAFETY: as in `state`.
        unsafe { (self.comm_abort)(comm.0) }
    }

    pub(super) fn group_start(&self) -> c_int {
        // SAFETY: no arguments.
        unsafe { (self.group_start)() }
    }

    pub(super) fn group_end(&self) -> c_int {
        // SAFETY: no arguments.
        unsafe { (self.group_end)() }
    }

    pub(super) fn send(&self, from: Span, to: usize, comm: Handle, stream: Stream) -> c_int {
        let (address, to) = (from.address() as *const c_void, to as c_int);
        // SAFETY: a `Span` is memory of a tensor that its user keeps until the stream has used it.
        unsafe { (self.send)(address, from.len(), data_type(from), to, comm.0, stream.0) }
    }

    pub(super) fn recv(&self, to: Span, from: usize, comm: Handle, stream: Stream) -> c_int {
        let (address, from) = (to.address() as *mut c_void, from as c_int);
        // SAFETY: as in `send`.
        unsafe { (self.recv)(address, to.len(), data_type(to), from, comm.0, stream.0) }
    }

    /// Replaces `span` by its sum over all ranks.
    pub(super) fn all_reduce(&self, span: Span, comm: Handle, stream: Stream) -> c_int {
        let address = span.address() as *mut c_void;
        let len = span.len();
        // SAFETY: as in `send`.
        unsafe { (self.all_reduce)(address, address, len, FLOAT32, SUM, comm.0, stream.0) }
    }

    /// Replaces `own`, the share of this rank in `all`, by the sum of this share over all ranks.
    pub(super) fn reduce_scatter(
        &self,
        all: Span,
        own: Span,
        comm: Handle,
        stream: Stream,
    ) -> c_int {
        let (all, to) = (all.address() as *const c_void, own.address() as *mut c_void);
        let len = own.len();
        // SAFETY: as in `send`. `all` has `len` elements for each rank.
        unsafe { (self.reduce_scatter)(all, to, len, FLOAT32, SUM, comm.0, stream.0) }
    }

    /// Copies `own` of each rank into `all`, in the order of the ranks.
    pub(super) fn all_gather(&self, own: Span, all: Span, comm: Handle, stream: Stream) -> c_int {
        let (from, all) = (own.address() as *const c_void, all.address() as *mut c_void);
        // SAFETY: as in `send`. `all` has the length of `own` for each rank.
        unsafe { (self.all_gather)(from, all, own.len(), data_type(own), comm.0, stream.0) }
    }
}

fn data_type(span: Span) -> c_int {
    match span.unit() {
        Unit::F32 => FLOAT32,
        Unit::Byte => UINT8,
    }
}

/// # Safety
///
/// `T` is the type of the function `name`.
unsafe fn symbol<T: Copy>(
    library: &libloading::Library,
    path: &Path,
    name: &str,
) -> Result<T, DistError> {
    // SAFETY: as the caller guarantees.
    let symbol = unsafe { library.get::<T>(name) };
    let symbol = symbol.map_err(|error| {
        cannot_load(path, format!("it has no function `{name}`: {}", reason(&error)))
    })?;
    Ok(*symbol)
}

fn cannot_load(path: &Path, problem: String) -> DistError {
    DistError::Library { path: path.display().to_string(), problem }
}

/// What the system's loader reports.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
