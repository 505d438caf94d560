//! `trainer`: supervised fine-tuning of vision-language models, in one binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    keep_freed_memory();
    trainer::cli::main()
}

/// Configures glibc to keep freed memory, so that each step reuses the memory of the step before it.
///
/// By default glibc maps new pages for every large buffer and the kernel zeroes them, which takes up to a
/// third of the time of a small step: see docs/decisions/0013-what-stayed.md.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "a function of the C library")]
fn keep_freed_memory() {
    const TOP_PAD: i32 = 64 << 20;
    let settings =
        [(libc::M_MMAP_MAX, 0), (libc::M_TRIM_THRESHOLD, -1), (libc::M_TOP_PAD, TOP_PAD)];
    for (parameter, value) in settings {
        // SAFETY: `mallopt` only changes settings of the allocator, and no other thread runs yet.
        unsafe { libc::mallopt(parameter, value) };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_freed_memory() {}
