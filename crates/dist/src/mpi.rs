//! Exchange of bytes between ranks over MPI (feature `mpi`).

#![expect(unsafe_code, reason = "MPI is a C library")]

use super::{DistError, Rank, Transport};
use mpi_sys::{self as ffi, MPI_Request};
use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of bytes of one message, because MPI counts with `int`.
const MAX_BYTES: usize = 1 << 30;

/// A message above this size is sent when both ranks are ready for it.
const SMALL: usize = 1 << 12;

/// How long a rank tests for a message without pause before it sleeps between tests.
const SPIN: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_micros(50);

/// Tags of messages.
const SENDER_READY: c_int = 1;
const RECEIVER_READY: c_int = 2;
const DATA: c_int = 3;

/// A rank's use of MPI. It stays on the thread that initialised MPI.
pub struct Mpi {
    rank: usize,
    this_thread: PhantomData<*const ()>,
}

impl Mpi {
    /// Initialises MPI. `rank` must be the place that MPI's launcher gave to this process. The
    /// process can do this once.
    pub fn connect(rank: Rank) -> Result<Self, DistError> {
        let failed = |problem: String| DistError::Collective { operation: "starting MPI", problem };
        let (mut initialized, mut level, mut found, mut world) = (0, 0, 0, 0);
        // SAFETY: MPI may be queried at any time. It is initialised once, and its functions are
        // called afterwards, from this thread, with pointers to variables that outlive the calls.
        unsafe {
            check("MPI_Initialized", ffi::MPI_Initialized(&raw mut initialized))?;
            if initialized != 0 {
                return Err(failed("this process has already used MPI".to_owned()));
            }
            let (argc, argv) = (ptr::null_mut(), ptr::null_mut());
            let code = ffi::MPI_Init_thread(argc, argv, ffi::RSMPI_THREAD_FUNNELED, &raw mut level);
            check("MPI_Init_thread", code)?;
            if level < ffi::RSMPI_THREAD_FUNNELED {
                let problem = "this MPI library does not support programs with threads";
                return Err(failed(problem.to_owned()));
            }
            let comm = ffi::RSMPI_COMM_WORLD;
            let handler = ffi::RSMPI_ERRORS_RETURN;
            check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(comm, handler))?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &raw mut found))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(comm, &raw mut world))?;
        }
        let expected = (rank.rank, rank.world);
        if (found as usize, world as usize) != expected {
            return Err(failed(format!(
                "MPI counts this process as rank {found} of {world}, and the environment as rank \
                 {} of {}: start the ranks with `mpirun`, or with `srun --mpi=pmix`, and without \
                 RANK and WORLD_SIZE",
                expected.0, expected.1
            )));
        }
        Ok(Self { rank: rank.rank, this_thread: PhantomData })
    }
}

impl Transport for Mpi {
    fn exchange(
        &mut self,
        to: usize,
        send: &[u8],
        from: usize,
        receive: &mut [u8],
    ) -> Result<(), DistError> {
        debug_assert!(to != self.rank && from != self.rank, "a rank sends nothing to itself");
        // The ranks at both ends of a message agree on its size. The ranks at both ends of an
        // exchange do not: one may send more than it receives.
        let mut ready = Requests::default();
        if send.len() > SMALL {
            ready.receive(to, RECEIVER_READY, &mut [])?;
            ready.send(to, SENDER_READY, &[])?;
        }
        if receive.len() > SMALL {
            ready.receive(from, SENDER_READY, &mut [])?;
            ready.send(from, RECEIVER_READY, &[])?;
        }
        let is_large = !ready.sends.is_empty();
        ready.wait(true)?;
        let mut requests = Requests::default();
        for part in receive.chunks_mut(MAX_BYTES) {
            requests.receive(from, DATA, part)?;
        }
        for part in send.chunks(MAX_BYTES) {
            requests.send(to, DATA, part)?;
        }
        requests.wait(!is_large)
    }

    fn finish(&mut self) -> Result<(), DistError> {
        // SAFETY: all requests are complete, and no function of MPI is called afterwards.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

/// Messages on their way. They end before the memory that they use does.
#[derive(Default)]
struct Requests<'a> {
    receives: Vec<MPI_Request>,
    sends: Vec<MPI_Request>,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Requests<'a> {
    fn receive(&mut self, from: usize, tag: c_int, part: &'a mut [u8]) -> Result<(), DistError> {
        let (len, from) = (part.len() as c_int, from as c_int);
        // SAFETY: MPI writes to `part` until the request is complete, and `'a` lasts longer.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (kind, comm) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD);
            let at = part.as_mut_ptr().cast();
            (ffi::MPI_Irecv(at, len, kind, from, tag, comm, &raw mut request), request)
        };
        check("MPI_Irecv", code)?;
        self.receives.push(request);
        Ok(())
    }

    fn send(&mut self, to: usize, tag: c_int, part: &'a [u8]) -> Result<(), DistError> {
        let (len, to) = (part.len() as c_int, to as c_int);
        // SAFETY: MPI reads `part` until the request is complete, and `'a` lasts longer.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (kind, comm) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD);
            let at = part.as_ptr().cast();
            (ffi::MPI_Isend(at, len, kind, to, tag, comm, &raw mut request), request)
        };
        check("MPI_Isend", code)?;
        self.sends.push(request);
        Ok(())
    }

    /// Waits until all messages are complete. MPI's own functions that wait use a processor all the
    /// time; with `sleep`, a rank that waits for another leaves the processor to its computation.
    fn wait(mut self, sleep: bool) -> Result<(), DistError> {
        let started = Instant::now();
        while !self.complete()? {
            if sleep && started.elapsed() > SPIN {
                thread::sleep(PAUSE);
            } else {
                thread::yield_now();
            }
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<bool, DistError> {
        for requests in [&mut self.receives, &mut self.sends] {
            let (len, mut complete) = (requests.len() as c_int, 0);
            // SAFETY: the requests are valid; MPI replaces complete ones by its null request.
            let code = unsafe {
                let statuses = ffi::RSMPI_STATUSES_IGNORE;
                ffi::MPI_Testall(len, requests.as_mut_ptr(), &raw mut complete, statuses)
            };
            check("MPI_Testall", code)?;
            if complete == 0 {
                return Ok(false);
            }
            requests.clear();
        }
        Ok(true)
    }
}

impl Drop for Requests<'_> {
    /// After an error, takes back the memory from MPI.
    fn drop(&mut self) {
        for request in &mut self.receives {
            // SAFETY: the request is valid; it is complete after the wait.
            unsafe {
                ffi::MPI_Cancel(request);
                ffi::MPI_Wait(request, ffi::RSMPI_STATUS_IGNORE);
            }
        }
        for request in &mut self.sends {
            // SAFETY: the request is valid. MPI cannot take back a message; it only reads it.
            unsafe { ffi::MPI_Request_free(request) };
        }
    }
}

/// The error of an MPI function, with MPI's message.
fn check(operation: &'static str, code: c_int) -> Result<(), DistError> {
    if code as u32 == ffi::MPI_SUCCESS {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: `text` has the size that MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    let text = &text[..(len.max(0) as usize).min(text.len())];
    Err(DistError::Collective { operation, problem: String::from_utf8_lossy(text).into_owned() })
}
