//! `trainer`: supervised fine-tuning of vision-language models, in one binary.

use std::process::ExitCode;
use trainer::ops::CachingAllocator;

/// Keeps freed buffers, so that each step reuses the memory of the step before it.
#[global_allocator]
static ALLOCATOR: CachingAllocator = CachingAllocator::new();

fn main() -> ExitCode {
    trainer::cli::main()
}
