//! JSONL to token streams, on host threads.

pub mod image;
