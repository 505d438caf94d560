//! The functions of NCCL that sums need, loaded at run time; communicators, whose errors name the
//! operation and the rank; memory and streams of a GPU.
//!
//! NCCL 2.14 or later. Streams and communicators are opaque pointers, so that this compiles without
//! CUDA.

#![expect(unsafe_code, reason = "NCCL is a C library")]

use super::super::{DistError, Rank};
use candle_core::{DType, Tensor, bail};
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Result of a call: success.
const SUCCESS: c_int = 0;
/// Result of a call on a communicator that does not block: the operation has not been started yet.
const IN_PROGRESS: c_int = 7;
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

    fn group_start(&self) -> c_int {
        // SAFETY: no arguments.
        unsafe { (self.group_start)() }
    }

    fn group_end(&self) -> c_int {
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

/// Time in which most operations are started. Until then, queries of the state have no pause
/// between them.
const USUAL: Duration = Duration::from_micros(200);
/// Pause between later queries.
const PAUSE: Duration = Duration::from_millis(1);

/// A communicator. Its calls do not block (`blocking: 0` of NCCL), so none holds the lock for long,
/// and [`Self::abort`] works at any time, from any thread.
pub(super) struct Communicator {
    library: Library,
    rank: Rank,
    /// Maximum time to start an operation, which includes connections to other ranks.
    timeout: Duration,
    state: Mutex<CommunicatorState>,
}

enum CommunicatorState {
    Open(Handle),
    /// Aborted because of this error, or [`DistError::Closed`].
    Ended(DistError),
}

impl Communicator {
    /// Joins the other ranks on the current GPU, and waits until all have done so.
    pub(super) fn join(
        library: Library,
        rank: Rank,
        id: UniqueId,
        timeout: Duration,
    ) -> Result<Self, DistError> {
        let (handle, code) = library.init(id, rank.rank, rank.world);
        let state =
            handle.map_or(CommunicatorState::Ended(DistError::Closed), CommunicatorState::Open);
        let joined = Self { library, rank, timeout, state: Mutex::new(state) };
        joined.finish("ncclCommInitRankConfig", code)?;
        Ok(joined)
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    fn state(&self) -> MutexGuard<'_, CommunicatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(state: &CommunicatorState) -> Result<Handle, DistError> {
        match state {
            CommunicatorState::Open(handle) => Ok(*handle),
            CommunicatorState::Ended(error) => Err(error.clone()),
        }
    }

    /// Makes one call, and waits until the operation is on the stream.
    pub(super) fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(&Library, Handle) -> c_int,
    ) -> Result<(), DistError> {
        let state = self.state();
        let code = call(&self.library, Self::handle(&state)?);
        drop(state);
        self.finish(operation, code)
    }

    /// Makes the calls of `calls` as one operation, which NCCL executes at the same time, and waits
    /// until it is on the stream.
    pub(super) fn group(
        &self,
        calls: impl FnOnce(&mut CallGroup<'_>) -> Result<(), (&'static str, c_int)>,
    ) -> Result<(), DistError> {
        let state = self.state();
        let mut group = CallGroup { library: &self.library, handle: Self::handle(&state)? };
        let code = self.library.group_start();
        if code != SUCCESS {
            drop(state);
            return Err(self.failed_call("ncclGroupStart", code));
        }
        let called = calls(&mut group);
        let ended = self.library.group_end(); // also after an error: the group belongs to the thread
        drop(state);
        match called {
            Ok(()) => self.finish("ncclGroupEnd", ended),
            Err((operation, code)) => Err(self.failed_call(operation, code)),
        }
    }

    /// Waits while an operation that returned `code` is in progress.
    fn finish(&self, operation: &'static str, mut code: c_int) -> Result<(), DistError> {
        let begin = Instant::now();
        while code == IN_PROGRESS {
            if begin.elapsed() > self.timeout {
                let seconds = self.timeout.as_secs_f64();
                let problem = format!(
                    "not complete after {seconds} s: another rank ended or cannot be reached \
                     (NCCL_DEBUG=INFO shows the connections)"
                );
                return Err(self.failed(operation, &problem));
            }
            if begin.elapsed() > USUAL {
                thread::sleep(PAUSE);
            } else {
                thread::yield_now();
            }
            let state = self.state();
            code = self.library.state(Self::handle(&state)?);
        }
        if code == SUCCESS { Ok(()) } else { Err(self.failed_call(operation, code)) }
    }

    /// Returns an error if an operation that is on the stream has failed.
    pub(super) fn check(&self) -> Result<(), DistError> {
        let state = self.state();
        let code = self.library.state(Self::handle(&state)?);
        drop(state);
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => {
                Err(self.failed_call("an exchange between ranks (ncclCommGetAsyncError)", code))
            }
        }
    }

    fn failed_call(&self, operation: &'static str, code: c_int) -> DistError {
        self.failed(operation, &self.library.text(code))
    }

    /// Returns an error with the place of this rank, after aborting the communicator. If it had
    /// ended before, the error is the reason of that end.
    pub(super) fn failed(&self, operation: &'static str, problem: &str) -> DistError {
        let Rank { rank, world, .. } = self.rank;
        let problem = format!("rank {rank} of {world}: {problem}");
        self.end(DistError::Collective { operation, problem })
    }

    /// Ends all operations of this rank. Its GPU stops waiting for other ranks, and later calls
    /// return [`DistError::Closed`].
    pub(super) fn abort(&self) {
        self.end(DistError::Closed);
    }

    fn end(&self, reason: DistError) -> DistError {
        let mut state = self.state();
        match &*state {
            CommunicatorState::Open(handle) => {
                self.library.abort(*handle); // nothing is left to do if this fails
                *state = CommunicatorState::Ended(reason.clone());
                reason
            }
            CommunicatorState::Ended(DistError::Closed) => reason,
            CommunicatorState::Ended(first) => first.clone(),
        }
    }

    /// Frees the communicator. The communication stream must be idle, on all ranks.
    pub(super) fn close(&self) -> Result<(), DistError> {
        self.call("ncclCommFinalize", Library::finalize)?;
        let mut state = self.state();
        let handle = Self::handle(&state)?;
        let code = self.library.destroy(handle);
        *state = CommunicatorState::Ended(DistError::Closed);
        drop(state);
        match code {
            // A communicator that does not block is freed by a thread of NCCL.
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.failed_call("ncclCommDestroy", code)),
        }
    }
}

pub(super) struct CallGroup<'a> {
    library: &'a Library,
    handle: Handle,
}

impl CallGroup<'_> {
    pub(super) fn call(
        &mut self,
        operation: &'static str,
        call: impl FnOnce(&Library, Handle) -> c_int,
    ) -> Result<(), (&'static str, c_int)> {
        match call(self.library, self.handle) {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err((operation, code)),
        }
    }
}

/// A CUDA stream (`cudaStream_t`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream(pub(super) *mut c_void);

/// What a [`Span`] consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    F32,
    Byte,
}

/// A range of `f32`, or of bytes, in the memory of a device. It is valid while its tensor exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    address: u64,
    len: usize,
    unit: Unit,
}

impl Span {
    pub(super) fn address(self) -> u64 {
        self.address
    }

    /// Length in units.
    pub(super) fn len(self) -> usize {
        self.len
    }

    pub(super) fn unit(self) -> Unit {
        self.unit
    }

    pub(super) fn num_bytes(self) -> usize {
        match self.unit {
            Unit::F32 => 4 * self.len,
            Unit::Byte => self.len,
        }
    }

    /// The units `range` of this span.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let before = Self { len: range.start, ..self }.num_bytes() as u64;
        Self { address: self.address + before, len: range.len(), ..self }
    }
}

/// The compute stream of a device, on which all its tensors are used, and the communication stream.
/// No function waits for the device.
///
/// Candle does not track which stream uses which tensor: `kernels::open_gpu` switches that off. The
/// order is right nevertheless, because the communication stream uses only two kinds of memory:
///
/// - Tensors that were passed to a call that starts an operation. The communication stream waits
///   for an event of the compute stream first, so earlier writes are visible. The callers use the
///   tensors again only after `wait` or `wait_for`, which makes the compute stream wait for the
///   communication stream. `Sums` keeps the tensors until then, and the memory of a tensor is freed
///   on the compute stream, so the memory is reused only after the operation.
/// - Two buffers that are allocated once. After their creation on the compute stream, only the
///   communication stream uses them. They are freed when it is idle.
pub(super) trait Streams: Send + Sync {
    /// Makes the device current on this thread, as NCCL requires.
    fn bind(&self) -> candle_core::Result<()>;

    fn communication(&self) -> Stream;

    /// Address of a tensor on the device, in `f32`, `bf16` or `u8`. Fails if it is not contiguous.
    fn address(&self, tensor: &Tensor) -> candle_core::Result<u64>;

    /// The memory of an `f32` tensor, as [`Self::address`].
    fn span(&self, tensor: &Tensor) -> candle_core::Result<Span> {
        if tensor.dtype() != DType::F32 {
            bail!("found {:?} {:?}, expected contiguous F32", tensor.dtype(), tensor.layout());
        }
        let len = tensor.elem_count();
        Ok(Span { address: self.address(tensor)?, len, unit: Unit::F32 })
    }

    /// The bytes of a tensor, as [`Self::address`].
    fn bytes(&self, tensor: &Tensor) -> candle_core::Result<Span> {
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        Ok(Span { address: self.address(tensor)?, len, unit: Unit::Byte })
    }

    /// Makes the communication stream wait for all earlier work of the compute stream.
    fn communication_waits(&self) -> candle_core::Result<()>;

    /// Makes the compute stream wait for all earlier work of the communication stream.
    fn compute_waits(&self) -> candle_core::Result<()>;

    /// Records the earlier work of the communication stream as number `mark`, in place of what this
    /// number stood for. A new number is one above all before it, from 0.
    fn record(&self, mark: usize) -> candle_core::Result<()>;

    /// Makes the compute stream wait for the work that was recorded as `mark`.
    fn compute_waits_for(&self, mark: usize) -> candle_core::Result<()>;

    /// Copies `from` to `to` on the communication stream. The spans have the same length.
    fn copy(&self, from: Span, to: Span) -> candle_core::Result<()>;

    /// Adds `from` to `to`, both `f32`, on the communication stream. The spans have the same
    /// length.
    fn add(&self, from: Span, to: Span) -> candle_core::Result<()>;

    /// Whether all work of the communication stream is done.
    fn is_idle(&self) -> candle_core::Result<bool>;
}

#[cfg(feature = "cuda")]
impl Streams for kernels::SideStream {
    fn bind(&self) -> candle_core::Result<()> {
        self.bind_to_thread()
    }

    fn communication(&self) -> Stream {
        Stream(self.handle())
    }

    fn address(&self, tensor: &Tensor) -> candle_core::Result<u64> {
        Self::address(self, tensor)
    }

    fn communication_waits(&self) -> candle_core::Result<()> {
        self.wait_for_tensors()
    }

    fn compute_waits(&self) -> candle_core::Result<()> {
        self.tensors_wait()
    }

    fn record(&self, mark: usize) -> candle_core::Result<()> {
        Self::record(self, mark)
    }

    fn compute_waits_for(&self, mark: usize) -> candle_core::Result<()> {
        self.tensors_wait_for(mark)
    }

    fn copy(&self, from: Span, to: Span) -> candle_core::Result<()> {
        assert_eq!((from.len(), from.unit()), (to.len(), to.unit()));
        Self::copy(self, from.address(), to.address(), from.num_bytes())
    }

    fn add(&self, from: Span, to: Span) -> candle_core::Result<()> {
        assert_eq!((from.len(), from.unit(), to.unit()), (to.len(), Unit::F32, Unit::F32));
        self.add_f32(from.address(), to.address(), from.len())
    }

    fn is_idle(&self) -> candle_core::Result<bool> {
        self.is_done()
    }
}
