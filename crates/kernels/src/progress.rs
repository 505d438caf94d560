//! How far a thread has come with its jobs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Counts the jobs that a thread has done, in order, and keeps the error that ended it. Other
/// threads wait for a job. `E` is the type of the error.
pub struct Progress<E> {
    state: Mutex<(u64, Option<E>)>, // number of complete jobs, and the error that ended the thread
    changed: Condvar,
}

impl<E> Default for Progress<E> {
    fn default() -> Self {
        Self { state: Mutex::new((0, None)), changed: Condvar::new() }
    }
}

impl<E: Clone> Progress<E> {
    fn state(&self) -> MutexGuard<'_, (u64, Option<E>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more job.
    pub fn job_done(&self) {
        self.state().0 += 1;
        self.changed.notify_all();
    }

    /// Reports that the thread has ended. Of several errors the first is kept.
    pub fn fail(&self, error: E) {
        self.state().1.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The error that ended the thread.
    pub fn error(&self) -> Option<E> {
        self.state().1.clone()
    }

    /// Waits until `number` jobs are done. Fails with the error that ended the thread before.
    pub fn wait_for(&self, number: u64) -> Result<(), E> {
        let mut state = self.state();
        loop {
            match &*state {
                (done, _) if *done >= number => return Ok(()),
                (_, Some(error)) => return Err(error.clone()),
                _ => {}
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Calls [`Self::fail`] with `error` when the returned value is dropped, also by a panic, so
    /// that no thread waits for one that has ended.
    pub fn fail_at_end(&self, error: E) -> FailAtEnd<'_, E> {
        FailAtEnd { progress: self, error }
    }
}

/// See [`Progress::fail_at_end`].
pub struct FailAtEnd<'a, E: Clone> {
    progress: &'a Progress<E>,
    error: E,
}

impl<E: Clone> Drop for FailAtEnd<'_, E> {
    fn drop(&mut self) {
        self.progress.fail(self.error.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn a_thread_that_panics_ends_the_wait_for_its_later_jobs() {
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let thread = thread::spawn(move || {
            let _end = shared.fail_at_end("ended");
            shared.job_done();
            panic!("a panic of the test");
        });
        assert_eq!(progress.wait_for(2), Err("ended"));
        assert_eq!(progress.wait_for(1), Ok(()));
        progress.fail("later");
        assert_eq!(progress.error(), Some("ended"));
        assert!(thread.join().is_err());
    }
}
