//! Ends the process with a message when memory cannot be allocated.
//!
//! After a failed allocation Rust aborts the process. A handler of that signal prints the size of the
//! allocation, and exits with a code of the program instead.

use std::fmt::Write;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Bytes of the last allocation that failed; 0: none.
static FAILED: AtomicUsize = AtomicUsize::new(0);
/// Predicted memory of this process in bytes; 0: unknown.
static PREDICTED: AtomicU64 = AtomicU64::new(0);
/// Exit code.
static CODE: AtomicI32 = AtomicI32::new(1);

/// Records an allocation that failed. The caller may still go on without it.
pub(super) fn record_failed_allocation(bytes: usize) {
    FAILED.store(bytes.max(1), Relaxed);
}

/// Sets the predicted memory of this process, which the message names.
pub fn set_predicted_memory(bytes: u64) {
    PREDICTED.store(bytes, Relaxed);
}

/// A text of limited length in memory that is always there.
struct Text {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let rest = &mut self.bytes[self.len..];
        let count = text.len().min(rest.len());
        rest[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}

/// The message about an allocation of `failed` bytes. It allocates nothing.
fn message(failed: usize, predicted: u64) -> Text {
    let mut text = Text { bytes: [0; 512], len: 0 };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let _ = write!(text, "error: out of memory: cannot allocate {} MiB more", mib(failed as u64));
    if predicted > 0 {
        let _ = write!(text, "; about {} MiB were predicted for the run", mib(predicted));
    }
    let _ = text.write_str(
        "\nhint: set `model.recompute: full`, lower `data.packing_length`, or train an adapter \
         (`adapter: {}`); the newest checkpoint is intact\n",
    );
    text
}

/// From now on, a failed allocation that aborts the process prints a message and exits with `code`.
#[cfg(unix)]
pub fn exit_when_out_of_memory(code: i32) {
    CODE.store(code, Relaxed);
    let handler: extern "C" fn(libc::c_int) = on_abort;
    #[expect(unsafe_code, reason = "a function of the C library")]
    // SAFETY: the handler only uses functions that are allowed in a signal handler.
    unsafe {
        libc::signal(libc::SIGABRT, handler as libc::sighandler_t);
    }
}

/// Other systems keep the abort.
#[cfg(not(unix))]
pub fn exit_when_out_of_memory(code: i32) {
    CODE.store(code, Relaxed);
}

/// Returns if no allocation failed; then the process aborts as usual.
#[cfg(unix)]
extern "C" fn on_abort(_: libc::c_int) {
    let failed = FAILED.load(Relaxed);
    if failed == 0 {
        return;
    }
    let text = message(failed, PREDICTED.load(Relaxed));
    #[expect(unsafe_code, reason = "functions of the C library")]
    // SAFETY: the pointer and the length are those of an array.
    unsafe {
        libc::write(2, text.bytes.as_ptr().cast(), text.len);
        libc::_exit(CODE.load(Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_has_the_failed_size_and_the_predicted_one() {
        let text = message(3 << 20, 5 << 30);
        let text = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(text.starts_with("error: out of memory: cannot allocate 3 MiB more"), "{text}");
        assert!(text.contains("about 5120 MiB were predicted"), "{text}");
        assert!(text.ends_with("is intact\n"), "{text}");
        let text = message(1, 0);
        let text = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(!text.contains("predicted"), "{text}");
    }
}
