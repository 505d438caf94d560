//! A communicator of NCCL, with errors that name the operation and the rank, and an end for waits.

use super::super::{DistError, Rank};
use super::library::{Handle, IN_PROGRESS, Library, SUCCESS, UniqueId};
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

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
    state: Mutex<State>,
}

enum State {
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
        let state = handle.map_or(State::Ended(DistError::Closed), State::Open);
        let joined = Self { library, rank, timeout, state: Mutex::new(state) };
        joined.finish("ncclCommInitRankConfig", code)?;
        Ok(joined)
    }

    /// The place of this rank.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(state: &State) -> Result<Handle, DistError> {
        match state {
            State::Open(handle) => Ok(*handle),
            State::Ended(error) => Err(error.clone()),
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
        calls: impl FnOnce(&mut Group<'_>) -> Result<(), (&'static str, c_int)>,
    ) -> Result<(), DistError> {
        let state = self.state();
        let mut group = Group { library: &self.library, handle: Self::handle(&state)? };
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
            State::Open(handle) => {
                self.library.abort(*handle); // nothing is left to do if this fails
                *state = State::Ended(reason.clone());
                reason
            }
            State::Ended(DistError::Closed) => reason,
            State::Ended(first) => first.clone(),
        }
    }

    /// Frees the communicator. The communication stream must be idle, on all ranks.
    pub(super) fn close(&self) -> Result<(), DistError> {
        self.call("ncclCommFinalize", Library::finalize)?;
        let mut state = self.state();
        let handle = Self::handle(&state)?;
        let code = self.library.destroy(handle);
        *state = State::Ended(DistError::Closed);
        drop(state);
        match code {
            // A communicator that does not block is freed by a thread of NCCL.
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.failed_call("ncclCommDestroy", code)),
        }
    }
}

/// The calls of one group.
pub(super) struct Group<'a> {
    library: &'a Library,
    handle: Handle,
}

impl Group<'_> {
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
