//! A panic is a mistake of ours: it is told as an error, and never as a backtrace.

use super::report::{Exit, Failure};
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};

thread_local! {
    /// What panicked last on this thread, and where.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `run`; its panic becomes an error.
///
/// Panics of other threads, and those of decoders that a damaged image sets off, are caught where
/// they can be told with the row: here they leave a line in the log of level `debug`.
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
        // A panic of another thread of the pool comes here without having passed the hook here.
        let last = LAST.with_borrow_mut(std::mem::take);
        let last = if last.starts_with(&text) { last } else { text };
        Err(Failure::new(Exit::Unknown, format!("the program failed: {last}"))
            .hint("this is a mistake of the trainer: please report it with the command and config")
            .into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::text;

    #[test]
    fn a_panic_is_told_as_an_error_with_its_place() {
        let before = panic::take_hook();
        let error = caught::<()>(|| panic!("no such index")).unwrap_err();
        panic::set_hook(before);
        let text = text(&error);
        assert!(text.starts_with("error: the program failed: no such index at src/"), "{text}");
        assert!(text.contains("\nhint: this is a mistake of the trainer"), "{text}");
    }
}
