//! Streams in host memory, and the stand-in for NCCL, for tests.
//!
//! A stream is a thread that executes its work in order. So a missing wait of one stream for the
//! other gives wrong sums, as on a GPU.

#![expect(unsafe_code, reason = "streams use memory by address, and the stand-in is a C library")]

use super::super::library::{Span, Stream, Streams, Unit};
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// The compiled `tests/fixtures/nccl/nccl.c`. Each copy of the file has a state of its own.
pub(super) struct StandIn {
    library: libloading::Library,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl StandIn {
    pub(super) fn compile() -> Arc<Self> {
        Self::compile_with(&[])
    }

    pub(super) fn compile_with(options: &[&str]) -> Arc<Self> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnccl.so.2");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/nccl/nccl.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).arg(&path).args(options).arg(source);
        let status = cc.status().expect("the tests of NCCL need a C compiler, `cc`");
        assert!(status.success(), "{cc:?}");
        // SAFETY: the library has no initializers.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        Arc::new(Self { library, path, _folder: folder })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Plans a failure of the next `call` (such as `ncclSend`) of `rank`.
    pub(super) fn fail(&self, call: &str, rank: usize, code: c_int) {
        let call = CString::new(call).unwrap();
        // SAFETY: the function has this type.
        unsafe {
            let fail: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char, c_int, c_int)> =
                self.library.get("standin_fail").unwrap();
            fail(call.as_ptr(), rank as c_int, code);
        }
    }

    /// Makes running operations of `rank` fail.
    pub(super) fn fail_async(&self, rank: usize, code: c_int) {
        // SAFETY: as in `fail`.
        unsafe {
            let fail: libloading::Symbol<'_, unsafe extern "C" fn(c_int, c_int)> =
                self.library.get("standin_fail_async").unwrap();
            fail(rank as c_int, code);
        }
    }

    fn note(&self, rank: usize, text: &str) {
        let text = CString::new(text).unwrap();
        // SAFETY: as in `fail`.
        unsafe {
            let note: libloading::Symbol<'_, unsafe extern "C" fn(c_int, *const c_char)> =
                self.library.get("standin_note").unwrap();
            note(rank as c_int, text.as_ptr());
        }
    }

    /// All calls of `rank` to NCCL and to its streams. The rank must make no calls meanwhile.
    pub(super) fn log(&self, rank: usize) -> Vec<String> {
        // SAFETY: as in `fail`; the text exists as long as the library.
        let text = unsafe {
            let log: libloading::Symbol<'_, unsafe extern "C" fn(c_int) -> *const c_char> =
                self.library.get("standin_log").unwrap();
            CStr::from_ptr(log(rank as c_int)).to_str().unwrap()
        };
        text.lines().map(str::to_owned).collect()
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Passed to the stand-in, which uses the first two fields.
#[repr(C)]
struct Queue {
    enqueue: extern "C" fn(*mut Queue, extern "C" fn(*mut c_void), *mut c_void),
    number: c_int,
    work: Sender<Work>,
    pending: Arc<AtomicUsize>,
}

/// A thread that executes work in order.
pub(super) struct HostStream(Box<Queue>);

struct Argument(*mut c_void);

// SAFETY: the argument belongs to the work that is passed with it.
unsafe impl Send for Argument {}

extern "C" fn enqueue(queue: *mut Queue, work: extern "C" fn(*mut c_void), argument: *mut c_void) {
    let argument = Argument(argument);
    // SAFETY: the queue belongs to a stream, which outlives the communicator.
    let queue = unsafe { &*queue };
    queue.add(move || {
        let Argument(argument) = { argument };
        work(argument);
    });
}

impl Queue {
    fn add(&self, work: impl FnOnce() + Send + 'static) {
        self.pending.fetch_add(1, Ordering::SeqCst);
        self.work.send(Box::new(work)).unwrap();
    }
}

impl HostStream {
    pub(super) fn new(number: c_int) -> Self {
        let (work, received) = channel::<Work>();
        let pending = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&pending);
        thread::spawn(move || {
            for work in received {
                work();
                left.fetch_sub(1, Ordering::SeqCst);
            }
        });
        Self(Box::new(Queue { enqueue, number, work, pending }))
    }

    pub(super) fn add(&self, work: impl FnOnce() + Send + 'static) {
        self.0.add(work);
    }

    /// Makes this stream wait for all earlier work of `other`.
    fn join(&self, other: &Self) {
        let (event, recorded) = channel();
        other.add(move || event.send(()).unwrap());
        self.add(move || recorded.recv().unwrap());
    }
}

/// The two streams of a rank.
pub(super) struct HostStreams {
    pub(super) rank: usize,
    pub(super) compute: Arc<HostStream>,
    pub(super) communication: HostStream,
    pub(super) stand_in: Arc<StandIn>,
    pub(super) marks: Mutex<HashMap<usize, Receiver<()>>>,
}

impl Streams for HostStreams {
    fn bind(&self) -> Result<()> {
        Ok(())
    }

    fn communication(&self) -> Stream {
        Stream(std::ptr::from_ref(&*self.communication.0).cast_mut().cast())
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let Some((start, _)) = layout.contiguous_offsets() else {
            bail!("found {layout:?}, expected contiguous elements");
        };
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => Ok(values[start..].as_ptr() as u64),
            Storage::Cpu(CpuStorage::BF16(values)) => Ok(values[start..].as_ptr() as u64),
            Storage::Cpu(CpuStorage::U8(values)) => Ok(values[start..].as_ptr() as u64),
            _ => bail!("found {:?}, expected F32, BF16 or U8", storage.dtype()),
        }
    }

    fn communication_waits(&self) -> Result<()> {
        self.stand_in.note(self.rank, "communication waits for compute");
        self.communication.join(&self.compute);
        Ok(())
    }

    fn compute_waits(&self) -> Result<()> {
        self.stand_in.note(self.rank, "compute waits for communication");
        self.compute.join(&self.communication);
        Ok(())
    }

    fn record(&self, mark: usize) -> Result<()> {
        self.stand_in.note(self.rank, &format!("record {mark}"));
        let (event, recorded) = channel();
        self.marks.lock().unwrap().insert(mark, recorded);
        self.communication.add(move || event.send(()).unwrap_or_default()); // fails if it was replaced
        Ok(())
    }

    fn compute_waits_for(&self, mark: usize) -> Result<()> {
        self.stand_in.note(self.rank, &format!("compute waits for {mark}"));
        let recorded = self.marks.lock().unwrap().remove(&mark).expect("a mark that was recorded");
        self.compute.add(move || recorded.recv().unwrap());
        Ok(())
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        self.stand_in.note(self.rank, &format!("copy {}", from.len()));
        assert_eq!((from.len(), from.unit()), (to.len(), to.unit()));
        self.communication.add(move || {
            let (from, to, len) = (from.address(), to.address(), from.num_bytes());
            // SAFETY: the spans belong to tensors that exist until the stream is idle.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
        });
        Ok(())
    }

    fn add(&self, from: Span, to: Span) -> Result<()> {
        self.stand_in.note(self.rank, &format!("add {}", from.len()));
        assert_eq!((from.len(), from.unit(), to.unit()), (to.len(), Unit::F32, Unit::F32));
        self.communication.add(move || {
            // SAFETY: as in `copy`; the spans have no common element.
            let (values, sums) = unsafe {
                let values = std::slice::from_raw_parts(from.address() as *const f32, from.len());
                (values, std::slice::from_raw_parts_mut(to.address() as *mut f32, to.len()))
            };
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        });
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        Ok(self.communication.0.pending.load(Ordering::SeqCst) == 0)
    }
}
