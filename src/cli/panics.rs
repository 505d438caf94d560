//! Reports a panic as an error, without a backtrace.

use super::error_report::BUG;
use super::failure::{Exit, Failure};
use std::cell::RefCell;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};

thread_local! {
    /// Message and place of the last panic of this thread.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `run` and turns its panic into an error.
///
/// Panics of other threads, and of decoders on damaged images, are caught where the row is known;
/// this only logs them at level `debug`.
pub(super) fn caught<T>(run: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
        let payload = info.payload_as_str().unwrap_or("no message");
        tracing::debug!(thread = std::thread::current().name(), "caught: {payload}{place}");
        LAST.with_borrow_mut(|last| *last = format!("{payload}{place}"));
    }));
    panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        // A panic of another thread of the pool ran the hook on that thread.
        let last = LAST.with_borrow_mut(std::mem::take);
        let last = if last.starts_with(&text) { last } else { text };
        Err(failure(&last).into())
    })
}

fn failure(last: &str) -> Failure {
    // the standard library and rayon panic if the system has no memory or no process for a thread
    if NO_THREAD.iter().any(|start| last.starts_with(start)) {
        return no_thread(&last);
    }
    Failure::new(Exit::Software, format!("the program failed: {last}")).hint(BUG)
}

/// The error of a system that has no memory or no process for a thread.
pub(super) fn no_thread(cause: &dyn Display) -> Failure {
    Failure::new(Exit::Resources, format!("cannot start a thread: {cause}"))
        .hint("raise the limits (`ulimit -v`, `ulimit -u`), or lower `data.workers`")
}

const NO_THREAD: [&str; 2] =
    ["failed to spawn thread", "The global thread pool has not been initialized"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error_report::{exit, text};

    #[test]
    fn a_thread_that_cannot_be_started_is_no_bug() {
        let failure = failure("failed to spawn thread: Os { code: 11 } at library/std");
        let text = text(&failure.into());
        assert!(text.starts_with("error: cannot start a thread: failed to spawn"), "{text}");
        assert!(text.contains("\nhint: raise the limits"), "{text}");
    }

    #[test]
    fn a_panic_is_reported_as_an_error_with_its_place() {
        let before = panic::take_hook();
        let error = caught::<()>(|| panic!("no such index")).unwrap_err();
        panic::set_hook(before);
        assert_eq!(exit(&error), Exit::Software);
        let text = text(&error);
        assert!(text.starts_with("error: the program failed: no such index at src/"), "{text}");
        assert!(text.contains("\nhint: this is a bug in trainer"), "{text}");
    }
}
