//! Reports a panic as an error, without a backtrace.

use super::failure::{Exit, Failure};
use std::cell::RefCell;
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
        Err(Failure::new(Exit::Unknown, format!("the program failed: {last}"))
            .hint("this is a bug in trainer: please report it with the command and config")
            .into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::text;

    #[test]
    fn a_panic_is_reported_as_an_error_with_its_place() {
        let before = panic::take_hook();
        let error = caught::<()>(|| panic!("no such index")).unwrap_err();
        panic::set_hook(before);
        let text = text(&error);
        assert!(text.starts_with("error: the program failed: no such index at src/"), "{text}");
        assert!(text.contains("\nhint: this is a bug in trainer"), "{text}");
    }
}
