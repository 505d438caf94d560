//! What can be checked from outside of the crate, one module a topic.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test stops at the first surprise")]

mod architecture;
mod bad_input;
mod bench;
mod cli;
mod corpora;
mod doc_commands;
mod docs;
mod encoding;
mod harness;
mod images;
mod inspect_html;
mod laws;
mod length_cache;
mod length_cache_passes;
mod length_laws;
mod memory;
mod output_dir;
mod parity;
mod resume;
mod simd;
mod video;
#[cfg(feature = "video")]
mod video_files;
