//! Ends the process with a message when memory cannot be allocated.
//!
//! After a failed allocation Rust aborts the process. A handler of that signal prints the size of
//! the allocation, and exits with a code of the program instead.

use std::fmt::Write;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Bytes of the last allocation that failed; 0: none.
static FAILED: AtomicUsize = AtomicUsize::new(0);
/// Predicted memory of this process in bytes; 0: unknown.
static PREDICTED: AtomicU64 = AtomicU64::new(0);
/// Settings that need less memory, for the message; empty: those of any config.
static ADVICE: Mutex<String> = Mutex::new(String::new());
/// Exit code.
static CODE: AtomicI32 = AtomicI32::new(1);

/// Records an allocation that failed. The caller may still go on without it.
pub(super) fn record_failed_allocation(bytes: usize) {
    FAILED.store(bytes.max(1), Relaxed);
}

/// Bytes of the last allocation on a GPU that failed; 0: none. No abort follows it, but an error.
static FAILED_ON_GPU: AtomicUsize = AtomicUsize::new(0);

#[cfg(feature = "cuda")]
pub(crate) fn record_failed_gpu_allocation(bytes: usize) {
    FAILED_ON_GPU.store(bytes.max(1), Relaxed);
}

/// The size of the last failed allocation on a GPU, and the predicted memory; `None` if none
/// failed.
pub fn failed_gpu_allocation() -> Option<String> {
    let failed = FAILED_ON_GPU.load(Relaxed);
    (failed > 0).then(|| {
        let mut text = Text { bytes: [0; 1024], len: 0 };
        write_sizes(&mut text, failed, PREDICTED.load(Relaxed));
        String::from_utf8_lossy(&text.bytes[..text.len]).into_owned()
    })
}

/// Sets the predicted memory of this process, which the message names.
pub fn set_predicted_memory(bytes: u64) {
    PREDICTED.store(bytes, Relaxed);
}

/// Sets the hint of the message: the settings with which the run would need less memory.
pub fn set_memory_advice(advice: String) {
    *ADVICE.lock().unwrap_or_else(PoisonError::into_inner) = advice;
}

/// The settings with which the run would need less memory.
pub fn memory_advice() -> String {
    let advice = ADVICE.lock().unwrap_or_else(PoisonError::into_inner);
    if advice.is_empty() { OF_ANY_CONFIG.to_owned() } else { advice.clone() }
}

/// The hint before a config is read.
const OF_ANY_CONFIG: &str = "set `model.recompute: full`, lower `data.packing_length`, or train an \
    adapter (`adapter: {}`)";

/// A text of limited length in memory that is always there.
struct Text {
    bytes: [u8; 1024],
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

/// Writes the size of an allocation that failed, and the predicted memory.
fn write_sizes(text: &mut Text, failed: usize, predicted: u64) {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let _ = write!(text, "cannot allocate {} MiB more", mib(failed as u64));
    if predicted > 0 {
        let _ = write!(text, "; about {} MiB were predicted for the run", mib(predicted));
    }
}

/// The message about an allocation of `failed` bytes. It allocates nothing.
fn message(failed: usize, predicted: u64, advice: &str) -> Text {
    let mut text = Text { bytes: [0; 1024], len: 0 };
    let _ = write!(text, "error: out of memory: ");
    write_sizes(&mut text, failed, predicted);
    let advice = if advice.is_empty() { OF_ANY_CONFIG } else { advice };
    let _ = write!(text, "\nhint: {advice}; the newest checkpoint is intact\n");
    text
}

/// Lets all threads allocate from one heap if the address space is limited (`ulimit -v`). Otherwise
/// the C library reserves 64 MiB of it for each thread, and allocations fail long before memory is
/// used. Call this before the first thread starts.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn share_one_heap_under_a_limit() {
    use rustix::process::{Resource, getrlimit};
    if getrlimit(Resource::As).current.is_some() {
        #[expect(unsafe_code, reason = "a function of the C library")]
        // SAFETY: it changes a setting of the allocator; there is one thread.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 1);
        }
    }
}

/// Other C libraries reserve no heap for each thread.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn share_one_heap_under_a_limit() {}

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
    // the thread that failed may hold the lock
    let advice = ADVICE.try_lock();
    let advice = advice.as_ref().map_or("", |advice| advice.as_str());
    let text = message(failed, PREDICTED.load(Relaxed), advice);
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
        let text = message(3 << 20, 5 << 30, "use less");
        let text = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(text.starts_with("error: out of memory: cannot allocate 3 MiB more"), "{text}");
        assert!(text.contains("about 5120 MiB were predicted"), "{text}");
        assert!(text.ends_with("\nhint: use less; the newest checkpoint is intact\n"), "{text}");
        let text = message(1, 0, "");
        let text = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(!text.contains("predicted") && text.contains("`model.recompute: full`"), "{text}");
    }
}
